"""`attach` to a host's exporter: its numbers and gaps are written, and nothing that looks like an engine's life."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine_probe.adapters.worker_map import WorkerMap
from engine_probe.attach.follower import AttachOptions
from engine_probe.attach.session import AttachSession, Summary
from engine_probe.attach.source_life import SourceLives
from engine_probe.errors import KvscopeError
from tests.attach_engine import FakeEngine, ListSink
from tests.attach_running import STRANGE_PAGES
from tests.host_pages import S, sample_text, with_values


@pytest.fixture
def exporter() -> Iterator[FakeEngine]:
    exporter = FakeEngine()
    exporter.set_metrics(sample_text("dcgm"))
    exporter.start()
    yield exporter
    exporter.stop()


def attach(
    exporter: FakeEngine, engine: str, until: Callable[[ListSink], bool], **options: Any
) -> tuple[ListSink, Summary, list[str]]:
    """Attach until the sink holds what is waited for."""
    sink, said, stop = ListSink(), list[str](), threading.Event()
    facts: dict[str, Any] = {"url": exporter.url, "salt": b"s", "engine": engine, "interval_s": 0.05}
    session = AttachSession(AttachOptions(**(facts | options)), sink, said.append, flush_s=0.02)
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(session.run(stop))
        except KvscopeError as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(1000):
        if until(sink) or result:
            break
        time.sleep(0.01)
    stop.set()
    thread.join(30)
    if isinstance(result[0], KvscopeError):
        raise result[0]
    return sink, result[0], said


def named(sink: ListSink, name: str) -> list[dict[str, Any]]:
    return [row for row in sink.rows("sample") if row["name"] == name]


def test_numbers_are_the_mapped_workers(exporter: FakeEngine) -> None:
    """--map gpu:1=worker-b: that GPU's rows carry the name; GPU 0 is its pod's; no worker row is made up."""
    rules = WorkerMap.parse(["gpu:1=worker-b"])
    sink, _, said = attach(exporter, "dcgm", lambda s: len(named(s, "gpu_util")) >= 4, worker_map=rules)
    assert {(row["labels"]["gpu"], row["worker"]) for row in named(sink, "gpu_util")} == {
        ("0", "vllm-0"),
        ("1", "worker-b"),
    }
    assert sink.rows("worker") == []
    assert not [row for row in sink.rows("mark") if row["mark"] != "gap"]
    assert any(line.startswith("throttling seen") for line in said)


def test_an_exporter_that_goes_away_is_a_gap_and_no_workers_end(exporter: FakeEngine) -> None:
    """It stops and comes back: one gap mark about the exporter, no worker_down, no worker_up."""
    stopped: list[bool] = []

    def until(sink: ListSink) -> bool:
        if not stopped and len(named(sink, "gpu_util")) >= 4:
            exporter.stop()
            stopped.append(True)
            time.sleep(0.2)
            exporter.start()
        return bool(sink.rows("mark"))

    sink, summary, _ = attach(exporter, "dcgm", until, worker="gpu-box")
    marks = sink.rows("mark")
    assert [row["mark"] for row in marks] == ["gap"]
    assert marks[0]["worker"] is None
    assert marks[0]["subject"] == f"dcgm-exporter at {exporter.url}"
    assert summary.restarts == 0
    assert {row["worker"] for row in named(sink, "gpu_xid") if row["labels"]["gpu"] == "1"} == {"gpu-box"}


def test_the_kubelets_path_is_found(exporter: FakeEngine) -> None:
    """The kubelet has its own metrics at /metrics and cAdvisor's below it; an address that ends there works too."""
    text = sample_text("cadvisor")
    exporter.pages["/metrics"] = (404, "text/plain", "no")
    exporter.pages["/metrics/cadvisor"] = (200, "text/plain; version=0.0.4", text)
    url = exporter.url + "/metrics/cadvisor"
    sink, _, _ = attach(exporter, "cadvisor", lambda s: bool(named(s, "cpu_periods_total")), url=url)
    assert {row["worker"] for row in named(sink, "cpu_periods_total")} == {"vllm-0"}


@pytest.mark.parametrize("engine", ["dcgm", "node", "cadvisor", "nvidia-smi"])
@pytest.mark.parametrize(("status", "content_type", "body", "said"), STRANGE_PAGES)
def test_what_is_not_the_exporter_is_told_in_a_sentence(
    exporter: FakeEngine, engine: str, status: int, content_type: str, body: str, said: str
) -> None:
    """HTML, an engine, nothing, no token, no page, half a line, a server in trouble."""
    exporter.set_metrics(body, status, content_type)
    with pytest.raises(KvscopeError) as caught:
        attach(exporter, engine, lambda s: False)
    assert said in caught.value.message


def test_source_lives_count_no_restarts() -> None:
    """Counters that fall are a reboot or a pod that went; gains are what the page shows now against its first sight."""
    lives = SourceLives("node_exporter at x")
    assert lives.seen({"network_errors_total": 5.0}, 1.0, 10 * S) == []
    assert lives.failed("no", 12 * S) == lives.failed("no", 13 * S) == []
    assert not lives.is_up
    (gap,) = lives.seen({"network_errors_total": 7.0}, 2.0, 15 * S)
    assert (gap["mark"], gap["attrs"]["first_ns"], gap["attrs"]["last_ns"]) == ("gap", str(12 * S), str(15 * S))
    assert lives.seen({"network_errors_total": 1.0}, 2.0, 16 * S) == []
    assert (lives.restarts, lives.is_up) == (0, True)
    assert lives.end(17 * S) == []


def test_a_stretch_without_answer_ends_with_the_watching(exporter: FakeEngine) -> None:
    """Still away at the end: the gap is written then."""
    lives = SourceLives("x")
    lives.seen({}, None, S)
    lives.failed("gone", 2 * S)
    assert [row["mark"] for row in lives.end(5 * S)] == ["gap"]
    assert with_values("a 1\n", {"a": 2}) == "a 2\n"
