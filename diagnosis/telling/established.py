"""What is said of a change that stands: what changed, who owns it, and what of it lies where this setup cannot look.

It stands at the common mix of requests, or in the raw numbers alone: then the traffic changed, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from diagnosis.attribution.traffic import ROWS as TRAFFIC_ROWS
from diagnosis.calibration import all_reached
from diagnosis.cause import Case
from diagnosis.causes.load_step import GROWTH, STANDS_OUT, growth_z, rates_a_worker
from diagnosis.ledger.rows import ROWS, UNOBSERVED
from diagnosis.statistics.judged import Judged
from diagnosis.telling.movement import moved_s, outweighed
from diagnosis.telling.phrases import owners, quantile_value
from diagnosis.telling.verdict import Change, Conclusion, LedgerRow, NamedCause
from diagnosis.telling.wording import interval, listing, metric_name, number, percent, quantile_name, seconds, signed

MAY_BE_WAITS = frozenset(("queue_unobserved", "ttft_unobserved", "decode_unobserved", "answer_unobserved"))
"""Rows of which nobody can tell how much is waiting for other requests."""


def of_established(
    case: Case, judged: Judged, causes: Sequence[NamedCause], delta: Change, rows: Sequence[LedgerRow]
) -> Conclusion:
    """The metric changed at the common mix: who owns it, what of it cannot be seen, or why nobody can be named."""
    opening, aside = _opening(case, judged, delta)
    moved, against = moved_s(case, judged), outweighed(case, judged)
    told = {row for cause in causes for row in cause.rows if row == "reuse_lost"}  # who names its reason has seen it
    hidden = [r for r in rows if r.cause in UNOBSERVED - told]
    unseen = sum(_seconds(r, judged) for r in hidden) / moved if moved else 0.0
    blind = ""
    if unseen > 0.5:
        where = listing([ROWS[r.cause] + _at(case, r.cause) for r in hidden if _seconds(r, judged) * moved > 0])
        blind = f"{percent(min(unseen, 1.0))} of {'that' if against else 'the change'} lies where this setup cannot look: {where}"
        if {r.cause for r in hidden} & MAY_BE_WAITS and "load_step" not in [cause.cause for cause in causes]:
            blind += _more_came(case)
    if against and of_its_rows(causes):
        parts = [part for part in (owners(case, judged, causes), blind) if part]
        return Conclusion("explained", opening + (f": {'; '.join(parts)}" if parts else "") + f".{aside}", named=True)
    if causes:
        said = f"{opening}: {owners(case, judged, causes)}"
        if blind:
            return Conclusion("not_observable", f"{said}; {blind}.{aside}", named=True)
        return Conclusion("explained", f"{said}.{aside}", named=True)
    if blind:
        return Conclusion("not_observable", f"{opening}; {blind}.{aside}")
    known = [r for r in rows if r.cause not in ("dependence", "other")]
    biggest = max(known, key=lambda r: abs(_seconds(r, judged)), default=None)
    largest = "" if biggest is None else f"; the largest part is {biggest.text} ({signed(_seconds(biggest, judged))})"
    return Conclusion(
        "not_distinguishable", f"{opening}; no cause has evidence for a material part of it{largest}.{aside}"
    )


def of_traffic_alone(case: Case, judged: Judged, causes: Sequence[NamedCause], delta: Change) -> Conclusion:
    """The raw numbers changed, at a common mix nothing did."""
    metric, name = metric_name(case.metric), quantile_name(judged.quantile)
    raw, at_mix = judged.raw, judged.significance
    assert raw is not None  # narrows: asked only where the raw numbers were compared apart from those at a common mix
    by_mean = not raw.changed
    direction = "rose" if (raw.delta_mean_s if by_mean else raw.delta_s) > 0 else "fell"
    what = f"mean {metric}" if by_mean else f"{name} {metric}"
    before, after = (
        (delta.base_mean_s, delta.suspect_mean_s) if by_mean else (delta.base_judged_s, delta.suspect_judged_s)
    )
    opening = f"{what} {direction} from {seconds(before)} to {seconds(after)}"
    found, bounds = (at_mix.delta_mean_s, at_mix.mean_interval_95) if by_mean else (at_mix.delta_s, at_mix.interval_95)
    rest = f"at a common mix of requests it did not change beyond noise ({signed(found)}, {interval(bounds)})"
    named = of_its_rows(causes)
    if not named:
        return Conclusion("not_distinguishable", f"{opening}; {rest}.")
    why = ROWS[named[0].rows[0]]
    return Conclusion("explained", f"{opening} because the traffic changed ({why}); {rest}.", named=True)


def of_its_rows(causes: Sequence[NamedCause]) -> list[NamedCause]:
    """Those of the causes that are the traffic's own."""
    return [c for c in causes if set(c.rows) & set(TRAFFIC_ROWS)]


