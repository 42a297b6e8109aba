"""What only a look at both windows tells of the requests of one: written before the ledgers, which give seconds away by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from diagnosis.facts import F64, Facts
from diagnosis.ledger.offset import find_offset, residual_s
from diagnosis.ledger.reuse_units import below_unit
from diagnosis.ledger.sharing import no_longer_shared
from diagnosis.ledger.smaller_pool import smaller_pool
from diagnosis.ledger.speculation import refused_share
from diagnosis.ledger.usual_reuse import UsualReuse, usual_reuse
from diagnosis.ledger.ways import Ways, ways


@dataclass(frozen=True, slots=True)
class Compared:
    """Of one window against the other.

    tokens         by row of the ledger, [n] prompt tokens that each request computed for that reason
    offset_s       [n] fixed seconds that no phase tells of; None where there are none
    refused_share  [n] share of its decode steps that drafts would have saved, were as many accepted as in the other window
    smaller_pool   blocks of the pool in this window and in the other, where they are fewer; None where they are not, or not told
    reuse          what each computed that its kind usually finds cached; None where that is not known, or blocks tell it
    ways           what lies between its caller and the engine, by the way; None where one window alone is read
    """

    tokens: Mapping[str, F64] = field(default_factory=dict)
    offset_s: F64 | None = None
    refused_share: F64 | float = 0.0
    reuse: UsualReuse | None = None
    smaller_pool: tuple[int, int] | None = None
    ways: Ways | None = None


def compare(base: Facts, suspect: Facts) -> tuple[Compared, Compared]:
    """(baseline against suspect window, suspect window against baseline)."""
    offset = find_offset(base, suspect) or find_offset(suspect, base)
    offsets = [None if offset is None else offset.of(residual_s(facts)) for facts in (base, suspect)]
    return _compared(base, suspect, offsets[0]), _compared(suspect, base, offsets[1])


def _compared(facts: Facts, other: Facts, offset_s: F64 | None) -> Compared:
    return Compared(
        _tokens(facts, other),
        offset_s,
        refused_share(facts, other),
        usual_reuse(facts, other),
        smaller_pool(facts, other),
        ways(facts, other),
    )


def _tokens(facts: Facts, other: Facts) -> dict[str, F64]:
    found = {"reuse_below_unit": below_unit(facts, other), "prompt_uncacheable": no_longer_shared(facts, other)}
    return {name: tokens for name, tokens in found.items() if np.any(tokens)}
