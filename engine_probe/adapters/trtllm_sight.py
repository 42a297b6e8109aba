"""TensorRT-LLM's lines: whether each thing is seen, from where, and which setting would show more."""

from __future__ import annotations

from engine_probe.adapters.adapter import Discovery, Line, Surroundings
from engine_probe.adapters.trtllm import EVENTS, ITERATIONS, REQUESTS

ALONE = "nobody else may read it: whoever asks takes the records away"


def describe(seen: Discovery, around: Surroundings) -> list[Line]:
    """The lines after that of the metrics, most important first."""
    has_page = bool(seen.details.get("has_page"))
    return [_requests(has_page, around), _steps(has_page, around), _blocks(seen, around)]


def _requests(has_page: bool, around: Surroundings) -> Line:
    if not has_page:
        text = "no counters, no requests: start trtllm-serve with return_perf_metrics: true and "
        return Line("requests", False, text + "perf_metrics_max_requests: 10000 (steps are then not seen)")
    return _asked(around, "requests", REQUESTS, f"one row each, from {REQUESTS} ({ALONE})")


def _steps(has_page: bool, around: Surroundings) -> Line:
    if has_page:
        text = "with return_perf_metrics the server reads its own iteration records; without it, and with "
        return Line("steps", False, text + "enable_iter_perf_stats: true, kvscope sees every step instead of requests")
    return _asked(around, "steps", ITERATIONS, f"one row an iteration, from {ITERATIONS} ({ALONE})")


def _blocks(seen: Discovery, around: Surroundings) -> Line:
    if seen.prefix_caching is False:
        return Line("blocks", False, "blocks are not reused: start it with kv_cache_config.enable_block_reuse: true")
    text = f"KV events, from {EVENTS} ({ALONE})"
    if around.block_rate < 1:
        text += f"; a share of {around.block_rate:g} of the blocks is kept"
    return _asked(around, "blocks", EVENTS, text)


def _asked(around: Surroundings, subject: str, path: str, text: str) -> Line:
    error = around.polls.get(path, "")
    if error:
        return Line(subject, False, error)
    return Line(subject, True if error is None else None, text)
