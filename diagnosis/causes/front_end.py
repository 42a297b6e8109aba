"""Time went by before the engine had the request."""

from __future__ import annotations

import numpy as np

from diagnosis.calibration import threshold
from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.evidence_sql import request_sql
from diagnosis.facts import Facts
from diagnosis.ledger.ways import ways
from diagnosis.telling.wording import number, seconds

WAY_IN = "network_s"
"""Where callers and engine are linked, the way in is told apart from the way back (`ledger/ways.py`)."""
PARTS = {"frontend_s": "HTTP and parsing", "tokenize_s": "tokenising", WAY_IN: "the way into the engine"}
"""What the time before the engine is made of; the last is no column."""
RISE = threshold(
    "front_end.rise",
    least=0.001,
    unit="s",
    says="rise of the mean time before the engine, beyond the rest of a step",
    why="one part of it scatters as much in a server that is idle",
)


@cause("front_end", needs=("request.frontend_s|request.tokenize_s|request.queue_s",), rows=("front_end",))
def front_end(case: Case) -> Claim | Excluded | None:
    """Requests waited before the engine had them: for the network, a parser or a tokenizer.

    Why: one process parses, templates and tokenises for all, in few threads; near its limit requests queue in it although the
    engine has room. A proxy, a slow upload of a long prompt and a saturated event loop look the same from here.
    An engine that tells this time as the rest of its TTFT (vLLM's spans) counts the first token's way from its core to that process, too.

    Refuted by: requests that reach the engine as soon as before, so that the time lies behind it; as much time before the engine as in
    the baseline, or more by no more than the rest of a step, which an engine that takes requests between two steps makes them wait; an
    engine queue that grew by the same seconds.

    Remedy:
    - vLLM: more front-end processes (--api-server-count), so that tokenising is not one core's work
    - host: cores for the front end that nothing else takes; look at its CPU use and the event loop's lag at that time
    - fleet: more front ends before the same engines; look at proxies and at the connection pool of the callers
    - application: shorter prompts cost less to send, template and tokenise; keep connections open

    Experiment: send the same request to the engine's own port, past proxy and front end, beside the usual way; the time must go.
    """
    known = [name for name in PARTS if _knows(case, name)]
    if not known:
        return None
    now, then = (float(ledger.column("front_end").mean()) for ledger in (case.suspect_ledger, case.base_ledger))
    step = rest_of_a_step(case.suspect)
    if not RISE.is_reached(now - then) or now - then < step:
        return Excluded(
            f"a request spent {seconds(now)} before the engine on average ({seconds(then)} in the {case.base_word})"
            + (f"; an engine that takes requests between two steps makes them wait {seconds(step)}" if step else "")
        )
    spent = case.suspect_ledger.column("front_end")
    evidence = [
        Evidence(
            f"a request of the {case.suspect_word} spent {seconds(now)} before the engine on average ({seconds(then)} in the "
            f"{case.base_word}), the slowest of {number(len(spent))} {seconds(float(spent.max()))}",
            now,
            "s",
            None,
            case.worst_requests("front_end"),
        )
    ]
    for name in known:
        mean, before = _means(case, name)
        if mean - before < RISE.least:  # evidence is what is material, whatever chance does
            continue
        sql = None if name == WAY_IN else request_sql(case, case.suspect, f"avg({name}) AS mean_s", name)
        evidence.append(
            Evidence(
                f"{PARTS[name]} took {seconds(mean)} on average ({seconds(before)} in the {case.base_word})",
                mean,
                "s",
                sql,
                computed_by="the join of the caller's and the engine's rows of each request",
            )
        )
    queued, queued_before = (_mean_queue(facts.requests.get("queue_s")) for facts in (case.suspect, case.base))
    if queued is not None and queued_before is not None:
        evidence.append(
            Evidence(
                f"behind it, in the engine's own queue, a request waited {seconds(queued)} ({seconds(queued_before)} in the {case.base_word})",
                queued,
                "s",
                request_sql(case, case.suspect, "avg(queue_s) AS mean_queue_s", "queue_s"),
            )
        )
    return Claim(evidence, ("fleet", None), case.when("front_end"), 1.0 if known != [WAY_IN] else 0.9)


def rest_of_a_step(facts: Facts) -> float:
    """Mean rest of the step that somebody who comes at any instant meets, s; 0 where no step and no gap tells.

    An engine that looks for new requests between two steps lets them wait that long, and its front end shows the wait.
    Source: the inspection paradox, E[D^2] / 2 E[D].
    """
    gaps = facts.requests.gaps
    lasted = np.zeros(0) if gaps is None else gaps.gap_s / gaps.tokens if gaps.is_even else gaps.gap_s
    if facts.steps is not None and np.isfinite(facts.steps.duration_s).any():
        lasted = facts.steps.duration_s[np.isfinite(facts.steps.duration_s)]
    mean = float(lasted.mean()) if len(lasted) else 0.0
    return float((lasted**2).mean()) / (2.0 * mean) if mean > 0 else 0.0


def _knows(case: Case, name: str) -> bool:
    """Whether both windows tell this part."""
    return all(np.isfinite(facts.requests.get(name)).any() for facts in (case.base, case.suspect))


def _means(case: Case, name: str) -> tuple[float, float]:
    """Mean seconds of this part in the (suspect window, baseline); of the way in what is known to be on it."""
    sides = ((case.suspect, case.base), (case.base, case.suspect))
    if name == WAY_IN:
        now, then = (float(ways(facts, other).in_s.mean()) for facts, other in sides)
    else:
        now, then = (float(np.nanmean(facts.requests.get(name))) for facts, _ in sides)
    return now, then


def _mean_queue(queue: np.ndarray) -> float | None:
    return float(np.nanmean(queue)) if np.isfinite(queue).any() else None
