"""Waiting is passed on: what a worker's steps spent their time on, as functions of time that can be integrated.

A timeline is piecewise constant between the instants at which a request arrives, is first scheduled, sees its first token
or ends. In each piece it knows which share of time went into which kind of prefill (`KINDS`)
and what bound the queue (blocks, dependency, or budget/seats). A request's wait is the difference of two integrals, so
the rows of a wait sum to the wait exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnosis.censored import at_least_s
from diagnosis.facts import F64, Bool, Facts
from diagnosis.rows import KINDS
from diagnosis.work_model import WorkModel

BINDINGS = ("blocks", "dependency", "other")
SHORT_OF_BLOCKS = 1.0
"""Blocks wanted over blocks there are, from which on blocks can be what binds."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What each request's own prefill was: tokens by kind, [n, len(KINDS)], and the share of time it took of a step [n]."""

    tokens: F64
    density: F64


@dataclass(frozen=True, slots=True)
class Timeline:
    """One worker. `edges` [m+1] s; `activity` [m, len(KINDS)] shares of time; `binding` [m, 3] weights that sum to 1."""

    edges: F64
    activity: F64
    binding: F64
    running: F64
    waiting: F64
    seats: int | None

    def integrate(self, shares: F64, start_s: F64, end_s: F64) -> F64:
        """Integral of `shares` [m, k] over [start, end) a request -> [n, k]."""
        cumulative = np.vstack([np.zeros(shares.shape[1]), np.cumsum(shares * np.diff(self.edges)[:, None], axis=0)])
        out = np.empty((len(start_s), shares.shape[1]))
        for column in range(shares.shape[1]):
            at_end = np.interp(end_s, self.edges, cumulative[:, column])
            out[:, column] = at_end - np.interp(start_s, self.edges, cumulative[:, column])
        return out

    def wait_shares(self) -> F64:
        """[m, 2 + len(KINDS)]: blocks, dependency, what the steps computed for others, and last ordinary work. Rows sum to 1."""
        blocks, dependency, other = self.binding.T
        answered = self.activity[:, :-1]
        rest = np.clip(1.0 - answered.sum(axis=1), 0.0, 1.0)
        return np.column_stack([blocks, dependency, answered * other[:, None], rest * other])


def build(facts: Facts, worker: int, spent: Spent, model: WorkModel, most_running: int) -> Timeline | None:
    """Timeline of one worker from the engine's own instants; None where no request of it knows them.

    `most_running`: the most requests that this configuration was ever seen to run at once, in either window.
    """
    r = facts.requests
    mine = (
        (r.worker == worker)
        & np.isfinite(r.scheduled_s)
        & np.isfinite(r.engine_first_s)
        & np.isfinite(r.engine_arrival_s)
    )
    if not mine.any():
        return None
    arrival, scheduled, first = r.engine_arrival_s[mine], r.scheduled_s[mine], r.engine_first_s[mine]
    last = np.where(np.isfinite(r.engine_last_s[mine]), r.engine_last_s[mine], first)
    gone = given_up(facts) & (r.worker == worker)
    came = np.concatenate([arrival, r.engine_arrival_s[gone]])
    left = np.concatenate([scheduled, r.engine_arrival_s[gone] + at_least_s(facts)[gone]])
    edges = np.unique(np.concatenate([came, left, first, last]))
    if len(edges) < 2:
        return None
    activity = _activity(edges, scheduled, first, spent, mine)
    running = _level(edges, scheduled, last)
    prefilling = _level(edges, scheduled, first)
    waiting = _level(edges, came, left)
    seats = facts.seats(r.worker_names[worker])
    binding = _binding_from_steps(facts, worker, edges)
    if binding is None:
        wanted = _blocks_wanted(facts, mine, edges, r.worker_names[worker])
        binding = _binding(facts, running, prefilling, waiting, wanted, seats, most_running)
    return Timeline(edges, activity, binding, running, waiting, seats)


def given_up(facts: Facts) -> Bool:
    """Unfinished requests that no step ever worked on, [n]: the engine knew them, and tells of others when they were scheduled."""
    r = facts.requests
    waited = np.isfinite(at_least_s(facts)) & np.isfinite(r.engine_arrival_s)
    never = waited & ~np.isfinite(r.scheduled_s) & ~np.isfinite(r.engine_first_s)
    told = np.zeros(len(r.worker_names), dtype=bool)
    told[np.unique(r.worker[np.isfinite(r.scheduled_s)])] = True
    return never & told[r.worker]


def most_running(facts: Facts) -> int:
    """The most requests that any one worker ran at once."""
    most = 0
    r = facts.requests
    for worker in range(len(r.worker_names)):
        mine = (r.worker == worker) & np.isfinite(r.scheduled_s)
        if mine.any():
            scheduled = r.scheduled_s[mine]
            last = np.where(np.isfinite(r.engine_last_s[mine]), r.engine_last_s[mine], scheduled)
            edges = np.unique(np.concatenate([scheduled, last]))
            if len(edges) > 1:
                most = max(most, int(_level(edges, scheduled, last).max()))
    return most


