"""The cache was empty after a start or a reset."""

from __future__ import annotations

from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.evidence_sql import bounds
from diagnosis.facts import BY_BLOCKS
from diagnosis.telling.wording import number, seconds
from store.interface import Window

MARKS_BEFORE_NS = 60_000_000_000
"""A start up to this long before the window still makes its cache cold."""


@cause("cold_start", needs=("request.cached_tokens",), rows=("cold_start",))
def cold_start(case: Case) -> Claim | Excluded | None:
    """A worker had just started or its cache was reset: first requests filled an empty prefix cache.

    Why: every shared prefix is computed once before it can be found; the cost falls on whoever comes first. A reset is told by a mark, or
    by the worker's own block events: what had been stored before it and was missed in the minute after it is the reset's.

    Refuted by: no start and no reset in or just before the window; misses that go on after the first minute.

    Remedy:
    - vLLM: reset the cache (/reset_prefix_cache, a weight update, a LoRA that is loaded in place) no more often than the weights change
    - fleet: send one request a prefix to a new worker before it takes traffic
    - router: give a new worker its share slowly
    - vLLM: a tier that workers share (a connector in --kv-transfer-config) lets a new worker load what others computed

    Experiment: restart one worker with warming and one without; only the first minute may differ.
    """
    facts = case.suspect
    starts = [m for m in facts.marks if m.mark in ("worker_up", "cache_reset")]
    cleared = [m for m in starts if m.attrs == BY_BLOCKS]
    marked = [m for m in starts if m.attrs != BY_BLOCKS]
    if not starts:
        return Excluded(f"0 workers started and 0 caches were reset in or just before the {case.suspect_word}")
    spent = case.suspect_ledger.column("cold_start")
    if not (spent > 0).any():
        return Excluded(
            f"starts or resets: {number(len(starts))}, but the requests after them missed no more than later ones"
        )
    window = bounds(case, facts)
    where = case.sql_where(Window((window.start_ns or 0) - MARKS_BEFORE_NS, window.end_ns, window.run_id), "at_ns")
    told = []
    if marked:
        first = marked[0]
        told.append(
            Evidence(
                f"starts or resets in or just before the {case.suspect_word}: {number(len(marked))}, the first {first.mark} of "
                f"{first.subject or 'a worker'} ({first.text or 'no text'})",
                float(len(marked)),
                "marks",
                f"SELECT count(*) AS marks FROM mark WHERE mark IN ('worker_up', 'cache_reset') AND {where}",
            )
        )
    if cleared:
        told.append(
            Evidence(
                f"caches that were cleared in or just before the {case.suspect_word}, by their blocks' events: {number(len(cleared))}, the first "
                f"of {cleared[0].subject or 'a worker'}",
                float(len(cleared)),
                "resets",
                f"SELECT count(*) AS resets FROM block WHERE change = 'cleared' AND {where}",
            )
        )
    return Claim(
        [
            *told,
            Evidence(
                f"{number(int((spent > 0).sum()))} requests in the first minute after it lost {seconds(float(spent.sum()))} in all to filling the cache",
                float(spent.sum()),
                "s",
                None,
                case.worst_requests("cold_start"),
            ),
        ],
        case.worker_subject("cold_start"),
        case.when("cold_start"),
    )
