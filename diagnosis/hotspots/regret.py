"""Regret: seconds that a decision lost against the best worker there was at its instant.

    cost of a worker = (tokens that wait there + tokens of the prompt that it would compute) x its seconds a token

The queue is the engine's own at that instant, not what the router believed: the number that waited by the last step before
it (or, where more, by the request rows: some came since), each with the mean length of those that waited there by the request rows (else of all requests), and what was left of the
prompts under computation, each taken to go on evenly. A worker's seconds a token are measured in its own steps (least squares
through the origin over steps that computed prompts, so full steps decide), else in its own requests.

What the chosen worker had to compute is what was found there (`cached_tokens`), not what was hoped for. Of the others it is
the prompt less what the router believed them to hold; where nothing tells, the whole prompt: regret is then a lower bound.
Unknown is NaN, never zero.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

from diagnosis.facts import F64, I64
from diagnosis.hotspots.observed import Observed, Served, Steps

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


def regret_of(seen: Observed) -> Regret:
    """The regret of every decision of the window."""
    decisions, served = seen.decisions, seen.served
    num, everyone = len(decisions), np.arange(len(decisions))
    token_s = seconds_a_token(seen)
    waiting, pending, ahead_tokens = _queues(seen)
    wait_s = ahead_tokens * token_s
    known = decisions.request >= 0
    row = np.maximum(decisions.request, 0)

    def of(values: F64) -> F64:
        return np.where(known, values[row], np.nan) if len(served) else np.full(num, np.nan)

    prompt, computed = of(served.prompt_tokens), of(served.computed_tokens)
    matched = np.nan_to_num(decisions.matched.astype(np.float64))
    to_compute = np.maximum(prompt[:, None] - matched, 0.0)
    found = np.isfinite(computed)
    to_compute[everyone[found], decisions.chosen[found]] = computed[found]
    compute_s = to_compute * token_s
    cost = wait_s + compute_s
    own = cost[everyone, decisions.chosen]
    has_any = np.isfinite(cost).any(axis=1)
    best = np.where(has_any, np.argmin(np.where(np.isfinite(cost), cost, np.inf), axis=1), -1)
    seconds = np.where(has_any, own - cost[everyone, np.maximum(best, 0)], np.nan)
    return Regret(seconds, best, ahead_tokens, wait_s, compute_s, token_s, computed, waiting, pending)


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
    return np.where(np.isfinite(measured), measured, np.nanmedian(measured))


def _slopes(worker: I64, tokens: F64, seconds: F64, num: int) -> F64:
    """Least squares through the origin: sum(tokens * seconds) / sum(tokens^2)."""
    used = (worker >= 0) & (tokens > 0) & (seconds > 0) & np.isfinite(seconds)
    worker, tokens, seconds = worker[used], tokens[used], seconds[used]
    count = np.bincount(worker, minlength=num)
    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        slope = np.bincount(worker, tokens * seconds, num) / np.bincount(worker, tokens * tokens, num)
    return np.where(count >= MIN_STEPS, slope, np.nan)


def _queues(seen: Observed) -> tuple[F64, F64, F64]:
    """([N, K] requests that waited, these and those under computation, tokens before a new one) at each decision's instant."""
    at, num = seen.decisions.at_s, seen.num_workers
    waiting = np.full((len(at), num), np.nan)
    pending = np.full((len(at), num), np.nan)
    tokens = np.full((len(at), num), np.nan)
    served = seen.served
    typical = _mean(served.computed_tokens)
    for worker in range(num):
        rows = np.flatnonzero(served.worker == worker)
        counted, their_tokens, under_way, left = _by_rows(served, rows, at)
        by_steps = None if seen.steps is None else _by_steps(seen.steps, worker, at)
        if by_steps is None:
            if seen.steps is None and counted is None:
                continue
            by_steps = counted if counted is not None else np.zeros(len(at))
        if counted is not None:  # those that came since that step ended
            by_steps = np.maximum(by_steps, counted)
        each = _mean(served.computed_tokens[rows])
        each = each if np.isfinite(each) else typical
        if counted is not None:
            length = np.where(counted > 0, their_tokens / np.maximum(counted, 1), each)
        else:
            length = np.full(len(at), each)
        waiting[:, worker] = by_steps
        pending[:, worker] = by_steps + under_way
        tokens[:, worker] = np.where(by_steps > 0, by_steps * length, 0.0) + left
    return waiting, pending, tokens


def _by_steps(steps: Steps, worker: int, at: F64) -> F64 | None:
    """How many waited by the last step that had ended; before the first nobody did. None: the worker tells no steps."""
    first, end = np.searchsorted(steps.worker, [worker, worker + 1])
    if first == end:
        return None
    last = np.searchsorted(steps.at_s[first:end], at, "right") - 1
    return np.where(last >= 0, np.nan_to_num(steps.waiting[first:end][np.maximum(last, 0)]), 0.0)


def _by_rows(served: Served, rows: I64, at: F64) -> tuple[F64 | None, F64, F64, F64]:
    """(requests that waited, their tokens, prompts under computation, tokens left of these), before each instant.

    A request arrives, is scheduled, has its first token; between the last two its tokens go down evenly.
    """
    none = np.zeros(len(at))
    arrival, begun, done = served.arrival_s[rows], served.first_scheduled_s[rows], served.first_token_s[rows]
    size = served.computed_tokens[rows]
    known = np.isfinite(begun) & np.isfinite(size)
    if not known.any():
        return None, none, none, none
    arrival, begun, done, size = arrival[known], begun[known], done[known], size[known]
    ones = np.ones(len(size))
    waiting = _passed(arrival, ones, at) - _passed(begun, ones, at)
    tokens = _passed(arrival, size, at) - _passed(begun, size, at)
    ended = np.isfinite(done) & (done > begun)
    begun, done, size = begun[ended], done[ended], size[ended]
    under_way = np.maximum(_passed(begun, np.ones(len(done)), at) - _passed(done, np.ones(len(done)), at), 0.0)
    speed = size / (done - begun)
    ends_at = _passed(begun, speed * done, at) - _passed(done, speed * done, at)
    at_speed = _passed(begun, speed, at) - _passed(done, speed, at)
    # sums of large numbers that cancel: what is left of nothing is nothing
    left = np.where(at_speed > 1e-9, np.maximum(ends_at - at * at_speed, 0.0), 0.0)
    return np.maximum(waiting, 0.0), np.maximum(tokens, 0.0), under_way, left


def _passed(instants: F64, amounts: F64, at: F64) -> F64:
    """Sum of the amounts of those instants that lie before each of `at`: what comes then itself is not in its own way."""
    order = np.argsort(instants, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(amounts[order])])
    return np.asarray(sums[np.searchsorted(instants[order], at, "left")])


def _mean(values: F64) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")
