"""Tokens that a step attends to: work that grows while the number of sequences stays, so equal sequences are not yet equal work.

A decode step reads the keys and values of all that each of its sequences was given and gave so far. Steps that took longer while contexts
were longer accuse nobody until steps of equal context are compared too. Where there are none, a step cannot have grown by more than its
contexts did: what is beyond that is slowness, as a lower bound; and where nothing is beyond it, nobody can tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from diagnosis.facts import F64, I64, RequestFacts, rows_by_code

LONGER: Final = 0.10
"""Relative rise of context from which on it is looked at: steps that read a tenth more take a tenth more at most, which is no slow step yet."""
PER_OCTAVE: Final = 8
"""Classes of sequences and of context in a doubling: within one, amounts differ by 9 % at most."""
KNOWN: Final = 0.5
"""Share of the requests whose lengths are known, below which contexts are not."""


def mean_contexts(requests: RequestFacts, worker: I64, at_s: F64) -> F64 | None:
    """[m] tokens that a sequence which decodes at `at_s` has been given and gave, on average over those of its worker (code [m]).

    A request's answer is taken to grow evenly from its first token to its last. NaN where none decodes; None where lengths are not known.
    """
    prompt, output = requests.get("prompt_tokens"), requests.get("output_tokens")
    first = np.where(np.isfinite(requests.engine_first_s), requests.engine_first_s, requests.first_token_s)
    last = np.where(np.isfinite(requests.engine_last_s), requests.engine_last_s, requests.last_token_s)
    known = np.isfinite(prompt) & np.isfinite(output) & (last > first)
    if not len(known) or known.mean() < KNOWN:
        return None
    contexts = np.full(len(at_s), np.nan)
    for rows, mine in zip(requests.by_worker(), rows_by_code(worker, len(requests.worker_names)), strict=True):
        rows = rows[known[rows]]
        if not len(rows) or not len(mine):
            continue
        contexts[mine] = mean_context(first[rows], last[rows], prompt[rows], output[rows], at_s[mine])
    return contexts


def mean_context(begun: F64, ended: F64, prompt: F64, output: F64, at_s: F64) -> F64:
    """The same at one worker, of requests that decode from `begun` to `ended`."""
    grows = (output - 1.0) / (ended - begun)
    start = prompt + 1.0 - grows * begun
    count, fixed, rate = (sum_at(begun, ended, each, at_s) for each in (np.ones(len(begun)), start, grows))
    return np.asarray(np.divide(fixed + rate * at_s, count, out=np.full(len(at_s), np.nan), where=count > 0))


def sum_at(begun: F64, ended: F64, amount: F64, at_s: F64) -> F64:
    """Sum of the amounts that have begun and not ended at each instant."""
    total = np.zeros(len(at_s))
    for edges, sign in ((begun, 1.0), (ended, -1.0)):
        order = np.argsort(edges, kind="stable")
        sums = np.concatenate([[0.0], np.cumsum(amount[order])])
        total += sign * sums[np.searchsorted(edges[order], at_s, "right")]
    return total


def grew(slower: F64, faster: F64) -> bool:
    """Whether contexts are longer, by what could matter, in what was slower."""
    slower, faster = slower[np.isfinite(slower)], faster[np.isfinite(faster)]
    if not len(slower) or not len(faster):
        return False
    return float(np.median(slower)) >= (1.0 + LONGER) * float(np.median(faster))


def at_equal_context(
    effects: Sequence[F64], sequences: Sequence[F64], contexts: Sequence[F64], fewest: int
) -> list[F64]:
    """The effects (log of step time) of both windows about the middle of their class of sequences and context; NaN where one has no
    `fewest` of the class."""
    classes = [_class(n) * 4096 + _class(tokens) for n, tokens in zip(sequences, contexts, strict=True)]
    told = [np.isfinite(e) & (n > 0) & (c > 0) for e, n, c in zip(effects, sequences, contexts, strict=True)]
    equal = [np.full(len(effect), np.nan) for effect in effects]
    counted = [np.unique(one[known], return_counts=True) for known, one in zip(told, classes, strict=True)]
    common = [each[count >= fewest] for each, count in counted]
    for each in np.intersect1d(common[0], common[1]):
        inside = [known & (one == each) for known, one in zip(told, classes, strict=True)]
        middle = sum(float(np.median(effect[rows])) for effect, rows in zip(effects, inside, strict=True)) / 2
        for out, effect, rows in zip(equal, effects, inside, strict=True):
            out[rows] = effect[rows] - middle
    return equal


def _class(amount: F64) -> I64:
    known = np.maximum(np.nan_to_num(amount), 1.0)
    return np.round(PER_OCTAVE * np.log2(known)).astype(np.int64)


def beyond_context(effects: Sequence[F64], contexts: Sequence[F64]) -> list[F64]:
    """The effects less all that contexts could explain: step time in proportion to them, which is the most there can be."""
    return [effect - np.log(np.maximum(tokens, 1.0)) for effect, tokens in zip(effects, contexts, strict=True)]
