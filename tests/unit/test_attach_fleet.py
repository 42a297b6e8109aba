"""A fleet in one process: workers come, go, restart, hang, and are replaced by others with other settings."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_probe.attach.fleet import Fleet, FleetSummary
from engine_probe.attach.fleet_facts import FleetFacts
from engine_probe.attach.follower import AUTO, AttachOptions
from engine_probe.attach.targets import FileTargets, Target
from engine_probe.errors import UnknownFormat
from engine_probe.schema import table_from_rows
from engine_probe.wire.validate import validate
from tests.attach_engine import FakeEngine, ListSink, page


class Fleets:
    """A running fleet over a targets file that the test rewrites."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "targets.json"
        self.sink = ListSink()
        self.said: list[str] = []
        self.summary: FleetSummary | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def write(self, *urls: str, **labels: str) -> None:
        """The targets file, written whole as configuration tools do."""
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps([{"targets": [url.partition("://")[2] for url in urls], "labels": labels}]))
        new.replace(self.file)

    def start(self, engine: str = AUTO) -> Fleets:
        options = AttachOptions(url="", salt=b"s", engine=engine, interval_s=0.05)
        fleet = Fleet(FileTargets(str(self.file)), options, self.sink, self.said.append, refresh_s=0.05, flush_s=0.02)

        def run() -> None:
            self.summary = fleet.run(self._stop)

        self._thread = threading.Thread(target=run)
        self._thread.start()
        return self

    def stop(self) -> FleetSummary:
        self._stop.set()
        assert self._thread is not None
        self._thread.join(30)
        assert self.summary is not None
        return self.summary

    def until(self, holds: Callable[[], object], timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, self.said
            time.sleep(0.01)

    def marks(self, word: str) -> list[dict[str, Any]]:
        return [row for row in self.sink.rows("mark") if row["mark"] == word]

    def sampled(self) -> set[str]:
        return {row["worker"] for row in self.sink.rows("sample")}


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    found = [FakeEngine().start() for _ in range(3)]
    yield found
    for engine in found:
        engine.stop()


def name(engine: FakeEngine) -> str:
    return engine.url.partition("://")[2]


def test_workers_come_and_go(engines: list[FakeEngine], tmp_path: Path) -> None:
    """Each is found by itself, followed, marked when it joins and when it leaves; the count is a mark too."""
    fleet = Fleets(tmp_path)
    fleet.write(engines[0].url, engines[1].url)
    fleet.start()
    fleet.until(lambda: fleet.sampled() == {name(engines[0]), name(engines[1])})
    fleet.write(engines[1].url, engines[2].url)
    fleet.until(lambda: name(engines[2]) in fleet.sampled() and fleet.marks("worker_down"))
    summary = fleet.stop()
    assert [m["worker"] for m in fleet.marks("worker_down")] == [name(engines[0])]
    joined = {m["worker"] for m in fleet.marks("worker_up") if "joined the targets" in m["text"]}
    assert joined == {name(engine) for engine in engines} == set(summary.workers)
    assert {row["worker"] for row in fleet.sink.rows("worker")} == joined
    # one of each came as another left: two workers before and after
    assert [m for m in fleet.marks("config_changed") if dict(m["attrs"])["setting"] == "replicas"] == []
    for kind in ("mark", "sample", "worker"):
        rows = [
            {**row, **{k: dict(v) for k, v in row.items() if k in ("attrs", "labels", "flags") and v}}
            for row in fleet.sink.rows(kind)
        ]
        validate(kind, table_from_rows(kind, rows), time.time_ns())


def test_a_rolling_deployment_is_one_mark_a_setting(engines: list[FakeEngine], tmp_path: Path) -> None:
    """New workers have new names; what they have otherwise than those before is told once, not once a worker."""
    for engine in engines[1:]:
        engine.set_json("/version", {"version": "0.33.0"})
        engine.set_metrics(page(blocks=999))
    fleet = Fleets(tmp_path)
    fleet.write(engines[0].url)
    fleet.start("vllm")
    fleet.until(lambda: len(fleet.sampled()) == 1)
    fleet.write(*(engine.url for engine in engines))
    fleet.until(lambda: len(fleet.sampled()) == 3)
    fleet.stop()
    deployed = fleet.marks("deployed")
    assert [(m["subject"], dict(m["attrs"])["setting"], dict(m["attrs"])["new"]) for m in deployed] == [
        ("tiny", "engine_version", "0.33.0")
    ]
    replicas = [dict(m["attrs"]) for m in fleet.marks("config_changed")]
    assert [(m["old"], m["new"]) for m in replicas] == [("1", "3")]


def test_a_worker_that_hangs_costs_nobody_else(engines: list[FakeEngine], tmp_path: Path) -> None:
    """One accepts and never answers, one port is closed, one speaks another language: the good one is scraped on."""
    with socket.socket() as hung:
        hung.bind(("127.0.0.1", 0))
        hung.listen()
        engines[1].pages.clear()
        engines[1].set_metrics("<html>hello</html>")
        fleet = Fleets(tmp_path)
        closed = "http://127.0.0.1:1"
        fleet.write(engines[0].url, engines[1].url, f"http://127.0.0.1:{hung.getsockname()[1]}", closed)
        fleet.start()
        fleet.until(lambda: len([r for r in fleet.sink.rows("sample") if r["name"] == "requests_running"]) > 5)
        fleet.until(lambda: any("HTML" in line for line in fleet.said))
        summary = fleet.stop()
    assert set(summary.workers) == {name(engines[0])}
    assert "Nothing answers" in summary.never_found[closed]
    assert engines[1].url in summary.never_found


def test_a_broken_targets_file_takes_nobody_away(engines: list[FakeEngine], tmp_path: Path) -> None:
    """A file that is being written: said once, and the workers stay."""
    fleet = Fleets(tmp_path)
    fleet.write(engines[0].url)
    fleet.start()
    fleet.until(lambda: fleet.sampled())
    fleet.file.write_text("[")
    fleet.until(lambda: any("stay as they are" in line for line in fleet.said))
    seen = len(fleet.sink.rows("sample"))
    fleet.until(lambda: len(fleet.sink.rows("sample")) > seen + 5)
    fleet.write(engines[0].url)
    fleet.until(lambda: "The targets can be told again." in fleet.said)
    fleet.stop()
    assert fleet.marks("worker_down") == []
    assert sum("stay as they are" in line for line in fleet.said) == 1


class Hanging:
    """A source of targets that answers once, and then never: a name server that is away."""

    def __init__(self, *urls: str) -> None:
        self.found = [Target(url) for url in urls]
        self.is_asked_again = threading.Event()
        self.ends = threading.Event()
        self._reads = 0

    def read(self) -> list[Target]:
        self._reads += 1
        if self._reads > 1:
            self.is_asked_again.set()
            self.ends.wait(30)
        return self.found


def test_a_source_of_targets_that_hangs_holds_up_no_scrape(engines: list[FakeEngine]) -> None:
    """The engines that are known are scraped on, and the end waits for no answer either."""
    source, sink, stop = Hanging(engines[0].url), ListSink(), threading.Event()
    options = AttachOptions(url="", salt=b"s", engine="vllm", interval_s=0.05)
    fleet = Fleet(source, options, sink, lambda _: None, refresh_s=0.05, flush_s=0.02)
    thread = threading.Thread(target=fleet.run, args=(stop,))
    thread.start()
    assert source.is_asked_again.wait(20)
    seen = len(engines[0].requests)
    deadline = time.monotonic() + 20
    while len(engines[0].requests) < seen + 5:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    stop.set()
    thread.join(20)
    assert not thread.is_alive()
    source.ends.set()


def test_a_rack_that_is_gone_takes_no_thread_from_the_others(
    engines: list[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More workers that hang than there are threads: the one that answers has its turns all the same."""
    monkeypatch.setattr("engine_probe.attach.fleet.THREADS", 2)
    with socket.socket() as hung:
        hung.bind(("127.0.0.1", 0))
        hung.listen()
        port = hung.getsockname()[1]
        fleet = Fleets(tmp_path)
        fleet.write(engines[0].url)
        fleet.start("vllm")
        fleet.until(lambda: fleet.sampled())
        fleet.write(engines[0].url, *(f"http://127.0.0.1:{port}/{number}" for number in range(8)))
        fleet.until(lambda: len(fleet.marks("config_changed")) == 1)
        seen = len(engines[0].requests)
        fleet.until(lambda: len(engines[0].requests) > seen + 10)
    summary = fleet.stop()
    assert set(summary.workers) == {name(engines[0])}
    assert len(summary.never_found) == 8


def test_without_targets_at_the_start_it_is_an_error(tmp_path: Path) -> None:
    """Nothing to follow is misconfigured, not quiet; the sink is closed."""
    sink = ListSink()
    fleet = Fleet(FileTargets(str(tmp_path / "none.json")), AttachOptions(url="", salt=b"s"), sink, lambda _: None)
    with pytest.raises(UnknownFormat):
        fleet.run(threading.Event())
    assert sink.closed


def test_targets_that_cannot_be_followed_are_said_once(engines: list[FakeEngine], tmp_path: Path) -> None:
    """An engine word that nobody knows in the file's labels."""
    fleet = Fleets(tmp_path)
    fleet.write(engines[0].url, engine="gpt9")
    fleet.start()
    fleet.until(lambda: any("is not an engine that kvscope knows" in line for line in fleet.said))
    time.sleep(0.2)
    fleet.stop()
    assert len(fleet.said) == 1


def test_what_differs_from_machine_to_machine_is_no_deployment() -> None:
    """Blocks that fit, addresses and seeds are a worker's own; an unknown fact is no change."""
    facts = FleetFacts()
    assert facts.joined("m", "a", {"num_blocks": 10, "dtype": "bf16", "flags": {"seed": "1"}}, 1) == []
    assert facts.joined("m", "b", {"num_blocks": 20, "dtype": None, "flags": {"seed": "2"}}, 2) == []
    marks = facts.joined("m", "c", {"dtype": "fp8", "flags": {"max_num_seqs": "8"}}, 3)
    assert [(m["worker"], m["attrs"]["setting"], m["attrs"]["old"]) for m in marks] == [("c", "dtype", "bf16")]
    assert facts.joined("other", "d", {"dtype": "x"}, 4) == []
