"""`kvscope requests list|show` on a store, and `kvscope bench`: what a person reads and a program gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from collector.commands import requests
from engine_probe.schema import table_from_rows
from store.interface import Batch
from store.open import open_store

NOW_NS = 1_764_403_200_000_000_000
MS = 1_000_000
Kvscope = Callable[..., Any]


def row(request_id: str, ttft_ms: int | None, **columns: Any) -> dict[str, Any]:
    first = None if ttft_ms is None else NOW_NS + ttft_ms * MS
    base = {
        "request_id": request_id,
        "vantage": "engine",
        "state": "finished",
        "worker": "w0",
        "arrival_ns": NOW_NS,
        "first_token_ns": first,
        "at_ns": NOW_NS + 900 * MS,
    }
    return base | columns


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "kvscope.duckdb"
    with open_store(str(path)) as opened:
        rows = [row("slow", 800), row("fast", 10), row("unknown", None), row("imported", 5, run_id="run-1")]
        opened.append(Batch({"request": table_from_rows("request", rows)}))
    return path


def test_list_is_a_table_slowest_first(kvscope: Kvscope, store: Path) -> None:
    """Sorted as asked, unknown last and shown as a dash; how to go on is said on stderr."""
    ended = kvscope("requests", "list", "--store", store, "--sort", "ttft", "--limit", "2")
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert lines[0].split() == [
        "request_id",
        "vantage",
        "worker",
        "state",
        "arrival",
        "TTFT",
        "TPOT",
        "E2E",
        "prompt",
        "cached",
        "output",
    ]
    assert [line.split()[0] for line in lines[1:]] == ["slow", "fast"]
    assert "800.0 ms" in lines[1]
    assert "--cursor" in ended.err
    cursor = ended.err.split("--cursor ")[1].strip()
    rest = kvscope("requests", "list", "--store", store, "--sort", "ttft", "--cursor", cursor)
    assert [line.split()[0] for line in rest.out.splitlines()[1:]] == ["unknown"]


def test_a_narrow_terminal_gets_fewer_columns() -> None:
    """What a person needs least goes first until a line fits; who pipes the output gets every column."""
    lines = [
        list(requests._COLUMNS),
        ["r" * 20, "engine", "worker-0", "finished", "t" * 23, *["123.4 ms"] * 3, *["512"] * 3],
    ]
    assert len(requests.fitting(lines, None)) == len(requests.fitting(lines, 200)) == 11
    # 20+7+8+8+23+8+8+8+6+6+6 and ten gaps of 2 are 128; without cached (8), TPOT (10), vantage (9), output (8) and
    # prompt (8) a line is 85 long, without worker (10) 75.
    names = [[requests._COLUMNS[i] for i in requests.fitting(lines, width)] for width in (128, 127, 85, 84, 10)]
    assert "cached" in names[0]
    assert "cached" not in names[1]
    assert names[2] == ["request_id", "worker", "state", "arrival", "TTFT", "E2E"]
    assert names[3] == names[4] == ["request_id", "state", "arrival", "TTFT", "E2E"]


def test_list_as_json_is_one_document(kvscope: Kvscope, store: Path) -> None:
    """The API's answer: rows with ttft_s, and the cursor."""
    ended = kvscope("requests", "list", "--store", store, "--window", "run-1", "--json")
    page = json.loads(ended.out)
    assert [found["request_id"] for found in page["requests"]] == ["imported"]
    assert page["requests"][0]["ttft_s"] == pytest.approx(0.005)
    assert page["next_cursor"] is None
    assert ended.err == ""


def test_empty_list_says_where_rows_are(kvscope: Kvscope, store: Path) -> None:
    """Whoever imported a run and forgets --window is told its name."""
    ended = kvscope("requests", "list", "--store", store, "--worker", "nobody")
    assert (ended.code, len(ended.out.splitlines())) == (0, 1)
    assert "run-1" in ended.err


def test_show_tells_the_course(kvscope: Kvscope, store: Path) -> None:
    """Text for people; with --json every column and the timeline."""
    ended = kvscope("requests", "show", "slow", "--store", store)
    assert ended.code == 0
    assert "first token" in ended.out
    assert "800.0 ms" in ended.out
    document = json.loads(kvscope("requests", "show", "slow", "--store", store, "--json").out)
    assert document["rows"][0]["vantage"] == "engine"
    assert [event["what"] for event in document["timeline"]["events"]] == ["arrived", "first token"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("list", "--sort", "beauty"), 2, "no order 'beauty'"),
        (("list", "--window", "nobody"), 2, "run-1"),
        (("list", "--cursor", "x"), 2, "cursor"),
        (("list", "--url", "http://127.0.0.1:1"), 3, "no collector answers"),
        (("list", "--url", "nonsense"), 3, "nonsense"),
        (("show", "nobody"), 2, "no row of request 'nobody'"),
        (("list", "--limit", "0"), 2, "limit"),
        (("list", "--vantage", "moon"), 2, "no vantage 'moon'; the words are engine, client, router"),
        (("list", "--state", "open"), 2, "no state 'open'"),
    ],
)
def test_misuse_is_said_with_its_exit_code(
    kvscope: Kvscope, store: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    """2 misuse (a name that is not there too), 3 unreachable; one line on stderr."""
    ended = kvscope("requests", *arguments, "--store", store)
    assert (ended.code, ended.out) == (code, "")
    assert said in ended.err


def test_text_of_others_cannot_drive_the_terminal(kvscope: Kvscope, tmp_path: Path) -> None:
    """Escape sequences in an id are shown, not obeyed."""
    path = tmp_path / "evil.duckdb"
    with open_store(str(path)) as opened:
        opened.append(Batch({"request": table_from_rows("request", [row("\x1b[2Jgone", 1, worker="a\nb")])}))
    for arguments in (("list",), ("show", "\x1b[2Jgone")):
        out = kvscope("requests", *arguments, "--store", path).out
        assert "\x1b" not in out
        assert "\\x1b[2Jgone" in out
        assert "a\\nb" in out


def test_bench_lists_what_there_is_and_refuses_other_names(kvscope: Kvscope) -> None:
    """The names are those of the files in bench/ that can run."""
    names = json.loads(kvscope("bench", "--json").out)
    assert {"ingest", "query", "probe"} <= set(names)
    ended = kvscope("bench", "beauty")
    assert ended.code == 2
    assert "ingest" in ended.err


def test_bench_without_the_source_says_so(kvscope: Kvscope, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installed package has no benchmarks."""
    import collector

    monkeypatch.setattr(collector, "__file__", str(tmp_path / "collector" / "__init__.py"))
    ended = kvscope("bench", "ingest")
    assert ended.code == 2
    assert "checkout" in ended.err
