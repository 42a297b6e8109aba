"""In which intervals a worker gets too much, or is slow: tests whose false alarms are at most FALSE_ALARMS an interval.

The tests share that rate between them (Bonferroni), and each shares its part between the workers; those of the load look at
single intervals and at LONG of them together:

    requests, tokens   Where nobody is favoured a decision falls on a worker with a probability of at most 1/m, m of the K
                       workers having had no longer a queue at that instant: 1/K of a random choice or a turn, 1/ties of the
                       least loaded. A load L is then a sum of weights t_i for which P(L >= x) <= min over theta of
                       prod(1 + (exp(theta t_i) - 1)/m_i) exp(-theta x) (Chernoff 1952; decisions may depend on earlier
                       ones, as in Freedman 1975). That holds for any lengths.
    pace               Seconds of a worker's steps over those that steps of the same shape took at the others, in CHUNKS parts
                       of the interval: a one-sided t test of the logarithms against the median of the others. Without steps the
                       seconds of prompts share the rate with those of tokens (`decoding`) in LONG intervals taken as one.
    belief             Decisions in which the router's match and what was found differ, against TOLERATED_ERRORS (binomial,
                       by the same bound). Found is what was there at the decision, where block events tell (`holders`): what
                       was evicted while the request waited is no error of the index.

A test that finds something is no hotspot yet: it must have cost what MIN_HARM says, by what requests really took, or its cost must be unknown. That only
takes alarms away. Which kind it is, `kinds` says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from diagnosis.calibration import threshold
from diagnosis.facts import F64, I64
from diagnosis.hotspots.decoding import answers, lost_share
from diagnosis.hotspots.observed import Observed, Steps
from diagnosis.hotspots.regret import Borne, Regret, bear

INTERVAL_S = 10.0
"""Time that is judged at once: long enough for some decisions at each worker, short beside what a person waits for an answer."""
FALSE_ALARMS = 0.01
"""Most of the intervals without a hotspot in which one is told."""
LONG = 6
"""Intervals that are also looked at as one."""
BY_TEST = {
    "requests": 0.0015,
    "tokens": 0.0015,
    "requests_long": 0.001,
    "tokens_long": 0.001,
    "pace": 0.004,
    "belief": 0.001,
}
"""What each test may use up of FALSE_ALARMS, for all workers of an interval together: 1 % in all."""
MIN_HARM = 0.1
"""Regret over what the best alternatives would have cost, from which on a worker's excess is a hotspot: a tenth is the least that is told of a latency anywhere."""
THETAS = np.geomspace(0.02, 40.0, 28)
"""Tilts that are tried, for weights whose largest is 1."""
SLACK = 2.0
"""Requests (or seconds of so many typical prompts) by which a queue must be longer to count as longer."""
CHUNKS = 5
"""Parts of an interval whose scatter tells how sure a worker's pace is: `_t_tail` knows up to five."""
SLOWER = threshold(
    "hotspot_straggler.slower",
    least=0.15,
    unit="relative",
    says="how much longer a worker's steps take than the others' of the same shape, in an interval where that is no chance",
    why="machines of one kind differ by a few percent, and a router that goes by queues makes up for a tenth",
)
MIN_CHUNK_STEPS = 4
"""Steps of a part before it tells a pace."""
TOLERATED_ERRORS = 0.05
"""Share of a router's beliefs that blocks which come and go meanwhile make wrong."""
WRONG_TOKENS, WRONG_RATIO = 64, 0.1
"""A belief is wrong by more than these tokens and this share of the prompt: blocks that come meanwhile are no error."""
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Detected:
    """By interval [I], unknown and untested false.

    edges_s    [I + 1] bounds of the intervals; of: [N] interval of each decision
    load       [I, K] the worker got more than chance would give it, and it cost; load_at_once: told by that interval alone
    slow       [I, K] its steps took longer than those of the others, and it cost
    wrong      [I] the router's index was wrong more often than it may
    slowness   [I, K] times as long as the median of the others, NaN unknown
    p_load     [I, K] most that chance makes as likely, all tests of the load together
    is_wrong   [N] decisions whose belief was wrong; can_err: [N] those where it can be told
    """

    edges_s: F64
    of: I64
    load: Flags
    load_at_once: Flags
    slow: Flags
    wrong: Flags
    slowness: F64
    p_load: F64
    is_wrong: Flags
    can_err: Flags

    @property
    def num(self) -> int:
        return len(self.edges_s) - 1


