"""People's SQL against a real child: everything that could reach out, break in or run away is refused or killed.

Each statement runs in a process of its own; the same runner serves all of them, so each test also shows that the
parent goes on serving after the one before.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine_probe.errors import KvscopeError, QueryKilled, QueryRefused, StoreBusy, StoreError
from engine_probe.schema import table_from_rows
from store.sandbox.sandbox import MIB, SqlData, SqlLimits, SqlRunner, run_sql

SECRET = "correct-horse-battery-staple"
LIMITS = SqlLimits(timeout_s=60.0, memory_bytes=256 * MIB, max_rows=100_000, max_result_bytes=16 * MIB)
IMPATIENT = SqlLimits(timeout_s=1.5, memory_bytes=256 * MIB, max_rows=100_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store's Parquet folder, with a secret beside it."""
    root = tmp_path_factory.mktemp("sandbox")
    (root / "secret.csv").write_text(SECRET)
    sealed = root / "parquet" / "kind=mark" / "date=2026-11-29" / "hour=10"
    sealed.mkdir(parents=True)
    pq.write_table(table_from_rows("mark", [{"mark": "fault", "at_ns": 1, "text": "sealed"}]), sealed / "1.parquet")
    return root


@pytest.fixture(scope="module")
def data(folder: Path) -> SqlData:
    """Sealed rows in the folder, hot rows in memory."""
    hot = {"mark": table_from_rows("mark", [{"mark": "fault", "at_ns": 2, "text": "hot"}])}
    return SqlData(parquet_dir=folder / "parquet", hot=hot)


@pytest.fixture(scope="module")
def runner() -> Iterator[SqlRunner]:
    """One runner for the whole module."""
    with SqlRunner(LIMITS) as made:
        yield made


@pytest.fixture(scope="module")
def impatient() -> Iterator[SqlRunner]:
    """A runner whose deadline comes soon, for statements that must be killed."""
    with SqlRunner(IMPATIENT) as made:
        yield made


def texts(runner: SqlRunner, data: SqlData) -> list[str]:
    """What a decent statement answers."""
    return runner.run("SELECT text FROM mark ORDER BY text", data=data).table.column("text").to_pylist()


