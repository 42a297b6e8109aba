"""The routing of a window as facts: its hotspots, read and judged once for all causes, and what each request lost to them.

Invariant: only requests that went to a hotspot's worker in its interval lost anything (to an index that is stale or not gone by: all
of the interval), and never more than their decision's regret, or a straggler's share of their own engine time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.facts import F64, I64, Bool, RequestFacts, RoutingFacts, StepFacts
from diagnosis.hotspots.finding import Hotspot
from diagnosis.hotspots.holders import informed, truly_matched
from diagnosis.hotspots.intervals import INTERVAL_S
from diagnosis.hotspots.judge import judged
from diagnosis.hotspots.observed import Decisions, Decoded, Observed, Served, Steps
from diagnosis.hotspots.pace import pace, pace_of_answers
from diagnosis.hotspots.reading import read
from diagnosis.hotspots.regret import Regret, regret_of
from diagnosis.loading.hosts import hosts, unattached
from engine_probe.errors import BadWindow
from store.evidence.lineage import window_sql
from store.interface import Store, Window

STRAGGLER: Final = "hotspot_straggler"
OF_THE_INDEX: Final = ("hotspot_stale_index", "hotspot_unreachable_threshold")


def routing(
    store: Store, window: Window, requests: RequestFacts, steps: StepFacts | None, block_size: int | None
) -> RoutingFacts | None:
    """None where one worker served and no route row tells of others.

    Without route rows and the router's load gauge only a straggler can be named, so the whole is judged only where some worker was slow.
    """
    if not _tells(store, window):
        if sum(name is not None for name in requests.worker_names) < 2:
            return None
        quiet = _without_stragglers(window, requests, steps)
        if quiet is not None:
            return quiet
    try:
        seen = informed(store, window, read(store, window))
    except BadWindow:  # longer or larger than hotspots are looked for in
        return None
    found, regret = judged(seen)
    lost_s: dict[str, F64] = {}
    lost_tokens: dict[str, F64] = {}
    amiss: dict[str, Bool] = {}
    slow = np.zeros(len(requests))
    of_request = _position(seen, requests)
    for spot in found.hotspots:
        if spot.cause is None:
            continue
        rows = _rows(seen, spot)
        if spot.cause == STRAGGLER:
            mine = of_request[rows][of_request[rows] >= 0]
            slow[mine] = np.maximum(slow[mine], 1.0 - 1.0 / max(spot.evidence[0].value or 1.0, 1.0))
            rows = np.concatenate([rows, _aftermath(seen, regret, spot)])
        into, values = lost_s, np.fmax(regret.seconds, _place_lost(seen, regret))
        if spot.cause in OF_THE_INDEX:
            into, values = lost_tokens, _tokens(store, window, seen, regret, rows, block_size)
        rows = rows[of_request[rows] >= 0]
        mine = of_request[rows]
        if spot.cause in OF_THE_INDEX:
            amiss.setdefault(spot.cause, np.zeros(len(requests), dtype=bool))[mine] = True
        column = into.setdefault(spot.cause, np.zeros(len(requests)))
        column[mine] = np.maximum(column[mine], np.nan_to_num(values[rows]))
    return RoutingFacts(
        found.hotspots,
        lost_s,
        lost_tokens,
        amiss,
        slow,
        found.num_decisions,
        seen.num_workers,
        found.num_intervals,
        found.has_routes,
        _visible(seen),
        hosts(store, window, [spot for spot in found.hotspots if spot.cause == STRAGGLER]),
        unattached(store, window, [spot for spot in found.hotspots if spot.cause == OF_THE_INDEX[0]]),
    )


def _without_stragglers(window: Window, requests: RequestFacts, steps: StepFacts | None) -> RoutingFacts | None:
    """The facts of a window without route rows in which no worker was slow; None where one was."""
    names, known = requests.worker_names, len(requests)
    worker = np.where(np.array([name is None for name in names])[requests.worker], -1, requests.worker)
    nothing = np.full(known, np.nan)
    served = Served(
        [],
        worker,
        requests.engine_arrival_s,
        requests.scheduled_s,
        requests.engine_first_s,
        requests.get("prompt_tokens"),
        requests.get("cached_tokens"),
        requests.get("computed_tokens"),
        requests.get("prefill_s"),
        Decoded(requests.engine_last_s, requests.get("decode_s"), requests.get("output_tokens")),
    )
    grid = np.full((0, len(names)), np.nan, dtype=np.float32)
    empty = np.zeros(0, dtype=np.int64)
    nobody = Decisions([], nothing[:0], empty, empty, empty, empty, np.zeros(0, dtype=bool), grid, grid, grid)
    end_s = float(np.nanmax(np.append(requests.engine_arrival_s, 0.0)))
    workers = tuple(str(name) for name in names)
    seen = Observed(
        window, requests.origin_ns, end_s, workers, (), (), (), nobody, served, _steps(steps, names), False, "engine"
    )
    num = max(1, math.ceil(end_s / INTERVAL_S))
    if pace(seen, num)[1].any() or pace_of_answers(seen, num)[1].any():
        return None
    return RoutingFacts((), {}, {}, {}, np.zeros(known), known, len(names), num, False, frozenset())


def _steps(steps: StepFacts | None, names: Sequence[str | None]) -> Steps | None:
    """Steps of the workers that requests name."""
    if steps is None:
        return None
    place = [names.index(name) if name in names else -1 for name in steps.worker_names]
    worker = np.array([*place, -1], dtype=np.int64)[steps.worker]
    kept = worker >= 0
    if not kept.any():
        return None
    columns = [
        steps.get(name)[kept] for name in ("prefill_tokens", "decode_tokens", "num_waiting_prefill", "num_running")
    ]
    return Steps(worker[kept], steps.at_s[kept], steps.duration_s[kept], *columns)


def _tells(store: Store, window: Window) -> bool:
    """Whether the router tells anything of the window: its decisions, or the loads that it reads."""
    condition, params = window_sql(window, "at_ns")
    if store.query(f"SELECT 1 FROM route WHERE {condition} LIMIT 1", params).num_rows:
        return True
    loads = f"SELECT 1 FROM sample WHERE {condition} AND name = 'router_load' AND worker IS NOT NULL LIMIT 1"
    return bool(store.query(loads, params).num_rows)


def _position(seen: Observed, requests: RequestFacts) -> I64:
    """Row of the request that each decision was about, -1 where it is none of the window's: [N]."""
    ids, known = pa.array(seen.decisions.ids, pa.string()), pa.array(requests.request_id, pa.string())
    found = pc.index_in(ids, value_set=known)
    if requests.num_shared_ids:  # then the id and the worker together say whose it was
        chosen, served = (
            pa.array([names[code] for code in codes.tolist()], pa.string())
            for names, codes in ((seen.workers, seen.decisions.chosen), (requests.worker_names, requests.worker))
        )
        found = pc.index_in(
            pc.binary_join_element_wise(ids, chosen, "\x1f"),
            value_set=pc.binary_join_element_wise(known, served, "\x1f"),
            skip_nulls=True,
        )
    return np.asarray(pc.fill_null(found, -1)).astype(np.int64)


