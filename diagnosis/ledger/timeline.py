"""Waiting is passed on: what a worker's steps spent their time on, as functions of time that can be integrated.

A timeline is piecewise constant between the instants at which a request arrives, is first scheduled, sees its first token
or ends, and a step begins or ends where steps tell their tokens. In each piece it knows which share of time went into which
kind of prefill (`KINDS`) or of bookkeeping (`OVERHEADS`) and what bound the queue (blocks, dependency, seats, budget, or nobody can tell). A request's wait is the difference of two integrals, so
the rows of a wait sum to the wait exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from diagnosis.facts import F64, I64, Bool, Facts
from diagnosis.ledger.overheads import of_requests, overheads
from diagnosis.ledger.rows import KINDS
from diagnosis.ledger.step_work import StepWork, step_work
from diagnosis.sampled import around, beside_rate
from diagnosis.statistics.censored import at_least_s

BINDINGS = ("blocks", "dependency", "other", "unknown", "seats", "budget")
SEEN_IN = frozenset(("sample.preemptions_total", "request.num_preemptions", "step.num_preempted"))
"""Where preemptions would have been seen."""
SHORT_OF_BLOCKS = 1.0
"""Blocks wanted over blocks there are, from which on blocks can be what binds."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What each request's own prefill was: tokens [n] of each kind, in the order of KINDS, and the share of time it took of a
    step [n]."""

    tokens: Mapping[str, F64]
    density: F64

    def total(self) -> F64:
        """Tokens of all kinds, [n]."""
        return sum_of(self.tokens.values(), len(self.density))


@dataclass(frozen=True, slots=True)
class Timeline:
    """One worker. `edges` [m+1] s; `activity`: shares of time [m] of what occurs of KINDS and OVERHEADS; `binding` [6, m], weights
    that sum to 1 in each piece."""

    edges: F64
    activity: Mapping[str, F64]
    binding: F64
    running: F64
    waiting: F64
    seats: int | None

    def integrate(self, shares: Mapping[str, F64], start_s: F64, end_s: F64) -> dict[str, F64]:
        """Integral of each of `shares` [m] over [start, end) of a request -> [n] each."""
        width = np.diff(self.edges)
        instants = [np.maximum(at, self.edges[0]) for at in (start_s, end_s)]
        ends = [(at, np.searchsorted(self.edges, at, "right") - 1) for at in instants]
        out = {}
        for name, share in shares.items():
            cumulative = np.concatenate([[0.0], np.cumsum(share * width)])
            slope = np.append(np.diff(cumulative) / width, 0.0)
            start, end = (slope[piece] * (at - self.edges[piece]) + cumulative[piece] for at, piece in ends)
            out[name] = end - start
        return out

    def wait_shares(self) -> dict[str, F64]:
        """Shares of each piece's waiting by row: blocks, dependency, what the steps did for others, and last ordinary work."""
        blocks, dependency, other, unknown, seats, budget = self.binding
        free = other + seats + budget
        answered = {name: share for name, share in self.activity.items() if name != KINDS[-1]}
        rest = np.clip(1.0 - sum_of(answered.values(), len(other)), 0.0, 1.0)
        return {
            "admission_blocked_on_blocks": blocks,
            "queue_dependency": dependency,
            **{name: share * free for name, share in answered.items()},
            "queue_seats": rest * seats,
            "queue_budget": rest * budget,
            "queue_load": rest * other,
            "queue_unobserved": unknown,
        }


def build_all(
    facts: Facts, spent: Spent, most_running: int, token_s: float | None, *, shrank: bool = False
) -> dict[int, Timeline]:
    """Timeline of each worker from the engine's own instants; without those of whose requests none knows them.

    most_running  the most requests that this configuration was ever seen to run at once, in either window
    token_s       what a computed prompt token costs in this window, s; None where unknown
    shrank        the pool is told to hold less than in the other window: a trace of shortage where none else could be seen
    """
    gone, waited = given_up(facts), at_least_s(facts)
    shortage = _shortage(facts)
    if shortage is None and shrank:
        shortage = True
    beside, own = overheads(facts), of_requests(facts)
    built = {}
    for worker, rows in enumerate(facts.requests.by_worker()):
        steps = step_work(facts, facts.requests.worker_names[worker], token_s, beside)
        line = _build(facts, worker, rows, spent, most_running, rows[gone[rows]], waited, shortage, steps, own)
        if line is not None:
            built[worker] = line
    return built


