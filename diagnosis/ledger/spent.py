"""What each request's own prefill was spent on: tokens by kind, and who would have to answer for them.

Invariant: the kinds of a request sum to the tokens it computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from diagnosis.calibration import all_reached, threshold
from diagnosis.facts import F64, Facts
from diagnosis.ledger.pair import Compared
from diagnosis.ledger.rows import KINDS
from diagnosis.ledger.timeline import Spent, sum_of
from diagnosis.ledger.usual_reuse import found_by_counters, spread_over
from diagnosis.ledger.work_model import WorkModel
from diagnosis.quality import workers_off
from diagnosis.sampled import num_requests

LONG_PREFILL, LONG_PREFILL_TOKENS = 4.0, 1024
"""A prefill is long from LONG_PREFILL times the baseline's median prompt on, and from LONG_PREFILL_TOKENS at least."""


REUSE_LOST = threshold(
    "reuse_lost.share",
    least=0.05,
    unit="ratio",
    says="prompt tokens that the other window's hit rate would have found",
    why="a twentieth of the prompts: counters are scraped at other instants than requests begin",
)


COLD = threshold(
    "cold_start.shortfall",
    least=0.01,
    unit="ratio",
    says="share of the prompts that is found less in the cold period than outside it",
    why="a hundredth of the prompts' tokens is no second of anybody's",
)
COLD_STANDS_OUT = threshold(
    "cold_start.standard_errors",
    least=3.0,
    unit="standard errors",
    says="how far that shortfall is from two samples of one rate",
    why="one in 700 pairs of equal rates is as far apart",
)
COLD_FEWEST = 10
"""Requests inside the cold period, and outside it, before their means are compared."""
COLD_PERIOD_S = 60.0
"""How long after a start (or a cache reset) misses are put down to the empty cache, at most."""
AT_ONCE_S = 1.0
"""Workers that start within this are one start."""


@dataclass(frozen=True, slots=True)
class Context:
    """What both windows of a pair share when their ledgers are written."""

    model: WorkModel
    most_running: int
    long_tokens: float
    reuse_ratio: float | None
    """Share of prompt tokens that the *other* window served from its cache; None where unknown."""
    caching_off: bool
    usual_prefill_s: float
    """Median prefill of the baseline."""
    suspect: bool
    found_each: float | None = None
    """Prompt tokens that a request of the *other* window found on average; None where unknown."""
    pair: Compared = field(default_factory=Compared)
    """What a look at both windows tells of this one's requests."""


def long_prefill_tokens(base: Facts) -> float:
    """Computed prompt tokens from which on a prefill counts as long, judged by the baseline's prompts."""
    prompt = base.requests.get("prompt_tokens")
    median = float(np.nanmedian(prompt)) if np.isfinite(prompt).any() else 0.0
    return max(LONG_PREFILL * median, float(LONG_PREFILL_TOKENS))


def own_work(facts: Facts, context: Context) -> Spent:
    """Prompt tokens that each request computed, by kind (the last kind is ordinary), and their share of its prefill time."""
    r = facts.requests
    n = len(r)
    tokens = {name: np.zeros(n) for name in KINDS}
    left = np.nan_to_num(r.get("computed_tokens"))
    prompt = np.nan_to_num(r.get("prompt_tokens"))
    reuse = context.pair.reuse

    def give(kind: str, amount: F64) -> None:
        taken = np.clip(np.nan_to_num(amount), 0.0, left)
        tokens[kind] = tokens[kind] + taken
        np.subtract(left, taken, out=left)

    if facts.lineage is not None and facts.lineage.unused_tokens is not None:
        # it was in this worker's cache and too short to be used: no other worker's copy is longer for that
        give("reuse_below_unit", facts.lineage.unused_tokens)
    elsewhere = np.zeros(n)
    for kind, lost in ({} if facts.routing is None else facts.routing.lost_tokens).items():
        give(kind, lost)
        elsewhere += tokens[kind]
    if facts.lineage is not None:
        # what was evicted here and held by another worker is the router's, not the cache's
        give("premature_eviction", np.clip(facts.lineage.evicted_tokens - elsewhere, 0.0, None))
        if facts.lineage.expired_tokens is not None:
            give("ttl_expiry", facts.lineage.expired_tokens)
    elif facts.blocks is not None and facts.blocks.restored and left.sum() > 0:
        restored = float(facts.blocks.restored * (facts.block_size() or 0))
        give("premature_eviction", spread_over(left, restored, None if reuse is None else reuse.missed))
    if context.reuse_ratio is not None:
        away = workers_off(facts)
        off = np.isin(r.worker, [code for code, name in enumerate(r.worker_names) if name in away])
        give("prefix_caching_off", np.where(context.caching_off | off, context.reuse_ratio * prompt, 0.0))
    give("cold_start", _cold_tokens(facts))
    if facts.lineage is not None and facts.lineage.untold_tokens is not None:
        give("reuse_lost", facts.lineage.untold_tokens)
    for kind, told in context.pair.tokens.items():
        give(kind, told)

    def give_lost(lost: F64) -> None:
        for kind, amiss in ({} if facts.routing is None else facts.routing.amiss).items():
            more = np.where(amiss, lost, 0.0)
            lost = lost - more
            give(kind, more)
        give("reuse_lost", lost)

    untold = facts.lineage is None and (facts.blocks is None or facts.blocks.restored is None)
    if untold and reuse is not None and REUSE_LOST.is_reached(float(reuse.lost.sum()) / max(float(prompt.sum()), 1e-9)):
        # before long prompts: what is usually found is computed for want of it
        give_lost(np.clip(reuse.lost - (np.nan_to_num(r.get("computed_tokens")) - left), 0.0, left))
    is_long = left >= context.long_tokens
    give("long_prefill_interference", np.where(is_long, left, 0.0))
    if untold and context.reuse_ratio is not None:
        slower = np.clip(np.nan_to_num(r.get("prefill_s")) - context.usual_prefill_s, 0.0, None)
        shortfall = _reuse_shortfall(left, np.where(is_long, 0.0, prompt), context.reuse_ratio, slower)
        give_lost(shortfall * _share_that_was_found(facts, context, float(shortfall.sum())))
    give("shared_prefill", left.copy())
    density = np.zeros(n)
    rate = context.model.prefill_s_per_token
    prefill = r.get("prefill_s")
    if rate is not None:
        seconds = sum_of(tokens.values(), n) * rate * speed(context)
        known = np.isfinite(prefill) & (prefill > 1e-9)
        density[known] = np.clip(seconds[known] / prefill[known], 0.0, 1.0)
    return Spent(tokens, density)


