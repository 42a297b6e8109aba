"""Stalls between tokens: gaps far longer than the usual step, less what the steps are known to have done meanwhile.

Idea: who schedules long prompts whole, or in steps of their own, lets everybody who decodes wait for them. Such a gap is as long as a stall,
but it is no riddle: the worker's steps computed somebody's prompt then, and those seconds are that prompt's.

Invariant: a request's stalls are never longer than its gaps; what the requests themselves tell of stalls is believed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from diagnosis.facts import F64, I64, Facts
from diagnosis.ledger.timeline import Timeline, sum_of

STALL: Final = 8.0
"""A gap between tokens is a stall from this many times the usual gap on."""
OUT: Final = 2.0
"""A request whose token took this many times the usual on average may have been out for a while."""


def stalls(facts: Facts, lines: Mapping[int, Timeline], *, preempted: bool) -> F64:
    """Seconds in which each request gained nothing after its first token and no prompt of others tells why, [n].

    preempted   requests gave their blocks back in this window: whatever steps did while one was out, it waited for its place
    """
    r = facts.requests
    stalled = r.get("stalled_s")
    if np.isfinite(stalled).any():
        return np.where(np.isfinite(stalled), stalled, 0.0)
    gaps = r.gaps
    out = np.zeros(len(r))
    if gaps is None or len(gaps.gap_s) < 2:
        rows, beyond_s = preempted_by_count(facts)
        out[rows] = beyond_s
        return out
    usual = float(np.median(gaps.gap_s))
    long = gaps.gap_s > STALL * usual
    rows, end_s, beyond_s = gaps.request[long], gaps.at_s[long], gaps.gap_s[long] - usual
    if not preempted:
        beyond_s = np.clip(beyond_s - _answered_for(facts, lines, rows, end_s - gaps.gap_s[long], end_s), 0.0, None)
    np.add.at(out, rows, beyond_s)
    return out


def preempted_by_count(facts: Facts) -> tuple[I64, F64]:
    """(rows, seconds beyond their usual decode) of the requests that were preempted, where a counter alone says how many were.

    Neither gaps nor the requests themselves tell who: as many as were counted, those first whose tokens took longest, and none whose took
    less than OUT times the median.
    """
    r = facts.requests
    count = facts.samples.get("preemptions_total", 0.0)
    told = r.gaps is not None or any(np.isfinite(r.get(name)).any() for name in ("num_preemptions", "stalled_s"))
    decode, tokens = r.last_token_s - r.first_token_s, r.get("output_tokens") - 1.0
    token_s = np.divide(decode, tokens, out=np.full(len(r), np.nan), where=tokens > 0)
    known = np.isfinite(token_s)
    if told or count < 1.0 or not known.any():
        return np.empty(0, dtype=np.int64), np.empty(0)
    usual = float(np.median(token_s[known]))
    rows = np.flatnonzero(known & (token_s > OUT * usual))
    rows = rows[np.argsort(token_s[rows])[::-1]][: int(count)]
    return rows, decode[rows] - usual * tokens[rows]


def _answered_for(facts: Facts, lines: Mapping[int, Timeline], rows: I64, start_s: F64, end_s: F64) -> F64:
    """Seconds of [start, end) that the steps of each request's worker spent on prompts and bookkeeping, [m]; 0 where nobody tells."""
    r = facts.requests
    start_s, end_s = np.fmax(start_s, r.engine_first_s[rows]), np.fmin(end_s, r.engine_last_s[rows])
    out = np.zeros(len(rows))
    for worker, line in lines.items():
        mine = np.flatnonzero((r.worker[rows] == worker) & (end_s > start_s))
        if len(mine):
            done = line.integrate(line.activity, start_s[mine], end_s[mine])
            out[mine] = sum_of(done.values(), len(mine))
    return out
