"""vLLM's lines: whether each thing is seen, from where, and which flag would show more.

Pure: from what was discovered and what was asked for to lines. Flags are the engine's own names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine_probe.adapters.adapter import Discovery, Line, Surroundings

_EVENTS: Final = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'
EVENTS_FLAG: Final = f"--kv-events-config '{_EVENTS}'"
PLUGIN_HINT: Final = "install kvscope into the engine's environment and start it with KVSCOPE_URL=http://collector:8321"
RESIDENCY: Final = frozenset(("vllm:kv_block_lifetime_seconds_count", "vllm_kv_block_lifetime_seconds_count"))


def describe(seen: Discovery, around: Surroundings) -> list[Line]:
    """The lines after that of the metrics, most important first."""
    return [
        _requests(seen, around.otlp_url),
        _steps(seen),
        _blocks(seen, around.kv_links, around.kv_error, around.has_replay),
        _residency(seen),
        _log(around.log_path, around.log_error),
    ]


def _requests(discovery: Discovery, otlp_url: str | None) -> Line:
    if discovery.plugin_worker is not None:
        text = f"one row each, from the plugin inside the engine (worker {discovery.plugin_worker})"
        return Line("requests", True, text + ("; spans are left out, they would count twice" if otlp_url else ""))
    if otlp_url is not None:
        text = f"spans are received at {otlp_url}: start the engine with --otlp-traces-endpoint {otlp_url}"
        return Line("requests", None, text + " and OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf")
    text = f"only counters and histograms. For one row a request: {PLUGIN_HINT}; or give --otlp-port for its spans, or "
    text += "point its --otlp-traces-endpoint at the collector's /v1/traces"
    return Line("requests", False, text)


def _steps(discovery: Discovery) -> Line:
    if discovery.plugin_worker is None:
        return Line("steps", False, f"what each scheduler step did is told by the plugin only: {PLUGIN_HINT}")
    return Line(
        "steps", True, "from the plugin; --enable-logging-iteration-details gives each step's exact length and batch"
    )


def _blocks(discovery: Discovery, kv_links: Sequence[str], kv_error: str | None, has_replay: bool) -> Line:
    if kv_error is not None:
        return Line("blocks", False, kv_error)
    if discovery.prefix_caching is False:
        return Line(
            "blocks", False, "prefix caching is off, so no block is ever hashed: start it with --enable-prefix-caching"
        )
    if kv_links:
        text = "KV events, " + "; ".join(kv_links)
        return Line("blocks", True, text + ("" if has_replay else "; without replay_endpoint lost messages stay lost"))
    if discovery.kv_sources is None:
        text = f"this release does not tell its KV-event endpoint: start it with {EVENTS_FLAG} and give --kv-events tcp://*:5557"
        return Line("blocks", False, text)
    if discovery.kv_sources:
        return Line("blocks", False, "the engine tells a KV-event endpoint that is none: give --kv-events yourself")
    return Line("blocks", False, f"KV events are off: start the engine with {EVENTS_FLAG}")


def _residency(discovery: Discovery) -> Line:
    if discovery.series & RESIDENCY:
        return Line("residency", True, "how long sampled blocks live and lie idle (histograms)")
    return Line("residency", False, "how long blocks live and lie idle: start the engine with --kv-cache-metrics")


def _log(path: str | None, error: str | None) -> Line:
    if error is not None:
        return Line("log", False, error)
    if path is None:
        return Line("log", False, "start-up lines (memory, parallelism, data types) are not read: give --log FILE")
    return Line("log", True, f"start-up lines of {path}")
