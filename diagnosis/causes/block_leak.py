"""Blocks stayed in use after their requests had ended."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnosis.calibration import threshold
from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.evidence_sql import bounds, request_sql
from diagnosis.facts import Facts
from diagnosis.telling.wording import number, percent, seconds

PART = 0.2
"""Share of the window at its beginning and at its end whose floors are compared."""
GROWTH = threshold(
    "block_leak.growth",
    least=0.05,
    unit="share of the pool",
    says="rise of the blocks in use while little runs, over a window",
    why="a few long requests hold as much of a pool, and end",
)
MIN_STEPS = 10
"""Steps that each part needs."""


@cause(
    "block_leak",
    needs=("step.blocks_used", "step.num_running"),
    rows=("admission_blocked_on_blocks", "premature_eviction"),
)
def block_leak(case: Case) -> Claim | Excluded | None:
    """Blocks stayed in use after their requests had ended: the pool got smaller by the hour, and requests waited for its rest.

    Why: a request that is aborted, fails or is handed over keeps a reference to its blocks, which nobody gives back. It shows as a
    floor: blocks in use while next to nothing runs, and more of them the longer the engine is up. A restart cures it for a while.

    Refuted by: usage that falls back to the same floor whenever little runs; a floor that rises while no request is aborted; as many
    blocks in use as the running requests hold.

    Remedy:
    - vLLM: take the newest patch release, look for reports of leaked blocks on abort or with the connector in use (--kv-transfer-config)
    - fleet: restart a worker when its floor of blocks in use passes a tenth of the pool, until the engine is mended
    - application: fewer callers that go away: timeouts above the usual TTFT, no hedged requests

    Experiment: on an idle worker send and cancel a hundred requests; the blocks in use must be as many as before.
    """
    now, before = floor(case.suspect), floor(case.base)
    if now is None:
        return None
    grown = now.last - now.first
    drift = 0.0 if before is None else abs(before.last - before.first)
    if not GROWTH.is_reached(grown) or grown < 2.0 * drift:
        return Excluded(
            f"with {number(now.running)} or fewer requests running {percent(now.last)} of the blocks were in use at the end of the "
            f"{case.suspect_word}, {percent(now.first)} at its beginning"
        )
    ended = int((~case.suspect.requests.finished).sum())
    if ended == 0:
        return Excluded(
            f"the blocks in use with little running rose from {percent(now.first)} to {percent(now.last)}, but 0 requests were aborted or failed"
        )
    waits = case.suspect_ledger.column("admission_blocked_on_blocks")
    evidence = [
        Evidence(
            f"with {number(now.running)} or fewer requests running {percent(now.last)} of the blocks were in use at the end of the "
            f"{case.suspect_word}, {percent(now.first)} at its beginning"
            + ("" if before is None else f" ({percent(before.last)} at the end of the {case.base_word})"),
            now.last,
            "ratio",
            _sql(case, now),
        ),
        Evidence(
            f"{number(ended)} requests of the {case.suspect_word} were aborted or failed",
            float(ended),
            "requests",
            request_sql(case, case.suspect, "count(*) AS requests", where="state IS DISTINCT FROM 'finished'"),
            _aborted(case.suspect),
        ),
        Evidence(
            f"waiting for what was left of the pool costs a request {seconds(float(waits.mean()))} on average",
            float(waits.mean()),
            "s",
            None,
            case.worst_requests("admission_blocked_on_blocks"),
        ),
    ]
    pool = case.suspect.num_blocks()
    if pool is not None:
        lost = grown * pool
        evidence.append(
            Evidence(
                f"about {number(round(lost))} of {number(pool)} blocks went missing, {number(round(lost / ended))} for each request that did not finish",
                float(round(lost)),
                "blocks",
                computed_by="the rise of the floor times the pool",
            )
        )
    return Claim(
        evidence,
        case.worker_subject("admission_blocked_on_blocks"),
        case.when("admission_blocked_on_blocks"),
        0.9,
    )


@dataclass(frozen=True, slots=True)
class Floor:
    """Share of the blocks in use with at most `running` requests, in the first and the last part of a window (median).

    from_s  where the last part begins, s since the origin
    """

    running: int
    first: float
    last: float
    from_s: float


def floor(facts: Facts) -> Floor | None:
    """Blocks in use when little runs: with no more running than the tenth of the steps with fewest has, at either end of the window.

    None where steps do not tell, or are too few.
    """
    steps = facts.steps
    if steps is None:
        return None
    total = steps.get("blocks_total")
    used = steps.get("blocks_used") / np.where(total > 0, total, np.nan)
    running = steps.get("num_running")
    known = np.isfinite(used) & np.isfinite(running) & (steps.at_s >= facts.start_s) & (steps.at_s < facts.end_s)
    length = facts.end_s - facts.start_s
    from_s = facts.end_s - PART * length
    parts = [known & (steps.at_s < facts.start_s + PART * length), known & (steps.at_s >= from_s)]
    if min(int(part.sum()) for part in parts) < MIN_STEPS:
        return None
    few = int(max(np.quantile(running[part], 0.1, method="inverted_cdf") for part in parts))
    early, late = (part & (running <= few) for part in parts)
    return Floor(few, float(np.median(used[early])), float(np.median(used[late])), from_s)


def _sql(case: Case, found: Floor) -> str:
    window = bounds(case, case.suspect)
    since = case.suspect.requests.origin_ns + round(found.from_s * 1e9)
    return (
        f"SELECT median(blocks_used / blocks_total) AS used FROM step WHERE {case.sql_scope(case.suspect_window)} AND at_ns >= {since} "
        f"AND at_ns < {window.end_ns} AND num_running <= {found.running} AND blocks_total > 0"
    )


def _aborted(facts: Facts, limit: int = 5) -> list[str]:
    return [str(rid) for rid in facts.requests.request_id[~facts.requests.finished][:limit]]
