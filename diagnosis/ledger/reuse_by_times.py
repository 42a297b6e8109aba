"""What a cache that is off no longer finds, where no request and no counter tells what was found before: by the times of prefill.

Idea: with caching off all of a prompt is computed. If prompts take less prefill a token in the other window, where it was on, the rest was
found there. A fixed part of prefill makes that share too small, never too large; a slower machine is taken off first.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from diagnosis.facts import F64, Facts
from diagnosis.quality import caching_is_off

FEWEST: Final = 30
"""Requests that tell their prefill and their prompt, in each window."""


def reuse_by_times(facts: Facts, other: Facts, slower: float) -> float | None:
    """Share of the prompts that `other` found cached while caching was off in `facts`; None where caching tells of no such change.

    slower   step time of `facts` over that of `other`, at equal work
    """
    if not caching_is_off(facts)[0] or caching_is_off(other)[0]:
        return None
    if not other.workers or any(w.prefix_caching is None for w in other.workers):
        return None
    found = [_prefill_s_per_token(each) for each in (facts, other)]
    if found[0] is None or found[1] is None:
        return None
    share = 1.0 - found[1] * max(slower, 1.0) / found[0]
    return share if share > 0.0 else None


def _prefill_s_per_token(facts: Facts) -> float | None:
    """Median over the requests, s; None where too few tell, or none takes any."""
    r = facts.requests
    prompt: F64 = r.get("prompt_tokens")
    each = r.get("prefill_s") / np.where(prompt > 0, prompt, np.nan)
    each = each[np.isfinite(each)]
    return float(np.median(each)) or None if len(each) >= FEWEST else None
