"""Values that break the contract are refused with their row; those that only look odd are not."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from engine_probe.errors import InvalidRows
from engine_probe.schema import table_from_rows
from engine_probe.wire.validate import validate

NOW = 1_764_000_000 * 10**9
DAY = 86_400 * 10**9
GOOD: dict[str, dict[str, Any]] = {
    "request": {
        "request_id": "r",
        "vantage": "engine",
        "state": "finished",
        "at_ns": NOW,
        "arrival_ns": NOW - 10,
        "token_ns": [NOW - 3, NOW - 3, NOW],
        "token_counts": [1, 2, 1],
    },
    "step": {"step": 1, "at_ns": NOW},
    "sample": {"name": "a", "value": 1.0, "at_ns": NOW},
    "mark": {"mark": "gap", "at_ns": NOW},
    "route": {"request_id": "r", "at_ns": NOW},
    "check": {"check": "mask", "outcome": "passed", "at_ns": NOW},
}


def judge(kind: str, **columns: Any) -> None:
    """Validate five rows of which the one at 3 has these columns."""
    rows = [dict(GOOD[kind]) for _ in range(5)]
    rows[3].update(columns)
    table = table_from_rows(kind, rows)
    validate(kind, table, NOW)


@pytest.mark.parametrize(
    ("kind", "column", "value", "words"),
    [
        ("request", "request_id", None, "is null"),
        ("request", "request_id", "", "is empty; expected a text with at least one character"),
        ("route", "request_id", "", "is empty"),
        ("sample", "name", "", "is empty"),
        ("mark", "run_id", "", "is empty"),
        ("step", "run_id", "", "is empty"),
        ("request", "vantage", "moon", "is 'moon'; expected one of: engine client router"),
        ("request", "truncation_side", "top", "expected one of: left right, or null where unknown"),
        ("request", "prefill_s", float("nan"), "is nan; expected a finite number"),
        ("request", "prefill_s", float("inf"), "is inf"),
        ("request", "prefill_s", -0.5, "is -0.5; expected 0 or more"),
        ("request", "prompt_tokens", -1, "is -1; expected 0 or more"),
        ("request", "sample_rate", 0.0, "expected above 0"),
        ("request", "sample_rate", 1.5, "expected within 0..1"),
        ("step", "gpu_util", 93.0, "is 93.0, which looks like a percentage"),
        ("step", "padding_ratio", 1.01, "expected within 0..1"),
        ("sample", "value", float("-inf"), "is -inf"),
        ("request", "at_ns", 1_764_000_000, "which looks like seconds"),
        ("request", "arrival_ns", 1_764_000_000_000, "which looks like milliseconds"),
        ("request", "end_ns", 1_764_000_000_000_000, "which looks like microseconds"),
        ("request", "first_token_ns", 0, "leave the column out where the instant is not known"),
        ("request", "first_token_ns", -5, "which is before 1970"),
        ("mark", "at_ns", NOW + DAY + 1, "is 1764086400000000001, 86400 s after this machine's clock"),
    ],
)
def test_a_bad_value_is_refused_with_its_row(kind: str, column: str, value: Any, words: str) -> None:
    """Row 3 is wrong: kind, row, column, value and what was expected are facts and words."""
    with pytest.raises(InvalidRows) as caught:
        judge(kind, **{column: value})
    facts = caught.value.facts
    assert (facts["kind"], facts["row"], facts["column"]) == (kind, 3, column)
    assert facts["expected"]
    assert str(facts["value"]) == str(value)
    assert caught.value.message.startswith(f"{kind} row 3, column {column} ")
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("request", {"prefill_s": 0.0, "prompt_tokens": 0, "sample_rate": 1.0}),
        ("request", {"token_ns": [], "token_counts": []}),
        ("request", {"token_counts": None}),
        ("request", {"token_ns": None, "token_counts": None}),
        ("request", {"spans": [], "prompt_blocks": [0, 2**64 - 1], "prompt_parts": None}),
        ("request", {"billable_units": -3.5}),
        ("check", {"ignore_index": -100, "segment_ids": [-1, 0]}),
        ("sample", {"value": -1e300}),
        ("step", {"gpu_util": 1.0, "waiting_on": {"blocks": 0}, "duration_s": 1e300, "forward_s": 1.7e308}),
        ("mark", {"at_ns": NOW + DAY, "attrs": {"a": "1", "b": "2"}}),
        ("route", {"candidates": [{"worker": "w", "score": -2.0, "load": 3.0}]}),
    ],
)
def test_values_at_the_edge_are_accepted(kind: str, columns: dict[str, Any]) -> None:
    """Zeros, empty lists, negative scores and the last allowed instant break nothing."""
    judge(kind, **columns)


@pytest.mark.parametrize(
    ("kind", "columns", "column", "words"),
    [
        ("request", {"token_ns": [NOW - 1, NOW - 2, NOW]}, "token_ns", f"goes back from {NOW - 1} to {NOW - 2}"),
        ("request", {"token_ns": [1, 2, 3]}, "token_ns", "has an entry that is 1, which looks like seconds"),
        ("request", {"token_ns": [NOW, None, NOW]}, "token_ns", "holds a null entry"),
        ("request", {"token_counts": [1, 2]}, "token_counts", "has 2 entries where token_ns has 3 entries"),
        ("request", {"token_ns": None}, "token_counts", "where token_ns has null"),
        ("request", {"token_counts": [1, -1, 1]}, "token_counts", "has an entry that is -1"),
        ("request", {"spans": [{"start_ns": NOW, "end_ns": NOW - 1}]}, "spans", "an entry that ends before it starts"),
        ("request", {"spans": [{"start_ns": 7}]}, "spans", "at .start_ns that is 7"),
        ("request", {"spans": [{"tokens": 1}, {"tokens": -1}]}, "spans", "at .tokens that is -1"),
        ("request", {"spans": [None]}, "spans", "holds a null entry"),
        ("request", {"prompt_blocks": [1, None]}, "prompt_blocks", "holds a null entry"),
        ("step", {"waiting_on": {"blocks": -2}}, "waiting_on", "at .blocks that is -2"),
        ("route", {"candidates": [{"load": float("nan")}]}, "candidates", "at .load that is nan"),
        ("mark", {"attrs": [("a", "1"), ("b", "2"), ("a", "3")]}, "attrs", "has the key 'a' twice"),
    ],
)
def test_a_bad_entry_of_a_list_is_refused_with_the_row_that_holds_it(
    kind: str, columns: dict[str, Any], column: str, words: str
) -> None:
    """Nested values are judged like columns, and told by the row that owns them."""
    with pytest.raises(InvalidRows) as caught:
        judge(kind, **columns)
    assert (caught.value.kind, caught.value.row, caught.value.column) == (kind, 3, column)
    assert words in caught.value.message


def test_the_row_is_right_in_a_later_chunk() -> None:
    """A table of several record batches counts its rows through, for flat and nested columns alike."""
    good = [dict(GOOD["request"]) for _ in range(3)]
    for bad in ({"prompt_tokens": -1}, {"token_ns": [NOW, NOW - 1, NOW]}, {"spans": [{"tokens": -1}]}):
        chunks = [table_from_rows("request", good), table_from_rows("request", [*good[:1], {**good[0], **bad}])]
        with pytest.raises(InvalidRows) as caught:
            validate("request", pa.concat_tables(chunks), NOW)
        assert caught.value.row == 4


def test_a_slice_is_judged_by_its_own_rows() -> None:
    """What lies before a slice in the same buffers is not looked at."""
    rows = [{**GOOD["mark"], "attrs": [("a", "1"), ("a", "2")]}, {**GOOD["mark"], "attrs": [("a", "1"), ("b", "2")]}]
    table = table_from_rows("mark", rows)
    validate("mark", table.slice(1), NOW)
    with pytest.raises(InvalidRows):
        validate("mark", table.slice(0, 1), NOW)


def test_an_empty_table_is_valid() -> None:
    """No rows break no rule."""
    validate("request", table_from_rows("request", []), NOW)
