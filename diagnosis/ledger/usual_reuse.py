"""What requests of one kind usually find in the cache: who computed tokens that others of its kind did not have to.

Idea: without the prompts' blocks nobody tells which tokens of a request had been cached before. But requests of one tenant, one
workload and about one length find about the same share of their prompts. A prompt that is computed although its kind is usually
found is no long prompt: it is one whose reuse was lost.

Invariant: what a kind lost in all is never more than what the other window's share would have found beyond what it found here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.facts import F64, I64, Facts, rows_by_code
from diagnosis.ledger.tiers import found_here_too
from diagnosis.sampled import total

FEWEST: Final = 10
"""Requests of a kind that have to tell what they found, in a window, before it says what is usual."""
COUNTED: Final = 0.2
"""Share by which looked-up tokens and those of the prompts may differ: scrapes begin and end beside the window, preempted requests look twice."""
BEST: Final = 0.9
"""Quantile of the share that requests of a kind find, which one finds whose prefix is all there."""


@dataclass(frozen=True, slots=True)
class UsualReuse:
    """Of a window's requests, [n] prompt tokens each.

    missed  that it computed, and one of its kind whose prefix is in the cache would have found
    lost    of those, what its kind would have found were it served as in the other window: their sum is counted, who has it is not
    """

    missed: F64
    lost: F64


def usual_reuse(facts: Facts, other: Facts) -> UsualReuse | None:
    """None where the requests of either window do not tell what they found, or their blocks tell it better."""
    if facts.lineage is not None:
        return None
    found = [_share(facts, other), _share(other, facts)]
    if not all(np.isfinite(share).any() for share in found):
        return None
    kinds, num_kinds = _kinds(facts, other)
    n = len(facts.requests)
    prompt = [np.nan_to_num(each.requests.get("prompt_tokens")) for each in (facts, other)]
    missed, lost = np.zeros(n), np.zeros(n)
    for here, there in zip(rows_by_code(kinds[:n], num_kinds), rows_by_code(kinds[n:], num_kinds), strict=True):
        here, there = here[np.isfinite(found[0][here])], there[np.isfinite(found[1][there])]
        if len(here) == 0 or len(here) + len(there) < FEWEST:
            continue
        best = float(np.quantile(np.concatenate([found[0][here], found[1][there]]), BEST))
        missed[here] = np.clip(best - found[0][here], 0.0, None) * prompt[0][here]
        if len(there) < FEWEST or not missed[here].any():
            continue
        usual = float(np.average(found[1][there], weights=np.maximum(prompt[1][there], 1.0)))
        total = float(((usual - found[0][here]) * prompt[0][here]).sum())
        lost[here] = missed[here] * min(1.0, max(total, 0.0) / float(missed[here].sum()))
    return UsualReuse(missed, lost)


def found_by_counters(facts: Facts) -> float | None:
    """Prompt tokens that all requests of the window found together, by the engine's hit counter; None where it counts others beside them.

    It counts these requests if as many tokens were looked up as their prompts have, give or take COUNTED.
    """
    queries, hits = (facts.samples.get(f"prefix_{name}_tokens_total") for name in ("queries", "hits"))
    prompt = total(facts.requests, "prompt_tokens")
    if not queries or hits is None or not prompt or abs(queries / prompt - 1.0) > COUNTED:
        return None
    return hits


def spread_over(left: F64, total: float, missed: F64 | None) -> F64:
    """`total` tokens over requests that have `left` [n] to give, [n]: first to who missed what its kind finds, then to all alike."""
    first = np.zeros(len(left)) if missed is None else np.minimum(missed, left)
    most = float(first.sum())
    if most >= total:
        return first * (total / most) if most > 0 else first
    rest = left - first
    return first + rest * min(1.0, (total - most) / max(float(rest.sum()), 1e-12))


def _share(facts: Facts, other: Facts) -> F64:
    """[n] share of each prompt that was found, and could be in the other window; NaN where its request does not tell that."""
    cached, prompt = found_here_too(facts, other), facts.requests.get("prompt_tokens")
    return cached / np.where(prompt > 0, prompt, np.nan)


def _kinds(facts: Facts, other: Facts) -> tuple[I64, int]:
    """(kind of each request of both windows, one after the other; how many kinds there are): tenant, workload, octave of the prompt."""
    both = (facts.requests, other.requests)
    octave = np.floor(np.log2(np.maximum(np.nan_to_num(np.concatenate([r.get("prompt_tokens") for r in both])), 1.0)))
    codes = octave.astype(np.int64)
    for name in ("tenant", "workload"):
        words = pa.array(np.concatenate([getattr(r, name) for r in both]), pa.string()).dictionary_encode()
        codes = codes * (len(words.dictionary) + 1) + np.asarray(pc.fill_null(words.indices, len(words.dictionary)))
    distinct, place = np.unique(codes, return_inverse=True)
    return place.astype(np.int64), len(distinct)
