"""Sentences on a change that is not established: what moved much all the same, whom that points at, and what did not move."""

from __future__ import annotations

from collections.abc import Sequence

from diagnosis.cause import Case
from diagnosis.statistics.judged import Judged
from diagnosis.telling.movement import only_tail
from diagnosis.telling.phrases import owners, went
from diagnosis.telling.verdict import Change, NamedCause
from diagnosis.telling.wording import interval, listing, metric_name, quantile_name, seconds, share_of


def of_suspicious(case: Case, judged: Judged, causes: Sequence[NamedCause], delta: Change) -> str:
    """A large change that one burst may be all of: said as it is, with whom it points at."""
    metric = metric_name(case.metric)
    bounds = interval(judged.significance.mean_interval_95)
    episodes, side = min(zip(judged.significance.episodes, ("baseline", "suspect window"), strict=True))
    need = judged.requested.n_needed
    pointed = f"; if it is real, {causes[0].cause} owns most of it" if causes else ""
    wanted = f" About {need:,} requests a window would show a change of 20 %." if need else ""
    return (
        f"{quantile_name(judged.quantile)} {metric} went {went(delta)}, but too few independent requests carry it: "
        f"{episodes} separate episode{'' if episodes == 1 else 's'} of slow ones in the {side}, difference of the mean {bounds}{pointed}.{wanted}"
    )


def of_chance(case: Case, judged: Judged, causes: Sequence[NamedCause], delta: Change) -> str:
    """A change beyond its interval, yet no rarer than a few pairs of quiet windows in a hundred, and nothing in it that began."""
    need = judged.requested.n_needed
    wanted = f" About {need:,} requests a window would show a change of 20 %." if need else ""
    return (
        f"{quantile_name(judged.quantile)} {metric_name(case.metric)} went {went(delta)}. That is beyond noise, but {_chance(judged.chance)} two "
        f"draws of the same traffic differ by as much, and the {case.base_word} has what it points at too, so nobody is accused; if it is real, "
        f"{owners(case, judged, causes)}.{wanted}"
    )


def _chance(p: float | None) -> str:
    """Of 0.02: once in 50 times."""
    return f"once in {max(round(1.0 / p), 2):,} times" if p else "at times"


def of_what_began(case: Case, judged: Judged, causes: Sequence[NamedCause], delta: Change) -> str:
    """A large change without an interval, most of which belongs to what the other window has nothing of."""
    metric = metric_name(case.metric)
    if only_tail(case, judged, delta):
        asked_change = f"{seconds(delta.base_p99_s)} -> {seconds(delta.suspect_p99_s)}"
        means = f"mean {seconds(delta.base_mean_s)} -> {seconds(delta.suspect_mean_s)}"
        shares = listing(
            [f"{'the end of ' if c.ended else ''}{c.cause} owns {share_of(c.share_p99)}" for c in causes[:3]]
        )
        episodes, side = min(zip(judged.requested.episodes, ("baseline", "suspect window"), strict=True))
        return (
            f"{quantile_name(judged.asked)} {metric} went {asked_change} ({means}): {shares} of it, and the {case.base_word} shows nothing of "
            f"{causes[0].cause}. Too few independent requests carry the change for an interval ({episodes} separate "
            f"episode{'' if episodes == 1 else 's'} of slow ones in the {side})."
        )
    episodes, side = min(zip(judged.significance.episodes, ("baseline", "suspect window"), strict=True))
    return (
        f"{quantile_name(judged.quantile)} {metric} went {went(delta)}: {owners(case, judged, causes)}, and the {case.base_word} "
        f"shows nothing of {causes[0].cause}. Too few independent requests carry the change for an interval ({episodes} separate "
        f"episode{'' if episodes == 1 else 's'} of slow ones in the {side})."
    )


def of_no_change(case: Case, judged: Judged, delta: Change) -> str:
    """What did not change, by the number that has an interval; the quantile that was asked for as it is."""
    metric, name, asked = metric_name(case.metric), quantile_name(judged.quantile), quantile_name(judged.asked)
    asked_change = f"{seconds(delta.base_p99_s)} -> {seconds(delta.suspect_p99_s)}"
    means = f"mean {seconds(delta.base_mean_s)} -> {seconds(delta.suspect_mean_s)}"
    mixed = "at a common mix of requests, " if judged.raw is not None else ""
    found, small = judged.significance, _small(judged)
    bounds = found.interval_95 if found.enough else found.mean_interval_95
    how = "by a tenth" if _without_0(bounds) else "beyond noise"
    if judged.significance.enough and judged.quantile == judged.asked:
        return (
            f"{asked} {metric} did not change {how}: {asked_change} (difference {mixed}{interval(delta.interval_95)}), "
            f"{means}.{small}"
        )
    if judged.significance.enough:
        carrier = (
            f"{name} {seconds(delta.base_judged_s)} -> {seconds(delta.suspect_judged_s)} "
            f"(difference {mixed}{interval(delta.interval_95)}), {means}"
        )
    else:
        carrier = f"{means} (difference {mixed}{interval(delta.mean_interval_95)})"
    return (
        f"{metric} did not change {how}: {carrier}. {asked} went {asked_change}, but too few independent requests "
        f"carry it.{small}"
    )


def _small(judged: Judged) -> str:
    """What moved beyond noise and by too little to be called a change; empty where nothing did."""
    found = judged.significance
    numbers = [("the mean", found.delta_mean_s, found.mean_interval_95)]
    if found.enough:
        numbers.insert(0, (quantile_name(judged.quantile), found.delta_s, found.interval_95))
    told = [
        f"{name} {'rose' if moved > 0 else 'fell'} by {seconds(abs(moved))} ({interval(bounds)})"
        for name, moved, bounds in numbers
        if _without_0(bounds)
    ]
    if not told:
        return ""
    said = listing(told)
    return f" {said[0].upper()}{said[1:]}: beyond noise, and less than the tenth from which on it is called a change."


def _without_0(bounds: tuple[float, float] | None) -> bool:
    """Whether there is an interval, and 0 lies outside it."""
    return bounds is not None and (bounds[0] > 0.0 or bounds[1] < 0.0)