def detect(seen: Observed, regret: Regret) -> Detected:
    """All intervals of the window, from its begin on; the last may be shorter."""
    decisions, workers = seen.decisions, seen.num_workers
    of, num = intervals(seen)
    edges = np.minimum(np.arange(num + 1) * INTERVAL_S, max(seen.end_s, 1e-9))
    borne = bear(seen, regret)
    p_load, load, at_once = _load(of, decisions.chosen, regret, borne, num, workers)
    harmful = _harm(of, decisions.chosen, borne, num, workers)
    slowness, is_slow = pace(seen, num)
    by_answers = pace_of_answers(seen, num)
    slowness = np.where(by_answers[1], np.fmax(slowness, by_answers[0]), slowness)
    is_wrong, can_err = wrong_beliefs(seen)
    return Detected(
        edges,
        of,
        load,
        at_once,
        is_slow & (harmful | _harm_by_pace(seen, of, regret, is_slow)) | by_answers[1],
        wrong_intervals(of, is_wrong, can_err, num),
        slowness,
        p_load,
        is_wrong,
        can_err,
    )


def intervals(seen: Observed) -> tuple[I64, int]:
    """([N] interval of each decision, how many intervals the window has)."""
    num = max(1, math.ceil(seen.end_s / INTERVAL_S - 1e-9))
    return np.clip((seen.decisions.at_s / INTERVAL_S).astype(np.int64), 0, num - 1), num


def _harm_by_pace(seen: Observed, of: I64, regret: Regret, is_slow: Flags) -> Flags:
    """[I, K] the slow worker's requests lost MIN_HARM by its pace alone: the same tokens, computed behind another worker's queue.

    Asked where nobody tells what other workers held of a prompt. Regret then takes it that they held nothing, so what a slow worker
    computes of a prompt that it mostly holds itself is never worth another's while.
    """
    num, workers = is_slow.shape
    untold = (
        np.flatnonzero(np.isnan(seen.decisions.matched).all(axis=1)) if is_slow.any() else np.zeros(0, dtype=np.int64)
    )
    if not len(untold):
        return np.zeros_like(is_slow)
    cost = regret.wait_s[untold] + regret.tokens[untold, None] * regret.token_s
    chosen = seen.decisions.chosen[untold]
    own, least = cost[np.arange(len(untold)), np.maximum(chosen, 0)], np.fmin.reduce(cost, axis=1)
    known = np.isfinite(own) & np.isfinite(least) & (chosen >= 0)
    cell = of[untold][known] * workers + chosen[known]
    lost = np.bincount(cell, (own - least)[known], num * workers)
    best = np.bincount(cell, least[known], num * workers)
    harmful: Flags = (lost >= MIN_HARM * best) & (lost > 0)
    return harmful.reshape(num, workers)


def _load(of: I64, chosen: I64, regret: Regret, borne: Borne, num: int, workers: int) -> tuple[F64, Flags, Flags]:
    """([num, workers] least bound of the load tests, found by them, found by those of single intervals), on one scale.

    Long intervals find what is small but stays: each of their parts is then in alarm.
    """
    p, flagged = np.ones((num, workers)), np.zeros((num, workers), dtype=np.bool_)
    at_once = flagged.copy()
    if workers < 2:
        return p, flagged, at_once
    known = np.isfinite(regret.tokens)
    typical = float(np.median(regret.tokens[known])) if known.any() else 1.0
    tokens = np.where(known, regret.tokens, typical)
    odds = Odds(regret)
    for name, parts in (("", 1), ("_long", LONG)):
        cells, size = of // parts, -(-num // parts)
        own = np.ones((size, workers))
        for weights, test in ((np.ones(len(of)), "requests"), (tokens, "tokens")):
            bound = excess_p(cells, chosen, weights, size, workers, odds)
            own = np.minimum(own, bound * FALSE_ALARMS / BY_TEST[test + name])
        found = (own <= FALSE_ALARMS) & _harm(cells, chosen, borne, size, workers)
        p = np.minimum(p, np.repeat(own, parts, axis=0)[:num])
        flagged |= np.repeat(found, parts, axis=0)[:num]
        at_once |= found if parts == 1 else False
    return p, flagged, at_once


