"""Sentences on windows of which no change can be told: too few requests, first tokens that never came, nothing in common.

Such windows are told before anything is said of a change, whatever was found about one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diagnosis.cause import Case
from diagnosis.facts import F64, Facts
from diagnosis.statistics.dimensions import LENGTHS, WORDS
from diagnosis.statistics.judged import Judged
from diagnosis.statistics.sufficiency import MOST_REQUESTS, required_n
from diagnosis.telling.phrases import went
from diagnosis.telling.verdict import Change, NamedCause
from diagnosis.telling.wording import listing, metric_name, number, quantile_name, seconds

MIN_REQUESTS = 20
"""Below this many requests in a window nothing is said about a change."""


def of_incomparable(case: Case, judged: Judged, causes: Sequence[NamedCause], delta: Change) -> str | None:
    """Why the windows cannot be compared; None where they can, as far as their own requests tell."""
    if min(judged.significance.n) < MIN_REQUESTS:
        return _too_few(case, judged)
    if case.base_ledger.censored.all() and case.suspect_ledger.censored.all():
        return _never_a_token(case, delta)
    if case.base_ledger.censored.all() or case.suspect_ledger.censored.all():
        return _nobody_served(case, judged, delta)
    unbounded = _unbounded(case, judged, delta)
    if unbounded is not None:
        return unbounded
    if case.apart and not (causes and causes[0].cause == "length_shift"):
        return _nothing_in_common(case, judged, delta)
    return None


def of_other_models(
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
        f"{quantile_name(judged.quantile)} {metric_name(case.metric)} went {went(delta)}, and the windows were served by different "
        f"models ({then} in the baseline, {now} in the suspect window): what a request costs is another thing then, whatever the engine "
        f"did{pointed}."
    )


def _too_few(case: Case, judged: Judged) -> str:
    """How many there are, and how many of a kind that both windows hold; how many it takes for the quantile that was asked for."""
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
    """Neither window served anybody."""
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
        f"({quantile_name(judged.quantile)} went {went(delta).partition(' (')[0]}). Why they ended "
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


def _nothing_in_common(case: Case, judged: Judged, delta: Change) -> str:
    """The numbers as they are, and which lengths moved so far that no kind of request is in both windows."""
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
        f"{name} {metric} went {went(delta)}, but the windows have no kind of request in common{moved}: whether the traffic or the "
        "engine changed cannot be told."
    )


def _sides(case: Case) -> tuple[Facts, Facts]:
    """(baseline, suspect window), whichever way the case is asked."""
    return (case.suspect, case.base) if case.ended else (case.base, case.suspect)


def _mean(lengths: F64) -> float | None:
    """Mean of what is known, None where nothing is."""
    known = lengths[np.isfinite(lengths)]
    return float(known.mean()) if len(known) else None
