"""The plugin never hurts the engine: broken statistics, a dead sink and a full buffer are counted, not raised."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace as Fake
from typing import Any

import pyarrow as pa
import pytest

from engine_probe.errors import ProbeError
from engine_probe.sampling import Sampling
from engine_probe.sending import outbox as outbox_module
from engine_probe.sending.outbox import Outbox
from engine_probe.vllm.plugin import EngineTap, KvscopeStatLogger, default_worker, make_sink, open_tap, sampling_of

NOW = 1_700_000_000_000_000_000


class ListSink:
    """Keeps what it is given; `fail` makes it refuse."""

    def __init__(self) -> None:
        self.batches: list[Mapping[str, pa.Table]] = []
        self.fail: Exception | None = None
        self.closed = False

    def write(self, tables: Mapping[str, pa.Table]) -> None:
        if self.fail is not None:
            raise self.fail
        self.batches.append(tables)

    def close(self) -> None:
        self.closed = True

    def rows(self, kind: str) -> list[dict[str, Any]]:
        return [row for batch in self.batches if kind in batch for row in batch[kind].to_pylist()]


@pytest.fixture
def sink() -> ListSink:
    return ListSink()


@pytest.fixture
def outbox(sink: ListSink) -> Iterator[Outbox]:
    box = Outbox(sink, max_rows=4, flush_s=3600)
    yield box
    box.close()


def scheduler(**changes: Any) -> Fake:
    facts: dict[str, Any] = {"num_running_reqs": 1, "num_waiting_reqs": 0, "kv_cache_usage": 0.5}
    return Fake(**(facts | changes))


def test_steps_and_requests_arrive_in_the_sink(sink: ListSink, outbox: Outbox) -> None:
    """One record call gives one step row and one row a finished request, with the full schema."""
    tap = EngineTap(Fake(), "w", outbox, clock=lambda: NOW)
    request = Fake(e2e_latency=1.0, request_id="chatcmpl-a", finish_reason="stop")
    tap.record(scheduler(), Fake(iteration_timestamp=NOW / 1e9, finished_requests=[request], num_generation_tokens=1))
    tap.record(scheduler(), None)
    outbox.flush()
    assert [row["step"] for row in sink.rows("step")] == [0, 1]
    assert [row["request_id"] for row in sink.rows("request")] == ["a"]
    assert tap.errors == {}


def test_a_share_of_the_requests_is_kept_by_their_ids(sink: ListSink) -> None:
    """The very requests that every other probe keeps at this rate, with the rate in the row; steps are never left out."""
    box = Outbox(sink, max_rows=1000, flush_s=3600)
    sampling = Sampling(0.25)
    tap = EngineTap(Fake(), "w", box, clock=lambda: NOW, sampling=sampling)
    for number in range(200):
        request = Fake(e2e_latency=1.0, request_id=f"cmpl-r{number}-0", finish_reason="stop")
        tap.record(
            scheduler(), Fake(iteration_timestamp=NOW / 1e9, finished_requests=[request], num_generation_tokens=1)
        )
    box.close()
    kept = [f"r{number}" for number in range(200) if sampling.keeps_request(f"r{number}")]
    assert 20 < len(kept) < 90
    assert [(row["request_id"], row["sample_rate"]) for row in sink.rows("request")] == [(id_, 0.25) for id_ in kept]
    assert len(sink.rows("step")) == 200
    assert {row["sample_rate"] for row in sink.rows("step")} == {None}


@pytest.mark.parametrize(
    ("text", "rate"), [("", 1.0), ("0.1", 0.1), ("0", 1.0), ("7", 1.0), ("much", 1.0), ("nan", 1.0)]
)
def test_a_share_that_makes_no_sense_keeps_all(text: str, rate: float) -> None:
    """A wrong setting must not lose rows."""
    assert sampling_of(text).rate == rate


def test_engine_initialized_tells_geometry(sink: ListSink, outbox: Outbox) -> None:
    """A worker row and a worker_up mark; steps after it know the number of blocks."""
    config = Fake(cache_config=Fake(num_gpu_blocks=41, block_size=32, enable_prefix_caching=True))
    tap = EngineTap(config, "w", outbox, clock=lambda: NOW)
    tap.engine_initialized()
    tap.record(scheduler(), None)
    outbox.flush()
    assert [(row["worker"], row["num_blocks"]) for row in sink.rows("worker")] == [("w", 40)]
    assert [row["mark"] for row in sink.rows("mark")] == ["worker_up"]
    assert [(row["blocks_total"], row["blocks_used"]) for row in sink.rows("step")] == [(40, 20)]


def test_a_reset_of_the_prefix_cache_is_a_mark(sink: ListSink, outbox: Outbox) -> None:
    """People must see on the time axis why hits fell."""
    EngineTap(Fake(), "w", outbox, clock=lambda: NOW).record(scheduler(prefix_cache_stats=Fake(reset=True)), None)
    outbox.flush()
    assert [(row["mark"], row["subject"], row["at_ns"]) for row in sink.rows("mark")] == [("cache_reset", "w", NOW)]


def test_sleep_is_a_mark(sink: ListSink, outbox: Outbox) -> None:
    """Asleep and awake are both said."""
    tap = EngineTap(Fake(), "w", outbox, clock=lambda: NOW)
    tap.sleep_state(1, 2)
    tap.sleep_state(0, 0)
    outbox.flush()
    assert [row["text"] for row in sink.rows("mark")] == ["the engine sleeps (level 2)", "the engine is awake"]


def test_broken_statistics_are_counted_and_logged_once(
    sink: ListSink, outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """A release that changed a list into a number must not stop the engine, nor fill its log."""
    tap = EngineTap(Fake(), "w", outbox, clock=lambda: NOW)
    for _ in range(3):
        tap.record(None, Fake(finished_requests=7))
    tap.record(scheduler(), None)
    outbox.flush()
    assert tap.errors == {"TypeError": 3}
    assert len([r for r in caplog.records if "could not read" in r.message]) == 1
    assert len(sink.rows("step")) == 1


def test_a_refusing_sink_costs_rows_and_nothing_else(
    sink: ListSink, outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """What is lost is counted by kind and told with a gap mark as soon as the sink takes rows again."""
    sink.fail = ConnectionError("no route")
    for _ in range(2):
        outbox.put("step", {"step": 1, "at_ns": NOW})
        outbox.flush()
    assert (outbox.failures, outbox.dropped) == (2, {"step": 2})
    assert len([r for r in caplog.records if "could not be sent" in r.message]) == 1
    sink.fail = None
    outbox.flush()
    (gap,) = sink.rows("mark")
    assert (gap["mark"], dict(gap["attrs"])) == ("gap", {"dropped_rows": "2", "dropped_step": "2"})


def test_a_full_buffer_drops_steps_before_requests(sink: ListSink, outbox: Outbox) -> None:
    """Four rows fit: steps give way to requests, and the loss is told."""
    for number in range(3):
        outbox.put("step", {"step": number, "at_ns": NOW})
    for number in range(4):
        outbox.put("request", {"request_id": f"r{number}", "at_ns": NOW})
    outbox.put("request", {"request_id": "one too many", "at_ns": NOW})
    outbox.flush()
    assert [row["request_id"] for row in sink.rows("request")] == ["r0", "r1", "r2", "r3"]
    assert sink.rows("step") == []
    assert outbox.dropped == {"step": 3, "request": 1}
    assert dict(sink.rows("mark")[0]["attrs"])["dropped_rows"] == "4"


def test_close_sends_what_is_left_and_returns_though_the_sink_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that stops is held up for a bounded time only."""
    monkeypatch.setattr(outbox_module, "CLOSE_S", 0.05)
    sink, release = ListSink(), threading.Event()
    box = Outbox(sink, flush_s=3600)
    box.put("step", {"step": 0, "at_ns": NOW})
    box.close()
    assert len(sink.rows("step")) == 1
    assert sink.closed

    class Hangs(ListSink):
        def write(self, tables: Mapping[str, pa.Table]) -> None:
            release.wait(30)

    stuck = Outbox(Hangs(), flush_s=3600)
    stuck.put("step", {"step": 0, "at_ns": NOW})
    stuck.close()
    assert stuck._thread.is_alive()
    release.set()
    stuck._thread.join(10)


