"""Which workers a decision could have fallen on: those of the pool that serves such requests, and of these who was there at its instant.

Told by the lists of candidates. Workers that no chain of lists connects are of different pools (another model, another part of the
work). Who is left out of more lists in a row than chance would leave it out of was not there: it had not joined yet, had left, was
drained. A router that lists only those that it has drawn leaves each out now and then, which is no absence: whom it drew is its own doing, so
regret and excess are told against all who were there; but whether it followed a match is told within the list that it had.

Without lists, `worker_up` and `worker_down` marks tell who was there, and the served model who is of one pool.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow.compute as pc

from diagnosis.facts import I64, Bool
from diagnosis.hotspots.columns import codes, names_in, seconds_after
from diagnosis.hotspots.observed import Decisions
from store.evidence.lineage import window_sql
from store.interface import Store, Window

MISSED_P: Final = 1e-6
"""Chance that a worker which is there is left out of so many lists in a row, from which on it was not there."""


def reached(
    store: Store,
    window: Window,
    workers: tuple[str, ...],
    origin: int,
    decisions: Decisions,
    listed: Bool | None,
    has_lists: bool,
) -> tuple[Decisions, I64 | None]:
    """(the decisions with who could be chosen in each, the pools of the workers). listed None: everybody, where lists are told."""
    pools, there = by_model(store, window, workers), None
    if listed is not None:
        there, connected = by_lists(listed)
        pools = connected if pools is None else np.unique(np.stack([connected, pools]), axis=1, return_inverse=True)[1]
    elif not has_lists:
        there = by_marks(store, window, workers, origin, decisions)
        if pools is not None:
            of_model = pools == pools[decisions.chosen][:, None]
            there = np.asarray(of_model if there is None else there & of_model, dtype=np.bool_)
    drawn = None
    if there is not None:
        there[np.arange(len(decisions)), decisions.chosen] = True
        drawn = None if listed is None else drawn_from(there, listed, decisions)
    return replace(decisions, there=there, listed=drawn), None if pools is None else pools.astype(np.int64)


def by_lists(listed: Bool) -> tuple[Bool, I64]:
    """([N, K] the worker could be chosen, [K] its pool) from who stood in which list [N, K]; a decision without a list: everybody."""
    pool = _connected(listed)
    told = np.asarray(listed.any(axis=1))
    of = pool[listed.argmax(axis=1)]
    there = np.repeat(~told[:, None], listed.shape[1], axis=1)
    for code in np.unique(pool).tolist():
        rows, members = np.flatnonzero(told & (of == code)), np.flatnonzero(pool == code)
        if len(rows):
            inside = np.ix_(rows, members)
            there[inside] = _present(listed[inside])
    return there, pool


def drawn_from(there: Bool, listed: Bool, decisions: Decisions) -> Bool | None:
    """[N, K] who was looked at, where that is not everybody who was there; None where it is. A decision without a list: everybody."""
    if np.array_equal(listed, there):
        return None
    looked_at = listed | there & ~np.asarray(listed.any(axis=1))[:, None]
    looked_at[np.arange(len(decisions)), decisions.chosen] = True
    return looked_at


def by_marks(store: Store, window: Window, workers: tuple[str, ...], origin: int, decisions: Decisions) -> Bool | None:
    """[N, K] the worker was up; None where no mark says that one came or went. Who was chosen before it is said to come was there."""
    condition, params = window_sql(window, "at_ns")
    table = store.query(
        f"SELECT coalesce(subject, worker) AS worker, mark, at_ns FROM mark WHERE {condition} "
        "AND mark IN ('worker_up', 'worker_down') ORDER BY at_ns",
        params,
    )
    code, at = codes(table["worker"], workers), seconds_after(table["at_ns"], origin)
    is_up = np.asarray(pc.equal(table["mark"], "worker_up"))
    there = np.ones((len(decisions), len(workers)), dtype=np.bool_)
    for worker in np.unique(code[code >= 0]).tolist():
        mine = np.flatnonzero(code == worker)
        chosen_before = decisions.at_s[(decisions.chosen == worker) & (decisions.at_s < at[mine[0]])]
        begins = not is_up[mine[0]] or len(chosen_before) > 0
        state = np.append(begins, is_up[mine])
        there[:, worker] = state[np.searchsorted(at[mine], decisions.at_s, "right")]
    return None if there.all() else there


def by_model(store: Store, window: Window, workers: tuple[str, ...]) -> I64 | None:
    """[K] the model that each worker says it serves, as a code (-1: it does not say); None where no two differ."""
    past, params = window_sql(Window(None, window.end_ns, window.run_id), "at_ns")
    table = store.query(
        f"SELECT worker, arg_max(model, at_ns) AS model FROM worker WHERE {past} AND worker IS NOT NULL AND model IS NOT NULL "
        "GROUP BY worker",
        params,
    )
    models = names_in(table["model"])
    place, served = codes(table["worker"], workers), codes(table["model"], models)
    pool = np.full(len(workers), -1, dtype=np.int64)
    pool[place[place >= 0]] = served[place >= 0]
    return pool if len(np.unique(pool[pool >= 0])) > 1 else None


def _connected(listed: Bool) -> I64:
    """[K] the first worker of those that lists connect with each."""
    workers = listed.shape[1]
    kinds = np.unique(np.packbits(listed, axis=1), axis=0)
    patterns = np.unpackbits(kinds, axis=1, count=workers).astype(np.float32)
    joined = (patterns.T @ patterns > 0) | np.eye(workers, dtype=np.bool_)
    while True:
        wider = joined.astype(np.float32) @ joined.astype(np.float32) > 0
        if (wider == joined).all():
            return np.asarray(joined.argmax(axis=1))
        joined = wider


def _present(listed: Bool) -> Bool:
    """[n, k] who is listed, and who is left out of no more lists in a row than chance leaves out of one pool's."""
    num = len(listed)
    places = [np.flatnonzero(column) for column in listed.T]
    rates = [len(place) / (place[-1] - place[0] + 1) for place in places if len(place) > 1]
    rate = float(np.median(rates)) if rates else 0.0
    if rate == 0.0:
        return np.ones_like(listed)
    least = 1 if rate >= 1.0 else math.ceil(math.log(MISSED_P) / math.log1p(-rate))
    present = listed.copy()
    for worker, place in enumerate(places):
        edges = np.concatenate([[-1], place, [num]])
        after = np.searchsorted(place, np.arange(num), "right")
        missed = edges[np.minimum(after + 1, len(place) + 1)] - edges[after] - 1
        present[:, worker] |= missed < least
    return present
