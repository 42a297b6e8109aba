"""A fixed time in front of the first token that no phase tells of."""

from __future__ import annotations

import numpy as np

from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.evidence_sql import request_sql
from diagnosis.facts import F64
from diagnosis.ledger.offset import find_offset, residual_s
from diagnosis.telling.wording import number, percent, seconds

BY_REST = "the requests: time to the first token less all phases that somebody tells"
HALF = 0.5
"""Share of the offset that must lie between caller and engine to be put there: most of it."""


@cause("fixed_offset", needs=("request.queue_s", "request.prefill_s"), rows=("fixed_offset",))
def fixed_offset(case: Case) -> Claim | Excluded | None:
    """Requests took the same fixed time longer, outside everything that was recorded: that is all that the data tell.

    Why: what queues or computes scatters, what waits for a clock does not: a buffer that is flushed at intervals, delayed
    acknowledgements, a name look-up or a connection attempt that runs into its timeout, a poll. No phase of the engine holds these
    seconds, so no cause in the engine is named.

    Refuted by: seconds that grow with prompts, queue or load; a scatter as wide as a queue's; a phase that turns out to hold them.

    Remedy:
    - host: record what lies between caller and engine (spans of the proxy, `kvscope proxy` in front of and behind it) until a phase holds the seconds
    - fleet: look for timers of that length: a proxy's buffering, delayed acknowledgements (40 ms), name look-ups (5 s), connection timeouts, polling
    - application: keep connections open, and send one request straight to the engine's port beside the usual way

    Experiment: send the same request past each hop in turn; the offset goes with the hop that has it.
    """
    offset = find_offset(case.base, case.suspect)
    after, before = (residual_s(facts) for facts in (case.suspect, case.base))
    known, known_before = (values[np.isfinite(values)] for values in (after, before))
    if not len(known) or not len(known_before):
        return None
    if offset is None:
        return Excluded(
            f"what no phase tells of took {seconds(float(np.median(known)))} in the median and {seconds(float(np.quantile(known, 0.99)))} "
            f"at P99 ({seconds(float(np.median(known_before)))} and {seconds(float(np.quantile(known_before, 0.99)))} in the "
            f"{case.base_word}): no fixed time stands out"
        )
    has = offset.of(after) > 0
    excess = (after - offset.usual_s)[has]
    width = float(np.quantile(excess, 0.9) - np.quantile(excess, 0.1))
    had = float((offset.of(before) > 0).sum()) / len(known_before)
    evidence = [
        Evidence(
            f"{number(int(has.sum()))} of {number(len(known))} requests took {seconds(offset.seconds)} longer outside all phases"
            + (", the others none of it" if offset.two_modes else "")
            + f"; eight in ten of them lie within {seconds(width)}",
            offset.seconds,
            "s",
            None,
            case.worst_requests("fixed_offset"),
            BY_REST,
        ),
        Evidence(f"in the {case.base_word} {percent(had)} of the requests had it", had, "ratio", computed_by=BY_REST),
    ]
    r = case.suspect.requests
    ttft = r.first_token_s - r.arrival_s
    evidence.append(
        Evidence(
            f"the first token took {seconds(float(np.nanmean(ttft)))} on average, of which all phases that are told hold "
            f"{seconds(float(np.nanmean(ttft)) - float(known.mean()))}",
            float(np.nanmean(ttft)),
            "s",
            request_sql(case, case.suspect, "avg((first_token_ns - arrival_ns) / 1e9) AS mean_ttft_s"),
        )
    )
    network = r.get("network_s")
    if np.isfinite(network[has]).any():
        between = float(np.nanmean(network[has]))
        where = (
            "between the caller and the engine" if between > HALF * offset.seconds else "inside the engine's own time"
        )
        evidence.append(
            Evidence(
                f"it lies {where}: a request that has it spent {seconds(between)} outside the engine",
                between,
                "s",
                computed_by="the join of the caller's and the engine's rows of each request",
            )
        )
    halves = _by_length(case.suspect.requests.get("prompt_tokens")[has], excess)
    if halves is not None:
        evidence.append(
            Evidence(
                f"it does not follow the work: {seconds(halves[0])} for the shorter half of the prompts, {seconds(halves[1])} for the longer",
                halves[1],
                "s",
                computed_by=BY_REST,
            )
        )
    return Claim(evidence, case.worker_subject("fixed_offset"), case.when("fixed_offset"), 0.9)


def _by_length(tokens: F64, excess: F64) -> tuple[float, float] | None:
    """Median seconds of the shorter and of the longer half; None where lengths are not told or all the same."""
    known = np.isfinite(tokens)
    if not known.any() or np.ptp(tokens[known]) == 0:
        return None
    middle = float(np.median(tokens[known]))
    short, long = excess[known & (tokens <= middle)], excess[known & (tokens > middle)]
    return (float(np.median(short)), float(np.median(long))) if len(short) and len(long) else None
