"""Who gets more requests, or more tokens, than chance would give: in single intervals, and in LONG of them together.

Where nobody is favoured a decision falls on a worker with a probability of at most 1/m, m of the K workers having had no longer a queue
at that instant: 1/K of a random choice or a turn, 1/ties of the least loaded. A load L is then a sum of weights t_i for which

    P(L >= x) <= min over theta of prod(1 + (exp(theta t_i) - 1)/m_i) exp(-theta x)

(Chernoff 1952; decisions may depend on earlier ones, as in Freedman 1975). That holds for any lengths.
"""

from __future__ import annotations

import math

import numpy as np

from diagnosis.facts import F64, I64, Bool
from diagnosis.hotspots.harm import did_harm
from diagnosis.hotspots.intervals import BY_TEST, FALSE_ALARMS, LONG
from diagnosis.hotspots.regret import Borne, Regret

THETAS = np.geomspace(0.02, 40.0, 28)
"""Tilts that are tried, for weights whose largest is 1."""
SLACK = 2.0
"""Requests (or seconds of so many typical prompts) by which a queue must be longer to count as longer."""


def excess_load(
    of: I64, chosen: I64, regret: Regret, borne: Borne, num: int, workers: int, there: Bool | None = None
) -> tuple[F64, Bool, Bool]:
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
    odds = Odds(regret, there)
    for name, parts in (("", 1), ("_long", LONG)):
        cells, size = of // parts, -(-num // parts)
        own = np.ones((size, workers))
        for weights, test in ((np.ones(len(of)), "requests"), (tokens, "tokens")):
            bound = excess_p(cells, chosen, weights, size, workers, odds)
            own = np.minimum(own, bound * FALSE_ALARMS / BY_TEST[test + name])
        found = (own <= FALSE_ALARMS) & did_harm(cells, chosen, borne, size, workers)
        p = np.minimum(p, np.repeat(own, parts, axis=0)[:num])
        flagged |= np.repeat(found, parts, axis=0)[:num]
        at_once |= found if parts == 1 else False
    return p, flagged, at_once


class Odds:
    """Most likely share of decisions that a worker gets where nobody is favoured: 1 / workers whose queue was no longer.

    A queue may be told in requests, tokens or seconds, and a router may go by any of them: the largest share holds. Queues
    that differ by less than SLACK typical requests count as equal; where one is unknown all do. Who could not be chosen
    (`there` [N, K]; None: everybody could) is none of them.
    """

    def __init__(self, regret: Regret, there: Bool | None = None) -> None:
        self.there = there
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
            there = np.ones(queue.shape, dtype=np.bool_) if self.there is None else self.there[rows]
            no_longer = (there & (queue <= queue[:, [worker]] + slack + 1e-9)).sum(axis=1)
            known = (np.isfinite(queue) | ~there).all(axis=1)
            most = 1.0 / np.maximum(np.where(known, no_longer, there.sum(axis=1)), 1)
            share = np.maximum(share, np.where(there[:, worker], most, 0.0))
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
        chance = np.full((1, 1), even) if odds is None or odds.there is None else _even(odds.there[rows])
        mean, variance = (
            (scaled[:, None] * chance).sum(axis=0),
            (scaled[:, None] ** 2 * chance * (1 - chance)).sum(axis=0),
        )
        above = np.flatnonzero(load > mean + 2 * np.sqrt(variance))
        lift = np.expm1(np.outer(THETAS, scaled)) if len(above) else scaled
        for worker in above.tolist():
            p[index, worker] = _bound(chance[:, min(worker, chance.shape[1] - 1)], lift, load[worker], workers)
            if odds is not None and p[index, worker] <= FALSE_ALARMS:
                p[index, worker] = _bound(odds.of(rows, worker), lift, load[worker], workers)
    return p


def _even(there: Bool) -> F64:
    """[n, K] the same chance for all who could be chosen."""
    return np.asarray(there / np.maximum(there.sum(axis=1, keepdims=True), 1))


def _bound(share: F64 | float, lift: F64, load: float, workers: int) -> float:
    """workers * min over theta of prod(1 + share * (exp(theta t_i) - 1)) * exp(-theta load); lift [thetas, n]."""
    exponent = np.log1p(share * lift).sum(axis=1) - THETAS * load
    return float(min(1.0, workers * math.exp(min(float(exponent.min()), 0.0))))
