"""What the collector says about itself on `/metrics` where something is wrong, or nothing waits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine_probe.errors import StoreBusy
from store.duckdb_store import DuckDBStore
from store.interface import StoreStats
from tests.integration.collector_harness import running


def test_a_receiver_for_whom_nothing_waits_is_a_zero(tmp_path: Path) -> None:
    """A rule over the last 15 minutes sees only what is there: without the zeros between, a retry of a second looks like one of 15 minutes."""
    one = {"name": "box", "kind": "webhook", "url": "https://box.example/"}
    (tmp_path / "r.yml").write_text(json.dumps({"receivers": [one]}))
    settings = {"enabled": False, "receivers_file": tmp_path / "r.yml"}
    with running(tmp_path / "k.duckdb", alerts=settings) as collector:
        for state in ("waiting", "dead"):
            assert collector.metric("kvscope_alert_outbox_messages", receiver="box", state=state) == 0


def test_a_store_that_is_busy_takes_nothing_from_the_page_but_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else Prometheus sees no collector at all, and that is what it would tell people at night. Sizes that were known stay."""

    def busy(*_: object) -> StoreStats:
        raise StoreBusy("all readers are busy", retry_after_s=1)

    with running(tmp_path / "k.duckdb", alerts={"enabled": False}) as collector:
        before = DuckDBStore.stats
        monkeypatch.setattr(DuckDBStore, "stats", busy)
        assert collector.metric("kvscope_build_info") == 1
        assert collector.metric("kvscope_store_bytes") is None
        monkeypatch.setattr(DuckDBStore, "stats", before)
        assert collector.metric("kvscope_store_bytes") is not None
        monkeypatch.setattr(DuckDBStore, "stats", busy)
        monkeypatch.setattr("collector.live.metrics_page.STATS_AGE_S", -1.0)
        assert collector.metric("kvscope_store_bytes") is not None
