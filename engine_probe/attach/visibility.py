"""One line for each thing worth seeing: whether it is seen, from where, and which flag would show more.

Pure: from what was discovered and what was asked for to lines. Flags are the engine's own names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine_probe.attach.scraper import Discovery

_EVENTS: Final = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'
EVENTS_FLAG: Final = f"--kv-events-config '{_EVENTS}'"
PLUGIN_HINT: Final = "install kvscope into the engine's environment and start it with KVSCOPE_URL=http://collector:8321"
RESIDENCY: Final = frozenset(("vllm:kv_block_lifetime_seconds_count", "vllm_kv_block_lifetime_seconds_count"))


@dataclass(frozen=True, slots=True)
class Line:
    """`subject` is seen (True), not seen (False), or will be once the engine does its part (None)."""

    subject: str
    seen: bool | None
    text: str

    def __str__(self) -> str:
        word = {True: "seen", False: "not seen", None: "waiting"}[self.seen]
        return f"{self.subject:<10} {word:<9} {self.text}"


def describe(
    discovery: Discovery,
    *,
    interval_s: float,
    kv_links: Sequence[str],
    kv_error: str | None,
    has_replay: bool,
    otlp_url: str | None,
    log_path: str | None,
    log_error: str | None,
) -> list[Line]:
    """The lines for one engine, most important first.

    kv_links   how each KV-event endpoint is attached; empty where none is
    otlp_url   address of our trace receiver, None where there is none
    """
    model = ", ".join(discovery.models) or "models unknown (does /v1/models want a key? --engine-key)"
    version = discovery.version or "of unknown version"
    metrics = f"vLLM {version} serving {model}; {len(discovery.series)} series every {interval_s:g} s"
    if len(discovery.ranks) > 1:
        metrics += f"; {len(discovery.ranks)} data-parallel ranks"
    return [
        Line("metrics", True, metrics),
        _requests(discovery, otlp_url),
        _steps(discovery),
        _blocks(discovery, kv_links, kv_error, has_replay),
        _residency(discovery),
        _log(log_path, log_error),
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
