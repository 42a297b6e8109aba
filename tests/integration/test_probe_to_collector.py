"""An engine's loop, its recorder and its sink against a real collector: what was recorded is what is stored."""

from __future__ import annotations

from pathlib import Path

from engine_probe.clock import Clock
from engine_probe.recording.recorder import Recorder
from engine_probe.schema import table_from_rows
from engine_probe.sending.sink import HttpSink
from store.interface import Window
from tests.integration.collector_harness import NOW_NS, running

ALL = Window()
MS = 10**6


def test_recorded_requests_steps_and_blocks_are_stored(tmp_path: Path) -> None:
    """Twenty requests of three tokens in sixty steps: instants, tokens, phases and blocks arrive as recorded."""
    now = [0]
    with running(tmp_path / "kv.duckdb") as collector:
        sink = HttpSink(collector.url, "engine-0", spool_dir=tmp_path / "spool")
        clock = Clock(lambda: now[0], lambda: NOW_NS + now[0])
        recorder = Recorder(sink, worker="w0", clock=clock, flush_s=0)
        for number in range(20):
            slot = recorder.arrive(f"r{number}", prompt_tokens=16)
            recorder.prefill(slot, 16, emits=1)
            recorder.block_events("stored", [number + 1], slot=slot, num_tokens=16)
            for turn in range(3):
                recorder.begin_step()
                now[0] += 10 * MS
                recorder.end_step(num_running=1)
                if turn == 0:
                    recorder.decode(slot)
            recorder.finish(slot, finish_reason="length")
            if number % 7 == 0:
                recorder.flush()
        recorder.close()
        assert sink.stats.dropped_rows == {}
        requests = collector.store.rows("request", ALL, order_by="arrival_ns").to_pylist()
        assert [row["request_id"] for row in requests] == [f"r{number}" for number in range(20)]
        for number, row in enumerate(requests):
            begin = NOW_NS + number * 30 * MS
            assert row["token_ns"] == [begin + 10 * MS, begin + 20 * MS, begin + 30 * MS]
            assert (row["prefill_s"], row["decode_s"], row["queue_s"], row["unexplained_s"]) == (0.01, 0.02, 0.0, 0.0)
        assert collector.store.rows("step", ALL).num_rows == 60
        blocks = collector.store.rows("block", ALL, order_by="at_ns").to_pylist()
        assert [(row["block_hash"], row["request_id"]) for row in blocks] == [(n + 1, f"r{n}") for n in range(20)]
        (source,) = collector.store.sources()
        assert (source.source, source.missing) == ("engine-0", [])


def test_a_collector_that_takes_only_small_bodies_gets_small_ones(tmp_path: Path) -> None:
    """The batch is over the collector's limit: it is cut until it fits, and every row is stored once."""
    rows = [{"at_ns": NOW_NS + i, "name": f"x{i}", "value": float(i)} for i in range(3_000)]
    with running(tmp_path / "kv.duckdb", ingest={"max_body_bytes": 16_384}) as collector:
        sink = HttpSink(collector.url, "engine-0", compression=None)
        sink.write({"sample": table_from_rows("sample", rows)})
        assert sink.drain(30)
        sink.close()
        stored = collector.store.rows("sample", ALL, order_by="at_ns").column("value").to_pylist()
    assert stored == [float(i) for i in range(3_000)]
    assert sink.stats.dropped_rows == {}


def test_a_token_that_the_collector_does_not_know_loses_the_batch_in_words(tmp_path: Path) -> None:
    """A wrong token is tried a few times, then the rows are counted as lost, and the answer says why."""
    with running(tmp_path / "kv.duckdb", server={"token": "right"}) as collector:
        sink = HttpSink(collector.url, "engine-0", token="wrong", patience=2)
        sink.write({"mark": table_from_rows("mark", [{"at_ns": NOW_NS, "mark": "deployed"}])})
        assert sink.drain(30)
        sink.close()
        assert collector.store.rows("mark", ALL).num_rows == 0
    assert sink.stats.dropped_rows["mark"] >= 1
    assert "401" in str(sink.stats.last_error)
