"""The smallest piece that a cache gives back, where no block event tells of it: a larger unit than before, or misses by the grid.

A larger unit: the blocks (or the shortest reusable run) are longer than what requests found cached in the other window. By the
grid: a conversation is found or not found as a whole, depending on its length modulo a period (state snapshots on a chunk grid,
rounded to blocks), and on nothing else.

Invariant: a grid is claimed only where chance would part hits and misses as well in less than one of 10,000 windows, over all periods
that were looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lgamma, log
from typing import Final

import numpy as np

from diagnosis.claims.bound_wait import setting
from diagnosis.facts import F64, Bool, Facts

LOOKED_AT: Final = 2000
"""Requests of a window whose lengths are laid onto grids: the first."""
FEWEST: Final = 5
"""Full misses, and hits, that a grid takes."""
ROUNDS: Final = 3.0
"""Periods that the lengths of misses and those of hits have to span: within one, a grid is only a length."""
CHANCE: Final = log(1e-4)
"""Chance, of all grids that are tried together, that misses would lie so on one of them: log, so that it can be held against sums."""
UNITS: Final = 64
"""Multiples of a block that are tried as periods, beside powers of two."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Requests whose length modulo `period` lies from `low` on for `width` tokens (round the end) missed everything.

    by      which length: `own` prompt, or what the conversation held `before` the turn
    misses  [n] the requests that did; `num_looked_at` of them tell both length and hits
    """

    period: int
    low: int
    width: int
    by: str
    misses: Bool
    num_looked_at: int


def unit_tokens(facts: Facts) -> int | None:
    """The smallest reusable piece, tokens: a block, or what the workers' settings say; None where neither is told."""
    told = [size for size in (facts.block_size(), setting(facts, "min_reuse_tokens")) if size]
    return max(told) if told else None


def found_tokens(facts: Facts) -> tuple[float, float] | None:
    """Tokens that a request found cached: (of those that found some, in the median; of all, on average). None where nobody tells.

    Counters tell of all alone: then the mean stands for both.
    """
    cached = facts.requests.get("cached_tokens")
    known = cached[np.isfinite(cached)]
    if len(known):
        hits = known[known > 0]
        return (float(np.median(hits)) if len(hits) else 0.0), float(known.mean())
    hit = facts.samples.get("prefix_hits_tokens_total")
    if hit is None or not len(facts.requests):
        return None
    return hit / len(facts.requests), hit / len(facts.requests)


def larger_unit(facts: Facts, other: Facts) -> tuple[int, int] | None:
    """(unit of `facts`, of `other`) where it grew beyond what requests found in `other`, and they find nothing any more."""
    unit, before, here, there = unit_tokens(facts), unit_tokens(other), found_tokens(facts), found_tokens(other)
    if unit is None or before is None or here is None or there is None:
        return None
    return (unit, before) if unit > before and here[1] == 0.0 and 0.0 < there[0] < unit else None


def below_unit(facts: Facts, other: Facts) -> F64:
    """[n] prompt tokens that each request computed because of the unit."""
    r = facts.requests
    prompt = np.nan_to_num(r.get("prompt_tokens"))
    there = found_tokens(other)
    if there is not None and larger_unit(facts, other) is not None:
        return np.minimum(prompt, there[1])
    grid = grid_of(facts)
    if grid is None:
        return np.zeros(len(r))
    cached = r.get("cached_tokens")
    share = np.divide(cached, prompt, out=np.full(len(r), np.nan), where=prompt > 0)
    hits = share[np.isfinite(share) & (share > 0)]
    return np.where(grid.misses, float(np.median(hits)) * prompt, 0.0)


def grid_of(facts: Facts) -> Grid | None:
    """The grid that parts full misses from hits, if one does."""
    r = facts.requests
    cached, prompt = r.get("cached_tokens")[:LOOKED_AT], r.get("prompt_tokens")[:LOOKED_AT]
    missed = cached == 0
    if min(int(missed.sum()), int((cached > 0).sum())) < FEWEST:
        return None
    size = facts.block_size()
    periods = [1 << k for k in range(6, 17)] + ([] if size is None else [size * k for k in range(2, UNITS + 1)])
    best: Grid | None = None
    least = CHANCE - log(2 * len(periods))
    for by, length in (("before", _before(facts)[:LOOKED_AT]), ("own", prompt)):
        known = np.isfinite(length) & np.isfinite(cached)
        if min(int((known & missed).sum()), int((known & ~missed).sum())) < FEWEST:
            continue
        if log_chance(int(known.sum()), int((known & missed).sum())) > least:
            continue
        spanned = min(float(np.ptp(length[known & mine])) for mine in (missed, ~missed))
        for period in periods:
            if spanned < ROUNDS * period or best is not None:
                continue
            arc = _arc(length[known].astype(np.int64) % period, missed[known], period)
            if arc is not None:
                misses = np.zeros(len(r), dtype=bool)
                misses[np.flatnonzero(known & missed)] = True
                best = Grid(period, *arc, by, misses, int(known.sum()))
    return best


def log_chance(num: int, misses: int) -> float:
    """Log of the chance that so many misses lie side by side on a circle of `num`: num arcs of all choices."""
    choices = lgamma(num + 1) - lgamma(misses + 1) - lgamma(num - misses + 1)
    return log(num) - choices


def _arc(phase: np.ndarray, missed: Bool, period: int) -> tuple[int, int] | None:
    """(begin, width) of the arc that holds all misses and no hit; None where there is none."""
    order = np.lexsort((missed, phase))
    phase, missed = phase[order], missed[order]
    changes = np.flatnonzero(missed != np.roll(missed, 1))
    if len(changes) != 2:
        return None
    begin = changes[0] if missed[changes[0]] else changes[1]
    end = changes[1] if missed[changes[0]] else changes[0]
    last = phase[end - 1]
    if phase[begin] == phase[begin - 1] or last == phase[end % len(phase)]:
        return None  # hits and misses at one length
    return int(phase[begin]), int((last - phase[begin]) % period) + 1


def _before(facts: Facts) -> F64:
    """[n] prompt tokens of the turn before; NaN for a first turn, and where turns cannot be told."""
    r = facts.requests
    prompt, out = r.get("prompt_tokens"), np.full(len(r), np.nan)
    if len(r) < 2:
        return out
    names = r.session
    if all(name is None for name in names[:LOOKED_AT]):
        grows = np.diff(prompt[:LOOKED_AT]) > 0
        if float(grows.mean()) < 0.8:
            return out
        out[1:] = prompt[:-1]
        return out
    last: dict[object, int] = {}
    for row, name in enumerate(names[:LOOKED_AT]):
        if name is not None and name in last:
            out[row] = prompt[last[name]]
        if name is not None:
            last[name] = row
    return out