class Odds:
    """Most likely share of decisions that a worker gets where nobody is favoured: 1 / workers whose queue was no longer.

    A queue may be told in requests, tokens or seconds, and a router may go by any of them: the largest share holds. Queues
    that differ by less than SLACK typical requests count as equal; where one is unknown all do.
    """

    def __init__(self, regret: Regret) -> None:
        tokens = regret.tokens[np.isfinite(regret.tokens)]
        typical = float(tokens.mean()) if len(tokens) else 0.0
        rates = regret.token_s[np.isfinite(regret.token_s)]
        token_s = float(rates.mean()) if len(rates) else 0.0
        self._queues = (
            (regret.pending, SLACK),
            (regret.ahead, SLACK * typical),
            (regret.wait_s, SLACK * typical * token_s),
        )

    def of(self, rows: I64, worker: int) -> F64:
        """[len(rows)] of these decisions."""
        share = np.zeros(len(rows))
        for queues, slack in self._queues:
            queue = queues[rows]
            no_longer = (queue <= queue[:, [worker]] + slack + 1e-9).sum(axis=1)
            known = np.isfinite(queue).all(axis=1)
            share = np.maximum(share, 1.0 / np.where(known, np.maximum(no_longer, 1), queue.shape[1]))
        return share


def excess_p(of: I64, chosen: I64, weights: F64, num: int, workers: int, odds: Odds | None = None) -> F64:
    """[num, workers] most that chance gives to a load as large as each worker's or larger, for all workers together.

    odds   asked where an even chance for all (which makes less of a load likely) would tell an alarm; None: it is even
    """
    p = np.ones((num, workers))
    order = np.argsort(of, kind="stable")
    bounds = np.searchsorted(of[order], np.arange(num + 1))
    even = 1.0 / workers
    for index in range(num):
        rows = order[bounds[index] : bounds[index + 1]]
        top = weights[rows].max(initial=0.0)
        if len(rows) < 2 or top <= 0.0:
            continue
        scaled, told = weights[rows] / top, chosen[rows] >= 0
        load = np.bincount(chosen[rows][told], scaled[told], workers)
        # nearer to the mean the bound is above exp(-2): no alarm at any rate that is worth stating
        far = even * scaled.sum() + 2 * math.sqrt(even * (1 - even) * float(scaled @ scaled))
        lift = np.expm1(np.outer(THETAS, scaled))
        for worker in np.flatnonzero(load > far).tolist():
            p[index, worker] = _bound(even, lift, load[worker], workers)
            if odds is not None and p[index, worker] <= FALSE_ALARMS:
                p[index, worker] = _bound(odds.of(rows, worker), lift, load[worker], workers)
    return p


def _bound(share: F64 | float, lift: F64, load: float, workers: int) -> float:
    """workers * min over theta of prod(1 + share * (exp(theta t_i) - 1)) * exp(-theta load); lift [thetas, n]."""
    exponent = np.log1p(share * lift).sum(axis=1) - THETAS * load
    return float(min(1.0, workers * math.exp(min(float(exponent.min()), 0.0))))


def _harm(of: I64, chosen: I64, borne: Borne, num: int, workers: int) -> Flags:
    """[num, workers] what was lost is at least MIN_HARM of what the best would have cost, or nobody can tell."""
    known = np.isfinite(borne.lost_s) & np.isfinite(borne.best_s) & (chosen >= 0)
    cell = of[known] * workers + chosen[known]
    lost = np.bincount(cell, borne.lost_s[known], num * workers)
    cost = np.bincount(cell, borne.best_s[known], num * workers)
    told = np.bincount(cell, minlength=num * workers)
    harmful: Flags = (told == 0) | (lost >= MIN_HARM * cost) & (lost > 0)
    return harmful.reshape(num, workers)


