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

from diagnosis.arms import Arm, sum_rows
from diagnosis.quantiles import (
    F64,
    Counts,
    Index,
    descending_order,
    parse_quantile,
    tail_indices,
    tail_limit,
)


@dataclass(frozen=True, slots=True)
class Play:
    """One reading of the game in seconds: Shapley rows [g] and dependence; plain differences for the mean.

    work counts the numbers that were looked at, to decide how many replicates are affordable.
    """

    rows: F64
    dependence: float
    es_rows: F64
    es_dependence: float
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
        np.put_along_axis(self.place, suspect.orders, np.arange(suspect.n)[None, :], axis=1)
        lower, upper = self._advance_bounds()
        by_lower = descending_order(lower)
        self.certain = suspect.tail_of(by_lower)
        floor = lower[by_lower[self.certain.size - 1]]
        self.near = self._seat(np.flatnonzero(upper >= floor - slack(floor)))
        self.base_tail = base.tail_of(base.by_total)

    def play(self, base_mass: Counts | None = None, mass: Counts | None = None) -> Play:
        """Play with the drawn masses [n_b], [n_s]; without any, on the windows as they are."""
        base_mass = self.base.mass if base_mass is None else base_mass
        mass = self.suspect.mass if mass is None else mass
        base_through, through = self.base.cumulate(base_mass), self.suspect.cumulate(mass)
        base_total, total = mass_sum(base_mass), mass_sum(mass)
        banded = self.base.stays_in_band(base_through, base_total) and self.suspect.stays_in_band(through, total)
        # where enough mass lies among those who are certainly large, all who are not `near` lie below the quantile
        pruned = banded and reaches(mass.take(self.certain), total, self.q)
        near = self.near if pruned else self._seat(np.arange(self.suspect.n))
        held = mass.take(near.requests)
        matched = np.empty((self.g, near.requests.size))
        for k in range(self.g):
            matched[k] = self._match(k, near, held, through[k], base_through[k], base_total / total)
        own = near.own
        keep = self._can_matter(own, matched, held, total)
        quantile, shortfall = self._coalitions(own[:, keep], matched[:, keep], held[keep], total)
        base_quantile, base_shortfall = self._base_tail(base_mass, base_total)
        means = np.einsum("n,kn->k", mass.astype(np.float64), self.suspect.columns) / total
        base_means = np.einsum("n,kn->k", base_mass.astype(np.float64), self.base.columns) / base_total
        return Play(
            rows=(self.shapley * (quantile - quantile[0])).sum(axis=1),
            dependence=float(quantile[0] - base_quantile),
            es_rows=(self.shapley * (shortfall - shortfall[0])).sum(axis=1),
            es_dependence=float(shortfall[0] - base_shortfall),
            mean_rows=means - base_means,
            work=self._work(near.requests.size, keep.size),
        )

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

    def _match(self, k: int, near: Near, held: Counts, through: Counts, base_through: Counts, scale: float) -> F64:
        """Baseline seconds of part k at the weighted ranks of the requests `near`: their middle rank, lower inverse."""
        by_place = near.by_place[k]  # a search for rising needles stays in the cache
        middle = through.take(near.places[k]) - held.take(by_place) * 0.5
        found = np.searchsorted(base_through, rank_needle(middle * scale, base_through))
        matched = np.empty(by_place.size)
        matched[by_place] = self.base.ordered[k].take(found, mode="clip")
        return matched

    def _can_matter(self, own: F64, matched: F64, held: Counts, total: float) -> Index:
        """Drawn requests that can be the quantile or above it in some coalition, by the exact bounds of this replicate."""
        lower, upper = sum_rows(np.minimum(own, matched)), sum_rows(np.maximum(own, matched))
        if held.dtype.kind == "f":
            order = descending_order(lower)
            floor = lower[order[min(tail_indices(held[order][None, :], self.q, np.array([total]))[0], lower.size - 1)]]
        else:
            drawn = np.repeat(lower, held)
            at = max(drawn.size - 1 - int(tail_limit(np.array([int(total)]), self.q, 1)[0]), 0)
            floor = np.partition(drawn, at)[at]
        return np.flatnonzero((upper >= floor - slack(floor)) & (held > 0))

    def _coalitions(self, own: F64, matched: F64, mass: Counts, total: float) -> tuple[F64, F64]:
        """Quantile and expected shortfall of all 2^g coalitions; bit k of a coalition's number: cause k is in it."""
        if mass.dtype.kind != "f":  # whole masses are taken as repeats
            again = np.repeat(np.arange(mass.size), mass)
            own, matched, mass = own[:, again], matched[:, again], np.ones(again.size, dtype=np.int64)
        values = np.empty((1 << self.g, own.shape[1]))
        values[0] = sum_rows(matched)
        for k in range(self.g):
            np.add(values[: 1 << k], own[k] - matched[k], out=values[1 << k : 2 << k])
        values[-1] = sum_rows(own)
        return tails(values, mass, total, self.q)

    def _work(self, near: int, keep: int) -> int:
        """Numbers looked at in one play; weights cost more, since they are sorted where counts are partitioned."""
        weighted = self.base.weights is not None or self.suspect.weights is not None
        everyone = 5 * self.g * (self.base.n + self.suspect.n)
        return (2 if weighted else 1) * (everyone + 10 * self.g * near + (8 << self.g) * keep)

    def _base_tail(self, mass: Counts, total: float) -> tuple[float, float]:
        """Quantile and expected shortfall of the baseline."""
        largest = self.base_tail
        if not reaches(mass.take(largest), total, self.q):
            largest = self.base.by_total
        held = mass.take(largest)
        index = min(int(tail_indices(held[None, :], self.q, np.array([total]))[0]), largest.size - 1)
        tail = largest[: index + 1]
        tail = tail[held[: index + 1] > 0]
        found, shortfall = tails(self.base.total[tail][None, :], mass[tail], total, self.q)
        return float(found[0]), float(shortfall[0])


