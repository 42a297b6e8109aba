"""What arrived of the telemetry: known gaps, holes, rows told twice, requests that only one side saw, values that cannot be."""

from __future__ import annotations

import numpy as np

from diagnosis.checks.check import NOTHING, RARE, TOLERANCE, Check, is_rare
from diagnosis.facts import Facts
from diagnosis.loading.requests import CHUNKED
from diagnosis.sampled import half_interval, num_requests, rate_of
from diagnosis.telling.wording import number, percent, seconds
from engine_probe.events import KINDS

LOST_SHARE = 0.05
"""Share of the requests that may be lost: what overload loses are the busiest moments, which is no fair sample."""
COVERED = 0.5
"""Share of the window that lies between its first and its last request, below which that is said."""
PROBE = 0.01
"""What recording may take of a step."""
FEWEST_ARRIVALS = 20
"""Requests from which on the time that they span tells how much of the window they fill."""
FEW_REQUESTS = 5
"""So many more finish between the last row and the last scrape."""
FEWEST_STEPS = 50
"""Steps of a worker from which on holes in their numbers mean something."""


def gaps(facts: Facts) -> Check:
    """What senders say that they lost."""
    found = [m for m in facts.marks if m.mark == "gap"]
    if not found:
        return Check("gaps", "ok", f"{facts.name}: no gap in the telemetry is known")
    dropped = sum(m.number("dropped_rows") or 0.0 for m in found)
    by_kind = {kind: sum(m.number(f"dropped_{kind}") or 0.0 for m in found) for kind in KINDS}
    told = ", ".join(f"{number(count)} {kind}" for kind, count in by_kind.items() if count)
    statement = f"{facts.name}: {len(found)} gaps in the telemetry, {number(dropped)} rows known to be lost"
    if told:
        statement += f" ({told})"
    if by_kind["block"]:
        statement += "; evictions and lost tokens are more than is told here"
    if by_kind["request"] > LOST_SHARE * len(facts.requests):
        statement += "; so many requests are missing that those that are left may not be like the others"
        return Check("gaps", "contradiction", statement)
    return Check("gaps", "warning", statement)


def holes(facts: Facts) -> Check | None:
    """Schedulers number their steps, so what was lost without a word leaves a hole."""
    missing, seen = _missing_steps(facts)
    if seen == 0:
        return None
    share = missing / (missing + seen)
    if missing == 0:
        return Check("holes", "ok", f"{facts.name}: no step is missing among {number(seen)}")
    statement = (
        f"{facts.name}: {number(missing)} of {number(missing + seen)} steps are missing ({percent(share)}); requests and events of "
        "the same moments are missing too"
    )
    return Check("holes", "contradiction" if share > LOST_SHARE else "warning", statement, value=share, unit="ratio")


def covered(facts: Facts) -> Check | None:
    """A window that requests fill only in part: it was cut wrongly, or the recording is shorter."""
    arrival = facts.requests.arrival_s
    if len(arrival) < FEWEST_ARRIVALS or facts.duration_s <= 0 or facts.arrivals_s is not None:
        return None
    seen_s = float(arrival[-1] - arrival[0])
    # gaps at both ends are as long as others
    if seen_s * (len(arrival) + 1) / (len(arrival) - 1) >= COVERED * facts.duration_s:
        return None
    return Check(
        "coverage",
        "warning",
        f"{facts.name}: requests arrived in {seconds(seen_s)} of its {seconds(facts.duration_s)} only; rates hold for the whole of it",
        touches=NOTHING,
        value=seen_s / facts.duration_s,
        unit="ratio",
    )


def lost_share(facts: Facts) -> float:
    """Share of the requests of which half a row may be missing: each lost batch may hold one of two rows of a request.

    By the holes in steps, and the requests that only one side tells of.
    """
    missing, seen = _missing_steps(facts)
    alone = 0.0
    if facts.requests.vantage != "engine" and np.isfinite(facts.requests.engine_arrival_s).any():
        alone = float((~np.isfinite(facts.requests.engine_arrival_s)).mean())
    return 2.0 * max(missing / (missing + seen) if seen else 0.0, alone)


def missing_share(facts: Facts) -> float:
    """Share of the steps that are missing by the schedulers' own numbers; 0 where they number none."""
    missing, seen = _missing_steps(facts)
    return missing / (missing + seen) if seen else 0.0


def handed_over(facts: Facts) -> float:
    """Share of the requests that one worker prefilled and another decoded: counters of both tell of them."""
    moves = facts.handover
    return float(moves.moved.mean()) if moves is not None and len(moves.moved) else 0.0


def _missing_steps(facts: Facts) -> tuple[float, float]:
    """(steps that are missing by the schedulers' own numbers, steps that are there), of workers with enough of them."""
    steps = facts.steps
    missing = seen = 0.0
    if steps is None or not np.isfinite(steps.get("step")).any():
        return missing, seen
    counted = steps.get("step")
    for code in range(len(steps.worker_names)):
        mine = counted[(steps.worker == code) & np.isfinite(counted)]
        if len(mine) < FEWEST_STEPS:
            continue
        jump = np.diff(mine)
        missing += float(np.clip(jump[jump > 0] - 1.0, 0.0, None).sum())  # a restart counts from 0 again
        seen += float(len(mine))
    return missing, seen


