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
        return out
    usual = float(np.median(gaps.gap_s))
    long = gaps.gap_s > STALL * usual
    rows, end_s, beyond_s = gaps.request[long], gaps.at_s[long], gaps.gap_s[long] - usual
    if not preempted:
        beyond_s = np.clip(beyond_s - _answered_for(facts, lines, rows, end_s - gaps.gap_s[long], end_s), 0.0, None)
    np.add.at(out, rows, beyond_s)
    return out


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
