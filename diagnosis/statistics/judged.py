"""Which quantile carries the verdict: the one that was asked for, or what too few requests still allow."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from diagnosis.facts import F64, I64
from diagnosis.ledger.values import Counted
from diagnosis.statistics.comparability import Mix
from diagnosis.statistics.significance import Significance, compare
from diagnosis.telling.wording import metric_name, quantile_name

FALLBACK = "0.95"
"""Judged where the quantile that was asked for has no interval."""
SURE_P = 0.003
"""Chance of a change as large between two draws of one traffic, up to which it may be laid to what both windows have: three standard
errors. A 95 % interval is passed by one pair in twenty, and such a pair always has something that grew a little."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Which quantile carries the verdict, and what was found about it and about the one that was asked for."""

    quantile: str
    asked: str
    requested: Significance
    significance: Significance
    notes: list[str]
    raw: Significance | None = None
    """The same without reweighting; None where nothing was reweighted."""

    @property
    def changed(self) -> bool:
        return self.significance.changed or self.significance.changed_mean

    @property
    def chance(self) -> float | None:
        """Of the numbers that changed, the least chance of as much between two draws of one traffic; None where none did."""
        found = self.significance
        told = [
            p
            for p, changed in ((found.p_quantile, found.changed), (found.p_mean, found.changed_mean))
            if changed and p is not None
        ]
        return min(told, default=None)

    @property
    def sure(self) -> bool:
        """It changed, and by more than chance may well do: enough to accuse what the other window has too."""
        return self.chance is not None and self.chance <= SURE_P

    @property
    def by_mean(self) -> bool:
        """The mean carries the verdict: the quantile has no interval, or did not change by itself."""
        return not self.significance.changed


Repeats = tuple[I64 | None, I64 | None]
"""Which repeat each counted request is of, by window; None: the window is no arm that was run several times."""
ONCE: Repeats = (None, None)


def carry(
    base: Counted, suspect: Counted, mix: Mix, metric: str, quantile: str, seed: int, repeats: Repeats = ONCE
) -> Judged:
    """Judge the quantile at the common mix, or what can stand in for it; and, where reweighted, the raw change as well."""
    repeats = under(mix, repeats)
    found = _carried(base, suspect, mix, metric, quantile, seed, repeats)
    if not mix.shifted:
        return found
    raw = compare(
        base.values,
        suspect.values,
        found.quantile,
        seed=seed,
        repeat_base=repeats[0],
        repeat_suspect=repeats[1],
    )
    return replace(found, raw=raw)


def under(mix: Mix, repeats: Repeats) -> Repeats:
    """The repeats as they stand at the common mix: None of a window of which fewer than two have a request left."""

    def one(side: int) -> I64 | None:
        of, weight = repeats[side], weights(mix, side)
        left = of if of is None or weight is None else of[weight > 0]
        return None if left is None or len(np.unique(left)) < 2 else of

    return one(0), one(1)


def _carried(
    base: Counted, suspect: Counted, mix: Mix, metric: str, quantile: str, seed: int, repeats: Repeats
) -> Judged:
    def at(q: str) -> Significance:
        return compare(
            base.values,
            suspect.values,
            q,
            w_base=weights(mix, 0),
            w_suspect=weights(mix, 1),
            seed=seed,
            repeat_base=repeats[0],
            repeat_suspect=repeats[1],
        )

    requested = at(quantile)
    notes: list[str] = []
    if requested.enough:
        return Judged(quantile, quantile, requested, requested, notes)
    name, fallback = quantile_name(quantile), quantile_name(FALLBACK)
    need = (
        "; no window is long enough to show a change of 20 %"
        if requested.n_needed is None
        else f"; about {requested.n_needed:,} requests a window would show a change of 20 %"
    )
    notes.append(f"too few for an interval of {name} {metric_name(metric)}: {requested.reason}{need}")
    if float(quantile) > float(FALLBACK):
        lower = at(FALLBACK)
        carried = (
            f"{fallback} and the mean carry the verdict"
            if lower.enough
            else f"{fallback} has no interval either; the mean carries the verdict"
        )
        notes.append(f"{carried}; {name} is shown without an interval")
        return Judged(FALLBACK, quantile, requested, lower, notes)
    notes.append("the mean carries the verdict")
    return Judged(quantile, quantile, requested, requested, notes)


def weights(mix: Mix, side: int) -> F64 | None:
    return (mix.w_base, mix.w_suspect)[side] if mix.shifted else None