def _build(
    facts: Facts,
    worker: int,
    rows: I64,
    spent: Spent,
    most_running: int,
    gone: I64,
    waited: F64,
    shortage: bool | None,
    steps: StepWork | None,
    own: Mapping[str, F64],
) -> Timeline | None:
    r = facts.requests
    known = (
        np.isfinite(r.scheduled_s[rows]) & np.isfinite(r.engine_first_s[rows]) & np.isfinite(r.engine_arrival_s[rows])
    )
    mine = rows[known]
    if len(mine) == 0:
        return None
    scheduled, first, last = r.scheduled_s[mine], r.engine_first_s[mine], r.engine_last_s[mine]
    last = np.where(np.isfinite(last), last, first)
    came = r.engine_arrival_s[np.concatenate([mine, gone])]
    left = np.concatenate([scheduled, r.engine_arrival_s[gone] + waited[gone]])
    edges = np.unique(np.concatenate([came, left, first, last]))
    if len(edges) < 2:
        return None
    if steps is not None:
        edges = np.unique(np.concatenate([edges, steps.edges(edges[0], edges[-1])]))
    at_scheduled, at_first, at_last = (np.searchsorted(edges, at) for at in (scheduled, first, last))
    num_pieces = len(edges) - 1
    running = _level(num_pieces, at_scheduled, at_last)
    prefilling = _level(num_pieces, at_scheduled, at_first)
    waiting = _level(num_pieces, np.searchsorted(edges, came), np.searchsorted(edges, left))
    took = np.maximum(first - scheduled, 1e-9)
    beside = {name: np.clip(seconds[mine] / took, 0.0, 1.0) for name, seconds in own.items()}
    activity = _activity(num_pieces, at_scheduled, at_first, spent, mine, beside)
    rate = beside_rate(r)
    if rate < 1.0:
        levels = {"running": running, "prefilling": prefilling, "waiting": waiting}
        running, prefilling, waiting = around(edges, levels, len(mine), rate).values()
        activity = around(edges, activity, len(mine), rate)
        crowd = np.maximum(sum_of(activity.values(), num_pieces), 1.0)
        activity = {name: share / crowd for name, share in activity.items()}
    if steps is not None:
        activity = steps.refine(edges, activity)
    seats = facts.seats(r.worker_names[worker])
    binding = _binding_from_steps(facts, worker, edges)
    if binding is None:
        free_seats = running < (seats if seats is not None else most_running)
        wanted = _blocks_wanted(facts, mine, edges, at_scheduled, at_last, r.worker_names[worker])
        binding = _binding(facts, free_seats, prefilling, waiting, wanted, shortage=shortage)
        if seats is not None and rate == 1.0:  # told, so that who waits while all are taken waits for one
            full = np.where(~free_seats & (waiting > 0), binding[2], 0.0)
            binding[2], binding[4] = binding[2] - full, binding[4] + full
    return Timeline(edges, activity, binding, running, waiting, seats)


def sum_of(columns: Iterable[F64], n: int) -> F64:
    """Sum of columns [n], in their order; zeros where there are none."""
    out = np.zeros(n)
    for column in columns:
        out += column
    return out


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
    most = 0.0
    r = facts.requests
    for rows in r.by_worker():
        mine = rows[np.isfinite(r.scheduled_s[rows])]
        if len(mine):
            scheduled, last = r.scheduled_s[mine], r.engine_last_s[mine]
            last = np.where(np.isfinite(last), last, scheduled)
            edges = np.unique(np.concatenate([scheduled, last]))
            if len(edges) > 1:
                level = _level(len(edges) - 1, np.searchsorted(edges, scheduled), np.searchsorted(edges, last))
                if beside_rate(r) < 1.0:
                    level = around(edges, {"running": level}, len(mine), beside_rate(r))["running"]
                most = max(most, float(level.max()))
    return round(most)


def _level(num_pieces: int, start: I64, end: I64) -> F64:
    """How many intervals cover each piece, [m]; `start` and `end` are the edges at which they begin and end."""
    change = np.bincount(start, minlength=num_pieces + 1) - np.bincount(end, minlength=num_pieces + 1)
    return np.cumsum(change[:-1]).astype(float)