def _reuse_shortfall(left: F64, prompt: F64, ratio: float, slower: F64) -> F64:
    """Tokens to compute beyond what the other window's hit rate would have left, [n].

    Which requests had to compute them is told by the requests themselves where they say what was cached; else those whose
    prefill took longer than usual (`slower`, s) get them.
    """
    shortfall = float(left.sum()) - (1.0 - ratio) * float(prompt.sum())
    if not REUSE_LOST.is_reached(shortfall / max(float(prompt.sum()), 1e-9)):
        return np.zeros(len(left))
    weight = left * slower
    total = float(weight.sum())
    return shortfall * weight / total if total > 0 else np.zeros(len(left))


def _share_that_was_found(facts: Facts, context: Context, shortfall: float) -> float:
    """Share of the shortfall that requests of the other window found more of, each: who finds as many tokens as they and asks with a
    longer prompt has lost nothing. 1 where neither requests nor the engine's counter tell."""
    cached = facts.requests.get("cached_tokens")
    cached = cached[np.isfinite(cached)]
    asked = float(len(cached)) or num_requests(facts.requests)
    found = float(cached.sum()) if len(cached) else found_by_counters(facts)
    if context.found_each is None or found is None or shortfall <= 0:
        return 1.0
    less = context.found_each * asked - found
    return min(1.0, max(less, 0.0) / shortfall)


def _cold_tokens(facts: Facts) -> F64:
    """Tokens computed because the cache was still empty: the mean shortfall of the cold period against the rest of the window.

    The cold period begins with a `worker_up` or `cache_reset` mark, or where a worker told that it cleared its blocks; it ends COLD_PERIOD_S later, and half-way to the next start or
    the end of the window at the latest, so that there is a rest to compare with. It counts only where it stands out from the rest by
    three standard errors: single requests with a long tail of their own are no cold start. In all no more is given than the mean
    shortfall: some requests of the cold period would have missed anyway. What a reset took is counted instead where lineage tells it.
    """
    r = facts.requests
    out = np.zeros(len(r)) if facts.lineage is None else facts.lineage.cleared_tokens.copy()
    kinds = ("worker_up",) if out.any() else ("worker_up", "cache_reset")
    starts = sorted({m.at_s for m in facts.marks if m.mark in kinds})
    prompt = r.get("prompt_tokens")
    share = r.get("cached_tokens") / np.where(prompt > 0, prompt, np.nan)
    if facts.lineage is not None:
        lost = facts.lineage
        told = (lost.evicted_tokens, lost.expired_tokens, lost.unused_tokens)
        share = share + sum_of((t for t in told if t is not None), len(r)) / np.where(prompt > 0, prompt, np.nan)
    cold = np.zeros(len(r), dtype=bool)
    ends = np.append(starts, facts.end_s)[np.searchsorted(starts, np.array(starts) + AT_ONCE_S, "right")]
    for start, later in zip(starts, ends, strict=True):
        cold |= (r.arrival_s >= start) & (r.arrival_s <= start + min(COLD_PERIOD_S, (later - start) / 2.0))
    inside, outside = share[cold & np.isfinite(share)], share[~cold & np.isfinite(share)]
    if min(len(inside), len(outside)) < COLD_FEWEST:
        return out
    shortfall = float(outside.mean() - inside.mean())
    error = float(np.sqrt(inside.var(ddof=1) / len(inside) + outside.var(ddof=1) / len(outside)))
    if all_reached((COLD, shortfall), (COLD_STANDS_OUT, shortfall / max(error, 1e-12))):
        missing = np.nan_to_num(np.clip(outside.mean() - share[cold], 0.0, 1.0))
        given = missing * min(1.0, shortfall / max(float(missing.mean()), 1e-9)) * prompt[cold]
        out[cold] = np.fmax(out[cold], given)
    return np.nan_to_num(out)


def speed(context: Context) -> float:
    """Seconds in this window for a second of the faster one."""
    return 1.0 / max(1.0 - context.model.slow_share(suspect=context.suspect), 1e-3)


def token_s(context: Context) -> float | None:
    """Seconds that a computed prompt token costs in this window; None where that cannot be fitted."""
    rate = context.model.prefill_s_per_token
    return None if rate is None else rate * speed(context)
