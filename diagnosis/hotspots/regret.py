"""Regret: seconds that a decision lost against the best worker there was at its instant.

    cost of a worker = (tokens that wait there + tokens of the prompt that it would compute) x its seconds a token

The queue is the engine's own at that instant, not what the router believed: the number that waited by the last step before
it or, without steps, by the last scrape (or, where more, by the request rows: some came since), each with the mean length of those that waited there by the request rows (else of all requests), and what was left of the
prompts under computation, each taken to go on evenly. A worker's seconds a token are measured in its own steps (least squares
through the origin over steps that computed prompts, so full steps decide), else in its own requests.

What the chosen worker had to compute is what was found there (`cached_tokens`), not what was hoped for. Of the others it is
the prompt less what the router believed them to hold; where nothing tells, the whole prompt: regret is then a lower bound.
Unknown is NaN, never zero.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from diagnosis.facts import F64, I64
from diagnosis.hotspots.observed import F32, Observed, Served, Steps
from diagnosis.parallel import both

MIN_STEPS = 5
"""Steps (or requests) that computed prompts which a worker's own speed is measured from; with fewer it is taken for typical."""


@dataclass(frozen=True, slots=True)
class Regret:
    """By decision [N], unknown NaN.

    seconds    lost against the best alternative, 0 where there was none better
    best       that alternative's code, -1 where nothing is known
    ahead      [N, K] tokens that stood before a new request at each worker; wait_s: the seconds that they take there
    compute_s  [N, K] seconds that its prompt would have taken there
    token_s    [K] measured seconds a prompt token
    tokens     [N] prompt tokens that the chosen worker computed
    waiting    [N, K] requests that really waited there; pending: and those whose prompt was under computation
    """

    seconds: F64
    best: I64
    ahead: F64
    wait_s: F64
    compute_s: F64
    token_s: F64
    tokens: F64
    waiting: F64
    pending: F64

    def cost_at(self, rows: I64, workers: I64) -> F64:
        """[n] seconds until the first token that each of these decisions would have had at each of these workers."""
        return np.asarray(self.wait_s[rows, workers] + self.compute_s[rows, workers])


def regret_of(seen: Observed) -> Regret:
    """The regret of every decision of the window."""
    decisions, served = seen.decisions, seen.served
    num, everyone = len(decisions), np.arange(len(decisions))
    token_s = seconds_a_token(seen)
    waiting, pending, ahead_tokens = _queues(seen)
    wait_s = ahead_tokens * token_s[:, None]
    known = decisions.request >= 0
    row = np.maximum(decisions.request, 0)

    def of(values: F64) -> F64:
        return np.where(known, values[row], np.nan) if len(served) else np.full(num, np.nan)

    prompt, computed = of(served.prompt_tokens), of(served.computed_tokens)
    # a row a worker: so all that follows goes through memory in its order. fmax: where no match is told, none is counted
    matched = _turned(decisions.matched)
    to_compute = prompt - np.fmax(matched, np.float32(0.0), out=matched)
    np.maximum(to_compute, 0.0, out=to_compute)
    found = np.isfinite(computed)
    to_compute[decisions.chosen[found], everyone[found]] = computed[found]
    compute_s = np.multiply(to_compute, token_s[:, None], out=to_compute)
    cost = wait_s + compute_s
    own = cost[decisions.chosen, everyone]
    np.copyto(cost, np.inf, where=np.isnan(cost))
    if decisions.there is not None:  # who could not be chosen is no alternative
        np.copyto(cost, np.inf, where=~decisions.there.T)
    cheapest = np.argmin(cost, axis=0) if seen.num_workers else np.zeros(num, dtype=np.int64)
    least = cost[cheapest, everyone]
    has_any = np.isfinite(least)
    best = np.where(has_any, cheapest, -1)
    seconds = np.where(has_any, own - np.where(has_any, least, 0.0), np.nan)
    return Regret(seconds, best, ahead_tokens.T, wait_s.T, compute_s.T, token_s, computed, waiting.T, pending.T)


