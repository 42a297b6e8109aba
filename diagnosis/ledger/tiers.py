"""A slower tier of KV (host memory, disk, another machine): what requests got from it, what that cost, what it took in and gave up."""

from __future__ import annotations

import numpy as np

from diagnosis.facts import F64, Facts
from diagnosis.ledger.work_model import WorkModel

READ: tuple[str, ...] = ("cached_tokens_host", "cached_tokens_remote")


def tier_tokens(facts: Facts) -> F64:
    """[n] prompt tokens that each request was saved by a tier, the device's own hits counted once; NaN where it tells of none."""
    r = facts.requests
    told = [r.get(name) for name in READ]
    known = np.isfinite(told[0]) | np.isfinite(told[1])
    tokens = np.nan_to_num(told[0]) + np.nan_to_num(told[1])
    device, prompt = r.get("cached_tokens_device"), r.get("prompt_tokens")
    room = np.where(np.isfinite(device) & np.isfinite(prompt), np.maximum(prompt - np.nan_to_num(device), 0.0), np.inf)
    cached = r.get("cached_tokens")
    beyond = np.where(np.isfinite(cached) & np.isfinite(device), np.maximum(cached - device, 0.0), np.inf)
    return np.where(known, np.minimum(np.minimum(tokens, room), beyond), np.nan)


def found_here_too(facts: Facts, other: Facts) -> F64:
    """[n] cached tokens of `facts`, less those of a slower tier where `other` has none: they are not to be found there, and none was lost."""
    cached, by_tier = facts.requests.get("cached_tokens"), tier_tokens(facts)
    has_none = not has_tier(other) and not np.isfinite(tier_tokens(other)).any()
    return np.maximum(cached - np.nan_to_num(by_tier), 0.0) if has_none else cached


def claimed_tokens(facts: Facts) -> float:
    """Tokens that tiers say they held, those that the device held too among them."""
    return float(sum(np.nansum(facts.requests.get(name)) for name in READ))


def read_per_request(facts: Facts) -> float | None:
    """Tokens that a tier saved a request, on average over all; None where neither requests nor counters tell."""
    tokens = tier_tokens(facts)
    if np.isfinite(tokens).any():
        return float(np.nansum(tokens)) / len(facts.requests)
    if facts.blocks is not None and facts.blocks.tier_taken:
        size = facts.block_size()
        return None if size is None else facts.blocks.tier_loaded * size / len(facts.requests)
    read = facts.samples.get("tier_read_bytes_total")
    return 0.0 if read == 0.0 else None


def has_tier(facts: Facts) -> bool:
    """Whether anything was written to a tier, or read from one."""
    taken = facts.blocks is not None and facts.blocks.tier_taken > 0
    return taken or claimed_tokens(facts) > 0 or facts.samples.get("tier_written_bytes_total", 0.0) > 0


def written(facts: Facts) -> tuple[float, str] | None:
    """(what a tier took in, its unit); None where that is not told."""
    if facts.blocks is not None and facts.blocks.tier_taken:
        return float(facts.blocks.tier_taken), "blocks"
    counted = facts.samples.get("tier_written_bytes_total")
    return None if counted is None else (counted, "bytes")


def given_up_share(facts: Facts) -> float | None:
    """What a tier gave up over what it took in; None where block events do not tell."""
    if facts.blocks is None or not facts.blocks.tier_taken:
        return None
    return facts.blocks.tier_given_up / facts.blocks.tier_taken


def token_cost_s(model: WorkModel, *, suspect: bool) -> float | None:
    """What computing a prompt token takes in this window, s; None where that cannot be fitted."""
    if model.prefill_s_per_token is None:
        return None
    return model.prefill_s_per_token / max(1.0 - model.slow_share(suspect=suspect), 1e-3)


def loads(facts: Facts) -> tuple[F64, F64, F64]:
    """Seconds, tokens and bytes of each request's load, [n]; NaN where it loaded nothing or that is not told."""
    seconds, tokens = facts.requests.get("kv_load_s"), tier_tokens(facts)
    loaded = np.isfinite(seconds) & (seconds > 0)
    size = bytes_per_token(facts)
    told = np.full(len(seconds), np.nan) if facts.loaded_bytes is None else facts.loaded_bytes
    num_bytes = np.where(np.isfinite(told), told, np.nan if size is None else tokens * size)
    unknown = np.full(len(seconds), np.nan)
    return tuple(np.where(loaded, values, unknown) for values in (seconds, tokens, num_bytes))  # type: ignore[return-value]  # three in, three out: a tuple of a generator has no length for the checker


def held_share(facts: Facts) -> float | None:
    """Share of the device's blocks that loads under way held, on average over the window; None where sizes are not told."""
    pool, size, each = facts.num_blocks(), facts.block_size(), bytes_per_token(facts)
    if not pool or not size or not each or facts.offered_s <= 0:
        return None
    load_s, _, num_bytes = loads(facts)
    return float(np.nansum(load_s * num_bytes)) / each / size / pool / facts.offered_s


def bytes_per_token(facts: Facts) -> float | None:
    """KV bytes of a token, by the loads that tell both."""
    tokens, told = tier_tokens(facts), facts.loaded_bytes
    if told is None:
        return None
    known = np.isfinite(told) & np.isfinite(tokens) & (tokens > 0)
    return float(told[known].sum() / tokens[known].sum()) if known.any() else None
