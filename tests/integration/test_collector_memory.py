"""The database's memory is used up: over HTTP a batch is 503 with when to come back, applied whole later, and never 500."""

from __future__ import annotations

from pathlib import Path

from store.duckdb_store import DuckDBStore
from tests.integration.collector_harness import NOW_NS, running, step_row


def test_a_batch_without_memory_is_503_and_the_next_try_is_stored(tmp_path: Path) -> None:
    """Nothing of it is kept, so the same identity is applied when there is memory again."""
    rows = {"step": [step_row(number) for number in range(3000)], "mark": [{"at_ns": NOW_NS, "mark": "deployed"}]}
    sent = {"source": "a", "epoch": "e", "seq": "0"}
    with running(tmp_path / "k.duckdb", store_memory_bytes=64 << 20) as collector:
        assert isinstance(collector.store, DuckDBStore)
        holder = collector.store._database.cursor()
        holder.execute("SELECT list(i) FROM range(800000) t(i) GROUP BY i % 200000")
        other = collector.store._database.cursor()
        (used,) = other.execute("SELECT sum(memory_usage_bytes) FROM duckdb_memory()").fetchone() or (0,)
        other.execute(f"SET memory_limit = '{int(used) + (64 << 10)}B'")
        refused = collector.post(rows, **sent)
        assert refused.status_code == 503, refused.text
        assert refused.headers["Retry-After"] == "2"
        assert refused.json()["type"] == "urn:kvscope:error:out-of-memory"
        assert "Nothing of it was kept" in refused.json()["detail"]
        holder.close()
        assert (collector.count("step"), collector.count("mark")) == (0, 0)
        stored = collector.post(rows, **sent)
        assert stored.json()["duplicate"] is False, stored.text
        assert (collector.count("step"), collector.count("mark")) == (3000, 1)
        assert collector.post(rows, **sent).json()["duplicate"] is True
