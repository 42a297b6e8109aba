"""`kvscope import`: a run is whole or absent, and the same thing twice is once."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from collector.commands.import_ import import_source
from engine_probe.readers.detect import open_source
from engine_probe.readers.source import ReadOptions
from store.interface import Window
from store.open import open_store

RECORDING = Path(__file__).parents[1] / "data" / "recordings" / "vllm-0.32.0-squeezed"


def counts(store: str) -> dict[str, int]:
    """Rows by kind and run in a store."""
    opened = open_store(store, read_only=True)
    try:
        return {
            kind: opened.rows(kind, Window(run_id="bad")).num_rows for kind in ("request", "block", "sample", "worker")
        }
    finally:
        opened.close()


def test_a_recording_becomes_a_run(kvscope: Callable[..., Any], tmp_path: Path) -> None:
    """Rows by kind, windows and what was left out, as JSON on stdout; talk on stderr."""
    store = tmp_path / "s.duckdb"
    ended = kvscope("import", RECORDING, "--run", "bad", "--store", store, "--json")
    assert ended.code == 0
    summary = json.loads(ended.out)
    assert summary["run"] == "bad"
    assert (summary["rows"]["request"], summary["rows"]["block"], summary["rows"]["worker"]) == (130, 1339, 1)
    assert [window["name"] for window in summary["windows"]] == ["warmup", "measure"]
    assert summary["already_imported"] is False
    assert counts(str(store)) == {kind: summary["rows"][kind] for kind in ("request", "block", "sample", "worker")}


def test_the_same_again_adds_nothing(kvscope: Callable[..., Any], tmp_path: Path) -> None:
    """Also from a moved and renamed copy: content is the identity. Another run name is another run."""
    store = tmp_path / "s.duckdb"
    kvscope("import", RECORDING, "--run", "bad", "--store", store)
    before = counts(str(store))
    copy = tmp_path / "elsewhere"
    shutil.copytree(RECORDING, copy)
    again = kvscope("import", copy, "--run", "bad", "--store", store)
    assert "nothing was added" in again.out
    assert counts(str(store)) == before
    other = kvscope("import", copy, "--run", "good", "--store", store)
    assert "Imported a recording as run good" in other.out
    opened = open_store(str(store), read_only=True)
    assert sorted(opened.runs()) == ["bad", "good"]
    opened.close()


def test_a_half_recording_leaves_no_half_run(kvscope: Callable[..., Any], tmp_path: Path) -> None:
    """The last stream is cut off: an error, exit 2, and not even a store."""
    copy = tmp_path / "half"
    shutil.copytree(RECORDING, copy)
    path = copy / "host.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-30])
    store = tmp_path / "s.duckdb"
    ended = kvscope("import", copy, "--run", "bad", "--store", store)
    assert ended.code == 2
    assert "host.jsonl.gz" in ended.err
    assert ended.out == ""
    assert not store.exists()


def test_two_recordings_under_one_name_are_said(kvscope: Callable[..., Any], tmp_path: Path) -> None:
    """Parts of one run may come one by one; two runs under one name could not be told apart any more."""
    store = tmp_path / "s.duckdb"
    kvscope("import", RECORDING, "--run", "bad", "--store", store)
    ended = kvscope("import", RECORDING.parent / "vllm-0.32.0-cache-off", "--run", "bad", "--store", store)
    assert "held rows of another import before" in ended.out
    again = kvscope("import", RECORDING, "--run", "bad", "--store", store)
    assert "held rows of another import before" not in again.out


def test_what_was_assumed_is_not_called_left_out(kvscope: Callable[..., Any], tmp_path: Path) -> None:
    """A page without a time: its instant is assumed; a file that is no page is left out; a trace has no timing to tell."""
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "metrics.txt").write_text("vllm:num_requests_running 1\n")
    (pages / "notes.doc").write_text("?")
    told = kvscope("import", pages, "--run", "pages", "--dry-run", "--format", "prometheus").out
    assert "  assumed: instants: 1 pages without a time got that of the file's last change" in told
    assert "  left out: notes.doc: not a page" in told
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 2, "hash_ids": [1]}\n')
    summary = json.loads(kvscope("import", trace, "--run", "t", "--store", tmp_path / "s.duckdb", "--json").out)
    assert (summary["left_out"], summary["assumed"]) == ([], [])
    assert summary["not_told"] == ["timing: a trace tells arrivals and lengths; TTFT, ITL and hits are not in it"]


def test_what_to_do_next_can_be_pasted(kvscope: Callable[..., Any], tmp_path: Path) -> None:
    """Names with spaces and quotes are quoted for the shell; where talk is no terminal it names the stages alone."""
    store = tmp_path / "my store.duckdb"
    kvscope("import", RECORDING, "--run", "first", "--store", store)
    ended = kvscope("import", RECORDING, "--run", 'it\'s "bad"', "--store", store)
    words = shlex.split(ended.out.splitlines()[-1].removeprefix("Next: "))
    assert words[-6:] == ["--store", str(store), "--baseline", "first", "--suspect", 'it\'s "bad"']
    assert ended.err.split("\n")[:2] == ["reading recording", "storing"]


def test_an_interrupted_import_is_completed(tmp_path: Path) -> None:
    """The first chunks were committed, then the process ended: the next import adds only the rest."""
    store = open_store(str(tmp_path / "s.duckdb"))
    append = store.append
    done = []

    def fails_after_two(batch: Any) -> Any:
        if len(done) == 2:
            raise RuntimeError("the machine went away")
        done.append(append(batch))
        return done[-1]

    store.append = fails_after_two  # type: ignore[method-assign,assignment]
    with pytest.raises(RuntimeError):
        import_source(open_source(RECORDING), store, "bad", ReadOptions())
    store.append = append  # type: ignore[method-assign]
    summary = import_source(open_source(RECORDING), store, "bad", ReadOptions())
    store.close()
    assert summary["already_imported"] is False
    assert counts(str(tmp_path / "s.duckdb"))["block"] == 1339


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run", " "], "--run needs a name"),
        (["--run", "a", "--salt", ""], "--salt"),
        (["--run", "a", "--salt", "x" * 65], "--salt"),
        (["--run", "a", "--start", "yesterday"], "--start 'yesterday' is no instant"),
    ],
)
def test_options_that_make_no_sense_are_misuse(
    kvscope: Callable[..., Any], tmp_path: Path, arguments: list[str], message: str
) -> None:
    """Exit 2 and one sentence."""
    ended = kvscope("import", RECORDING, "--store", tmp_path / "s.duckdb", *arguments)
    assert ended.code == 2
    assert message in ended.err


def test_a_path_that_is_not_there_is_misuse(kvscope: Callable[..., Any], tmp_path: Path) -> None:
    """Exit 2, and what would be known."""
    ended = kvscope("import", tmp_path / "absent", "--run", "a", "--store", tmp_path / "s.duckdb")
    assert ended.code == 2
    assert "There is nothing at" in ended.err
    assert "Mooncake" in ended.err


def test_events_keep_the_contract(kvscope: Callable[..., Any], tmp_path: Path) -> None:
    """A row that breaks a rule of ingest is refused at import too, and nothing is stored."""
    path = tmp_path / "events.ndjson"
    path.write_text('{"kind": "step", "at_ns": 1795958453000000000, "step": 1, "duration_s": -1.0}\n')
    ended = kvscope("import", path, "--run", "a", "--store", tmp_path / "s.duckdb")
    assert ended.code == 2
    assert "duration_s" in ended.err


def test_an_instant_may_be_iso_or_ns(kvscope: Callable[..., Any], tmp_path: Path) -> None:
    """2026-11-29T13:20:53Z, without zone (UTC) and in ns are the same instant."""
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 7, "output_length": 9}\n')
    for run, start in enumerate(("2026-11-29T13:20:53Z", "2026-11-29T13:20:53", "1795958453000000000")):
        store = tmp_path / f"{run}.duckdb"
        ended = kvscope("import", trace, "--run", run, "--store", store, "--start", start, "--json")
        assert json.loads(ended.out)["start_ns"] == 1_795_958_453_000_000_000
