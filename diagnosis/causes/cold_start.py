"""The cache was empty after a start or a reset."""

from __future__ import annotations

from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.wording import number, seconds


@cause("cold_start", needs=("request.cached_tokens",), rows=("cold_start",))
def cold_start(case: Case) -> Claim | Excluded | None:
    """A worker had just started or its cache was reset: first requests filled an empty prefix cache.

    Why: every shared prefix is computed once before it can be found; the cost falls on whoever comes first.

    Refuted by: no start and no reset in or just before the window; misses that go on after the first minute.

    Remedy:
    - fleet: send one request a prefix to a new worker before it takes traffic
    - router: give a new worker its share slowly
    - vLLM: a shared tier (--kv-offloading-size, a connector) lets a new worker load what others computed

    Experiment: restart one worker with warming and one without; only the first minute may differ.
    """
    starts = [m for m in case.suspect.marks if m.mark in ("worker_up", "cache_reset")]
    if not starts:
        return Excluded("no worker started and no cache was reset in or just before the window")
    spent = case.suspect_ledger.column("cold_start")
    if not (spent > 0).any():
        return Excluded(
            "a worker started or a cache was reset, but the requests after it missed no more than later ones"
        )
    where = case.sql_where(case.suspect_window, "at_ns")
    return Claim(
        [
            Evidence(
                f"{starts[0].mark} of {starts[0].subject or 'a worker'}: {starts[0].text or 'no text'}",
                starts[0].at_s,
                "s after the first request",
                f"SELECT at_ns, mark, subject, text FROM mark WHERE mark IN ('worker_up', 'cache_reset') AND {where}",
            ),
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