def _activity(
    num_pieces: int, at_scheduled: I64, at_first: I64, spent: Spent, mine: I64, beside: Mapping[str, F64]
) -> dict[str, F64]:
    """Shares of each piece by row [m]; `beside`: those of each request's own time to its first token that went into bookkeeping."""
    tokens = {name: column[mine] for name, column in spent.tokens.items()}
    tokens = {name: column for name, column in tokens.items() if column.any()}
    total = sum_of(tokens.values(), len(mine))
    total = np.maximum(total, 1e-12)
    room = np.clip(1.0 - sum_of(beside.values(), len(mine)), 0.0, 1.0)
    shares = {**beside, **{name: spent.density[mine] * room * (column / total) for name, column in tokens.items()}}
    activity = {}
    for name, share in shares.items():
        change = np.zeros(num_pieces + 1)
        np.add.at(change, at_scheduled, share)
        np.subtract.at(change, at_first, share)
        activity[name] = np.clip(np.cumsum(change)[:-1], 0.0, None)
    crowd = np.maximum(sum_of(activity.values(), num_pieces), 1.0)
    return {name: share / crowd for name, share in activity.items()}


def _blocks_wanted(
    facts: Facts, mine: I64, edges: F64, at_scheduled: I64, at_last: I64, worker: str | None
) -> F64 | None:
    """Blocks that the running requests and the head of the queue want, over the blocks there are: an upper bound, [m].

    Shared prefixes are counted as often as they occur.
    """
    pool = facts.worker(worker)
    if pool is None or not pool.block_size or not pool.num_blocks or not facts.requests.has("prompt_tokens"):
        return None
    size, usable = pool.block_size, pool.num_blocks
    r = facts.requests
    prompt = np.nan_to_num(r.get("prompt_tokens")[mine])
    output = np.nan_to_num(r.get("output_tokens")[mine])
    held = np.ceil((prompt + output / 2) / size)
    change = np.zeros(len(edges))
    np.add.at(change, at_scheduled, held)
    np.subtract.at(change, at_last, held)
    running, rate = np.cumsum(change)[:-1], beside_rate(r)
    if rate < 1.0:
        running = around(edges, {"held": running}, len(mine), rate)["held"]
    head = float(np.ceil(np.mean(prompt) / size)) if len(prompt) else 0.0
    return (running + head) / usable


def _shortage(facts: Facts) -> bool | None:
    """Any trace of a shortage of blocks in the window: evictions or preemptions. None where neither could have been seen."""
    preempted = facts.samples.get("preemptions_total", 0.0) > 0 or np.nansum(facts.requests.get("num_preemptions")) > 0
    if preempted or (facts.blocks is not None and facts.blocks.evicted > 0):
        return True
    seen = facts.blocks is not None or facts.visible & SEEN_IN
    return False if seen else None


def _binding(
    facts: Facts, free_seats: Bool, prefilling: F64, waiting: F64, wanted: F64 | None, *, shortage: bool | None
) -> F64:
    """By elimination: who waits while seats are free and nothing is deferred can only wait for budget or for blocks.

    Budget frees itself with the prefill in progress; so blocks bind where no prefill runs, or where more blocks are wanted
    than there are. Needs a trace of shortage in the window: without one the answer is `other`, and `unknown` where such a
    trace could not have been seen.
    """
    deferred = facts.samples.get("requests_waiting_deferred:max", 0.0) > 0
    out = np.zeros((len(BINDINGS), len(waiting)))
    if shortage is not False and not deferred:
        needed = (wanted >= SHORT_OF_BLOCKS) if wanted is not None else (prefilling == 0)
        out[0 if shortage else 3] = free_seats & needed & (waiting > 0)
    out[2] = 1.0 - out[0] - out[3]
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
    blocks, dependency, seats, budget = (counts[key] / scale for key in ("blocks", "dependency", "seats", "budget"))
    other = np.where(known > 0, 0.0, 1.0)
    return np.stack([blocks, dependency, other, np.zeros(len(blocks)), seats, budget])


_WAITING_ON = ("blocks", "budget", "seats", "dependency")
