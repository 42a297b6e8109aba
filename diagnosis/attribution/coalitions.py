"""The game that attribution plays: the value of every coalition of causes, again for every bootstrap replicate.

Idea: in coalition S the suspect's requests keep their own seconds for the causes in S and get the baseline's seconds at
the same rank for the others. Most requests can be neither the quantile nor in its tail whatever S is, so only their
number matters. Who can is worked out once, from bounds that hold while the drawn ranks stay inside a band (`arms.py`); a
replicate that leaves the band, or has too few of the certainly large ones, looks at everyone.

Invariant: pruning never changes a value. Equal windows give equal columns, hence exact zeros.
Source: Shapley 1953.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import factorial

import numpy as np

from diagnosis.attribution.arms import Arm, Draw, sum_rows
from diagnosis.facts import Bool
from diagnosis.statistics.quantiles import (
    F64,
    Counts,
    Index,
    descending_order,
    parse_quantile,
    tail_indices,
    tail_limit,
)

AT_ONCE_ELEMENTS = 400_000
"""Numbers in the largest arrays of replicates that are played at once: enough to make calls few, few enough to stay in a cache."""
NOBODY_S = -1e300
"""Seconds of who fills up a table: less than anybody's."""


@dataclass(frozen=True, slots=True)
class Play:
    """The game read once a replicate [r], in seconds: Shapley rows [r, g] and dependence [r]; plain differences for the mean.

    work counts the numbers that were looked at in one replicate, to decide how many are affordable.
    """

    rows: F64
    dependence: F64
    es_rows: F64
    es_dependence: F64
    mean_rows: F64
    work: int


@dataclass(frozen=True, slots=True)
class Near:
    """Requests [m] that may be in the tail, with their own seconds [g, m] and, column by column, the order [g, m] of their
    places among all requests, and those places [g, m], rising."""

    requests: Index
    own: F64
    by_place: Index
    places: Index


