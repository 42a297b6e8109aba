"""A statement answers the same over the hot rows it asked for as over all of them: whatever it is, up to the order of equal rows."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from engine_probe.schema import table_from_rows
from store.conform import contract_types
from store.sandbox import child, relations
from store.sandbox.check import Refused, check
from store.sandbox.wanted import Wanted, column_types
from tests.store_rows import request

MAX_ROWS = 12
Draw = st.SearchStrategy[str]


def one_of(*texts: str | Draw) -> Draw:
    """One of these texts, or of what is drawn."""
    return st.one_of(*(st.just(text) if isinstance(text, str) else text for text in texts))


def made(template: str, *parts: Draw) -> Draw:
    """The template with a text of each part in it."""
    return st.tuples(*parts).map(lambda texts: template.format(*texts))


INTEGERS = ["at_ns", "turn", "arrival_ns", "prefix_hash", "received_ns", '"AT_NS"', "Turn", "r.at_ns"]
TEXTS = ["worker", "error", "state", '"Worker"', "r.worker"]
NUMBERS = [
    "4", "9", "0", "-1", "NULL", "'9'", "'9.4'", "8.5", "1e1", "18446744073709551615", "9223372036854775807",
    "-9223372036854775808", "9223372036854775808", "4611686018427387920", "5 + 4", "1e1 * 0.85", "CAST(1e1 * 0.85e0 AS BIGINT)", "CAST('9' AS INT)", "9::UBIGINT",
    "9::DOUBLE", "true::BIGINT", "epoch_ns(now())", "epoch_ns(now()::DATE) - epoch_ns(today()) + 9", "-(-9)", "(SELECT 9)", "0x9",
    "9 - NULL", "9223372036854775807 + 1", "TRY_CAST('x' AS BIGINT)", "9::HUGEINT", "trunc(9.7)", "1e300",
]  # fmt: skip
WORDS = [
    "'w0'", "'W1'", "'wé'", "''", "'it''s'", "NULL", "'w' || '0'", "'w0'::VARCHAR", "'w0' COLLATE NOCASE", "lower('W0')",
    "'failed'",
]  # fmt: skip
OPERATORS = ["=", "<>", "<", "<=", ">", ">=", "IS DISTINCT FROM"]


def conditions(columns: list[str], values: list[str]) -> Draw:
    """Of one type."""
    column, value = st.sampled_from(columns), st.sampled_from(values)
    return one_of(
        made("{} {} {}", column, st.sampled_from(OPERATORS), value),
        made("{} {} {}", value, st.sampled_from(OPERATORS), column),
        made("{} {}BETWEEN {} AND {}", column, one_of("", "NOT "), value, value),
        made("{} {}IN ({}, {})", column, one_of("", "NOT "), value, value),
        made("{} IS {}NULL", column, one_of("", "NOT ")),
    )


CONDITION = one_of(
    conditions(INTEGERS, NUMBERS),
    conditions(TEXTS, WORDS),
    one_of(
        "true",
        "NULL",
        "worker LIKE 'w%'",
        "EXISTS (SELECT 1 WHERE at_ns > 5)",
        "at_ns > arrival_ns",
        "labels['k'] = 'v'",
    ),
    "at_ns > (SELECT min(at_ns) FROM request)",
)
WHERE = st.recursive(
    CONDITION,
    lambda inner: one_of(made("NOT ({})", inner), made("({} OR {})", inner, inner), made("({} AND {})", inner, inner)),
    max_leaves=4,
)
SELECTED = [
    "*", "* EXCLUDE (labels)", "* REPLACE (-at_ns AS at_ns)", "at_ns, worker", "worker AS at_ns, at_ns AS t", "r.at_ns, r.worker",
    "r", "r.*", "#2, worker", "at_ns, unnest(token_ns)", "COLUMNS('_ns$')", "DISTINCT worker", "DISTINCT ON (worker) worker",
    "count(*)", "at_ns, row_number() OVER (ORDER BY received_ns)", "at_ns AS worker", "labels.k, at_ns", "-at_ns AS arrival_ns, at_ns",
    "list(at_ns ORDER BY received_ns)", "1", "queue_s, at_ns", "sum(turn)", "at_ns, (SELECT count(*) FROM request s WHERE s.turn = r.turn)",
]  # fmt: skip
TABLE = one_of(
    "request r",
    "request AS r",
    '"REQUEST" r',
    "main.request r",
    "(FROM request WHERE at_ns > 5) r",
    "request r, (SELECT 1) x",
)
BY = [
    "at_ns", "at_ns DESC", "worker", "worker DESC NULLS FIRST", "1", "ALL", "turn NULLS FIRST", "prefix_hash DESC", "queue_s DESC",
    "labels", "token_ns", "worker COLLATE NOCASE", "at_ns + 0", "r.at_ns", '"AT_NS"', "at_ns, at_ns DESC", "t", "arrival_ns", "#1",
]  # fmt: skip
TAIL = one_of(
    "",
    made(" LIMIT {}", st.sampled_from(["0", "1", "5", "NULL", "ALL", "5.7", "'5'", "(SELECT 4)", "2+3", "50%", "9223372036854775807"])),
    made(" LIMIT 5 OFFSET {}", st.sampled_from(["0", "2", "100", "NULL", "1 + 1", "9223372036854775807"])),
    " FETCH FIRST 3 ROWS ONLY",
    " OFFSET 9223372036854775807",
)  # fmt: skip
STATEMENT = made(
    "SELECT {} FROM {}{}{}{}{}",
    st.sampled_from(SELECTED),
    TABLE,
    one_of("", made(" WHERE {}", WHERE), made(" WHERE {} AND {}", WHERE, CONDITION)),
    one_of("", "", "", " GROUP BY ALL", " HAVING count(*) > 1", " QUALIFY row_number() OVER (ORDER BY received_ns) < 9"),
    one_of("", made(" ORDER BY {}", st.sampled_from(BY)), made(" ORDER BY {}, received_ns", st.sampled_from(BY)), " ORDER BY received_ns"),
    TAIL,
)  # fmt: skip
WHOLE = one_of(
    STATEMENT,
    STATEMENT,
    STATEMENT,
    made("SELECT * FROM ({}) LIMIT 4", STATEMENT),
    made("WITH request AS (SELECT 5 AS at_ns, 'w' AS worker, 1 AS received_ns) {}", STATEMENT),
    made("SUMMARIZE {}", STATEMENT),
    made("({}) UNION ALL SELECT 1 FROM request", STATEMENT),
)


def rows(first: int, count: int) -> pa.Table:
    """Requests with equal values, unknown ones, NaN, numbers beyond 2^63; `received_ns` alone is of one row each."""
    facts = [
        request(
            f"r{n % 3}",
            state=["finished", "failed"][n % 2],
            arrival_ns=n // 2,
            at_ns=n % 13,
            worker=[None, "w0", "w1", "W1", "wé"][n % 5],
            error=["it's", None, ""][n % 3],
            prefix_hash=[None, 2**64 - 1, 2**63, 9, 0][n % 5],
            turn=[None, 0, 9, 2**62 + n][n % 4],
            labels={"k": "v"} if n % 3 else None,
            token_ns=[n] * (n % 3),
            queue_s=[None, float("nan"), 0.5, 1.5][n % 4],
        )
        for n in range(first, first + count)
    ]
    table = table_from_rows("request", facts)
    return table.append_column("source", pa.array(["s"] * count)).append_column(
        "received_ns", pa.array(range(first, first + count), pa.int64())
    )


class Child:
    """What a child does with a statement, over 8 sealed rows and 18 hot ones."""

    def __init__(self, folder: Path) -> None:
        pq.write_table(rows(0, 8), folder / "sealed.parquet")
        self._job = {
            "database": None,
            "files": {"request": [str(folder / "sealed.parquet")]},
            "parquet_dir": os.getcwd(),  # names of files begin where a child would be
            "views": [],
        }
        self._hot = duckdb.connect()
        self._hot.register("hot", rows(8, 18))
        self._hot.execute("CREATE TABLE request AS FROM hot")
        self._connection = child._connect()
        self._connection.execute("SET TimeZone = 'UTC'")

    def close(self) -> None:
        """Let go of both databases."""
        self._hot.close()
        self._connection.close()

    def answer(self, sql: str, *, narrowed: bool) -> tuple[list[str], list[str]] | None:
        """(columns, rows as text) over what is wanted, or over all; None where it is no statement, or fails."""
        connection = self._connection
        connection.execute("BEGIN TRANSACTION")
        try:
            checked = check(connection, sql)
            plan = relations.plan_of(connection, {}, checked, MAX_ROWS)
            wanted = plan.hot if narrowed else {kind: Wanted() for kind in plan.hot}
            found = {kind: self._hot.execute(one.sql(kind, column_types(kind))) for kind, one in wanted.items()}
            tables = {kind: contract_types(kind, answer.to_arrow_table()) for kind, answer in found.items()}
            relations.create_views(connection, self._job, plan.names, tables)
            connection.execute(sql)
            names = [f"{column[0]} {column[1]}" for column in connection.description or ()]
            return names, [repr(row) for row in connection.fetchmany(MAX_ROWS + 1)]
        except (duckdb.Error, Refused):
            return None
        finally:
            connection.execute("ROLLBACK")


@pytest.fixture(scope="module")
def a_child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One for all statements."""
    one = Child(tmp_path_factory.mktemp("hot"))
    yield one
    one.close()


