"""The status and the one sentence of a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diagnosis.attribution.traffic import ROWS as TRAFFIC_ROWS
from diagnosis.calibration import all_reached
from diagnosis.cause import Case
from diagnosis.causes.load_step import GROWTH, STANDS_OUT, growth_z, rates_a_worker
from diagnosis.claims.offered_load import past_knee
from diagnosis.facts import F64, Facts
from diagnosis.ledger.rows import ROWS, UNOBSERVED
from diagnosis.models import other_models
from diagnosis.statistics.dimensions import LENGTHS, WORDS
from diagnosis.statistics.judged import Judged
from diagnosis.statistics.sufficiency import MOST_REQUESTS, required_n
from diagnosis.telling.verdict import Change, LedgerRow, NamedCause
from diagnosis.telling.wording import (
    interval,
    listing,
    metric_name,
    number,
    percent,
    quantile_name,
    seconds,
    share_of,
    signed,
)

MIN_REQUESTS = 20
"""Below this many requests in a window nothing is said about a change."""
MAY_BE_WAITS = frozenset(("queue_unobserved", "ttft_unobserved", "decode_unobserved", "answer_unobserved"))
"""Rows of which nobody can tell how much is waiting for other requests."""
SUSPICIOUS = 0.20
"""Relative change of the mean from which on an answer of `no_change` needs more than a wide interval."""
WHY_NOT = {
    "no_change": "the metric did not change",
    "not_distinguishable": "the change itself is not established",
    "not_observable": "the change lies where this setup cannot look",
}
"""Why a claim is no cause where the verdict names none."""


def fell(case: Case, judged: Judged) -> bool:
    """Whether the metric changed for the better, at the common mix or, where it did not change there, in the raw numbers."""
    if judged.changed:
        moved = case.attribution.delta_mean_s if judged.by_mean else case.attribution.delta_quantile_s
        return moved < 0
    if case.traffic is not None and case.traffic.changed:
        return (case.traffic.raw_mean_s if case.traffic.by_mean else case.traffic.raw_quantile_s) < 0
    return False


def seems_to_fall(case: Case, judged: Judged, delta: Change) -> bool:
    """Whether what moved much and is not established went down: the mean, else the quantile that was asked for."""
    if judged.changed:
        return False
    if suspicious(case):
        return case.attribution.delta_mean_s < 0
    return only_tail(case, judged, delta) and judged.requested.delta_s < 0


@dataclass(frozen=True, slots=True)
class Conclusion:
    """Status and sentence of a verdict; `named`: its causes are shown (tentatively, where the status is not `explained`)."""

    status: str
    sentence: str
    named: bool = False


def conclude(
    case: Case,
    judged: Judged,
    causes: Sequence[NamedCause],
    delta: Change,
    rows: Sequence[LedgerRow],
) -> Conclusion:
    """What is said of the change."""
    if min(judged.significance.n) < MIN_REQUESTS:
        return Conclusion("not_distinguishable", _too_few(case, judged))
    if case.base_ledger.censored.all() and case.suspect_ledger.censored.all():
        return Conclusion("not_distinguishable", _never_a_token(case, delta))
    if case.base_ledger.censored.all() or case.suspect_ledger.censored.all():
        return Conclusion("not_distinguishable", _nobody_served(case, judged, delta))
    unbounded = _unbounded(case, judged, delta)
    if unbounded is not None:
        return Conclusion("not_distinguishable", unbounded)
    if case.apart and not (causes and causes[0].cause == "length_shift"):
        return Conclusion("not_distinguishable", _incomparable(case, judged, delta))
    models = other_models(case.base, case.suspect)
    if models is not None and (
        judged.changed or suspicious(case) or (case.traffic is not None and case.traffic.changed)
    ):
        return Conclusion("not_distinguishable", _other_models(case, judged, causes, delta, models), named=True)
    if judged.changed:
        return _changed(case, judged, causes, delta, rows)
    if case.traffic is not None and case.traffic.changed:
        return _only_traffic(case, judged, causes, delta)
    if causes and causes[0].began and (suspicious(case) or only_tail(case, judged, delta)):
        return Conclusion("explained", _began(case, judged, causes, delta), named=True)
    if suspicious(case):
        return Conclusion("not_distinguishable", _suspicious(case, judged, causes, delta), named=True)
    return Conclusion("no_change", _no_change(case, judged, delta))


def _changed(
    case: Case, judged: Judged, causes: Sequence[NamedCause], delta: Change, rows: Sequence[LedgerRow]
) -> Conclusion:
    """The metric changed at the common mix: who owns it, what of it cannot be seen, or why nobody can be named."""
    opening, aside = _opening(case, judged, delta)
    moved = _moved(case, judged)
    told = {row for cause in causes for row in cause.rows if row == "reuse_lost"}  # who names its reason has seen it
    hidden = [r for r in rows if r.cause in UNOBSERVED - told]
    unseen = sum(_seconds(r, judged) for r in hidden) / moved if moved else 0.0
    blind = ""
    if unseen > 0.5:
        where = listing([ROWS[r.cause] for r in hidden if _seconds(r, judged) * moved > 0])
        blind = f"{percent(min(unseen, 1.0))} of the change lies where this setup cannot look: {where}"
        if {r.cause for r in hidden} & MAY_BE_WAITS and "load_step" not in [cause.cause for cause in causes]:
            blind += _more_came(case)
    if causes:
        said = f"{opening}: {_owners(case, judged, causes)}"
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


def suspicious(case: Case) -> bool:
    """Whether the mean moved so much that noise is a poor answer, although too few independent requests carry it."""
    attribution = case.attribution
    before = float(case.base_ledger.values.mean() if not case.ended else case.suspect_ledger.values.mean())
    return abs(attribution.delta_mean_s) >= SUSPICIOUS * before and abs(attribution.delta_mean_s) > 0


def only_tail(case: Case, judged: Judged, delta: Change) -> bool:
    """Whether nothing is established, the mean hardly moved, and the quantile that was asked for moved much and has no interval.

    Two draws of one traffic do that too, so only a cause that began may be named for it.
    """
    if judged.changed or judged.requested.enough or suspicious(case):
        return False
    return abs(judged.requested.delta_s) >= SUSPICIOUS * delta.base_p99_s > 0.0


def _seconds(row: LedgerRow, judged: Judged) -> float:
    """Seconds of a row in the change that carries the verdict."""
    return row.mean_s if judged.by_mean else row.judged_s


def _moved(case: Case, judged: Judged) -> float:
    """The change that carries the verdict, s, at the common mix."""
    return case.attribution.delta_mean_s if judged.by_mean else case.attribution.delta_quantile_s


def _too_few(case: Case, judged: Judged) -> str:
    n_b, n_s = judged.significance.n
    most = judged.requested.n_needed or required_n(judged.asked, 2)
    need = f"{f'{most:,}' if most else f'more than {MOST_REQUESTS:,}'} for {quantile_name(judged.asked)}"
    raw = min(len(case.base_ledger.values), len(case.suspect_ledger.values))
    if raw >= MIN_REQUESTS:
        return (
            f"Too few comparable requests to say anything: {n_b} in the baseline and {n_s} in the suspect window are of kinds that both "
            f"hold; at least {MIN_REQUESTS} each are needed, and {need}."
        )
    base, suspect = len(case.base_ledger.values), len(case.suspect_ledger.values)
    if case.ended:
        base, suspect = suspect, base
    return (
        f"Too few requests to say anything: {base} in the baseline, {suspect} in the suspect window; at least {MIN_REQUESTS} each are "
        f"needed, and {need}."
    )


def _never_a_token(case: Case, delta: Change) -> str:
    return (
        f"{metric_name(case.metric)} cannot be compared: no request of either window got a first token; they ended after "
        f"{seconds(delta.base_mean_s)} and {seconds(delta.suspect_mean_s)} in the mean."
    )


def _nobody_served(case: Case, judged: Judged, delta: Change) -> str:
    """One of the windows served nobody: that is the finding, and no latency of it can be compared."""
    is_suspect = case.suspect_ledger.censored.all() != case.ended
    ledger = case.suspect_ledger if case.suspect_ledger.censored.all() else case.base_ledger
    side, waited = ("suspect window", delta.suspect_mean_s) if is_suspect else ("baseline", delta.base_mean_s)
    served = delta.base_mean_s if is_suspect else delta.suspect_mean_s
    return (
        f"{metric_name(case.metric)} cannot be compared: none of the {len(ledger.values):,} requests of the {side} got a first token; they "
        f"ended without one after {seconds(waited)} in the mean, where the other window served after {seconds(served)} "
        f"({quantile_name(judged.quantile)} went {_went(delta, judged).partition(' (')[0]}). Why they ended "
        "(failed, aborted, rejected) is what to look for first: `kvscope requests list`."
    )


def _unbounded(case: Case, judged: Judged, delta: Change) -> str | None:
    """One sentence where so many first tokens never came in one window that the direction of the change is unknown."""
    ranges = [delta.base_judged_range, delta.suspect_judged_range]
    is_open = [r is not None and r[1] is None for r in ranges]
    if is_open[0] == is_open[1]:
        return None
    side = is_open.index(True)
    at_least = (ranges[side] or (0.0, None))[0]
    seen = (delta.base_judged_s, delta.suspect_judged_s)
    other = ranges[1 - side]
    at_most = seen[1 - side] if other is None or other[1] is None else other[1]
    if at_least > at_most:
        return None  # open to the top, and above the other window all the same
    metric, name = metric_name(case.metric), quantile_name(judged.quantile)
    return (
        f"{name} {metric} cannot be compared: so many requests of the {('baseline', 'suspect window')[side]} ended without a first "
        f"token that it is {seconds(at_least)} or more there, with no upper limit "
        f"(of what was seen it went {seconds(seen[0])} -> {seconds(seen[1])})."
    )


def _incomparable(case: Case, judged: Judged, delta: Change) -> str:
    metric, name = metric_name(case.metric), quantile_name(judged.quantile)
    means = [
        f"mean {WORDS[length]} {number(before)} -> {number(now)} tokens"
        for length in LENGTHS
        if length in case.apart
        for before, now in [[_mean(facts.requests.get(length)) for facts in _sides(case)]]
        if before is not None and now is not None
    ]
    moved = f" ({listing(means)})" if means else ""
    return (
        f"{name} {metric} went {_went(delta, judged)}, but the windows have no kind of request in common{moved}: whether the traffic or the "
        "engine changed cannot be told."
    )


def _sides(case: Case) -> tuple[Facts, Facts]:
    """(baseline, suspect window), whichever way the case is asked."""
    return (case.suspect, case.base) if case.ended else (case.base, case.suspect)


def _mean(lengths: F64) -> float | None:
    """Mean of what is known, None where nothing is."""
    known = lengths[np.isfinite(lengths)]
    return float(known.mean()) if len(known) else None


def _other_models(
    case: Case, judged: Judged, causes: Sequence[NamedCause], delta: Change, models: tuple[str, str]
) -> str:
    """Another model takes other time for the same request: that comes before anything the engine did."""
    then, now = models[::-1] if case.ended else models
    pointed = (
        f"; if they are one model under two names, {causes[0].cause} owns most of the change"
        if causes
        else "; beside that no cause has evidence"
    )
    return (
        f"{quantile_name(judged.quantile)} {metric_name(case.metric)} went {_went(delta, judged)}, and the windows were served by different "
        f"models ({then} in the baseline, {now} in the suspect window): what a request costs is another thing then, whatever the engine "
        f"did{pointed}."
    )


def _suspicious(case: Case, judged: Judged, causes: Sequence[NamedCause], delta: Change) -> str:
    """A large change that one burst may be all of: said as it is, with whom it points at."""
    metric = metric_name(case.metric)
    bounds = interval(judged.significance.mean_interval_95)
    episodes, side = min(zip(judged.significance.episodes, ("baseline", "suspect window"), strict=True))
    need = judged.requested.n_needed
    pointed = f"; if it is real, {causes[0].cause} owns most of it" if causes else ""
    wanted = f" About {need:,} requests a window would show a change of 20 %." if need else ""
    return (
        f"{quantile_name(judged.quantile)} {metric} went {_went(delta, judged)}, but too few independent requests carry it: "
        f"{episodes} separate episode{'' if episodes == 1 else 's'} of slow ones in the {side}, difference of the mean {bounds}{pointed}.{wanted}"
    )


def _began(case: Case, judged: Judged, causes: Sequence[NamedCause], delta: Change) -> str:
    """A large change without an interval, most of which belongs to what the other window has nothing of."""
    metric = metric_name(case.metric)
    if only_tail(case, judged, delta):
        went = f"{seconds(delta.base_p99_s)} -> {seconds(delta.suspect_p99_s)}"
        means = f"mean {seconds(delta.base_mean_s)} -> {seconds(delta.suspect_mean_s)}"
        over = "the end of " if case.ended else ""
        shares = listing([f"{over}{c.cause} owns {share_of(c.share_p99)}" for c in causes[:3]])
        episodes, side = min(zip(judged.requested.episodes, ("baseline", "suspect window"), strict=True))
        return (
            f"{quantile_name(judged.asked)} {metric} went {went} ({means}): {shares} of it, and the {case.base_word} shows nothing of "
            f"{causes[0].cause}. Too few independent requests carry the change for an interval ({episodes} separate "
            f"episode{'' if episodes == 1 else 's'} of slow ones in the {side})."
        )
    episodes, side = min(zip(judged.significance.episodes, ("baseline", "suspect window"), strict=True))
    return (
        f"{quantile_name(judged.quantile)} {metric} went {_went(delta, judged)}: {_owners(case, judged, causes)}, and the {case.base_word} "
        f"shows nothing of {causes[0].cause}. Too few independent requests carry the change for an interval ({episodes} separate "
        f"episode{'' if episodes == 1 else 's'} of slow ones in the {side})."
    )


def _went(delta: Change, judged: Judged) -> str:
    return (
        f"{_value(delta.base_judged_s, delta.base_judged_range)} -> {_value(delta.suspect_judged_s, delta.suspect_judged_range)} "
        f"(mean {seconds(delta.base_mean_s)} -> {seconds(delta.suspect_mean_s)})"
    )


def _value(value: float, bounds: tuple[float, float | None] | None) -> str:
    """A quantile, with 'or more' where nothing bounds it from above."""
    return seconds(value) + (" or more" if bounds is not None and bounds[1] is None else "")


def _no_change(case: Case, judged: Judged, delta: Change) -> str:
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
    return bounds is not None and (bounds[0] > 0.0 or bounds[1] < 0.0)


def _only_traffic(case: Case, judged: Judged, causes: Sequence[NamedCause], delta: Change) -> Conclusion:
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
    named = [c for c in causes if set(c.rows) & set(TRAFFIC_ROWS)]
    if not named:
        return Conclusion("not_distinguishable", f"{opening}; {rest}.")
    why = ROWS[named[0].rows[0]]
    return Conclusion("explained", f"{opening} because the traffic changed ({why}); {rest}.", named=True)


def _opening(case: Case, judged: Judged, delta: Change) -> tuple[str, str]:
    """What changed, and an aside on the quantile that was asked for where another number carries the verdict."""
    metric, name, asked = metric_name(case.metric), quantile_name(judged.quantile), quantile_name(judged.asked)
    direction = "rose" if _moved(case, judged) > 0 else "fell"
    asked_change = (
        f"{_value(delta.base_p99_s, delta.base_p99_range)} -> {_value(delta.suspect_p99_s, delta.suspect_p99_range)}"
    )
    means = f"{seconds(delta.base_mean_s)} -> {seconds(delta.suspect_mean_s)}"
    thin = f" {asked} went {asked_change}, but too few independent requests carry an interval for it."
    aside = "" if judged.requested.enough else thin
    if judged.raw is not None:
        return _opening_at_mix(case, judged, delta), aside
    if judged.by_mean and judged.requested.enough:
        return f"{asked} {metric} did not change beyond noise ({asked_change}), but its mean {direction} ({means})", ""
    if judged.by_mean:
        return f"Mean {metric} {direction} ({means}, difference {interval(delta.mean_interval_95)})", aside
    return (
        f"{name} {metric} {direction} from {_value(delta.base_judged_s, delta.base_judged_range)} to "
        f"{_value(delta.suspect_judged_s, delta.suspect_judged_range)} (mean {means})",
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
        else f"{name} {seconds(delta.base_judged_s)} -> {_value(delta.suspect_judged_s, delta.suspect_judged_range)}"
    )
    direction = "rose" if moved > 0 else "fell"
    return f"At a common mix of requests {what} {direction} by {seconds(abs(moved))} ({interval(bounds)}; raw: {raw})"


def _owners(case: Case, judged: Judged, causes: Sequence[NamedCause]) -> str:
    """Who owns how much of the change, the first three; the traffic's part is seconds beside it."""
    moved = _moved(case, judged)
    engine = [c for c in causes if set(c.rows) - set(TRAFFIC_ROWS)]
    over = "the end of " if case.ended else ""
    known = {row.name: row for row in case.attribution.rows}
    parts = []
    for c in engine[:3]:
        rows = [known[name] for name in c.rows if name in known]
        owned = sum(row.mean_s if judged.by_mean else row.quantile_s for row in rows)
        knee = " (past the knee)" if c.cause == "load_step" and past_knee(case) is not None else ""
        parts.append(f"{over}{c.cause}{knee} owns {share_of(owned / moved if moved else None)}")
    said = f"{listing(parts)} of {'the change of the mean' if judged.by_mean else 'the change'}" if parts else ""
    beside = [c for c in causes if set(c.rows) & set(TRAFFIC_ROWS)]
    if beside and case.traffic is not None:
        size = case.traffic.mean_s if judged.by_mean else case.traffic.quantile_s
        text = f"{beside[0].cause} (the traffic) adds {signed(size)} to the raw numbers"
        said = f"{said}; {text}" if said else text
    return said