def _rows(seen: Observed, spot: Hotspot) -> I64:
    """Decisions of the hotspot's interval, to its worker where it is one's."""
    start_s, end_s = ((spot.interval[name] - seen.origin_ns) / 1e9 for name in ("start_ns", "end_ns"))
    inside = (seen.decisions.at_s >= start_s) & (seen.decisions.at_s < end_s)
    if spot.subject["kind"] == "worker":
        inside &= seen.decisions.chosen == list(seen.workers).index(str(spot.subject["id"]))
    return np.flatnonzero(inside)


def _aftermath(seen: Observed, regret: Regret, spot: Hotspot) -> I64:
    """Decisions for a straggler after it was slow, until its queue was no longer the longest: they wait for what it left undone."""
    worker = list(seen.workers).index(str(spot.subject["id"]))
    after = np.flatnonzero(seen.decisions.at_s >= (spot.interval["end_ns"] - seen.origin_ns) / 1e9)
    waiting = np.nan_to_num(regret.waiting[after])
    others = np.delete(waiting, worker, axis=1).max(axis=1, initial=0.0)
    over = np.flatnonzero(waiting[:, worker] <= others)
    after = after[: over[0]] if len(over) else after
    to_it: I64 = after[seen.decisions.chosen[after] == worker]
    return to_it


def _place_lost(seen: Observed, regret: Regret) -> F64:
    """[N] seconds that a request waited for a place while nobody waited at some other worker, less what its prompt would have taken longer there.

    Regret counts a queue by the prompts in it. Places are held by answers too, so those who wait for one wait longer than that; NaN where
    nobody tells, or somebody waited everywhere.
    """
    decisions, served = seen.decisions, seen.served
    num = len(decisions)
    if not len(served):
        return np.full(num, np.nan)
    rows, row = np.arange(num), np.maximum(decisions.request, 0)
    waited = np.where(decisions.request >= 0, (served.first_scheduled_s - served.arrival_s)[row], np.nan)
    is_idle = regret.waiting == 0
    is_idle[rows, np.maximum(decisions.chosen, 0)] = False
    there = np.where(is_idle, np.where(np.isfinite(regret.compute_s), regret.compute_s, np.inf), np.inf).min(
        axis=1, initial=np.inf
    )
    longer = there - regret.compute_s[rows, np.maximum(decisions.chosen, 0)]
    lost = waited - np.maximum(longer, 0.0)
    return np.where(np.isfinite(lost) & (decisions.chosen >= 0), np.maximum(lost, 0.0), np.nan)


def _tokens(store: Store, window: Window, seen: Observed, regret: Regret, rows: I64, block_size: int | None) -> F64:
    """[N] tokens that the chosen worker computed and the best one held, its queue being counted in tokens too.

    By the life of the blocks; where none is known, what the router believed of the chosen worker and was not found there.
    """
    decisions = seen.decisions
    everyone = np.arange(len(decisions))
    held = np.full(decisions.matched.shape, np.nan, dtype=np.float32)
    if block_size:
        held = truly_matched(store, window, seen, rows, block_size)
    known = np.asarray(np.isfinite(held).any(axis=1))
    true = replace(seen, decisions=replace(decisions, matched=np.where(known[:, None], held, decisions.matched)))
    by_truth = regret_of(true).seconds / regret.token_s[decisions.chosen]
    # what the chosen worker held itself, and did not use, no index could have found elsewhere
    best = np.nan_to_num(np.where(known[:, None], held, 0.0)).max(axis=1)
    by_truth = np.minimum(by_truth, np.maximum(best - np.nan_to_num(held[everyone, decisions.chosen]), 0.0))
    prompt = np.where(decisions.request >= 0, seen.served.prompt_tokens[np.maximum(decisions.request, 0)], np.nan)
    missed = decisions.matched[everyone, decisions.chosen] - (prompt - regret.tokens)
    return np.where(known, by_truth, np.maximum(missed, 0.0))


def _visible(seen: Observed) -> frozenset[str]:
    if not seen.has_routes:
        return frozenset()
    told = {"matched_tokens": seen.decisions.matched, "load": seen.decisions.load, "score": seen.decisions.score}
    return frozenset({"route.chosen"} | {f"route.candidates_{n}" for n, v in told.items() if np.isfinite(v).any()})