def _level(edges: F64, start: F64, end: F64) -> F64:
    """How many [start, end) intervals cover each piece, [m]."""
    middle = (edges[:-1] + edges[1:]) / 2
    covered = np.searchsorted(np.sort(start), middle, "right") - np.searchsorted(np.sort(end), middle, "right")
    return covered.astype(float)


def _activity(edges: F64, scheduled: F64, first: F64, spent: Spent, mine: Bool) -> F64:
    tokens = spent.tokens[mine]
    total = np.maximum(tokens.sum(axis=1), 1e-12)
    density = spent.density[mine][:, None] * (tokens / total[:, None])
    density[tokens.sum(axis=1) <= 0] = 0.0
    change = np.zeros((len(edges), len(KINDS)))
    np.add.at(change, np.searchsorted(edges, scheduled), density)
    np.add.at(change, np.searchsorted(edges, first), -density)
    activity = np.clip(np.cumsum(change, axis=0)[:-1], 0.0, None)
    crowd = activity.sum(axis=1)
    shares: F64 = activity / np.maximum(crowd, 1.0)[:, None]
    return shares


def _blocks_wanted(facts: Facts, mine: Bool, edges: F64, worker: str | None) -> F64 | None:
    """Blocks that the running requests and the head of the queue want, over the blocks there are: an upper bound, [m].

    Shared prefixes are counted once a running prefix group where prompts name their prefix, else as often as they occur.
    """
    pool = facts.worker(worker)
    if pool is None or not pool.block_size or not pool.num_blocks or not facts.requests.has("prompt_tokens"):
        return None
    size, usable = pool.block_size, pool.num_blocks
    r = facts.requests
    prompt = np.nan_to_num(r.get("prompt_tokens")[mine])
    output = np.nan_to_num(r.get("output_tokens")[mine])
    scheduled = r.scheduled_s[mine]
    last = np.where(np.isfinite(r.engine_last_s[mine]), r.engine_last_s[mine], r.engine_first_s[mine])
    held = np.ceil((prompt + output / 2) / size)
    change = np.zeros(len(edges))
    np.add.at(change, np.searchsorted(edges, scheduled), held)
    np.add.at(change, np.searchsorted(edges, last), -held)
    running = np.cumsum(change)[:-1]
    head = float(np.ceil(np.mean(prompt) / size)) if len(prompt) else 0.0
    return (running + head) / usable


def _binding(
    facts: Facts, running: F64, prefilling: F64, waiting: F64, wanted: F64 | None, seats: int | None, most_running: int
) -> F64:
    """By elimination: who waits while seats are free and nothing is deferred can only wait for budget or for blocks.

    Budget frees itself with the prefill in progress; so blocks bind where no prefill runs, or where more blocks are wanted
    than there are. Needs a trace of shortage in the window (evictions or preemptions), else the answer is `other`.
    """
    free_seats = running < (seats if seats is not None else most_running)
    deferred = facts.samples.get("requests_waiting_deferred:max", 0.0) > 0
    preempted = facts.samples.get("preemptions_total", 0.0) > 0 or np.nansum(facts.requests.get("num_preemptions")) > 0
    evicted = facts.blocks is not None and facts.blocks.evicted > 0
    shortage = preempted or evicted
    needed = (wanted >= SHORT_OF_BLOCKS) if wanted is not None else (prefilling == 0)
    blocks = free_seats & needed
    blocks &= (waiting > 0) & shortage & (not deferred)
    out = np.zeros((len(running), len(BINDINGS)))
    out[:, 0] = blocks
    out[:, 2] = 1.0 - out[:, 0]
    return out


def _binding_from_steps(facts: Facts, worker: int, edges: F64) -> F64 | None:
    """What the scheduler itself said requests wait for, of the step that covers each piece."""
    steps = facts.steps
    if steps is None or not np.isfinite(steps.get("waiting_on_blocks")).any():
        return None
    name = facts.requests.worker_names[worker]
    if name not in steps.worker_names:
        return None
    rows = np.flatnonzero(steps.worker == list(steps.worker_names).index(name))
    if len(rows) == 0:
        return None
    at = steps.at_s[rows]
    middle = (edges[:-1] + edges[1:]) / 2
    position = np.clip(np.searchsorted(at, middle, "left"), 0, len(rows) - 1)
    counts = {key: np.nan_to_num(steps.get(f"waiting_on_{key}")[rows][position]) for key in _WAITING_ON}
    known = counts["blocks"] + counts["budget"] + counts["seats"] + counts["dependency"]
    if known.sum() == 0:
        return None
    scale = np.where(known > 0, known, 1.0)
    blocks, dependency = counts["blocks"] / scale, counts["dependency"] / scale
    return np.column_stack([blocks, dependency, 1.0 - blocks - dependency])


_WAITING_ON = ("blocks", "budget", "seats", "dependency")
