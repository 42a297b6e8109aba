"""One call of a client: when it comes, how long it is, which blocks its prompt is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

MASK = (1 << 64) - 1
ODD = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Call:
    """at_ns: instant on the run's own clock.

    blocks       chain hashes of the full prompt blocks (of the engine's block size)
    names        `blocks` as an array, where whoever made the call had it
    token_ids    of the prompt, where it is to be computed and not only counted
    model        that it asks for: a LoRA adapter's name (None: the model itself)
    prefix_hash  of the prefix that it shares with others; None: it shares none
    """

    request_id: str
    at_ns: int
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int] = ()
    prefix_hash: int | None = None
    tenant: str | None = None
    workload: str | None = None
    session_id: str | None = None
    turn: int | None = None
    priority: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    token_ids: Sequence[int] = ()
    model: str | None = None
    names: npt.NDArray[np.uint64] | None = field(default=None, compare=False, repr=False)


def made_up_blocks(name: int, count: int, first: int = 0) -> list[int]:
    """`made_up_names` as a list."""
    names: list[int] = made_up_names(name, count, first).tolist()
    return names


def made_up_names(name: int, count: int, first: int = 0) -> npt.NDArray[np.uint64]:
    """Hashes of blocks [first, first + count) of the text called `name`: distinct for distinct (name, position).

    Odd, so never zero, and below 2^63. One text's numbers are evenly strewn; two names' sequences begin at places that a mixing
    function (splitmix64, Steele et al. 2014) keeps apart.
    """
    index = np.arange(first, first + max(count, 0), dtype=np.uint64)
    names: npt.NDArray[np.uint64] = (np.uint64(mixed(name)) + index * np.uint64(ODD)) >> np.uint64(1) | np.uint64(1)
    return names


def mixed(number: int) -> int:
    """splitmix64's finaliser: a bijection of 64-bit numbers that looks random."""
    z = (number + ODD) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)