def tails(values: F64, mass: Counts, total: float, q: str) -> tuple[F64, F64]:
    """Quantile and expected shortfall of each row of values [rows, m] with one mass [m].

    The values are the largest of a sample of mass `total`, the quantile among them. Whole masses are taken as repeats.
    """
    rest = float(1 - parse_quantile(q)) * total
    if mass.dtype.kind != "f":
        if (mass != 1).any():
            values = np.repeat(values, mass, axis=1)
        above = int(tail_limit(np.array([int(total)]), q, 1)[0])
        at = values.shape[1] - 1 - above
        values.partition(at, axis=1)
        quantile = values[:, at]
        worst = np.sort(values[:, at + 1 :], axis=1)  # sorted, so that equal samples add up to the same last bit
        return quantile, (worst.sum(axis=1) + (rest - above) * quantile) / rest
    order = np.argsort(-values, axis=1)  # whichever of equal values comes first, the sums are the same
    values, held = np.take_along_axis(values, order, axis=1), mass[order]
    index = np.minimum(tail_indices(held, q, np.full(values.shape[0], total)), values.shape[1] - 1)
    quantile = np.take_along_axis(values, index[:, None], axis=1)[:, 0]
    inside = np.minimum(np.maximum(rest - (np.cumsum(held, axis=1) - held), 0.0), held)
    return quantile, (values * inside).sum(axis=1) / inside.sum(axis=1)


def reaches(mass: Counts, total: float, q: str) -> bool:
    """Whether the nearest rank of a sample of mass `total` lies among its largest values, whose masses [m] these are."""
    found = tail_limit(np.array([total]), q, mass.size)
    return bool(mass_sum(mass) > found[0])


def rank_needle(middle: F64, through: Counts) -> Counts:
    """What to search for among cumulative masses: in whole numbers the first one >= m is the first >= ceil(m)."""
    return middle if through.dtype.kind == "f" else np.ceil(middle).astype(through.dtype)


def shapley_matrix(g: int) -> F64:
    """[g, 2^g]: the Shapley value of player k is row k times the vector of coalition values."""
    members = (np.arange(1 << g)[:, None] >> np.arange(g)) & 1
    size = members.sum(axis=1)
    weight = np.array([factorial(s) * factorial(g - s - 1) / factorial(g) for s in range(g)] + [0.0])
    return np.asarray(np.where(members.T == 1, weight[np.maximum(size - 1, 0)], -weight[size]), dtype=np.float64)


def mass_sum(mass: Counts) -> float:
    """Total mass; exact for whole numbers."""
    return float(mass.sum()) if mass.dtype.kind == "f" else int(mass.sum(dtype=np.int64))


def slack(value: float) -> float:
    """Room for rounding when a bound is compared with a value made of the same numbers in another order."""
    return 1e-9 * abs(float(value)) + 1e-12
