"""JSON and NDJSON bodies: what is accepted, what is counted, and what a refusal says."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine_probe.errors import InvalidRows
from engine_probe.wire.codec import decode_json, decode_ndjson
from engine_probe.wire.json_codec import RUN_ROWS

NOW = 1_764_000_000 * 10**9


def document(kind: str, *rows: dict[str, Any]) -> bytes:
    """A JSON body of rows of one kind."""
    return msgspec.json.encode({"source": "s", "epoch": "e", "seq": 1, "sent_ns": 2, "events": {kind: rows}})


def mark(**columns: Any) -> dict[str, Any]:
    """A row with every required column."""
    return {"at_ns": NOW, "mark": "gap", **columns}


def test_a_document_carries_its_identity() -> None:
    """source, epoch, seq and sent_ns come from the body; a kind sent with no rows is an empty table."""
    decoded = decode_json(document("mark"))
    assert (decoded.source, decoded.epoch, decoded.seq, decoded.sent_ns) == ("s", "e", 1, 2)
    assert decoded.tables["mark"].num_rows == 0
    assert list(decoded.tables) == ["mark"]


def test_rows_keep_their_order_over_several_runs() -> None:
    """Rows are turned in runs of `RUN_ROWS`; the table has them all, in order, in one piece."""
    rows = [mark(at_ns=NOW + i) for i in range(2 * RUN_ROWS + 3)]
    column = decode_json(document("mark", *rows)).tables["mark"].column("at_ns")
    assert column.to_pylist() == list(range(NOW, NOW + 2 * RUN_ROWS + 3))
    assert column.num_chunks == 1


def test_a_misfit_beyond_the_first_run_names_its_own_row() -> None:
    """The row of a refusal counts from the start of the body, whatever run it was found in."""
    rows = [{"step": i, "at_ns": NOW} for i in range(RUN_ROWS + 2)]
    rows[RUN_ROWS + 1]["step"] = 2**63
    with pytest.raises(InvalidRows) as caught:
        decode_json(document("step", *rows))
    assert (caught.value.row, caught.value.column, caught.value.value) == (RUN_ROWS + 1, "step", 2**63)


def test_unknown_columns_are_counted_in_rows_and_in_structs() -> None:
    """Two rows with a column we do not know, one span with a field we do not know."""
    row = {"request_id": "r", "vantage": "engine", "state": "finished", "at_ns": NOW, "arrival_ns": NOW}
    span = {"phase": "queue", "gpu": 3}
    body = document("request", {**row, "colour": 1}, {**row, "colour": 2, "spans": [span, span]})
    decoded = decode_json(body)
    assert decoded.ignored_columns == {"request.colour": 2, "request.spans.gpu": 1}
    assert decoded.tables["request"].column("spans").to_pylist()[1][0]["phase"] == "queue"
    lines = b"\n".join(msgspec.json.encode({"kind": "request", **row, "colour": i}) for i in range(3))
    assert decode_ndjson(lines).ignored_columns == {"request.colour": 3}


@pytest.mark.parametrize(
    ("row", "column", "value", "words"),
    [
        (mark(at_ns="today"), "at_ns", "today", 'is "today"; expected a whole number'),
        (mark(at_ns=1.5), "at_ns", 1.5, "is 1.5"),
        (mark(at_ns=None), "at_ns", None, "is null"),
        (mark(at_ns=True), "at_ns", True, "is true"),
        ({"mark": "gap"}, "at_ns", None, "is missing; expected a whole number (int64) in ns since 1970-01-01 UTC"),
        (mark(text=3), "text", 3, "expected a text, or null where unknown"),
        (mark(attrs={"a": 1}), "attrs", '{"a":1}', 'is {"a":1}; expected an object of texts'),
        (mark(attrs=["a"]), "attrs", '["a"]', 'is ["a"]'),
    ],
)
def test_a_bad_value_is_told_with_kind_row_column_and_what_was_expected(
    row: dict[str, Any], column: str, value: Any, words: str
) -> None:
    """The second row is wrong: the message says so in the words of the contract."""
    with pytest.raises(InvalidRows) as caught:
        decode_json(document("mark", mark(), row))
    facts = caught.value.facts
    assert (facts["kind"], facts["row"], facts["column"]) == ("mark", 1, column)
    assert caught.value.message.startswith(f"mark row 1, column {column} ")
    assert words in caught.value.message
    assert facts["value"] == value


@pytest.mark.parametrize("number", [-1, 2**64])
def test_a_hash_outside_uint64_is_refused(number: int) -> None:
    """Hashes are unsigned 64 bits; a signed or longer one would be another hash."""
    with pytest.raises(InvalidRows, match=f"block row 0, column block_hash is {number}, which does not fit uint64"):
        decode_json(document("block", {"at_ns": NOW, "change": "stored", "block_hash": number}))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the body is no sound JSON"),
        (b"[]", "the document has the wrong shape"),
        (b'{"event": {}}', "missing required field `events`"),
        (b'{"events": {"marks": []}}', "names 'marks', which is no kind of row; expected one of: request step"),
        (b'{"events": {"mark": {}}}', "the document has the wrong shape at \\$.events.mark"),
        (b'{"events": {"mark": [7]}}', "mark row 0 is no row"),
        (b'{"events": {"mark": [{"at_ns": NaN}]}}', "NaN and Infinity are not JSON"),
        (
            b'{"events": {"sample": [{"at_ns": 1, "name": "a", "value": 1e999}]}}',
            "value is a number beyond every type; expected a number",
        ),
        (b'{"events": {"step": [{"at_ns": 1, "step": 1' + b"0" * 5000 + b"}]}}", "step is a number beyond every type"),
        (b'{"events": {"mark": [{"text": "cut \\ud83d"}]}}', r"holds \\ud83d, half of a surrogate pair"),
        (b'{"events": {"mark": [{"text": "cut \\ud83d and on"}]}}', "half of a surrogate pair"),
        (b'{"events": {"mark": [{"text": "\\ude00"}]}}', r"holds \\ude00, half of a surrogate pair"),
        (b'{"events": {"mark": [{"text": "\\ud83d\\ude00 \\\\ud83d"', "truncated"),
        (b'{"events": {"mark": [{"text": "\xff"}]}}', "UTF-8"),
        (b'{"events": {"mark": [{"at_ns": 1', "truncated"),
        (b'{"events": {}} {}', "trailing characters"),
        (b'{"events": {"mark": [{"at_ns": 1, "mark": "gap", "x": ' + b"[" * 99_999, "nested too deeply"),
    ],
)
def test_a_body_that_is_no_document_is_refused_in_words(body: bytes, words: str) -> None:
    """Broken JSON and wrong shapes are told apart."""
    with pytest.raises(InvalidRows, match=words):
        decode_json(body)


HEADER = b'{"source": "s", "epoch": "e", "seq": 4}\n'
ROW = msgspec.json.encode({"kind": "mark", **mark()}) + b"\n"


def test_lines_may_start_with_a_header_and_may_not() -> None:
    """The first line is a header where it has no kind; blank lines and line ends of Windows do no harm."""
    with_header = decode_ndjson(HEADER + ROW + b"\r\n" + ROW.replace(b"\n", b"\r\n"))
    assert (with_header.source, with_header.epoch, with_header.seq, with_header.num_rows) == ("s", "e", 4, 2)
    without = decode_ndjson(ROW + ROW)
    assert (without.source, without.num_rows) == (None, 2)


def test_a_header_alone_is_no_rows() -> None:
    """A sender with nothing to say is not an error."""
    assert decode_ndjson(HEADER).tables == {}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (b'{"kind": "mark", "at_ns": "x"}', 'mark row 1, column at_ns \\(line 4\\) is "x"'),
        (b'{"kind": "mark"}', "mark row 1, column at_ns \\(line 4\\) is missing"),
        (b'{"kind": "marks"}', "line 4 names 'marks', which is no kind of row"),
        (b'{"kind": 7}', "line 4 names '7'"),
        (b'{"at_ns": 3}', "line 4 has no kind"),
        (b'{"kind": "mark", "at_ns": 1,', "line 4 is no sound JSON"),
        (b"[1]", "line 4 has no kind"),
    ],
)
def test_a_bad_line_is_told_by_its_number(bad: bytes, words: str) -> None:
    """Header, row, blank line, then the bad one: it is line 4, and row 1 of its kind."""
    with pytest.raises(InvalidRows, match=words):
        decode_ndjson(HEADER + ROW + b"\n" + bad + b"\n" + ROW)


@pytest.mark.parametrize("first", [b"{}", b'{"at_ns": 3}', b'{"kind": 7}', b"[]"])
def test_a_first_line_that_is_neither_header_nor_row_is_refused(first: bytes) -> None:
    """A row without a kind is not taken for a header, which would lose it."""
    with pytest.raises(InvalidRows, match="line 1"):
        decode_ndjson(first + b"\n" + ROW)
