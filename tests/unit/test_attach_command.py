"""`kvscope attach` as a command: options that make no sense, exit codes, the document, and a store that it fills."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from collector.cli import main
from collector.terminal.sinks import StoreSink
from engine_probe.errors import StoreBusy
from engine_probe.schema import table_from_rows
from engine_probe.sending.sink import HttpSink
from store.interface import Batch, Window
from store.open import open_store
from tests.attach_engine import FakeEngine, page


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine().start()
    yield engine
    engine.stop()


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command; returns exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["attach", *arguments, "--salt-file", str(tmp_path / "salt")])
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, said.out, said.err

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt9", "http://h:1"], "it knows: "),
        (["vllm", "http://h:1", "--to", "http://c:1", "--store", "x"], "not both"),
        (["vllm", "http://h:1", "--kv-replay", "tcp://*:1"], "--kv-replay needs --kv-events"),
        (["vllm", "http://h:1", "--log", "/no/such/log"], "does not exist"),
        (["vllm", "http://h:1", "--interval", "soon"], "--interval is 'soon'"),
        (["vllm", "http://h:1", "--interval", "1ms"], "at least 50ms"),
        (["vllm", "http://h:1", "--duration", "-1"], "--duration"),
        (["vllm", "ftp://h", "--store", ":memory:"], "http://host:port"),
    ],
)
def test_options_that_make_no_sense_are_misuse(run: Any, arguments: list[str], message: str) -> None:
    """Exit 2 and one sentence, before anything is touched."""
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_nobody_there_is_exit_three(run: Any, engine: FakeEngine, tmp_path: Path) -> None:
    """The other side could not be reached."""
    engine.stop()
    code, out, err = run("vllm", engine.url, "--store", str(tmp_path / "s.duckdb"))
    assert (code, out) == (3, "")
    assert "Is the engine up" in err


def test_a_web_page_is_exit_two(run: Any, engine: FakeEngine, tmp_path: Path) -> None:
    """Somebody else is there."""
    engine.set_metrics("<html></html>", content_type="text/html")
    code, _, err = run("vllm", engine.url, "--store", str(tmp_path / "s.duckdb"))
    assert code == 2
    assert "HTML" in err


def test_a_store_is_filled_and_the_document_says_so(run: Any, engine: FakeEngine, tmp_path: Path) -> None:
    """One JSON document on stdout, talk on stderr, rows in the store under the worker's name."""
    engine.set_metrics(page(num_preemptions_total=3.0))
    store_path = str(tmp_path / "s.duckdb")
    options = ["--store", store_path, "--duration", "300ms", "--interval", "100ms", "--worker", "w", "--json"]
    code, out, err = run("vllm", engine.url, *options)
    document = json.loads(out)
    assert code == 0
    assert err.startswith("metrics    seen")
    assert (document["worker"], document["engine_version"], document["undelivered"]) == ("w", "0.32.0", None)
    store = open_store(store_path, read_only=True)
    try:
        samples = store.rows("sample", Window(), where="name = 'preemptions_total'")
        assert set(samples.column("value").to_pylist()) == {3.0}
        assert set(samples.column("worker").to_pylist()) == {"w"}
        assert len(store.rows("worker", Window())) == 1
        assert store.stats().rows["sample"] == document["rows"]["sample"]
    finally:
        store.close()


def test_the_text_says_what_was_counted(run: Any, engine: FakeEngine, tmp_path: Path) -> None:
    """A person reads how much was written, and what the engine counted meanwhile."""
    engine.set_metrics(page(num_preemptions_total=3.0))
    code, out, _ = run("vllm", engine.url, "--store", str(tmp_path / "s.duckdb"), "--duration", "200ms")
    assert code == 0
    assert out.startswith("Followed 127.0.0.1:")
    assert "preemptions_total +0" in out


def test_a_collector_that_is_away_is_said(
    run: Any, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that could not be delivered are not passed over in silence: kept with a spool, lost without."""
    close = HttpSink.close
    monkeypatch.setattr(HttpSink, "close", lambda sink: close(sink, timeout_s=0.1))
    options = ["vllm", engine.url, "--to", "http://127.0.0.1:9", "--duration", "200ms"]
    code, said, _ = run(*options)
    assert code == 3  # a script must not take lost rows for stored ones
    assert "batches were lost: give --spool" in said
    code, said, _ = run(*options, "--spool", str(tmp_path / "spool"))
    assert code == 0
    assert "batches stay in the spool" in said


class Flaky:
    """A store that commits and then says that it was busy, the first time."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def append(self, batch: Batch) -> None:
        self.batches.append(batch)
        if len(self.batches) == 1:
            raise StoreBusy("too late")

    def close(self) -> None:
        pass


def test_a_write_that_is_repeated_keeps_its_identity() -> None:
    """The store recognises it; the next one has the next number."""
    store = Flaky()
    sink = StoreSink(store, "attach:w")  # type: ignore[arg-type]
    tables = {"mark": table_from_rows("mark", [{"at_ns": 1, "mark": "gap"}])}
    with pytest.raises(StoreBusy):
        sink.write(tables)
    sink.write(tables)
    sink.write(tables)
    identities = [batch.identity for batch in store.batches]
    assert identities[0] == identities[1]
    assert [identity.seq for identity in identities if identity] == [0, 0, 1]
