"""`kvscope sql` as a person uses it: over a file, over the collector that holds it, in every format, with mistakes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from collector.cli import main
from collector.terminal.client import announced
from engine_probe.schema import table_from_rows
from store.interface import Batch
from store.open import open_store
from tests.integration.collector_harness import NOW_NS, running

ROWS = [
    {
        "request_id": "r1",
        "vantage": "engine",
        "state": "finished",
        "arrival_ns": NOW_NS,
        "at_ns": NOW_NS + 2,
        "prompt_tokens": 7,
    },
    {
        "request_id": "r\x1b[31m2",
        "vantage": "engine",
        "state": "failed",
        "arrival_ns": NOW_NS + 1,
        "at_ns": NOW_NS + 3,
        "labels": {"a": "b"},
    },
]
SQL = "SELECT request_id, prompt_tokens, labels FROM request ORDER BY arrival_ns"


@dataclass(frozen=True)
class Said:
    """What the command did."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()


Run = Callable[..., Said]


@pytest.fixture
def kvscope(capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `kvscope sql ARGUMENTS` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Said:
        capfdbinary.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["sql", *map(str, arguments)])
        out, err = capfdbinary.readouterr()
        assert isinstance(ended.value.code, int)
        return Said(ended.value.code, out, err.decode())

    return run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database with two requests."""
    with open_store(str(tmp_path / "k.duckdb")) as store:
        store.append(Batch({"request": table_from_rows("request", ROWS)}))
    return tmp_path / "k.duckdb"


def test_a_table_is_aligned_and_cannot_drive_a_terminal(kvscope: Run, path: Path) -> None:
    """Numbers right, null as -, nested values as JSON, control characters spelled out."""
    said = kvscope("--store", path, SQL)
    assert said.code == 0
    assert said.text.splitlines() == [
        r"request_id  prompt_tokens  labels",
        r"----------  -------------  ---------",
        r"r1                      7  -",
        r'r\x1b[31m2              -  {"a":"b"}',
    ]


def test_json_is_one_document(kvscope: Run, path: Path) -> None:
    """The same document as the HTTP API's."""
    said = kvscope("--store", path, "--json", SQL)
    document = json.loads(said.out)
    assert [column["type"] for column in document["columns"]] == ["VARCHAR", "BIGINT", "MAP(VARCHAR, VARCHAR)"]
    assert document["rows"] == [["r1", 7, None], ["r\x1b[31m2", None, {"a": "b"}]]
    assert document["truncated"] is False
    assert said.err == ""


def test_every_format_holds_the_same_rows(kvscope: Run, path: Path) -> None:
    """csv, ndjson, arrow and parquet, on stdout and in a file named by its suffix."""
    lines = list(csv.reader(io.StringIO(kvscope("--store", path, "--format", "csv", SQL).text)))
    assert lines == [["request_id", "prompt_tokens", "labels"], ["r1", "7", ""], ["r\x1b[31m2", "", '{"a":"b"}']]
    objects = [json.loads(line) for line in kvscope("--store", path, "--format", "ndjson", SQL).text.splitlines()]
    assert objects[0] == {"request_id": "r1", "prompt_tokens": 7, "labels": None}
    expected = [("r1", 7, None), ("r\x1b[31m2", None, [("a", "b")])]
    with pa.ipc.open_stream(kvscope("--store", path, "--format", "arrow", SQL).out) as reader:
        assert [tuple(row.values()) for row in reader.read_all().to_pylist()] == expected
    said = kvscope("--store", path, "-o", "result.parquet", SQL)
    assert "2 rows written to result.parquet" in said.err
    assert [tuple(row.values()) for row in pq.read_table("result.parquet").to_pylist()] == expected
    assert sorted(p.name for p in path.parent.iterdir()) == ["k.duckdb", "result.parquet"]


def test_rows_left_out_are_said(kvscope: Run, path: Path) -> None:
    """On stderr, so that a pipe stays clean."""
    said = kvscope("--store", path, "--max-rows", 1, "--format", "csv", "SELECT * FROM range(5)")
    assert said.text == "range\n0\n"
    assert "only the first 1 rows" in said.err


