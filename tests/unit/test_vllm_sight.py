"""What is seen, and which flag shows more: one line each, no promise that is not kept."""

from __future__ import annotations

from typing import Any

from engine_probe.adapters.adapter import Discovery, Surroundings
from engine_probe.adapters.registry import adapter

BARE = Discovery(
    series=frozenset({"vllm:num_requests_running"}),
    version="0.32.0",
    models=["tiny"],
    kv_sources={},
    prefix_caching=True,
    ranks=["0"],
)


def lines(discovery: Discovery, **changes: Any) -> dict[str, tuple[bool | None, str]]:
    told = adapter("vllm").lines(discovery, Surroundings(**changes))
    return {line.subject: (line.seen, line.text) for line in told}


def test_a_bare_engine_is_told_which_flag_shows_more() -> None:
    """Metrics only: every other line names its remedy."""
    told = lines(BARE)
    assert told["metrics"] == (True, "vLLM 0.32.0 serving tiny; 1 series every 1 s")
    assert told["requests"][0] is False
    assert "KVSCOPE_URL" in told["requests"][1]
    assert "--otlp-port" in told["requests"][1]
    assert told["steps"][0] is False
    assert told["blocks"][0] is False
    assert "--kv-events-config" in told["blocks"][1]
    assert "--kv-cache-metrics" in told["residency"][1]
    assert "--log FILE" in told["log"][1]


def test_with_everything_on_everything_is_seen() -> None:
    """Plugin, events with replay, residency histograms, log."""
    full = Discovery(
        version="0.32.0",
        models=["tiny"],
        kv_sources={"0": {}},
        series=frozenset({"vllm:kv_block_lifetime_seconds_count"}),
        ranks=["0", "1"],
        plugin_worker="w",
    )
    told = lines(
        full, kv_links=["bound x"], has_replay=True, log_path="engine.log", otlp_url="http://127.0.0.1:4318/v1/traces"
    )
    assert [seen for seen, _ in told.values()] == [True] * 6
    assert "2 data-parallel ranks" in told["metrics"][1]
    assert "spans are left out" in told["requests"][1]


def test_spans_wait_for_the_engine() -> None:
    """A receiver alone shows nothing: the line says what the engine needs."""
    seen, text = lines(BARE, otlp_url="http://127.0.0.1:4318/v1/traces")["requests"]
    assert seen is None
    assert "--otlp-traces-endpoint http://127.0.0.1:4318/v1/traces" in text


def test_without_replay_the_blocks_line_warns() -> None:
    """Lost messages stay lost then."""
    assert "stay lost" in lines(BARE, kv_links=["bound x"])["blocks"][1]


def test_prefix_caching_off_comes_before_any_flag_for_events() -> None:
    """With caching off vLLM publishes nothing, whatever the flag."""
    off = Discovery(kv_sources={}, prefix_caching=False)
    seen, text = lines(off, kv_links=["bound x"])["blocks"]
    assert seen is False
    assert "prefix caching is off" in text


def test_an_old_release_is_asked_by_option() -> None:
    """Where no endpoint tells the address, the user must."""
    assert "give --kv-events" in lines(Discovery(version="0.20.0"))["blocks"][1]


def test_errors_are_shown_in_place_of_the_line() -> None:
    """A source that failed is not seen."""
    told = lines(BARE, kv_error="port taken", log_error="x cannot be read")
    assert told["blocks"] == (False, "port taken")
    assert told["log"] == (False, "x cannot be read")