@settings(max_examples=60)
@example(sql="SELECT #2, worker FROM request")
@example(sql="SELECT main.request FROM request")
@example(sql="SELECT * FROM request WHERE turn BETWEEN 4611686018427387920 AND 1e300")
@example(sql="SELECT * FROM request WHERE at_ns > CAST(1e1 * 0.85e0 AS BIGINT)")
@example(sql="SELECT * FROM request WHERE at_ns >= epoch_ns(now()) - epoch_ns(now()) + 9")
@example(sql="SELECT * FROM request OFFSET 9223372036854775807")
@given(sql=WHOLE)
def test_what_a_statement_answers_does_not_depend_on_what_it_asks_for(a_child: Child, sql: str) -> None:
    """Columns, how many rows, and which, where an order or the lack of a bound makes that certain (SUMMARIZE only estimates)."""
    whole = a_child.answer(sql, narrowed=False)
    found = a_child.answer(sql, narrowed=True)
    assert (found is None) == (whole is None)
    assume(found is not None)
    assert found is not None
    assert whole is not None
    assert found[0] == whole[0]
    assert len(found[1]) == len(whole[1])
    if "received_ns LIMIT" in sql or "received_ns FETCH" in sql or sql.endswith("received_ns"):
        assert found[1] == whole[1] or " r, (SELECT 1)" in sql or "DISTINCT" in sql or "UNION" in sql or "unnest" in sql
    elif len(whole[1]) <= MAX_ROWS and not any(
        word in sql for word in ("LIMIT", "FETCH", "OFFSET", "DISTINCT ON", "SUMMARIZE")
    ):
        assert Counter(found[1]) == Counter(whole[1])
