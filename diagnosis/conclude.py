"""The status and the one sentence of a verdict."""

from __future__ import annotations

from collections.abc import Sequence

from diagnosis.cause import Case
from diagnosis.judged import Judged
from diagnosis.rows import ROWS, UNOBSERVED
from diagnosis.verdict import Change, LedgerRow, NamedCause
from diagnosis.wording import interval, listing, metric_name, percent, quantile_name, seconds, signed

MIN_REQUESTS = 20
"""Below this many requests in a window nothing is said about a change."""


def conclude(
    case: Case, judged: Judged, causes: Sequence[NamedCause], delta: Change, rows: Sequence[LedgerRow]
) -> tuple[str, str]:
    metric, name = metric_name(case.metric), quantile_name(judged.quantile)
    n_b, n_s = judged.significance.n
    if min(n_b, n_s) < MIN_REQUESTS:
        return (
            "not_distinguishable",
            f"Too few requests to say anything: {n_b} in the baseline, {n_s} in the suspect window; at least {MIN_REQUESTS} each are needed, "
            f"and {judged.requested.n_needed or 368:,} for {quantile_name(case.quantile)}.",
        )
    asked = quantile_name(judged.asked)
    asked_change = f"{seconds(delta.base_p99_s)} -> {seconds(delta.suspect_p99_s)}"
    means = f"mean {seconds(delta.base_mean_s)} -> {seconds(delta.suspect_mean_s)}"
    if not judged.changed:
        carrier = f"{name} {seconds(delta.base_judged_s)} -> {seconds(delta.suspect_judged_s)} ({interval(delta.interval_95)})"
        if judged.significance.enough and judged.quantile == judged.asked:
            return (
                "no_change",
                f"{asked} {metric} did not change beyond noise: {asked_change} (difference {interval(delta.interval_95)}), {means}.",
            )
        carrier = (
            f"{carrier}, {means}"
            if judged.significance.enough
            else f"{means} (difference {interval(delta.mean_interval_95)})"
        )
        return (
            "no_change",
            f"{metric} did not change beyond noise: {carrier}. {asked} went {asked_change}, but too few independent requests carry it.",
        )
    worse = delta.mean_s > 0 if judged.by_mean else delta.judged_s > 0
    direction = "rose" if worse else "fell"
    if judged.by_mean and judged.requested.enough:
        opening = (
            f"{asked} {metric} did not change beyond noise ({asked_change}), but its mean {direction} ({means[5:]})"
        )
    elif judged.by_mean:
        moved = "rose" if delta.p99_s > 0 else "fell"
        opening = (
            f"{asked} {metric} {moved} from {seconds(delta.base_p99_s)} to {seconds(delta.suspect_p99_s)}; too few independent requests for its "
            f"interval, so the mean carries the verdict ({means[5:]}, {interval(delta.mean_interval_95)})"
        )
    elif judged.quantile != judged.asked:
        opening = (
            f"{name} {metric} {direction} from {seconds(delta.base_judged_s)} to {seconds(delta.suspect_judged_s)} ({means}; {asked} {asked_change}, "
            "too few independent requests for its interval)"
        )
    else:
        opening = (
            f"{asked} {metric} {direction} from {seconds(delta.base_p99_s)} to {seconds(delta.suspect_p99_s)} ({means})"
        )
    if causes:
        parts = [f"{c.cause} owns {percent(_share(c, rows, delta, judged))}" for c in causes[:3]]
        of = "the change of the mean" if judged.by_mean else "the change"
        return "explained", f"{opening}: {listing(parts)} of {of}."
    hidden = sum(r.judged_s for r in rows if r.cause in UNOBSERVED)
    if delta.judged_s and hidden / delta.judged_s > 0.5:
        return (
            "not_observable",
            f"{opening}, and {percent(hidden / delta.judged_s)} of the change lies where this setup cannot look: "
            + listing([ROWS[r.cause] for r in rows if r.cause in UNOBSERVED and r.judged_s > 0])
            + ".",
        )
    biggest = next((r for r in rows if r.cause not in ("dependence", "other")), None)
    largest = "" if biggest is None else f"; the largest part is {biggest.text} ({signed(biggest.judged_s)})"
    return "not_distinguishable", f"{opening}, but no cause has evidence for a material part of it{largest}."


def _share(cause: NamedCause, rows: Sequence[LedgerRow], delta: Change, judged: Judged) -> float:
    owned = cause.rows
    if not judged.by_mean:
        return sum(r.judged_s for r in rows if r.cause in owned) / delta.judged_s if delta.judged_s else 0.0
    return sum(r.mean_s for r in rows if r.cause in owned) / delta.mean_s if delta.mean_s else 0.0