def pace(seen: Observed, num: int) -> tuple[F64, Flags]:
    """(slowness [num, K], slow [num, K]) by steps, else by the requests' own prefills."""
    nothing = np.full((num, seen.num_workers), np.nan), np.zeros((num, seen.num_workers), dtype=np.bool_)
    if seen.num_workers < 2:
        return nothing
    if seen.steps is not None:
        worker, at, took, usual = usual_seconds(seen.steps, seen.num_workers)
    else:
        served = seen.served
        used = (served.worker >= 0) & (served.computed_tokens > 0) & (served.prefill_s > 0)
        used &= np.isfinite(served.first_token_s)
        worker, at = served.worker[used], served.first_token_s[used]
        took = served.prefill_s[used]
        usual = _usual(worker, _bucket(served.computed_tokens[used]), took, seen.num_workers)
    level = BY_TEST["pace"] if seen.steps is not None else BY_TEST["pace"] / 2
    return _paced(seen, worker, at, took, usual, num, INTERVAL_S, level)


def pace_of_answers(seen: Observed, num: int) -> tuple[F64, Flags]:
    """The same by the tokens of answers where no step was recorded: LONG intervals are one. Slow ones lost MIN_HARM of their time by it."""
    paced = answers(seen.served, seen.num_workers) if seen.steps is None else None
    if paced is None:
        return np.full((num, seen.num_workers), np.nan), np.zeros((num, seen.num_workers), dtype=np.bool_)
    size = -(-num // LONG)
    slowness, slow = _paced(
        seen,
        paced.worker,
        paced.at_s,
        paced.took_s,
        paced.usual_s,
        size,
        LONG * INTERVAL_S,
        BY_TEST["pace"] / 2,
        least=0.0,
    )
    of = (paced.at_s / (LONG * INTERVAL_S)).astype(np.int64)
    for index, worker in np.argwhere(slow).tolist():
        inside = (of == index) & (paced.worker == worker)
        slow[index, worker] = lost_share(paced, inside) >= MIN_HARM
    return np.repeat(slowness, LONG, axis=0)[:num], np.repeat(slow, LONG, axis=0)[:num]


def _paced(
    seen: Observed,
    worker: I64,
    at: F64,
    took: F64,
    usual: F64,
    num: int,
    span_s: float,
    level: float,
    least: float = -math.inf,
) -> tuple[F64, Flags]:
    """(slowness [num, K], slow [num, K]) of `num` spans, by what each of [m] took and usually takes.

    least   log of the pace that the others are taken to have at least: who has more to do than anybody has no usual to be quicker than
    """
    cell = (at / span_s * CHUNKS).astype(np.int64)
    inside = (cell >= 0) & (cell < num * CHUNKS) & np.isfinite(usual) & (usual > 0)
    flat = cell[inside] * seen.num_workers + worker[inside]
    size = num * CHUNKS * seen.num_workers
    count = np.bincount(flat, minlength=size)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.bincount(flat, took[inside], size) / np.bincount(flat, usual[inside], size)
        ratio = np.where(count >= MIN_CHUNK_STEPS, ratio, np.nan)
        logs = np.log(ratio).reshape(num, CHUNKS, seen.num_workers)
        others = np.fmax(_median_of_others(logs), least) if np.isfinite(least) else _median_of_others(logs)
        excess = logs - others
        told = np.isfinite(excess).sum(axis=1)
        mean = (
            np.nansum(excess, axis=1) / told
        )  # not np.nanmean: its warning can only be kept quiet for all threads at once
        spread = np.sqrt(np.nansum(np.square(excess - mean[:, None]), axis=1) / (told - 1))
        t = mean / np.maximum(spread / np.sqrt(told), 1e-6)
        limits = np.array([t_limit(int(n), seen.num_workers, level) for n in range(CHUNKS + 1)])
        certain = (told >= 3) & (t >= limits[told])
        slow = certain & (np.expm1(mean) >= SLOWER.value)
    if (told >= 3).any():
        SLOWER.note(float(np.expm1(mean[certain]).max(initial=0.0)))
    return np.exp(mean), slow


def _median_of_others(values: F64) -> F64:
    """[..., K] median of the other workers' values; of many workers one's own makes no difference."""
    workers = values.shape[-1]
    if workers > 16:
        return np.broadcast_to(_median(values)[..., None], values.shape)
    return np.stack([_median(np.delete(values, k, axis=-1)) for k in range(workers)], axis=-1)


def _median(values: F64) -> F64:
    """Median of the last axis, NaN left out; NaN where nothing is left."""
    if not values.shape[-1]:
        return np.full(values.shape[:-1], np.nan)
    known = np.isfinite(values).sum(axis=-1)
    ranked = np.sort(values, axis=-1)  # NaN last
    low, high = (
        np.take_along_axis(ranked, at[..., None], axis=-1)[..., 0] for at in ((known - 1).clip(0) // 2, known // 2)
    )
    return np.where(known > 0, (low + high) / 2, np.nan)


def usual_seconds(steps: Steps, workers: int) -> tuple[I64, F64, F64, F64]:
    """(worker, end, seconds, usual seconds of steps of the same shape) of the steps that did something."""
    prefill, decode = np.nan_to_num(steps.prefill_tokens), np.nan_to_num(steps.decode_tokens)
    used = (steps.worker >= 0) & (steps.duration_s > 0) & (prefill + decode > 0)
    worker, took = steps.worker[used], steps.duration_s[used]
    shape = _bucket(prefill[used]) * 256 + _bucket(decode[used])
    return worker, steps.at_s[used], took, _usual(worker, shape, took, workers)


def _bucket(amount: F64) -> I64:
    """Quarter octaves: amounts within 19 % of each other; 0 has its own."""
    return np.where(amount > 0, np.floor(4 * np.log2(np.maximum(amount, 1.0))).astype(np.int64) + 1, 0)


def _usual(worker: I64, shape: I64, took: F64, workers: int) -> F64:
    """[m] what a worker takes for the same shape: the median of the workers' means, so that one that is slow moves nobody else's pace.

    NaN where no other worker did it.
    """
    _, code = np.unique(shape, return_inverse=True)
    num = int(code.max(initial=-1)) + 1
    cell = code * workers + worker
    count = np.bincount(cell, minlength=num * workers)
    means = np.where(count > 0, np.bincount(cell, took, num * workers) / np.maximum(count, 1), np.nan)
    means = means.reshape(num, workers)
    usual = np.where(np.isfinite(means).sum(axis=1) > 1, _median(means), np.nan)
    return np.asarray(usual[code])


@lru_cache
def t_limit(told: int, workers: int, level: float = BY_TEST["pace"]) -> float:
    """One-sided t of `told` values that one of `workers` exceeds with the probability `level`."""
    if told < 3:
        return math.inf
    level /= workers
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_tail(middle, told - 1) > level else (low, middle)
    return high


def _t_tail(t: float, freedom: int) -> float:
    """P(T >= t) of Student's t with 2, 3 or 4 degrees of freedom (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    if freedom % 2:  # 3
        inside = 2 / math.pi * (angle + math.sin(angle) * math.cos(angle))
    else:
        term = math.sin(angle)
        inside = term if freedom == 2 else term * (1 + math.cos(angle) ** 2 / 2)
    return (1 - inside) / 2


def wrong_beliefs(seen: Observed) -> tuple[Flags, Flags]:
    """([N] the match that the router believed of the chosen worker was wrong, [N] where both are known)."""
    decisions, served = seen.decisions, seen.served
    num = len(decisions)
    if len(served) == 0 or num == 0:
        return np.zeros(num, dtype=np.bool_), np.zeros(num, dtype=np.bool_)
    row = np.maximum(decisions.request, 0)
    believed = decisions.matched[np.arange(num), decisions.chosen]
    found, prompt = seen.found_there(), served.prompt_tokens[row]
    known = (decisions.request >= 0) & np.isfinite(believed) & np.isfinite(found) & np.isfinite(prompt)
    off = np.abs(np.where(known, believed - found, 0.0))
    return known & (off > np.maximum(WRONG_TOKENS, WRONG_RATIO * np.nan_to_num(prompt))), known


def wrong_intervals(of: I64, is_wrong: Flags, can_err: Flags, num: int) -> Flags:
    """[num] more errors than TOLERATED_ERRORS allows, and at least twice as many: by the bound for a binomial."""
    n = np.bincount(of[can_err], minlength=num)
    k = np.bincount(of[is_wrong], minlength=num)
    share = k / np.maximum(n, 1)
    q = np.clip(share, 1e-12, 1 - 1e-12)
    divergence = q * np.log(q / TOLERATED_ERRORS) + (1 - q) * np.log((1 - q) / (1 - TOLERATED_ERRORS))
    return (share >= 2 * TOLERATED_ERRORS) & (n * divergence >= -math.log(BY_TEST["belief"]))