def invalid(facts: Facts) -> Check | None:
    """Values that were taken as unknown because they cannot be."""
    found = facts.requests.num_invalid
    if found == 0:
        return None
    return Check(
        "values",
        "warning",
        f"{facts.name}: {number(found)} durations or counts of requests are negative or infinite; they are taken as unknown",
    )


def duplicates(facts: Facts) -> Check | None:
    """Rows that told of a request which another row tells too."""
    found = facts.requests.num_duplicates
    if found == 0:
        return None
    return Check(
        "duplicates",
        "ok",
        f"{facts.name}: {number(found)} rows told of a request that another row tells too; merged, each counts once",
    )


def shared_ids(facts: Facts) -> Check | None:
    """Ids that several requests have: what is told by id alone, of transfers for one, may be another's."""
    found = facts.requests.num_shared_ids
    if found == 0:
        return None
    return Check(
        "request_ids",
        "warning",
        f"{facts.name}: {number(found)} request ids are used by several requests; the engine's rows of theirs are told apart by worker, "
        "lengths and arrival",
    )


def arrivals(facts: Facts) -> Check | None:
    """Durations of a source without instants are as good as any; what rests on who was there at the same time is not."""
    assumed = facts.requests.num_assumed
    if not assumed:
        return None
    return Check(
        "arrivals",
        "warning",
        f"{facts.name}: the source does not tell when {number(assumed)} requests arrived; they are laid evenly over it, so rates "
        "hold for the whole of it, and nothing is said of concurrency or of moments within it",
    )


def joined(facts: Facts) -> Check | None:
    """Of the client's (or router's) requests, how many have an engine row."""
    r = facts.requests
    alone = ~np.isfinite(r.engine_arrival_s)
    if r.vantage == "engine" or alone.all():
        return None
    share = float(alone.mean())
    left_out = 1.0 - min((r.engine_rate or 1.0) / rate_of(r), 1.0)  # by sampling: by intention, and evenly
    return Check(
        "engine_rows",
        "ok" if is_rare(share, left_out + 3 * (left_out * (1.0 - left_out) / len(r)) ** 0.5) else "warning",
        f"{facts.name}: {percent(share)} of the {r.vantage}'s requests have no engine row; their phases are unknown",
    )


def finished(facts: Facts) -> Check | None:
    """Requests that the engine counted and nobody recorded."""
    counted = facts.samples.get("requests_finished_total")
    if counted is None:
        return None
    rate = rate_of(facts.requests)
    rows = round(num_requests(facts.requests) + facts.num_warmup / rate)
    most = rows * (1 + handed_over(facts))  # who prefilled a request finished it, and so did who decoded it
    if counted > most * (1 + 2 * TOLERANCE.value) + FEW_REQUESTS + half_interval(np.ones(round(rows * rate)), rate):
        return Check(
            "requests",
            "warning",
            f"{facts.name}: the engine finished {number(counted)} requests, {number(rows)} are recorded",
        )
    return Check(
        "requests",
        "ok",
        f"{facts.name}: {number(rows)} requests recorded, the engine counts {number(counted)} finished",
    )


def unfinished(facts: Facts) -> Check | None:
    """Requests without an end of their own."""
    if facts.num_unfinished == 0:
        return None
    share = facts.num_unfinished / max(len(facts.requests), 1)
    return Check(
        "unfinished",
        "warning" if share > RARE.value else "ok",
        f"{facts.name}: {facts.num_unfinished} requests ({percent(share)}) failed, were aborted or rejected",
    )


def chunks(facts: Facts) -> Check | None:
    """Several tokens in one streamed chunk."""
    gaps_, output = facts.requests.gaps, facts.requests.get("output_tokens")
    if gaps_ is None or not np.isfinite(output).any():
        return None
    count = np.bincount(gaps_.request, minlength=len(facts.requests)) + 1
    several = float(np.mean(count < np.nan_to_num(output)))
    if several <= CHUNKED:
        return None
    return Check(
        "chunks",
        "ok",
        f"{facts.name}: {percent(several)} of requests got several tokens in one chunk; single gaps are an average there"
        + (", and nobody tells how many tokens each chunk brought" if gaps_.is_even else ""),
    )


def estimated(facts: Facts) -> Check | None:
    """Computed tokens that no request told."""
    r = facts.requests
    if r.has("cached_tokens", 0.01) or not r.has("computed_tokens", 0.01):
        return None
    return Check(
        "computed_tokens",
        "ok",
        f"{facts.name}: no request says what was cached; computed tokens are prompt tokens times the engine's miss rate",
    )


def probe(facts: Facts) -> Check | None:
    """What recording itself took."""
    if facts.steps is None:
        return None
    took, duration = facts.steps.get("probe_s"), facts.steps.duration_s
    known = np.isfinite(took) & np.isfinite(duration)
    if not known.any():
        return None
    share = float(took[known].sum() / max(duration[known].sum(), 1e-9))
    return Check(
        "probe", "warning" if share > PROBE else "ok", f"{facts.name}: the probe took {percent(share)} of step time"
    )
