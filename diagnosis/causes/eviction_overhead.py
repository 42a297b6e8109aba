"""Making room for blocks took longer."""

from __future__ import annotations

import numpy as np

from diagnosis.calibration import threshold
from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.evidence_sql import counter_sql, event_where, evicted_sql
from diagnosis.facts import F64, Facts
from diagnosis.ledger.overheads import EVICTION, overheads
from diagnosis.sampled import rate_of
from diagnosis.telling.wording import number, seconds

LONGER = threshold(
    "eviction_overhead.ratio",
    least=1.5,
    unit="ratio",
    says="time of an evicted block over the baseline's",
    why="half as long again: a block more or less beside one that is taken anyway is no other way of evicting",
)
COUNTER = "blocks_evicted_total"
BY_REQUESTS = 0.8
"""How sure it is where no step tells which blocks were evicted while a request's were allocated."""
MIN_STEPS = 10
"""Steps that evict on either side of a change point."""


@cause(
    "eviction_overhead",
    needs=(
        "step.alloc_s|step.schedule_s|request.alloc_s",
        "step.blocks_evicted|block.evicted|sample.blocks_evicted_total",
    ),
    rows=("eviction_overhead",),
)
def eviction_overhead(case: Case) -> Claim | Excluded | None:
    """Each evicted block took longer to find and give up: full pools pay it with every prompt.

    Why: a victim that is found by looking through all cached blocks costs more the larger the cache is; giving it up updates an index,
    a tier or a subscriber of KV events. The scheduler does this inside the step, so everybody in the step pays. Where the engine
    does not tell the time of allocating, it is what its scheduler took more in steps that evicted than in others. Without steps it is the
    requests' own time of allocating, over the blocks that events or a counter say were evicted.

    Refuted by: as short a time for an evicted block as in the baseline; steps that evict nothing and schedule as long.

    Remedy:
    - vLLM: KV events (--kv-events-config) and connectors (--kv-transfer-config) are told of every block; try without them
    - vLLM: fewer evictions by more KV blocks (--gpu-memory-utilization) or larger ones (--block-size)
    - host: cores for the scheduler's process that nothing else takes
    - application: fewer distinct long prompts evict fewer blocks

    Experiment: run the same traffic with half the prompts' length; if a step's time follows the number of evicted blocks, it is this.
    """
    rates = [_per_block(facts) for facts in (case.base, case.suspect)]
    if rates[1] is None:
        if case.suspect.steps is None and _evicted(case.suspect) != 0.0:
            return None
        return Excluded(f"0 blocks were evicted in the {case.suspect_word}")
    per_block, before = rates[1], rates[0] or 0.0
    if not LONGER.is_reached(per_block / before if before > 0 else np.inf):
        return Excluded(
            f"an evicted block took {seconds(per_block)} to make room of ({seconds(before)} in the {case.base_word})"
        )
    spent = case.suspect_ledger.column(EVICTION)
    if not (spent > 0).any():
        return Excluded(f"evictions cost the requests of the {case.suspect_word} 0 ms")
    told = case.suspect.steps
    evicted, where, sql = _counted(case)
    since = change_point(case.suspect, before)
    when = "all the while" if since is None else f"from {seconds(since)} into the window on"
    return Claim(
        [
            Evidence(
                f"an evicted block took {seconds(per_block)} ({seconds(before)} in the {case.base_word}), {when}",
                per_block,
                "s",
                None,
                case.worst_requests(EVICTION),
                f"the {where}: their time of making room over the blocks that were evicted",
            ),
            Evidence(f"{number(evicted)} blocks were evicted in the {case.suspect_word}", evicted, "blocks", sql),
            Evidence(
                f"evictions cost a request {seconds(float(spent.mean()))} on average, in steps that it waited for or shared",
                float(spent.mean()),
                "s",
            ),
        ],
        case.worker_subject(EVICTION),
        case.when(EVICTION) if since is None else (since, case.suspect.end_s),
        BY_REQUESTS
        if where == "requests"
        else 1.0
        if told is not None and np.isfinite(told.get("alloc_s")).any()
        else 0.9,
    )


def _counted(case: Case) -> tuple[float, str, str]:
    """(blocks that were evicted in the suspect window, what tells the time of it, SQL of the number)."""
    facts = case.suspect
    if facts.steps is not None and _evicting_steps(facts) is not None:
        evicted = float(np.nansum(facts.steps.get("blocks_evicted")))
        return evicted, "steps", f"SELECT sum(blocks_evicted) AS blocks FROM step WHERE {event_where(case, facts)}"
    sql = evicted_sql(case, facts) if facts.blocks is not None else counter_sql(case, facts, COUNTER)
    return _evicted(facts) or 0.0, "requests", sql


def change_point(facts: Facts, before_s: float) -> float | None:
    """Instant (s since the origin) from which on a block took longer; None where it did so from the first step on.

    The split of the steps that evict which leaves least scatter around two means, the first of which is like the baseline's.
    """
    found = _evicting_steps(facts)
    if found is None or len(found[0]) < 2 * MIN_STEPS:
        return None
    at, cost, blocks = found
    each = cost / blocks
    ranks = np.arange(1, len(each))
    total, left = float(each.sum()), np.cumsum(each)[:-1]
    between = left**2 / ranks + (total - left) ** 2 / (len(each) - ranks)
    inside = slice(MIN_STEPS - 1, len(each) - MIN_STEPS)
    k = int(np.argmax(between[inside])) + MIN_STEPS
    first, rest = float(each[:k].mean()), float(each[k:].mean())
    return float(at[k]) if first <= LONGER.value * before_s < rest else None


def _per_block(facts: Facts) -> float | None:
    found = _evicting_steps(facts)
    if found is not None:
        return float(found[1].sum() / found[2].sum())
    alloc, evicted = facts.requests.get("alloc_s"), _evicted(facts)
    if facts.steps is not None or not evicted or not np.isfinite(alloc).any():
        return None
    return float(np.nansum(alloc)) / rate_of(facts.requests, "alloc_s") / evicted


def _evicted(facts: Facts) -> float | None:
    """Blocks evicted by events, else by the engine's counter; None where neither tells."""
    return float(facts.blocks.evicted) if facts.blocks is not None else facts.samples.get(COUNTER)


def _evicting_steps(facts: Facts) -> tuple[F64, F64, F64] | None:
    """End, seconds of making room and evicted blocks of the steps that evicted, in order of time; None where there is none."""
    spent = overheads(facts).get(EVICTION)
    if facts.steps is None or spent is None:
        return None
    evicted = np.nan_to_num(facts.steps.get("blocks_evicted"))
    rows = np.flatnonzero(evicted > 0)
    rows = rows[np.argsort(facts.steps.at_s[rows], kind="stable")]
    return (facts.steps.at_s[rows], spent[rows], evicted[rows]) if len(rows) else None
