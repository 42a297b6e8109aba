"""Look-ups in the prefix cache waited for others who held it."""

from __future__ import annotations

import numpy as np

from diagnosis.calibration import threshold
from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.evidence_sql import request_sql
from diagnosis.facts import F64, Bool, Facts
from diagnosis.ledger.overheads import BEYOND, lookup_parts
from diagnosis.ledger.pace import decoding_at
from diagnosis.telling.wording import number, percent, seconds

RISE = threshold(
    "cache_lock_contention.rise",
    least=0.0005,
    unit="s",
    says="rise of the mean wait of a look-up",
    why="less than a tenth of a short step, and far above a look-up in a table",
)
SIGMAS = 2.0
"""Standard errors that the rise stands out by: chance reaches so many in one of 40 quiet pairs, and a rise alone names nobody."""
STRETCHES = 20
"""Stretches of a window whose mean waits tell the standard error: waits come in bursts, and those of one burst are no more than one."""
FEWEST = 20
"""Look-ups on either side before busy and quiet moments are compared."""


@cause("cache_lock_contention", needs=("request.cache_lookup_s",), rows=("cache_lock_contention",))
def cache_lock_contention(case: Case) -> Claim | Excluded | None:
    """Looking prompts up takes as long as ever, but some look-ups waited for others who held the prefix cache.

    Why: one lock (or one thread, or one interpreter) guards the cache: a burst of look-ups, an eviction that scans, a subscriber of KV
    events or a tier's copies hold it, and who comes then waits. So some look-ups take many times what most take, the more so the more
    is going on at once; a look-up that is dear by itself is as dear for all (`lookup_overhead`).

    Refuted by: look-ups that are all as long, busy or not; as few and short waits as in the baseline.

    Remedy:
    - vLLM: KV events (--kv-events-config) and connectors (--kv-transfer-config) work in the scheduler's thread; try without them
    - fleet: several engines with fewer requests each hold each other up less
    - host: cores for the scheduler's process that nothing else takes; look for threads that share its interpreter
    - application: fewer blocks to look for (shorter prompts), and bursts that are spread out

    Experiment: halve the requests at once on one worker (--max-num-seqs); the slowest look-ups must shorten, the median must stay.
    """
    usual, waited = lookup_parts(case.suspect.requests)
    usual_before, before = lookup_parts(case.base.requests)
    known, known_before = np.isfinite(usual), np.isfinite(usual_before)
    if not known_before.any():
        return None
    mean, mean_before = float(waited[known].mean()), float(before[known_before].mean())
    rise, noise = rise_beyond_chance(waited[known], before[known_before])
    if not RISE.is_reached(rise):
        return Excluded(
            f"a look-up waited {seconds(mean)} beyond what it takes as a rule ({seconds(mean_before)} in the {case.base_word}; chance alone "
            f"explains a rise of {seconds(noise)})"
        )
    looked, share = (usual + waited)[known], float((waited[known] > 0).mean())
    spent = case.suspect_ledger.column("cache_lock_contention")
    evidence = [
        Evidence(
            f"a look-up took {seconds(float(looked.mean()))} on average: {seconds(float(usual[known].mean()))} as a rule, and "
            f"{seconds(mean)} of waiting ({seconds(mean_before)} in the {case.base_word})",
            float(looked.mean()),
            "s",
            request_sql(case, case.suspect, "avg(cache_lookup_s) AS mean_s", "cache_lookup_s"),
            case.worst_requests("cache_lock_contention"),
        ),
        Evidence(
            f"{percent(share)} of the look-ups took more than {number(BEYOND)} times what they take as a rule",
            share,
            "ratio",
            computed_by="the look-ups of the window: a quarter of them take no longer than what is called the rule",
        ),
        Evidence(
            f"waiting for the cache cost a request {seconds(float(spent.mean()))} on average, its own and that of others in its steps",
            float(spent.mean()),
            "s",
        ),
    ]
    crowd = _by_crowd(case.suspect, waited, known)
    if crowd is not None:
        evidence.append(crowd)
    return Claim(evidence, case.worker_subject("cache_lock_contention"), case.when("cache_lock_contention"))


def rise_beyond_chance(waited: F64, before: F64) -> tuple[float, float]:
    """(rise of the mean wait from `before` [m] to `waited` [n], s, 0 where it is within chance; what chance explains, s)."""
    rise = float(waited.mean()) - float(before.mean())
    noise = SIGMAS * float(np.hypot(_standard_error(waited), _standard_error(before)))
    return (rise if rise > noise else 0.0), noise


def _standard_error(waited: F64) -> float:
    """Of the mean wait, s, from the means of STRETCHES of the window [m]."""
    means = [float(part.mean()) for part in np.array_split(waited, min(STRETCHES, len(waited)))]
    return float(np.std(means, ddof=1) / np.sqrt(len(means))) if len(means) > 1 else float("inf")


def _by_crowd(facts: Facts, waited: F64, known: Bool) -> Evidence | None:
    """Waits when more requests than usual were running, and when fewer were."""
    r = facts.requests
    beside = np.full(len(r), np.nan)
    for rows in r.by_worker():
        mine = rows[known[rows] & np.isfinite(r.scheduled_s[rows])]
        if len(mine):
            beside[mine] = decoding_at(r, rows, r.scheduled_s[mine], with_itself=False)
    told = np.isfinite(beside)
    if not told.any():
        return None
    middle = float(np.median(beside[told]))
    busy, quiet = waited[told & (beside > middle)], waited[told & (beside <= middle)]
    if min(len(busy), len(quiet)) < FEWEST:
        return None
    return Evidence(
        f"with more than {number(middle)} others running a look-up waited {seconds(float(busy.mean()))}, else {seconds(float(quiet.mean()))}",
        float(busy.mean()),
        "s",
        computed_by="the look-ups of the window, by how many requests of the worker were running",
    )