def test_the_statement_can_come_from_a_file_or_stdin(
    kvscope: Run, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--file FILE, --file - and - alone."""
    (tmp_path / "q.sql").write_text("SELECT 1 AS a")
    assert kvscope("--store", path, "--file", "q.sql", "--format", "csv").text == "a\n1\n"
    for arguments in (["--file", "-"], ["-"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("SELECT 2 AS a"))
        assert kvscope("--store", path, "--format", "csv", *arguments).text == "a\n2\n"


def test_explain_prints_the_plan_as_it_is(kvscope: Run, path: Path) -> None:
    """A box drawing is not put into a cell."""
    assert kvscope("--store", path, "EXPLAIN SELECT count(*) FROM request").text.startswith("┌")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "Give one statement"),
        (["SELECT 1", "--file", "q.sql"], 2, "Give one statement"),
        (["--file", "absent.sql"], 2, "cannot be read from absent.sql"),
        (["SELECT 1", "--format", "xml"], 2, "There is no format 'xml'"),
        (["SELEC 1"], 2, "LINE 1: SELEC 1"),
        (["DELETE FROM request"], 2, "DELETE is not allowed"),
        (["SELECT * FROM read_csv('/etc/passwd')"], 2, "read_csv is not allowed"),
        (["SELECT 1", "-o", "absent/result.csv"], 2, "cannot be written"),
        (["SELECT INTERVAL 1 DAY AS i", "-o", "result.parquet"], 2, "Parquet cannot hold this result"),
        (
            ["SELECT count(*) FROM range(1e9::BIGINT) a, range(1e9::BIGINT) b", "--timeout", "0.3"],
            2,
            "ran longer than 0.3 s",
        ),
        (["SELECT 1", "--max-rows", "-1"], 2, "max-rows"),
        (["SELECT 1", "--url", "http://127.0.0.1:1"], 3, "no collector answers"),
    ],
)
def test_a_mistake_is_told_with_its_exit_code(
    kvscope: Run, path: Path, arguments: list[Any], code: int, said: str
) -> None:
    """2 for misuse (asking for too much is one), 3 for nobody there; nothing on stdout, no traceback."""
    answer = kvscope("--store", path, *arguments)
    assert answer.code == code
    assert said in answer.err
    assert answer.out == b""
    assert "Traceback" not in answer.err


def test_json_and_another_format_contradict_each_other(kvscope: Run, path: Path) -> None:
    """Under --json the refusal is the document on stdout."""
    answer = kvscope("--store", path, "SELECT 1", "--json", "--format", "csv")
    assert (answer.code, json.loads(answer.out)["title"]) == (2, "Usage makes no sense")
    assert "contradict" in answer.err


def test_a_store_that_is_not_there_is_said(kvscope: Run, tmp_path: Path) -> None:
    """And none is made."""
    answer = kvscope("--store", tmp_path / "absent.duckdb", "SELECT 1")
    assert answer.code == 2
    assert "There is no database at" in answer.err
    assert not (tmp_path / "absent.duckdb").exists()


def test_while_a_collector_serves_it_is_asked(kvscope: Run, tmp_path: Path) -> None:
    """By its address: the same answer, types and digits included, and its refusals as if they had happened here."""
    with running(tmp_path / "k.duckdb") as collector:
        assert collector.post({"request": ROWS}, source="s", epoch="e", seq="0").status_code == 200
        said = kvscope(
            "--url", collector.url, "--json", "SELECT request_id, 18446744073709551615::UBIGINT AS h FROM request"
        )
        assert sorted(json.loads(said.out)["rows"]) == [["r\x1b[31m2", 2**64 - 1], ["r1", 2**64 - 1]]
        refused = kvscope("--url", collector.url, "DROP TABLE request")
        assert (refused.code, refused.out) == (2, b"")
        assert "DROP is not allowed" in refused.err
        with pa.ipc.open_stream(kvscope("--url", collector.url, "--format", "arrow", "SELECT 1 AS a").out) as reader:
            assert reader.read_all().to_pylist() == [{"a": 1}]


def test_the_collector_that_holds_the_file_is_found(kvscope: Run, tmp_path: Path) -> None:
    """Without --url: the file is held, its holder has left its address beside it."""
    path = tmp_path / "k.duckdb"
    with running(path) as collector, announced(str(path), collector.url):
        said = kvscope("--store", path, "--format", "csv", "SELECT 1 AS a")
        assert (said.code, said.text) == (0, "a\n1\n")
        assert f"asking the collector at {collector.url}" in said.err
    with open_store(str(path)):
        said = kvscope("--store", path, "SELECT 1")
        assert said.code == 3
        assert "open in this process already" in said.err


def test_http_answers_json_and_arrow(tmp_path: Path) -> None:
    """JSON as documented by default, an Arrow stream where the client accepts one."""
    with running(tmp_path / "k.duckdb") as collector:
        assert collector.post({"request": ROWS}, source="s", epoch="e", seq="0").status_code == 200
        question = {"sql": "SELECT prompt_tokens FROM request ORDER BY arrival_ns", "max_rows": 1}
        answer = collector.client.post("/api/v1/sql", json=question)
        assert answer.json() == {
            "columns": [{"name": "prompt_tokens", "type": "BIGINT"}],
            "rows": [[7]],
            "truncated": True,
        }
        accept = {"Accept": "application/vnd.apache.arrow.stream"}
        with pa.ipc.open_stream(collector.client.post("/api/v1/sql", json=question, headers=accept).content) as reader:
            assert reader.read_all().to_pylist() == [{"prompt_tokens": 7}]
        problem = collector.client.post("/api/v1/sql", json={"sql": "FROM nowhere"}, headers=accept)
        assert problem.status_code == 400
        assert problem.headers["content-type"].startswith("application/problem+json")
        assert "The tables and views are" in problem.json()["detail"]