class Game:
    """The coalition game between a baseline and a suspect arm, played once per replicate."""

    def __init__(self, base: Arm, suspect: Arm, q: str) -> None:
        self.base, self.suspect, self.q, self.g = base, suspect, q, base.g
        self.shapley = shapley_matrix(self.g)
        self.place = np.empty((self.g, suspect.n), dtype=np.intp)
        for place, order in zip(self.place, suspect.orders, strict=True):
            place[order] = np.arange(suspect.n)
        lower, upper = self._advance_bounds()
        by_lower = descending_order(lower)
        self.certain = suspect.tail_of(by_lower)
        floor = lower[by_lower[self.certain.size - 1]]
        self.near = self._seat(np.flatnonzero(upper >= floor - slack(floor)))
        self.base_tail = base.tail_of(base.by_total)

    def at_once(self) -> int:
        """How many replicates are best played at once."""
        widest = max(self.base.n, self.suspect.n, self.near.requests.size << self.g)
        return max(1, AT_ONCE_ELEMENTS // widest)

    def play(self, base: Draw, suspect: Draw) -> Play:
        """Play each of these replicates."""
        pruned, played = self._play(base, suspect, self.near)
        if pruned.all():
            return played
        everyone = self._seat(np.arange(self.suspect.n))
        for row in np.flatnonzero(~pruned).tolist():
            one = np.array([row])
            _, alone = self._play(base.rows(one), suspect.rows(one), everyone)
            for name in ("rows", "dependence", "es_rows", "es_dependence", "mean_rows"):
                getattr(played, name)[row] = getattr(alone, name)[0]
        return played

    def _play(self, base: Draw, suspect: Draw, near: Near) -> tuple[Bool, Play]:
        """(in which replicates all who are not `near` lie below the quantile; what was read, right in those)."""
        base_total, total = base.total, suspect.total
        # where enough mass lies among those who are certainly large, and ranks stay in the band, the others are smaller
        pruned = reaches(suspect.mass.take(self.certain, axis=1), total, self.q)
        held = suspect.mass.take(near.requests, axis=1)
        matched = np.empty((len(total), self.g, near.requests.size))
        for k in range(self.g):
            base_through, through = self.base.cumulate(base.mass, k), self.suspect.cumulate(suspect.mass, k)
            pruned &= self.base.stays_in_band(base_through, k, base_total)
            pruned &= self.suspect.stays_in_band(through, k, total)
            self._match(k, near, held, through, base_through, base_total / total, matched[:, k])
        keeps = self._can_matter(near.own, matched, held, total)
        quantile, shortfall = self._coalitions(near.own, matched, held, keeps, total)
        base_quantile, base_shortfall = self._base_tail(base.mass, base_total)
        return pruned, Play(
            rows=self._rows(quantile),
            dependence=quantile[:, 0] - base_quantile,
            es_rows=self._rows(shortfall),
            es_dependence=shortfall[:, 0] - base_shortfall,
            mean_rows=suspect.sums / total[:, None] - base.sums / base_total[:, None],
            work=self._work(near.requests.size, keeps[0].size),
        )

    def _rows(self, values: F64) -> F64:
        """Shapley rows [r, g] of the values [r, 2^g] of the coalitions."""
        return np.asarray((self.shapley * (values - values[:, :1])[:, None, :]).sum(axis=2))

    def _advance_bounds(self) -> tuple[F64, F64]:
        """Bounds [n_s] on what a request can take in any coalition of any replicate inside the bands."""
        base, suspect = self.base, self.suspect
        lower, upper = np.zeros(suspect.n), np.zeros(suspect.n)
        scale = base.nominal / suspect.nominal
        for k in range(self.g):
            if k == 0 or base.weights is not None or suspect.weights is not None:
                before = np.concatenate([[0], suspect.low[k][:-1]])
                least = np.searchsorted(base.high[k], before * scale * (1 - 1e-9))
                most = np.searchsorted(base.low[k], suspect.high[k] * scale * (1 + 1e-9))
            own = suspect.ordered[k]
            order = suspect.orders[k]
            lower[order] += np.minimum(own, base.ordered[k].take(least, mode="clip"))
            upper[order] += np.maximum(own, base.ordered[k].take(most, mode="clip"))
        return lower, upper

    def _seat(self, requests: Index) -> Near:
        """Some of the suspect's requests, rising, with their places in each column's order."""
        places = self.place[:, requests]
        by_place = np.argsort(places, axis=1)
        return Near(requests, self.suspect.columns[:, requests], by_place, np.take_along_axis(places, by_place, axis=1))

    def _match(
        self, k: int, near: Near, held: Counts, through: Counts, base_through: Counts, scale: F64, matched: F64
    ) -> None:
        """Baseline seconds of part k at the weighted ranks of the requests `near`, into `matched` [r, m]: their middle rank,
        lower inverse."""
        by_place = near.by_place[k]  # a search for rising needles stays in the cache
        middle = through.take(near.places[k], axis=1) - held.take(by_place, axis=1) * 0.5
        needles = rank_needle(middle * scale[:, None], base_through)
        for row, (needle, of_base) in enumerate(zip(needles, base_through, strict=True)):
            matched[row, by_place] = self.base.ordered[k].take(np.searchsorted(of_base, needle), mode="clip")

    def _can_matter(self, own: F64, matched: F64, held: Counts, total: Counts) -> list[Index]:
        """Drawn requests that can be the quantile or above it in some coalition, by the exact bounds of each replicate."""
        lower, upper = np.zeros(held.shape), np.zeros(held.shape)
        for k in range(self.g):
            lower += np.minimum(own[k], matched[:, k])
            upper += np.maximum(own[k], matched[:, k])
        limits = tail_limit(total, self.q, held.shape[1])
        keeps = []
        for low, high, mass, limit in zip(lower, upper, held, limits, strict=True):
            if mass.dtype.kind == "f":
                order = descending_order(low)
                floor = low[order[min(np.count_nonzero(np.cumsum(mass[order]) <= limit), low.size - 1)]]
            else:
                drawn = np.repeat(low, mass)
                at = max(drawn.size - 1 - int(limit), 0)
                floor = np.partition(drawn, at)[at]
            keeps.append(np.flatnonzero((high >= floor - slack(floor)) & (mass > 0)))
        return keeps

    def _coalitions(self, own: F64, matched: F64, held: Counts, keeps: list[Index], total: Counts) -> tuple[F64, F64]:
        """Quantile and expected shortfall [r, 2^g] of all coalitions; bit k of a coalition's number: cause k is in it."""
        if held.dtype.kind == "f":
            read = [
                tails(self._values(own[:, keep], matched[row][:, keep]), held[row, keep], float(total[row]), self.q)
                for row, keep in enumerate(keeps)
            ]
            return np.stack([quantile for quantile, _ in read]), np.stack([shortfall for _, shortfall in read])
        # whole masses are taken as repeats; tables of different lengths are filled up with nobody
        drawn = [np.repeat(keep, held[row, keep]) for row, keep in enumerate(keeps)]
        width = max(again.size for again in drawn)
        index = np.full((len(drawn), width), own.shape[1])
        for row, again in enumerate(drawn):
            index[row, : again.size] = again
        nobody = np.full((1, 1), NOBODY_S)
        mine = np.stack([np.append(column, nobody)[index] for column in own]) if self.g else np.empty((0, *index.shape))
        theirs = np.full((self.g, *index.shape), NOBODY_S)
        for row, again in enumerate(drawn):
            theirs[:, row, : again.size] = matched[row][:, again]
        values = self._values(mine, theirs)  # [2^g, r, width]
        above = tail_limit(total, self.q, 1)
        rest = float(1 - parse_quantile(self.q)) * total
        return whole_tails(values, above, rest)

    def _values(self, own: F64, matched: F64) -> F64:
        """Seconds [2^g, ...] in every coalition of requests with these seconds [g, ...] of their own and of the baseline's."""
        values = np.empty((1 << self.g, *own.shape[1:]))
        values[0] = sum_rows(matched)
        for k in range(self.g):
            np.add(values[: 1 << k], own[k] - matched[k], out=values[1 << k : 2 << k])
        values[-1] = sum_rows(own)
        return values

    def _work(self, near: int, keep: int) -> int:
        """Numbers looked at in one play; weights cost more, since they are sorted where counts are partitioned."""
        weighted = self.base.weights is not None or self.suspect.weights is not None
        everyone = 5 * self.g * (self.base.n + self.suspect.n)
        return (2 if weighted else 1) * (everyone + 10 * self.g * near + (8 << self.g) * keep)

    def _base_tail(self, mass: Counts, total: Counts) -> tuple[F64, F64]:
        """Quantile and expected shortfall [r] of the baseline."""
        largest = self.base_tail
        if not reaches(mass.take(largest, axis=1), total, self.q).all():
            largest = self.base.by_total
        held = mass.take(largest, axis=1)
        index = np.minimum(tail_indices(held, self.q, total), largest.size - 1)
        quantile, shortfall = np.empty(len(total)), np.empty(len(total))
        for row, last in enumerate(index.tolist()):
            some = held[row, : last + 1]
            values = self.base.total[largest[: last + 1][some > 0]]
            found = tails(values[None, :], some[some > 0], float(total[row]), self.q)
            quantile[row], shortfall[row] = found[0][0], found[1][0]
        return quantile, shortfall


def whole_tails(values: F64, above: Counts, rest: F64) -> tuple[F64, F64]:
    """Quantile and expected shortfall [r, rows] of each row of values [rows, r, m]: the largest of samples of whole masses.

    above, rest [r]: how many lie above the quantile, and the mass of the tail.
    """
    quantile, shortfall = (np.empty(values.shape[1::-1]) for _ in range(2))
    for number in np.unique(above).tolist():
        mine = np.flatnonzero(above == number)
        some = values if mine.size == above.size else values[:, mine]
        at = some.shape[2] - 1 - number
        some.partition(at, axis=2)
        found = some[:, :, at]
        worst = np.sort(some[:, :, at + 1 :], axis=2)  # sorted, so that equal samples add up to the same last bit
        quantile[mine] = found.T
        shortfall[mine] = ((worst.sum(axis=2) + (rest[mine] - number) * found) / rest[mine]).T
    return quantile, shortfall


def tails(values: F64, mass: Counts, total: float, q: str) -> tuple[F64, F64]:
    """Quantile and expected shortfall of each row of values [rows, m] with one mass [m].

    The values are the largest of a sample of mass `total`, the quantile among them. Whole masses are taken as repeats.
    """
    rest = float(1 - parse_quantile(q)) * total
    if mass.dtype.kind != "f":
        again = np.repeat(values, mass, axis=1)[:, None, :]
        found = whole_tails(again, tail_limit(np.array([int(total)]), q, 1), np.array([rest]))
        return found[0][0], found[1][0]
    order = np.argsort(-values, axis=1)  # whichever of equal values comes first, the sums are the same
    values, held = np.take_along_axis(values, order, axis=1), mass[order]
    index = np.minimum(tail_indices(held, q, np.full(values.shape[0], total)), values.shape[1] - 1)
    quantile = np.take_along_axis(values, index[:, None], axis=1)[:, 0]
    inside = np.minimum(np.maximum(rest - (np.cumsum(held, axis=1) - held), 0.0), held)
    return quantile, (values * inside).sum(axis=1) / inside.sum(axis=1)


def reaches(mass: Counts, total: Counts, q: str) -> Bool:
    """In which samples of mass `total` [r] the nearest rank lies among their largest values, whose masses [r, m] these are."""
    dtype = np.float64 if mass.dtype.kind == "f" else np.int64
    return np.asarray(mass.sum(axis=1, dtype=dtype) > tail_limit(total, q, mass.shape[1]))


def rank_needle(middle: F64, through: Counts) -> Counts:
    """What to search for among cumulative masses: in whole numbers the first one >= m is the first >= ceil(m)."""
    return middle if through.dtype.kind == "f" else np.ceil(middle).astype(through.dtype)


def shapley_matrix(g: int) -> F64:
    """[g, 2^g]: the Shapley value of player k is row k times the vector of coalition values."""
    members = (np.arange(1 << g)[:, None] >> np.arange(g)) & 1
    size = members.sum(axis=1)
    weight = np.array([factorial(s) * factorial(g - s - 1) / factorial(g) for s in range(g)] + [0.0])
    return np.asarray(np.where(members.T == 1, weight[np.maximum(size - 1, 0)], -weight[size]), dtype=np.float64)


def slack(value: float) -> float:
    """Room for rounding when a bound is compared with a value made of the same numbers in another order."""
    return 1e-9 * abs(float(value)) + 1e-12