@dataclass(frozen=True, slots=True)
class Borne:
    """By decision [N], NaN unknown: seconds that its request really lost at most, and what the best worker would have cost it."""

    lost_s: F64
    best_s: F64


def bear(seen: Observed, regret: Regret) -> Borne:
    """Regret is a model of queues: nobody lost more than the request took until its first token, less what the best would have cost.

    Where that is not known, requests lost what they waited for their turn and what their prompts took longer than at the other workers, which
    counts in sum: a short prompt makes up for a long one.
    """
    served, decisions = seen.served, seen.decisions
    num = len(decisions)
    if not len(served):
        return Borne(np.full(num, np.nan), np.full(num, np.nan))
    row, told = np.maximum(decisions.request, 0), decisions.request >= 0
    took = np.where(told, (served.first_token_s - served.arrival_s)[row], np.nan)
    waited = np.where(told, np.maximum(served.first_scheduled_s - served.arrival_s, 0.0)[row], np.nan)
    rows = np.arange(num)
    best = np.where(regret.best >= 0, regret.cost_at(rows, np.maximum(regret.best, 0)), np.nan)
    by_model = np.fmin(regret.seconds, np.maximum(took - best, 0.0))
    by_outcome, computing, pool = waited.copy(), took - waited, seen.pool_of()
    for worker in range(seen.num_workers):
        mine = decisions.chosen == worker
        others = computing[(pool[decisions.chosen] == pool[worker]) & ~mine & np.isfinite(computing)]
        if len(others):
            by_outcome[mine] += computing[mine] - float(others.mean())
    known = np.isfinite(regret.seconds)
    return Borne(np.where(known, by_model, by_outcome), np.where(known, best, took - by_outcome))


def seconds_a_token(seen: Observed) -> F64:
    """[K] of each worker, the median of the others where it computed too little; all NaN where nobody's is known."""
    steps, served, num = seen.steps, seen.served, seen.num_workers
    measured = np.full(num, np.nan)
    if steps is not None:
        measured = _slopes(steps.worker, steps.prefill_tokens, steps.duration_s, num)
    if not np.isfinite(measured).any():
        measured = _slopes(served.worker, served.computed_tokens, served.prefill_s, num)
    if not np.isfinite(measured).any():
        return measured
    typical = np.full(num, np.nanmedian(measured))
    for rows in (seen.pool_of() == code for code in np.unique(seen.pool_of())):
        if np.isfinite(measured[rows]).any():
            typical[rows] = np.nanmedian(measured[rows])
    return np.where(np.isfinite(measured), measured, typical)


def _turned(grid: F32) -> F32:
    """[K, N] copy of [N, K], by some rows at a time, which stay in the cache."""
    out = np.empty(grid.shape[::-1], grid.dtype)
    for first in range(0, len(grid), 1024):
        out[:, first : first + 1024] = grid[first : first + 1024].T
    return out


def _slopes(worker: I64, tokens: F64, seconds: F64, num: int) -> F64:
    """Least squares through the origin: sum(tokens * seconds) / sum(tokens^2)."""
    used = (worker >= 0) & (tokens > 0) & (seconds > 0) & np.isfinite(seconds)
    worker, tokens, seconds = worker[used], tokens[used], seconds[used]
    count = np.bincount(worker, minlength=num)
    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        slope = np.bincount(worker, tokens * seconds, num) / np.bincount(worker, tokens * tokens, num)
    return np.where(count >= MIN_STEPS, slope, np.nan)


