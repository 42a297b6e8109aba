"""SQL rows as JSON: every type of DuckDB that has an Arrow form, with nothing lost that a number can say."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import duckdb
import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.sql_json import json_column, json_objects, json_rows


def through_json(sql: str) -> Any:
    """The one value of `SELECT <sql>` after a round trip through JSON text."""
    with duckdb.connect(":memory:") as connection:
        connection.execute("SET TimeZone = 'America/New_York'")
        table = connection.execute(f"SELECT {sql} AS v UNION ALL SELECT NULL").to_arrow_table()
    value, null = json.loads(msgspec.json.encode(json_column(table.column(0))), parse_float=Decimal)
    assert null is None
    return value


@pytest.mark.parametrize(
    ("sql", "value"),
    [
        ("9007199254740993::BIGINT", 9007199254740993),
        ("18446744073709551615::UBIGINT", 2**64 - 1),
        ("(-9223372036854775808)::BIGINT", -(2**63)),
        ("18446744073709551616::HUGEINT", 2**64),
        ("170141183460469231731687303715884105727::HUGEINT", 2**127 - 1),
        ("-18446744073709551616::HUGEINT", -(2**64)),
        ("0.10::DECIMAL(18, 2)", Decimal("0.10")),
        ("12345678901234567.89::DECIMAL(38, 2)", Decimal("12345678901234567.89")),
        ("0.5::DOUBLE", Decimal("0.5")),
        ("'nan'::DOUBLE", None),
        ("'inf'::DOUBLE", None),
        ("'-inf'::FLOAT", None),
        ("true", True),
        ("'grün'", "grün"),
        ("'a'::ENUM('a', 'b')", "a"),
        ("'\\x00\\xFF'::BLOB", "AP8="),
        ("uuid '00000000-0000-0000-0000-000000000001'", "00000000-0000-0000-0000-000000000001"),
        ("DATE '2026-11-29'", "2026-11-29"),
        ("DATE 'infinity'", None),
        ("TIME '10:20:30'", "10:20:30.000000"),
        ("TIMESTAMP '2026-11-29 10:20:30.5'", "2026-11-29T10:20:30.500000"),
        ("TIMESTAMP_NS '2026-11-29 10:20:30.123456789'", "2026-11-29T10:20:30.123456789"),
        ("TIMESTAMP_S '2026-11-29 10:20:30'", "2026-11-29T10:20:30"),
        ("TIMESTAMPTZ '2026-11-29 10:20:30+02'", "2026-11-29T08:20:30.000000Z"),
        ("TIMESTAMP 'infinity'", None),
        ("TIMESTAMPTZ '-infinity'", None),
        ("INTERVAL '1 month 2 days 3.5 seconds'", "P1M2DT3.5S"),
        ("INTERVAL 0 seconds", "PT0S"),
        ("[1, NULL, 3]", [1, None, 3]),
        ("[]::INTEGER[]", []),
        ("[1, 2]::INTEGER[2]", [1, 2]),
        ("[[0.5::DOUBLE, 'nan'::DOUBLE], NULL]", [[Decimal("0.5"), None], None]),
        (
            "{'a': 1, 'b': TIMESTAMP '2026-01-01', 'c': 'inf'::DOUBLE}",
            {"a": 1, "b": "2026-01-01T00:00:00.000000", "c": None},
        ),
        ("MAP {'model': 'm', 'none': NULL}", {"model": "m", "none": None}),
        ("MAP {1: DATE '2026-01-01'}", [[1, "2026-01-01"]]),
        ("[{'phase': 'queue', 'start_ns': 9007199254740993}]", [{"phase": "queue", "start_ns": 9007199254740993}]),
        ("union_value(k := 0.5::DOUBLE)", Decimal("0.5")),
        ("'{\"a\": 1}'::JSON", '{"a": 1}'),
    ],
)
def test_a_value_keeps_what_it_says(sql: str, value: Any) -> None:
    """Digits, instants, nulls and nesting survive; what JSON cannot say is null."""
    assert through_json(sql) == value


def test_rows_are_lists_in_column_order_and_objects_by_name() -> None:
    """Two columns of one name are both in the list; in the object the last one counts."""
    table = pa.table([pa.array([1, 2]), pa.array(["a", None]), pa.array([3, 4])], names=["n", "s", "n"])
    assert json_rows(table) == [[1, "a", 3], [2, None, 4]]
    assert json_objects(table) == [{"n": 3, "s": "a"}, {"n": 4, "s": None}]


def test_no_rows_are_no_rows() -> None:
    """An empty result, of any type, is an empty list."""
    assert json_rows(pa.table({"a": pa.array([], pa.timestamp("ns")), "b": pa.array([], pa.list_(pa.date32()))})) == []


NESTED = st.lists(
    st.none()
    | st.fixed_dictionaries(
        {
            "at": st.none() | st.datetimes(),
            "tags": st.none() | st.dictionaries(st.text(max_size=3), st.none() | st.floats(), max_size=2),
            "days": st.none() | st.lists(st.none() | st.dates(), max_size=3),
        }
    ),
    max_size=8,
)
NESTED_TYPE = pa.struct(
    [("at", pa.timestamp("us")), ("tags", pa.map_(pa.string(), pa.float64())), ("days", pa.list_(pa.date32()))]
)


@given(values=NESTED, start=st.integers(0, 8), length=st.integers(0, 8))
def test_a_slice_says_what_its_rows_say(values: list[Any], start: int, length: int) -> None:
    """Arrow slices share buffers with an offset; the JSON of a slice is the slice of the JSON."""
    rows = [None if v is None else v | {"tags": v["tags"] and list(v["tags"].items())} for v in values]
    whole = pa.array(rows, NESTED_TYPE)
    expected = json_column(pa.chunked_array([whole]))[start : start + length]
    assert json_column(pa.chunked_array([whole.slice(start, length)])) == expected
    assert json_column(pa.chunked_array([whole.slice(0, start), whole.slice(start)], type=NESTED_TYPE)) == json_column(
        pa.chunked_array([whole])
    )
