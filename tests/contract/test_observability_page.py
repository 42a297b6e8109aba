"""What each engine allows to judge is the join of declarations and needs, and the docs page is that join."""

from __future__ import annotations

from pathlib import Path

from diagnosis.cause import all_causes
from diagnosis.observability import judgeable, openers, page
from engine_probe.adapters.provides import declared

ROOT = Path(__file__).parents[2]
BY_SOURCE = {(one.engine, one.source): one for one in declared()}


def test_the_page_is_the_declarations() -> None:
    """docs/observability.md is generated: `python -m diagnosis.observability`."""
    assert (ROOT / "docs" / "observability.md").read_text() == page()


def test_the_plugin_alone_judges_all_but_blocks() -> None:
    """vLLM's plugin tells requests and steps; premature eviction needs the life of blocks."""
    seen = judgeable(BY_SOURCE["vllm", "plugin"].names)
    assert seen.metrics == ("ttft", "tpot", "e2e")
    assert "admission_blocked_on_blocks" in seen.causes
    assert seen.lacking["premature_eviction"] == ["block.evicted"]


def test_scrapes_alone_judge_no_latency() -> None:
    """Histograms of a page are no requests: every cause lacks at least them."""
    seen = judgeable(BY_SOURCE["vllm", "metrics"].names)
    assert seen.metrics == seen.causes == ()
    assert set(seen.lacking) == set(all_causes())


def test_what_a_source_would_open_is_named() -> None:
    """With the plugin on, KV events are what is missing for evictions, and for what a tier is good for."""
    plugin = BY_SOURCE["vllm", "plugin"]
    found = openers([BY_SOURCE["vllm", "kv_events"], BY_SOURCE["vllm", "log"]], plugin.names)
    assert found == {"kv_events": ("premature_eviction", "tier_never_read", "tier_saves_nothing")}
