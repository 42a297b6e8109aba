"""Would a prefix cache pay here? Told before it is switched on, from the blocks that prompts are made of.

Idea: the cache is replayed at the size that the workers have; what each request would have found is worth the seconds that computing
those tokens took, fitted on the window's own prefills. Against that stands looking prompts up, which every request pays.

What is left out makes it a lower bound: whoever waits behind a shorter prefill waits less too. What makes it none: blocks that running
requests and answers need beside (`capacity.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from diagnosis.capacity.block_cache import needed_sizes
from diagnosis.capacity.traces import CacheLoad
from diagnosis.ledger.step_costs import fit_nonnegative
from diagnosis.statistics.quantiles import F64, nearest_rank
from diagnosis.telling.wording import percent, seconds, signed

LOOKUP_S: Final = 3.6e-3 / 50_000
"""Seconds of hashing and looking up a prompt's token in a slow one of today's engines (3.6 ms for 50,000)."""
FEWEST: Final = 20
"""Requests that tell their prefill before a token's cost is fitted."""


@dataclass(frozen=True, slots=True)
class CachingPays:
    """The answer. Unknown is None.

    pays           whether a request gains more than its look-up costs, on average
    hit_ratio      share of the prompts' tokens that a cache of `num_blocks` a worker (None: without an end) would have served
    served_ratio   share that was served from a cache as it was
    token_s        seconds of computing a prompt token, fitted
    saved_s, lookup_s   of a request on average: prefill that falls away, look-up that comes in its place
    ttft_s, ttft_then_s   (mean, P99) as it was, and as it would have been at the same waiting
    break_even_ratio   hit ratio from which on it pays
    """

    pays: bool | None
    sentence: str
    num_blocks: int | None
    hit_ratio: float
    served_ratio: float | None
    token_s: float | None
    saved_s: float | None
    lookup_s: float
    ttft_s: tuple[float, float] | None
    ttft_then_s: tuple[float, float] | None
    break_even_ratio: float | None


def caching_pays(loads: Sequence[CacheLoad], num_blocks: int | None) -> CachingPays | None:
    """Of a cache of so many blocks at each worker (None: without an end). None where prompts do not tell their lengths."""
    found, prompt, ttft, prefill, cached = (
        np.concatenate(parts) for parts in zip(*map(_of(num_blocks), loads), strict=True)
    )
    known = np.isfinite(prompt) & (prompt > 0) & np.isfinite(found)
    if not known.any():
        return None
    found, prompt, ttft, prefill, cached = (values[known] for values in (found, prompt, ttft, prefill, cached))
    served = np.nan_to_num(cached)
    gain = np.clip(np.minimum(found, prompt - 1) - served, 0.0, None)
    token_s = _token_s(prompt - served, prefill)
    hit_ratio = float(np.minimum(found, prompt - 1).sum() / prompt.sum())
    lookup_s = float((prompt * LOOKUP_S).mean())
    served_ratio = float(served.sum() / prompt.sum()) if np.isfinite(cached).any() else None
    then = now = saved_s = pays = even = None
    if token_s is not None:
        each = np.minimum(gain * token_s, np.where(np.isfinite(prefill), prefill, np.inf))
        saved_s, pays = float(each.mean()), bool(each.mean() > lookup_s)
        even = min(LOOKUP_S / token_s, 1.0)
        told = np.isfinite(ttft)
        if told.any():
            now, then = _mean_and_p99(ttft[told]), _mean_and_p99((ttft - each + prompt * LOOKUP_S)[told])
    size = "without an end" if num_blocks is None else f"of {num_blocks:,} blocks a worker"
    return CachingPays(
        pays,
        _sentence(size, hit_ratio, served_ratio, saved_s, lookup_s, pays, now, then, even),
        num_blocks,
        hit_ratio,
        served_ratio,
        token_s,
        saved_s,
        lookup_s,
        now,
        then,
        even,
    )


def _of(num_blocks: int | None) -> Callable[[CacheLoad], tuple[F64, ...]]:
    """Of a load: tokens found by the replay, prompt tokens, TTFT, prefill, tokens cached as it was; of the counted requests."""

    def arrays(load: CacheLoad) -> tuple[F64, ...]:
        hits = needed_sizes(load.trace) <= (np.iinfo(np.int64).max - 1 if num_blocks is None else num_blocks)
        lengths = np.diff(load.trace.offsets)
        of_request = np.bincount(np.repeat(np.arange(len(lengths)), lengths), hits, len(lengths))
        size = float("nan") if load.block_tokens is None else float(load.block_tokens)
        columns = (of_request * size, load.input_tokens, load.ttft_s, load.prefill_s, load.cached_tokens)
        return tuple(np.asarray(column, dtype=np.float64)[load.counted] for column in columns)

    return arrays


def _token_s(computed: F64, prefill: F64) -> float | None:
    """Seconds that one more computed token adds to a prefill."""
    known = np.isfinite(prefill) & np.isfinite(computed)
    if int(known.sum()) < FEWEST or np.ptp(computed[known]) == 0:
        return None
    fitted = fit_nonnegative(np.stack([np.ones(int(known.sum())), computed[known]], axis=1), prefill[known])
    return float(fitted[1]) if fitted[1] > 0 else None


def _mean_and_p99(values: F64) -> tuple[float, float]:
    return float(values.mean()), float(nearest_rank(values, "0.99"))


def _sentence(
    size: str,
    hit_ratio: float,
    served: float | None,
    saved_s: float | None,
    lookup_s: float,
    pays: bool | None,
    now: tuple[float, float] | None,
    then: tuple[float, float] | None,
    even: float | None,
) -> str:
    would = f"a prefix cache {size} would serve {percent(hit_ratio)} of the prompts' tokens"
    if served:
        would += f" ({percent(served)} are served as it is)"
    if pays is None or saved_s is None or even is None:
        return f"Would caching pay here? In tokens: {would}; what a token costs cannot be told, since no prefill times were recorded."
    said = "Yes" if pays else "No more than it does already" if served else "No"
    text = (
        f"Would caching pay here? {said}: {would}, {seconds(saved_s)} of prefill a request against {seconds(lookup_s)} for its look-up. "
        f"It pays from a hit rate of {percent(even)} on."
    )
    if now is not None and then is not None:
        text += (
            f" At the same waiting mean TTFT would go {seconds(now[0])} -> {seconds(then[0])}, P99 {seconds(now[1])} -> {seconds(then[1])} "
            f"({signed(then[1] - now[1])}); that less waiting comes of it is not counted."
        )
    return text
