"""How long a token of an answer took at each worker, beside what as much work takes at the others: where no step was recorded.

    seconds a token = a + b sequences + c context of all of them + d prompt tokens computed meanwhile a token

fitted for each worker on the requests of all others (least squares, nothing below 0). More work than any of theirs is taken to need
time in proportion, which is the most that it can: who is slow by that is slow. Less than most of theirs is taken for as little as they do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from diagnosis.facts import F64, I64, Bool, rows_by_code
from diagnosis.hotspots.observed import Served
from diagnosis.ledger.contexts import mean_context, sum_at
from diagnosis.ledger.step_costs import fit_nonnegative

MIN_TOKENS: Final = 4
"""Tokens of an answer before it tells a pace."""
LEAST: Final = 0.25
"""Of the others' requests, by each amount of work, the share that tells the least that their pace is known for."""
MIN_OTHERS: Final = 30
"""Requests of other workers that the usual pace is told by, at least."""
MOST_OTHERS: Final = 10_000
"""From twice as many on every second, third ... of them is looked at: four numbers are fitted."""


@dataclass(frozen=True, slots=True)
class Paced:
    """Answers [m]: who gave each, the middle of it, seconds a token, seconds that a token usually takes; and the whole it stands for.

    tokens   that were decoded    prefill_s: of the same request, NaN unknown
    """

    worker: I64
    at_s: F64
    took_s: F64
    usual_s: F64
    tokens: F64
    prefill_s: F64


def answers(served: Served, pool: I64) -> Paced | None:
    """Answers of a window beside those of other workers of the same pool [K]; None where decoding is not told."""
    told, workers = served.decoded, len(pool)
    if told is None or workers < 2:
        return None
    first, last, tokens = served.first_token_s, told.last_token_s, told.output_tokens - 1.0
    used = (served.worker >= 0) & (told.decode_s > 0) & (tokens >= MIN_TOKENS) & (last > first)
    if not used.any():
        return None
    amounts = np.full((len(served.worker), 4), np.nan)
    rows_of = rows_by_code(np.where(used, served.worker, -1), workers)
    for rows in rows_of:
        if len(rows):
            amounts[rows] = _work(served, told.output_tokens, first, last, rows)
    took = np.divide(told.decode_s, tokens, out=np.full(len(tokens), np.nan), where=used)
    known = used & np.isfinite(amounts).all(axis=1)
    usual = np.full(len(tokens), np.nan)
    for worker, rows in enumerate(rows_of):
        mine = rows[known[rows]]
        is_other = known & (pool[served.worker] == pool[worker])
        is_other[rows] = False
        others = np.flatnonzero(is_other)
        others = others[:: max(1, len(others) // MOST_OTHERS)]
        if len(mine) and len(others) >= MIN_OTHERS:
            usual[mine] = expected(amounts[others], took[others], amounts[mine])
    rows = np.flatnonzero(known & (usual > 0))
    middle = (first[rows] + last[rows]) / 2
    return Paced(served.worker[rows], middle, took[rows], usual[rows], tokens[rows], served.prefill_s[rows])


def _work(served: Served, output: F64, first: F64, last: F64, rows: I64) -> F64:
    """[len(rows), 4] what a step of each answer did, on average: 1, sequences, tokens of context of all, prompt tokens computed a token."""
    begun, ended = first[rows], last[rows]
    total = _until(begun, ended) - _until(ended, ended) - (_until(begun, begun) - _until(ended, begun))
    sequences = np.maximum(total / (ended - begun), 1.0)
    prompt = served.prompt_tokens[rows]
    context = mean_context(begun, ended, prompt, output[rows], (begun + ended) / 2)
    context = np.where(np.isfinite(context), context, 0.0)
    computed = np.nan_to_num(served.computed_tokens[rows])
    everything = np.full(len(rows), np.inf)
    meanwhile = sum_at(begun, everything, computed, ended) - sum_at(begun, everything, computed, begun)
    return np.stack(
        [np.ones(len(rows)), sequences, sequences * context, meanwhile / np.maximum(output[rows] - 1.0, 1.0)], axis=1
    )


def _until(edges: F64, at_s: F64) -> F64:
    """Seconds that lie between each of the edges and `at_s`, of the edges before it, [len(at_s)]."""
    ranked = np.sort(edges)
    before = np.searchsorted(ranked, at_s, "right")
    sums = np.concatenate([[0.0], np.cumsum(ranked)])
    return np.asarray(at_s * before - sums[before])


def expected(theirs: F64, took: F64, mine: F64, *, is_relative: bool = False) -> F64:
    """Seconds that each amount of my work [n, 4] takes at the others' pace. is_relative: a large one counts no more than a small one."""
    least, most = np.quantile(theirs, LEAST, axis=0), theirs.max(axis=0)
    inside = np.clip(mine, least, most)
    beyond = np.divide(mine, inside, out=np.ones_like(mine), where=inside > 0).max(axis=1)
    beyond = np.maximum(beyond, 1.0)
    fitted = (
        fit_nonnegative(theirs / took[:, None], np.ones(len(took))) if is_relative else fit_nonnegative(theirs, took)
    )
    return np.asarray(inside @ fitted * beyond)


def lost_share(paced: Paced, inside: Bool) -> float:
    """Seconds that these answers took beyond the usual, over what they would have taken with it."""
    usual = paced.usual_s[inside] * paced.tokens[inside]
    took = paced.took_s[inside] * paced.tokens[inside]
    whole = float(usual.sum() + np.nansum(paced.prefill_s[inside]))
    return float((took - usual).sum()) / whole if whole > 0 else 0.0