REFUSED = {
    "read_csv": "SELECT * FROM read_csv('/etc/passwd')",
    "read_csv of the secret": "SELECT * FROM read_csv('{root}/secret.csv')",
    "read_text": "SELECT content FROM read_text('/etc/passwd')",
    "read_blob": "SELECT * FROM read_blob('{root}/parquet/../secret.csv')",
    "read_parquet of our own folder": "SELECT * FROM read_parquet('{root}/parquet/**/*.parquet')",
    "glob": "SELECT * FROM glob('/etc/*')",
    "a file as a table": "SELECT * FROM '{root}/secret.csv'",
    "copy to": "COPY (SELECT 1) TO '{root}/parquet/stolen.csv'",
    "copy from": "COPY mark FROM '/etc/passwd'",
    "export": "EXPORT DATABASE '{root}/parquet/export'",
    "import": "IMPORT DATABASE '{root}/parquet/export'",
    "attach": "ATTACH '{root}/other.duckdb'",
    "attach of a network database": "ATTACH 'host=127.0.0.1 port=5432' AS pg (TYPE postgres)",
    "install": "INSTALL httpfs",
    "load": "LOAD httpfs",
    "load by path": "LOAD '{root}/evil.duckdb_extension'",
    "update extensions": "UPDATE EXTENSIONS",
    "set": "SET enable_external_access = true",
    "set variable": "SET VARIABLE x = 1",
    "reset": "RESET enable_external_access",
    "pragma": "PRAGMA database_list",
    "pragma setting": "PRAGMA enable_profiling = 'json'",
    "call": "CALL pragma_version()",
    "secrets": "SELECT * FROM duckdb_secrets()",
    "create secret": "CREATE SECRET s (TYPE s3)",
    "several statements": "SELECT 1; SELECT 2",
    "a second statement behind a comment": "SELECT 1 -- ;\n; DROP VIEW mark",
    "create": "CREATE TABLE x AS SELECT 1",
    "create macro": "CREATE MACRO f(x) AS x",
    "drop": "DROP VIEW mark",
    "alter": "ALTER VIEW mark RENAME TO m",
    "insert": "INSERT INTO mark (text) VALUES ('x')",
    "update": "UPDATE mark SET text = 'x'",
    "delete": "DELETE FROM mark",
    "explain analyze delete": "EXPLAIN ANALYZE DELETE FROM mark",
    "explain analyze select": "EXPLAIN ANALYZE SELECT 1",
    "delete in a CTE": "WITH d AS (DELETE FROM mark RETURNING *) SELECT * FROM d",
    "query()": "SELECT * FROM query('DELETE FROM mark')",
    "query_table()": "SELECT * FROM query_table('{root}/secret.csv')",
    "serialized sql": "SELECT * FROM json_execute_serialized_sql(json_serialize_sql('SELECT 42'))",
    "getenv": "SELECT getenv('PATH')",
    "settings": "SELECT current_setting('allowed_directories')",
    "python replacement scan of a module": "SELECT * FROM pa",
    "python replacement scan of our own variables": "SELECT * FROM job",
    "python replacement scan of a global": "SELECT * FROM _ENVIRONMENT",
    "pandas_scan": "SELECT * FROM pandas_scan(140000000000)",
    "arrow_scan": "SELECT * FROM arrow_scan(1, 2, 3)",
    "begin": "BEGIN TRANSACTION",
    "checkpoint": "FORCE CHECKPOINT",
    "vacuum": "VACUUM",
    "empty": "",
    "blank": " \n\t ",
    "only a comment": "-- nothing",
    "only a block comment": "/* nothing */",
    "a NUL that hides a second statement": "SELECT 1\x00; DELETE FROM mark",
    "a Greek question mark": "SELECT 1 \u037e DROP VIEW mark",
    "a full-width semicolon": "SELECT 1 \uff1b DROP VIEW mark",
    "full-width letters": "\uff24\uff32\uff2f\uff30 VIEW mark",
    "a zero-width space in a keyword": "DR\u200bOP VIEW mark",
    "a right-to-left override": "SELECT 1 \u202e; DROP VIEW mark",
    "a lone surrogate": "SELECT '\ud800'",
    "an unclosed comment": "SELECT 1 /* ; DROP VIEW mark",
    "an unclosed quote": "SELECT 'x",
    "a dollar quote left open": "SELECT $$ x",
    "unknown table": "SELECT * FROM nothing_of_that_name",
    "unknown column": "SELECT no_such_column FROM mark",
    "unknown function": "SELECT no_such_function(1)",
    "division into a type": "SELECT 'x'::INTEGER",
    "error()": "SELECT error('stop')",
    "a string of gigabytes": "SELECT repeat('x', 5000000000)",
    "deep nesting": "SELECT " + "NOT " * 5000 + "true",
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_attack_or_a_mistake_is_refused(runner: SqlRunner, data: SqlData, folder: Path, name: str) -> None:
    """QueryRefused with a message a person can use; nothing was read, written or changed."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(QueryRefused) as refused:
        runner.run(REFUSED[name].replace("{root}", str(folder)), data=data)
    assert len(refused.value.message) > 20
    assert SECRET not in refused.value.message
    assert sorted(folder.rglob("*")) == before
    assert refused.value.http_status == 400
    assert refused.value.exit_code == 2


RUNAWAY = {
    "recursion without end": "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT max(n) FROM t",
    "cross join": "SELECT count(*) FROM range(1000000) a, range(1000000) b, range(1000000) c",
    "range of 1e12": "SELECT sum(hash(range)) FROM range(1000000000000)",
    "a regular expression that backtracks": "SELECT count(*) FROM range(1e9::BIGINT) t(i) WHERE regexp_matches(i::VARCHAR || repeat('a', 90), '(a|aa)+$')",
    "a list of rows": "SELECT list(repeat('x', 1000)) FROM range(10000000)",
    "a string that grows": "SELECT length(string_agg(repeat(chr(97 + (i % 26)::INT), 1000000), '')) FROM range(4000) t(i)",
    "repeat of a gigabyte": "SELECT length(repeat('x', 1000000000) || repeat('y', 1000000000))",
    "a join that explodes": "SELECT count(DISTINCT a.range * b.range) FROM range(100000) a, range(100000) b",
    "a sort that does not fit": "SELECT * FROM range(1000000000) ORDER BY hash(range) DESC LIMIT 1 OFFSET 900000000",
    "a hash table that does not fit": "SELECT count(*) FROM (SELECT repeat(i::VARCHAR, 50) FROM range(50000000) t(i) GROUP BY ALL)",
    "a list of lists": "SELECT list(range(1000000 + i)) FROM range(100000) t(i)",
}


@pytest.mark.parametrize("name", RUNAWAY)
def test_a_statement_that_runs_away_is_killed(
    impatient: SqlRunner, runner: SqlRunner, data: SqlData, name: str
) -> None:
    """QueryKilled for time or memory, and the next statement is served."""
    with pytest.raises(QueryKilled) as killed:
        impatient.run(RUNAWAY[name], data=data)
    assert killed.value.reason in ("time", "memory", "crash")
    assert killed.value.http_status == 408
    assert texts(runner, data) == ["hot", "sealed"]


def test_range_of_1e12_answers_with_its_first_rows(runner: SqlRunner, data: SqlData) -> None:
    """A result is streamed: rows beyond the limit are never made, and `truncated` says that there are more."""
    result = runner.run("SELECT range AS i FROM range(1000000000000)", data=data)
    assert result.truncated
    assert result.table.num_rows == LIMITS.max_rows
    assert result.table.column("i")[-1].as_py() == LIMITS.max_rows - 1


def test_a_wide_result_is_cut_at_its_bytes(runner: SqlRunner, data: SqlData) -> None:
    """Few rows can be many bytes: the parent takes no more than max_result_bytes of them."""
    result = runner.run("SELECT repeat('x', 1000000) AS wide FROM range(100)", data=data)
    assert result.truncated
    assert 8 * MIB < result.table.nbytes <= LIMITS.max_result_bytes


def test_one_row_larger_than_the_limit_is_left_out(runner: SqlRunner, data: SqlData) -> None:
    """No row at all, but `truncated`, and no error."""
    result = runner.run("SELECT repeat('x', 20000000) AS wide", data=data)
    assert result.truncated
    assert result.table.num_rows == 0


def test_unicode_is_text_and_no_trick(runner: SqlRunner, data: SqlData) -> None:
    """Names and strings in any script work; a comment can hold anything."""
    sql = "SELECT 'größer ≥ 🦆; DROP VIEW mark' AS \"größe\" -- ; DELETE FROM mark\n/* ; /* nested */ */"
    assert runner.run(sql, data=data).table.to_pylist() == [{"größe": "größer ≥ 🦆; DROP VIEW mark"}]


def test_a_syntax_error_keeps_its_place(runner: SqlRunner, data: SqlData) -> None:
    """Line and caret survive the way out of the child."""
    with pytest.raises(QueryRefused, match=r'syntax error at or near "mark"(.|\n)*LINE 1: SELECT text FORM mark\n +\^'):
        runner.run("SELECT text FORM mark", data=data)


def test_an_unknown_table_is_answered_with_the_known_ones(runner: SqlRunner, data: SqlData) -> None:
    """The next step stands in the message."""
    with pytest.raises(QueryRefused, match="The tables and views are request, step, block"):
        runner.run("SELECT * FROM requests", data=data)


def test_explain_runs_nothing(runner: SqlRunner, data: SqlData) -> None:
    """EXPLAIN of an endless statement answers at once with the plan."""
    plan = runner.run(f"EXPLAIN {RUNAWAY['cross join']}", data=data).table.column("explain_value")[0].as_py()
    assert "CROSS_PRODUCT" in plan


def test_the_child_has_all_walls_here(runner: SqlRunner, data: SqlData) -> None:
    """On Linux with Landlock (5.13 and later) and seccomp, the result says that all of them stood."""
    walls = runner.run("SELECT 1", data=data).walls
    assert "rlimits" in walls
    if os.uname().sysname == "Linux":
        assert "seccomp" in walls


def test_a_cancelled_statement_is_stopped(runner: SqlRunner, data: SqlData) -> None:
    """When the caller gives up, the child is not kept until its deadline."""
    cancelled = threading.Event()
    threading.Timer(0.3, cancelled.set).start()
    with pytest.raises(QueryKilled) as killed:
        runner.run(RUNAWAY["cross join"], data=data, cancelled=cancelled)
    assert killed.value.reason == "cancelled"


def test_too_many_statements_at_once_are_told_so(data: SqlData) -> None:
    """The third of two seats gets StoreBusy, which asks to come again; the seats come free afterwards."""
    limits = SqlLimits(timeout_s=20.0, memory_bytes=256 * MIB, wait_s=0.1)
    outcomes: list[str] = []
    stop = threading.Event()

    def endless() -> None:
        try:
            runner.run(RUNAWAY["cross join"], data=data, cancelled=stop)
        except KvscopeError as error:
            outcomes.append(type(error).__name__)

    with SqlRunner(limits, max_children=2, prewarm=False) as runner:
        threads = [threading.Thread(target=endless) for _ in range(2)]
        for thread in threads:
            thread.start()
        while runner.free_seats:
            time.sleep(0.01)
        with pytest.raises(StoreBusy, match="2 SQL statements are running already") as busy:
            runner.run("SELECT 1", data=data)
        assert busy.value.retry_after_s > 0
        stop.set()
        for thread in threads:
            thread.join()
        assert outcomes == ["QueryKilled", "QueryKilled"]
        assert runner.run("SELECT 1 AS one", data=data).table.to_pylist() == [{"one": 1}]


def test_closing_the_runner_ends_what_runs(data: SqlData) -> None:
    """A service that goes down does not wait for a person's statement, and takes no new one."""
    runner = SqlRunner(SqlLimits(timeout_s=60.0), prewarm=False)
    threading.Timer(0.5, runner.close).start()
    with pytest.raises(StoreError):
        runner.run(RUNAWAY["cross join"], data=data)
    with pytest.raises(StoreError, match="going down"):
        runner.run("SELECT 1", data=data)


def test_nothing_of_a_child_is_left_behind(data: SqlData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After good, refused and killed statements the parent has the processes, descriptors and files it had before."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run_sql("SELECT 1", data=data)
    before = (children(), descriptors())
    with SqlRunner(IMPATIENT) as runner:
        for sql in (
            "SELECT * FROM mark",
            "DELETE FROM mark",
            RUNAWAY["cross join"],
            RUNAWAY["a list of rows"],
            "SELEC",
        ):
            try:
                runner.run(sql, data=data)
            except (QueryRefused, QueryKilled):
                continue
    assert (children(), descriptors()) == before
    assert list(tmp_path.iterdir()) == []


def test_a_child_ends_with_its_parent(data: SqlData, tmp_path: Path) -> None:
    """When the collector is killed in mid-query, the query does not go on without it."""
    import subprocess
    import sys

    script = (
        "import sys; from store.sandbox.sandbox import SqlRunner; import threading, time\n"
        "runner = SqlRunner(prewarm=False)\n"
        f"sql = {RUNAWAY['cross join']!r}\n"
        "threading.Thread(target=runner.run, args=(sql,), daemon=True).start()\n"
        "while not runner._running: time.sleep(0.01)\n"
        "time.sleep(2)\n"
        "print(*[c.process.pid for c in runner._running], flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
    assert is_running(child)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def test_an_idle_spare_that_died_is_replaced(data: SqlData) -> None:
    """The out-of-memory killer may take a waiting child; the next statement gets another."""
    with SqlRunner(LIMITS) as runner:
        spare = runner._spare
        assert spare is not None
        spare.process.kill()
        spare.process.wait()
        assert texts(runner, data) == ["hot", "sealed"]


def test_hot_rows_that_cannot_be_fetched_are_the_stores_error(data: SqlData) -> None:
    """An error of the store while it hands over rows is passed on, and the child is let go."""

    class Broken(dict[str, pa.Table]):
        def __getitem__(self, kind: str) -> pa.Table:
            raise StoreBusy("All readers are busy.")

        def __contains__(self, kind: object) -> bool:
            return True

    with pytest.raises(StoreBusy, match="All readers are busy"):
        run_sql("SELECT * FROM mark", hot=Broken())


def children() -> set[str]:
    """Process ids whose parent is this process."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        found.update((task / "children").read_text().split())
    return found


def descriptors() -> set[tuple[str, str]]:
    """Open descriptors of this process and what they are."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add((entry.name, os.readlink(entry)))
        except OSError:
            continue  # the descriptor of this very listing
    return {(name, what) for name, what in found if not what.startswith("/proc")}


def is_running(pid: int) -> bool:
    """The process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
