"""What a request can be told apart by: prompt length, output length, workload, tenant, each cut into bins.

Lengths are cut at quantiles of both windows together, finer at the top, where a tail latency is decided; where one window
ends and a good part of the other lies beyond, so that requests without a counterpart cannot hide in a wide bin; and where a
tail begins that moved. Categories are the most frequent ones and the rest. Unknown is a bin of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from diagnosis.statistics.quantiles import F64

I64: TypeAlias = npt.NDArray[np.int64]

LENGTHS = ("prompt_tokens", "output_tokens")
CATEGORIES = ("workload", "tenant")
WORDS = {"prompt_tokens": "prompt length", "output_tokens": "output length", "workload": "workload", "tenant": "tenant"}
TOP_CATEGORIES = 6
"""Names of a category that are strata of their own; the others are one."""
TAIL, MIN_TAIL_RATIO, TAIL_Z = 0.99, 2.0, 2.576  # a tail moved when its share doubles beyond chance (p < 0.01)
MAX_BEYOND = 0.05
"""Share of a window's lengths beyond all of the other's, from which on those are a kind of request of their own."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """One pooled column, baseline first: lengths with NaN for unknown, or category numbers with their words.

    edges: lengths that bins never reach across: where one window ends and a good part of the other lies beyond, and
    where a tail that moved begins, which `tail` then states.
    """

    name: str
    lengths: F64 | None = None
    edges: tuple[float, ...] = ()
    tail: str | None = None
    codes: I64 | None = None
    words: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        column = self.codes if self.lengths is None else self.lengths
        return 0 if column is None else int(column.size)

    def bins(self, cuts: tuple[float, ...]) -> tuple[I64, list[str]]:
        """Bin number of each request and the bins' names; unknown is a bin of its own."""
        word = WORDS[self.name]
        if self.codes is not None:
            return self.codes, [*(f"{word} {w}" for w in self.words), f"any other {word}", f"unknown {word}"]
        assert self.lengths is not None
        known = ~np.isnan(self.lengths)
        inside = self.lengths[known]
        edges = np.unique([*np.quantile(inside, cuts, method="inverted_cdf"), *self.edges])
        edges = edges[edges < inside.max()]  # a bin above the largest length would be empty
        codes = np.where(known, np.searchsorted(edges, np.where(known, self.lengths, 0.0)), edges.size + 1)
        bounds = [f"{edge:,.0f}" for edge in edges]
        if not bounds:
            return codes.astype(np.int64), [f"any {word}", f"unknown {word}"]
        between = [f"{word} {low} to {high}" for low, high in pairwise(bounds)]
        names = [f"{word} up to {bounds[0]}", *between, f"{word} above {bounds[-1]}", f"unknown {word}"]
        return codes.astype(np.int64), names


def dimensions_of(
    base: Mapping[str, Any], suspect: Mapping[str, Any], sizes: tuple[int, int]
) -> tuple[dict[str, Dimension], list[str]]:
    """The dimensions that both windows know at least in part, and statements about those that only one knows."""
    found: dict[str, Dimension] = {}
    statements: list[str] = []
    for name in (*LENGTHS, *CATEGORIES):
        columns = [window.get(name) for window in (base, suspect)]
        known_in = [column is not None and size > 0 for column, size in zip(columns, sizes, strict=True)]
        dimension = None
        if all(known_in):
            dimension, known = _pool(name, columns)
            known_in = [bool(part.any()) for part in np.split(known, [sizes[0]])]
        if all(known_in) and dimension is not None:
            found[name] = dimension
        elif any(known_in):
            side = "baseline" if not known_in[0] else "suspect"
            statements.append(f"{WORDS[name]} is not known in the {side} window, so it was not compared")
    return found, statements


def _pool(name: str, columns: list[Any]) -> tuple[Dimension, npt.NDArray[np.bool_]]:
    if name in LENGTHS:
        lengths = np.concatenate([np.asarray(column, dtype=np.float64) for column in columns])
        known = ~np.isnan(lengths)
        sides = [side[~np.isnan(side)] for side in np.split(lengths, [len(columns[0])])]
        if any(side.size == 0 for side in sides):
            return Dimension(name, lengths=lengths), known
        tail_edge, tail = _tail(*sides)
        return Dimension(name, lengths=lengths, edges=(*_support_ends(sides), *tail_edge), tail=tail), known
    pooled = np.concatenate([np.asarray(column, dtype=object) for column in columns])
    encoded = pa.array(pooled, type=pa.string(), from_pandas=True).dictionary_encode()
    words = encoded.dictionary.to_pylist()
    raw = encoded.indices.fill_null(len(words)).to_numpy(zero_copy_only=False).astype(np.int64)
    frequency = np.bincount(raw, minlength=len(words) + 1)
    top = sorted(range(len(words)), key=lambda w: (-int(frequency[w]), words[w]))[:TOP_CATEGORIES]
    renumber = np.full(len(words) + 1, len(top), dtype=np.int64)
    renumber[top] = np.arange(len(top))
    renumber[len(words)] = len(top) + 1
    return Dimension(name, codes=renumber[raw], words=tuple(words[w] for w in top)), raw < len(words)


def _support_ends(sides: list[F64]) -> list[float]:
    """Where one window's lengths end (0.5 % left aside) while more than 5 % of the other's lie beyond."""
    ends: list[float] = []
    for this, other in (sides, sides[::-1]):
        low, high = (float(end) for end in np.quantile(this, [0.005, 0.995], method="inverted_cdf"))
        if (other > high).mean() > MAX_BEYOND:
            ends.append(high)
        if (other < low).mean() > MAX_BEYOND:
            ends.append(low - 1.0)
    return ends


def _tail(base: F64, suspect: F64) -> tuple[list[float], str | None]:
    """Where the longest 1 % of both windows begins, and how its share moved; nothing when it did not."""
    pooled = np.concatenate([base, suspect])
    level = float(np.quantile(pooled, TAIL, method="inverted_cdf"))
    share = float((pooled >= level).mean())
    shares = (float((base >= level).mean()), float((suspect >= level).mean()))
    chance = np.sqrt(share * (1.0 - share) * (1.0 / base.size + 1.0 / suspect.size))
    if abs(shares[1] - shares[0]) <= TAIL_Z * chance or max(shares) < MIN_TAIL_RATIO * min(shares):
        return [], None
    text = f"{shares[0]:.1%} of the baseline and {shares[1]:.1%} of the suspect have {level:,.0f} tokens or more"
    return [level - 1.0], text