def test_the_url_names_the_sink(tmp_path: Path) -> None:
    """A folder gets Parquet files of this source; what is neither collector nor folder is refused with an example."""
    sink = make_sink(tmp_path.as_uri(), "vllm:gpu7:8000", None, None)
    box = Outbox(sink, flush_s=3600)
    box.put("step", {"step": 0, "at_ns": NOW})
    box.close()
    (part,) = tmp_path.rglob("*.parquet")
    assert part.relative_to(tmp_path).parts[:2] == ("vllm_gpu7_8000", "kind=step")
    for url in ("collector:8321", "ftp://c", "http://"):
        with pytest.raises(ProbeError, match="KVSCOPE_URL"):
            make_sink(url, "s", None, None)


@pytest.mark.parametrize("env", [{}, {"KVSCOPE_URL": " "}, {"KVSCOPE_URL": "http://c:1", "KVSCOPE_OFF": "1"}])
def test_off_and_unconfigured_do_nothing(env: dict[str, str]) -> None:
    """No thread, no connection, no rows."""
    before = threading.active_count()
    assert open_tap(Fake(), 0, env) is None
    assert threading.active_count() == before


def test_without_vllm_the_class_says_where_it_belongs() -> None:
    """Importing is harmless; using it outside vLLM is a clear error."""
    with pytest.raises(ProbeError, match="runs inside vLLM"):
        KvscopeStatLogger(Fake())


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["vllm", "serve", "m", "--port", "8001"], "h:8001"),
        (["vllm", "serve", "m", "--port=8002"], "h:8002"),
        (["python", "app.py"], "h"),
        (["vllm", "--port"], "h"),
    ],
)
def test_default_worker_is_host_and_port(argv: list[str], expected: str) -> None:
    """Two engines of one host get two names without any setting."""
    assert default_worker(argv, "h") == expected
