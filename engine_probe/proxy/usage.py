"""Tokens and seconds as answers tell them, in each API's words, as columns of a `request` row.

    OpenAI chat, completions     prompt_tokens, completion_tokens, prompt_tokens_details.cached_tokens
    OpenAI responses             input_tokens, output_tokens, input_tokens_details.cached_tokens
    Anthropic messages           input_tokens without what was read from or written to a cache, and those two beside it
    DeepSeek                     prompt_cache_hit_tokens, prompt_cache_miss_tokens
    llama.cpp                    timings: read by its adapter
    vLLM                         metrics: queue_time_ms, time_to_first_token_ms, generation_time_ms
    SGLang /generate             meta_info: prompt_tokens, completion_tokens, cached_tokens

Invariant: what an answer does not say is absent; a number that is no count of tokens is not taken. Source: reference 14.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine_probe.proxy.shapes import count
from engine_probe.readers.client_rows import told_phases


def usage_columns(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of one usage object of any API; `cache_created` and `reasoning` go into labels."""
    if "cache_read_input_tokens" in usage or "cache_creation_input_tokens" in usage:
        return _messages(usage)
    prompt = _first(usage, "prompt_tokens", "input_tokens")
    output = _first(usage, "completion_tokens", "output_tokens")
    prompt_details = _details(usage, "prompt_tokens_details", "input_tokens_details")
    output_details = _details(usage, "completion_tokens_details", "output_tokens_details")
    hit, miss = count(usage.get("prompt_cache_hit_tokens")), count(usage.get("prompt_cache_miss_tokens"))
    cached = count(prompt_details.get("cached_tokens"))
    if cached is None:
        cached = hit if hit is not None else count(usage.get("cached_tokens"))
    found = {
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "computed_tokens": miss if miss is not None else _difference(prompt, cached),
        "output_tokens": output,
        "cache_created": count(prompt_details.get("created_cache_tokens")),
        "reasoning": count(output_details.get("reasoning_tokens")),
    }
    return _known(found)


def metrics_columns(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of vLLM's `metrics`."""
    return dict(told_phases({"engine_metrics": dict(metrics)}))


def _messages(usage: Mapping[str, Any]) -> dict[str, Any]:
    fresh = count(usage.get("input_tokens"))
    read, created = count(usage.get("cache_read_input_tokens")), count(usage.get("cache_creation_input_tokens"))
    found = {
        "prompt_tokens": None if fresh is None else fresh + (read or 0) + (created or 0),
        "cached_tokens": read,
        "computed_tokens": None if fresh is None else fresh + (created or 0),
        "output_tokens": count(usage.get("output_tokens")),
        "cache_created": created,
    }
    return _known(found)


def _first(usage: Mapping[str, Any], *names: str) -> int | None:
    return next((found for name in names if (found := count(usage.get(name))) is not None), None)


def _details(usage: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    return next((usage[name] for name in names if isinstance(usage.get(name), dict)), {})


def _difference(whole: int | None, part: int | None) -> int | None:
    return whole - part if whole is not None and part is not None and part <= whole else None


def _known(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if value is not None}