def _opening(case: Case, judged: Judged, delta: Change) -> tuple[str, str]:
    """What changed, and an aside on the quantile that was asked for where another number carries the verdict."""
    metric, name, asked = metric_name(case.metric), quantile_name(judged.quantile), quantile_name(judged.asked)
    direction = "rose" if moved_s(case, judged) > 0 else "fell"
    asked_before = quantile_value(delta.base_p99_s, delta.base_p99_range)
    asked_change = f"{asked_before} -> {quantile_value(delta.suspect_p99_s, delta.suspect_p99_range)}"
    means = f"{seconds(delta.base_mean_s)} -> {seconds(delta.suspect_mean_s)}"
    thin = f" {asked} went {asked_change}, but too few independent requests carry an interval for it."
    aside = "" if judged.requested.enough else thin
    if outweighed(case, judged):
        return _opening_outweighed(case, judged, delta), aside
    if judged.raw is not None:
        return _opening_at_mix(case, judged, delta), aside
    if judged.by_mean and judged.requested.enough:
        return f"{asked} {metric} did not change beyond noise ({asked_change}), but its mean {direction} ({means})", ""
    if judged.by_mean:
        return f"Mean {metric} {direction} ({means}, difference {interval(delta.mean_interval_95)})", aside
    return (
        f"{name} {metric} {direction} from {quantile_value(delta.base_judged_s, delta.base_judged_range)} to "
        f"{quantile_value(delta.suspect_judged_s, delta.suspect_judged_range)} (mean {means})",
        aside,
    )


def _opening_at_mix(case: Case, judged: Judged, delta: Change) -> str:
    """The change at the common mix first: it is what the causes are measured against; then the raw numbers."""
    metric, name = metric_name(case.metric), quantile_name(judged.quantile)
    found = judged.significance
    moved, bounds = (
        (found.delta_mean_s, found.mean_interval_95) if judged.by_mean else (found.delta_s, found.interval_95)
    )
    what = f"mean {metric}" if judged.by_mean else f"{name} {metric}"
    raw = (
        f"mean {seconds(delta.base_mean_s)} -> {seconds(delta.suspect_mean_s)}"
        if judged.by_mean
        else f"{name} {seconds(delta.base_judged_s)} -> {quantile_value(delta.suspect_judged_s, delta.suspect_judged_range)}"
    )
    direction = "rose" if moved > 0 else "fell"
    return f"At a common mix of requests {what} {direction} by {seconds(abs(moved))} ({interval(bounds)}; raw: {raw})"


def _at(case: Case, row: str) -> str:
    """The worker of several whose requests have nearly all of what lies outside the engine; empty where none has, or it lies in one."""
    kind, name = case.worker_subject(row) if row in ("behind_engine", "either_way") else ("fleet", None)
    return f" (requests of {name})" if kind == "worker" and len(case.suspect.requests.worker_names) > 1 else ""


def _opening_outweighed(case: Case, judged: Judged, delta: Change) -> str:
    """The raw change first, where the traffic made it and the change at the common mix went the other way."""
    metric, traffic, found = metric_name(case.metric), case.traffic, judged.significance
    assert traffic is not None  # narrows: nothing is outweighed where nothing was reweighted
    by_mean = traffic.by_mean or judged.by_mean
    what, at_mix = (
        f"mean {metric}" if each else f"{quantile_name(judged.quantile)} {metric}" for each in (by_mean, judged.by_mean)
    )
    owned, (before, after) = (
        (traffic.mean_s, (seconds(delta.base_mean_s), seconds(delta.suspect_mean_s)))
        if by_mean
        else (
            traffic.quantile_s,
            (
                quantile_value(delta.base_judged_s, delta.base_judged_range),
                quantile_value(delta.suspect_judged_s, delta.suspect_judged_range),
            ),
        )
    )
    moved, bounds = (
        (found.delta_mean_s, found.mean_interval_95) if judged.by_mean else (found.delta_s, found.interval_95)
    )
    rose, fell = ("rose", "fell") if moved < 0 else ("fell", "rose")
    return (
        f"{what[0].upper()}{what[1:]} {rose} from {before} to {after} because the traffic changed ({ROWS[traffic.row]}: {signed(owned)}); at a common mix of "
        f"requests {'it' if what == at_mix else at_mix} {fell} by {seconds(abs(moved))} ({interval(bounds)})"
    )


def _more_came(case: Case) -> str:
    """That the arrivals at each worker grew in the window that is worse, whose waits nobody sees."""
    before, now = rates_a_worker(case.base, case.suspect)
    grew = now / before - 1.0 if before > 0 else 0.0
    if not all_reached((GROWTH, grew), (STANDS_OUT, growth_z(case.base, case.suspect) if grew > 0 else 0.0)):
        return ""
    then, since = (now, before) if case.ended else (before, now)
    word = "fell" if case.ended else "rose"
    return (
        f"; arrivals {word} from {number(then)} to {number(since)} requests/s ({since / then - 1.0:+.0%}), and what requests wait inside for one "
        "another cannot be seen"
    )


def _seconds(row: LedgerRow, judged: Judged) -> float:
    """Seconds of a row in the change that carries the verdict."""
    return row.mean_s if judged.by_mean else row.judged_s
