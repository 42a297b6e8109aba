"""SGLang's lines: whether each thing is seen, from where, and which flag would show more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine_probe.adapters.adapter import Discovery, Line, Surroundings

EVENTS_FLAG: Final = (
    '--kv-events-config \'{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\''
)
LOG_FLAGS: Final = "--log-requests --log-requests-level 0"
MANY_ROWS: Final = 16
"""With pages shorter than this, rows of blocks come by the token."""


def describe(seen: Discovery, around: Surroundings) -> list[Line]:
    """The lines after that of the metrics, most important first."""
    return [_requests(seen, around), _steps(), _blocks(seen, around), _tiers(seen), _log(around)]


def _requests(seen: Discovery, around: Surroundings) -> Line:
    logs = seen.details.get("log_requests") is True
    if around.log_path is not None and around.log_error is None and logs:
        return Line("requests", True, f"one row each, from the request log {around.log_path}")
    if around.otlp_url is not None:
        host = around.otlp_url.partition("://")[2].partition("/")[0]
        text = (
            f"spans are received at {around.otlp_url}: start SGLang with --enable-trace --otlp-traces-endpoint {host}"
        )
        return Line("requests", None, text + " and OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf")
    if logs:
        return Line("requests", False, "SGLang logs its requests: give --log FILE with its output")
    text = f"only counters and histograms. For one row a request: start SGLang with {LOG_FLAGS} and give --log FILE"
    return Line("requests", False, text + "; or give --otlp-port for its spans")


def _steps() -> Line:
    return Line("steps", False, "SGLang tells of single steps in sums only: what a queue waits for is not observable")


def _blocks(seen: Discovery, around: Surroundings) -> Line:
    if around.kv_error is not None:
        return Line("blocks", False, around.kv_error)
    if seen.prefix_caching is False:
        return Line("blocks", False, "the radix cache is off: start SGLang without --disable-radix-cache")
    if around.kv_links:
        text = "KV events, " + "; ".join(around.kv_links) + _volume(seen, around)
        lost = "" if around.has_replay else "; without replay_endpoint lost messages stay lost"
        return Line("blocks", True, text + lost)
    if seen.kv_sources is None:
        text = f"/server_info does not answer: start SGLang with {EVENTS_FLAG} and give --kv-events tcp://*:5557"
        return Line("blocks", False, text)
    if seen.kv_sources:
        return Line("blocks", False, "SGLang tells a KV-event endpoint that is none: give --kv-events yourself")
    return Line("blocks", False, f"KV events are off: start SGLang with {EVENTS_FLAG}")


def _volume(seen: Discovery, around: Surroundings) -> str:
    if around.block_rate < 1:
        return f"; a share of {around.block_rate:g} of the blocks is kept"
    size = seen.details.get("page_size")
    if not isinstance(size, int) or size >= MANY_ROWS:
        return ""
    each = "a token" if size == 1 else f"{size} tokens"
    return f"; a page is {each}: --block-rate 0.1 keeps every tenth, or start SGLang with --page-size 64"


def _tiers(seen: Discovery) -> Line:
    if _has(seen.series, "hicache_host_used_tokens"):
        return Line("tiers", True, "host tier of the hierarchical cache: tokens, bytes and seconds")
    return Line("tiers", False, "no host tier: SGLang runs without --enable-hierarchical-cache")


def _log(around: Surroundings) -> Line:
    if around.log_error is not None:
        return Line("log", False, around.log_error)
    if around.log_path is None:
        return Line(
            "log", False, "start-up lines (data types, weights) and the request log are not read: give --log FILE"
        )
    return Line("log", True, f"start-up lines and finished requests of {around.log_path}")


def _has(series: Sequence[str] | frozenset[str], name: str) -> bool:
    return f"sglang:{name}" in series or f"sglang_{name}" in series
