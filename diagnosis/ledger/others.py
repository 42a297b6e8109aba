"""What a request's steps did for others meanwhile: their prefills, and their decoding beside its own.

By what steps tell of themselves, where they do; else by who overlapped with whom.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from diagnosis.facts import F64, Facts
from diagnosis.ledger.overheads import lookup_parts
from diagnosis.ledger.rows import KINDS, OVERHEADS
from diagnosis.ledger.sheet import known_or_0
from diagnosis.ledger.step_work import decoding_by_steps, others_by_steps
from diagnosis.ledger.timeline import Spent, Timeline
from diagnosis.sampled import beside_rate


def shared_with(
    facts: Facts, spent: Spent, lines: Mapping[int, Timeline], start_s: F64, end_s: F64, *, own: bool
) -> dict[str, F64]:
    """Seconds of [start, end) that the steps spent on the answered-for prefills of *other* requests, [n] by kind.

    Kinds that occur nowhere are left out; the others come in the order of OVERHEADS and KINDS. `own`: what a request did itself is
    taken off.
    """
    r = facts.requests
    occur = {name for line in lines.values() for name in line.activity}
    out: dict[str, F64] = {name: np.zeros(len(r)) for name in (*OVERHEADS, *KINDS) if name in occur}
    known = np.isfinite(start_s) & np.isfinite(end_s)
    for worker, mine in enumerate(r.by_worker()):
        rows = mine[known[mine]]
        if worker in lines and len(rows):
            for name, seconds in lines[worker].integrate(lines[worker].activity, start_s[rows], end_s[rows]).items():
                out[name][rows] = seconds
    if own and out:
        total = spent.total()
        mine_s = np.where(total > 0, spent.density * known_or_0(r.get("prefill_s")), 0.0)
        for name, seconds in out.items():
            if name in spent.tokens:
                seconds -= mine_s * spent.tokens[name] / np.maximum(total, 1e-12)
        for name, looked in zip(("lookup_overhead", "cache_lock_contention"), lookup_parts(r), strict=True):
            if name in out:  # its own stands beside its prefill
                out[name] -= known_or_0(looked)
        if "tier_load" in out:
            out["tier_load"] -= known_or_0(r.get("kv_load_s"))
        if "eviction_overhead" in out and facts.steps is None:
            out["eviction_overhead"] -= known_or_0(r.get("alloc_s"))
    return {name: np.clip(seconds, 0.0, None) for name, seconds in out.items()}


def mean_others(facts: Facts) -> F64:
    """Mean number of other requests of its worker that decoded while this one did, [n]: by steps where they tell, else by overlap."""
    r = facts.requests
    out = np.zeros(len(r))
    last = np.where(np.isfinite(r.last_token_s), r.last_token_s, r.end_s)
    for worker in range(len(r.worker_names)):
        rows = np.flatnonzero((r.worker == worker) & np.isfinite(r.first_token_s) & np.isfinite(last))
        if len(rows) < 2:
            continue
        first, end = r.first_token_s[rows], last[rows]
        edges = np.unique(np.concatenate([first, end]))
        level = np.searchsorted(np.sort(first), edges[:-1], "right") - np.searchsorted(
            np.sort(end), edges[:-1], "right"
        )
        cumulative = np.concatenate([[0.0], np.cumsum(level * np.diff(edges))])
        seconds = np.interp(end, edges, cumulative) - np.interp(first, edges, cumulative)
        out[rows] = (seconds / np.maximum(end - first, 1e-9) - 1.0) / beside_rate(r)
        counted = others_by_steps(facts.steps, r.worker_names[worker], r.engine_first_s[rows], r.engine_last_s[rows])
        out[rows] = np.where(np.isfinite(counted), counted, out[rows])
    moves = facts.handover
    for code, name in enumerate(() if moves is None else moves.worker_names):
        assert moves is not None  # narrows: without hand-overs there is no name to go through
        rows = np.flatnonzero(moves.worker == code)
        counted = others_by_steps(facts.steps, name, moves.first_s[rows], moves.last_s[rows])
        out[rows] = np.where(np.isfinite(counted), counted, out[rows])
    return out


def others_decoding(facts: Facts, at_s: F64) -> F64:
    """Sequences of the same worker that decoded at an instant of each request (engine's vantage where known), [n]."""
    r = facts.requests
    out = np.zeros(len(r))
    for worker in range(len(r.worker_names)):
        rows = np.flatnonzero((r.worker == worker) & np.isfinite(at_s) & np.isfinite(r.engine_first_s))
        first = np.sort(r.engine_first_s[rows])
        last = np.sort(np.where(np.isfinite(r.engine_last_s), r.engine_last_s, r.engine_first_s)[rows])
        out[rows] = np.searchsorted(first, at_s[rows], "right") - np.searchsorted(last, at_s[rows], "right")
        if beside_rate(r) < 1.0:
            counted = decoding_by_steps(facts.steps, r.worker_names[worker], at_s[rows])
            out[rows] = np.where(np.isfinite(counted), counted, out[rows] / beside_rate(r))
    return np.maximum(out, 0.0)