def _queues(seen: Observed) -> tuple[F64, F64, F64]:
    """([K, N] requests that waited, these and those under computation, tokens before a new one) at each decision's instant."""
    served, at, num = seen.served, seen.decisions.at_s, seen.num_workers
    steps = seen.gauges if seen.steps is None else seen.steps
    told = (served.worker >= 0) & np.isfinite(served.first_scheduled_s) & np.isfinite(served.computed_tokens)
    # grids as large as these cost their memory most: results are written over what is not needed any more
    (waiting, length), (pending, ahead) = both(
        partial(_waiting, served, told, at, num), partial(_under_way, served, told, at, num)
    )
    count = np.bincount(served.worker[told], minlength=num)
    total = np.bincount(served.worker[told], served.computed_tokens[told], num)
    typical = np.where(count > 0, total / np.maximum(count, 1), _mean(served.computed_tokens))[:, None]
    waits = waiting > 0
    np.divide(length, waiting, out=length, where=waits)
    np.copyto(length, typical, where=~waits)
    silent = count == 0 if steps is None else np.zeros(num, dtype=np.bool_)
    if steps is not None:
        # those that came since a step ended are known by their rows
        np.maximum(waiting, _by_steps(steps, at, num), out=waiting)
        waits = waiting > 0
    np.add(ahead, np.multiply(length, waiting, out=length), out=ahead, where=waits)
    pending += waiting
    for levels in (waiting, pending, ahead):
        levels[silent] = np.nan
    return waiting, pending, ahead


def _waiting(served: Served, told: npt.NDArray[np.bool_], at: F64, num: int) -> tuple[F64, F64]:
    """([K, N] requests between arrival and schedule by their rows, and what they have to compute)."""
    size = served.computed_tokens[told]
    amounts, start, end = (np.ones(len(size)), size), served.arrival_s[told], served.first_scheduled_s[told]
    waiting, tokens = _between(served.worker[told], start, end, amounts, at, num)
    return waiting, tokens


def _under_way(served: Served, told: npt.NDArray[np.bool_], at: F64, num: int) -> tuple[F64, F64]:
    """([K, N] requests between schedule and first token by their rows, and what is left of them: it goes down evenly)."""
    used = told & np.isfinite(served.first_token_s) & (served.first_token_s > served.first_scheduled_s)
    begun, done = served.first_scheduled_s[used], served.first_token_s[used]
    speed = served.computed_tokens[used] / (done - begun)
    amounts = (np.ones(len(speed)), speed * done, speed)
    under_way, left, going = _between(served.worker[used], begun, done, amounts, at, num)
    left -= np.multiply(going, at, out=going)
    # sums of large numbers that cancel: what is left of nothing is nothing
    np.maximum(left, 0.0, out=left)
    np.copyto(left, 0.0, where=under_way <= 0)
    return under_way, left


def _between(worker: I64, start: F64, end: F64, amounts: Sequence[F64], at: F64, num: int) -> list[F64]:
    """[num, N] sums of each of the amounts that have started and not ended before each of `at` (which goes up)."""
    first = np.searchsorted(at, np.concatenate([start, end]), "right")
    changes = [np.concatenate([amount, -amount]) for amount in amounts]
    return _levels(np.concatenate([worker, worker]), first, changes, len(at), num)


def _by_steps(steps: Steps, at: F64, num: int) -> F64:
    """[num, N] how many waited by the last step that had ended; before a worker's first step nobody did."""
    waiting = np.nan_to_num(steps.waiting)
    change = np.diff(waiting, prepend=0.0)
    first_of = np.diff(steps.worker, prepend=-1) != 0
    change[first_of] = waiting[first_of]
    moved = change != 0
    first = np.searchsorted(at, steps.at_s[moved], "left")
    return _levels(steps.worker[moved], first, (change[moved],), len(at), num)[0]


def _levels(worker: I64, first: I64, changes: Sequence[F64], size: int, num: int) -> list[F64]:
    """[num, size] running sums of each of the changes, each from the decision `first` on: written once, from change to change."""
    inside = first < size
    rows = np.arange(num, dtype=np.int64)
    flat = np.concatenate([rows * size, worker[inside] * size + first[inside]])  # every row begins at 0
    order = np.argsort(flat, kind="stable")
    begin = flat[order]
    of, lasts = np.concatenate([rows, worker[inside]])[order], np.diff(begin, append=num * size)
    starts = np.searchsorted(of, rows)
    out = []
    for change in changes:
        running = np.cumsum(np.concatenate([np.zeros(num), change[inside]])[order])
        out.append(np.repeat(running - running[starts][of], lasts).reshape(num, size))
    return out


def _mean(values: F64) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")
