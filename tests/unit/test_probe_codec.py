"""Arrow bodies: what is cast, what is counted, and how each kind of damage is told."""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa
import pytest

from engine_probe.errors import InvalidRows, TooLarge, UnknownFormat
from engine_probe.schema import table_from_rows
from engine_probe.wire import ipc_frames
from engine_probe.wire.codec import MAX_COLUMNS, decode_arrow, encode_arrow

NOW = 1_764_000_000 * 10**9
METADATA = {"kvscope.kind": "sample", "kvscope.contract": "1"}


def stream(columns: dict[str, Any], metadata: dict[str, str] | None = None, compression: str | None = None) -> bytes:
    """One IPC stream as a foreign writer would make it."""
    table = pa.table(columns).replace_schema_metadata(METADATA if metadata is None else metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def sample(**columns: Any) -> bytes:
    """A stream of two samples, some columns replaced."""
    base = {"at_ns": pa.array([NOW, NOW + 1]), "name": pa.array(["a", "b"]), "value": pa.array([1.0, 2.0])}
    return stream({**base, **columns})


def one(body: bytes, name: str) -> list[Any]:
    """The values of one column after decoding."""
    return decode_arrow(body).tables["sample"].column(name).to_pylist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("column", "wire", "expected"),
    [
        ("at_ns", pa.array([1, 2], pa.int32()), [1, 2]),
        ("at_ns", pa.array([1, 2], pa.uint8()), [1, 2]),
        ("at_ns", pa.array([1.0, 2.0]), [1, 2]),
        ("at_ns", pa.array([1, 2], pa.timestamp("us", "UTC")), [1_000, 2_000]),
        ("value", pa.array([1, 2], pa.int16()), [1.0, 2.0]),
        ("value", pa.array([0.5, 2], pa.float32()), [0.5, 2.0]),
        ("name", pa.array(["x", None], pa.large_string()), ["x", None]),
        ("name", pa.array(["x", "x"]).dictionary_encode(), ["x", "x"]),
        ("worker", pa.nulls(2), [None, None]),
        (
            "labels",
            pa.array([[("k", "v")], None], pa.map_(pa.large_string(), pa.large_string())),
            [[("k", "v")], None],
        ),
    ],
)
def test_other_types_of_a_column_are_cast_without_loss(column: str, wire: pa.Array, expected: list[Any]) -> None:
    """Small integers, large strings, dictionaries, timestamps and empty columns of other writers keep their values."""
    assert one(sample(**{column: wire}), column) == expected


@pytest.mark.parametrize(
    ("column", "wire", "row", "value"),
    [
        ("at_ns", pa.array([1, 2**63], pa.uint64()), 1, 2**63),
        ("at_ns", pa.array([1.5, 2.0]), 0, 1.5),
        ("value", pa.array([0, 2**53 + 1]), 1, 2**53 + 1),
    ],
)
def test_a_value_that_would_be_lost_is_refused_with_its_row(column: str, wire: pa.Array, row: int, value: Any) -> None:
    """A number that the contract's type cannot hold is told, not rounded or wrapped."""
    with pytest.raises(InvalidRows) as caught:
        decode_arrow(sample(**{column: wire}))
    facts = caught.value.facts
    assert (facts["kind"], facts["row"], facts["column"], facts["value"]) == ("sample", row, column, value)


@pytest.mark.parametrize(
    ("column", "wire"),
    [
        ("at_ns", pa.array(["1", "2"])),
        ("at_ns", pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), pa.array([NOW]))),
        ("at_ns", pa.array([True, False])),
        ("prompt", pa.array([True, False])),
        ("name", pa.array([1, 2])),
        ("name", pa.array([1, 2]).dictionary_encode()),
        ("labels", pa.array(["a", "b"])),
    ],
)
def test_a_wrong_type_is_refused_and_says_what_was_sent(column: str, wire: pa.Array) -> None:
    """A column of another meaning is refused with both types; one that is not of the contract is only counted."""
    if column == "prompt":
        assert decode_arrow(sample(prompt=wire)).ignored_columns == {"sample.prompt": 2}
        return
    with pytest.raises(InvalidRows, match=f"sample, column {column} has the type") as caught:
        decode_arrow(sample(**{column: wire}))
    assert str(wire.type) in caught.value.message


def test_nested_columns_of_other_writers_are_cast_field_by_field() -> None:
    """Lists of other widths and structs in another field order or with unknown fields keep the contract's fields."""
    spans = pa.array(
        [[{"end_ns": 9, "start_ns": 7, "gpu": "x"}], None],
        pa.large_list(pa.struct([("end_ns", pa.int32()), ("start_ns", pa.int64()), ("gpu", pa.string())])),
    )
    columns = {
        "at_ns": [NOW, NOW],
        "request_id": ["a", "b"],
        "vantage": ["engine", "engine"],
        "state": ["finished", "finished"],
        "arrival_ns": [NOW, NOW],
        "spans": spans,
        "token_ns": pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)),
    }
    body = stream(columns, {"kvscope.kind": "request", "kvscope.contract": "1"})
    table = decode_arrow(body).tables["request"]
    assert table.column("spans").to_pylist() == [[{"phase": None, "start_ns": 7, "end_ns": 9, "tokens": None}], None]
    assert table.column("token_ns").to_pylist() == [[1, 2], [3, 4]]


def test_unknown_columns_are_counted_by_rows() -> None:
    """An old collector accepts a newer probe and can say what it did not keep."""
    body = sample(colour=pa.array(["red", "blue"])) + sample(colour=pa.array([1, 2]))
    decoded = decode_arrow(body)
    assert decoded.ignored_columns == {"sample.colour": 4}
    assert decoded.num_rows == 4


def test_every_prefix_of_a_body_is_refused() -> None:
    """A body cut off at any byte is never taken for whole, not even between two messages."""
    tables = {
        "sample": table_from_rows("sample", [{"at_ns": NOW, "name": "a", "value": 1.0}]),
        "mark": table_from_rows("mark", [{"at_ns": NOW, "mark": "gap"}]),
    }
    first = len(encode_arrow({"sample": tables["sample"]}))
    body = encode_arrow(tables)
    for size in range(1, len(body)):
        if size == first:
            continue
        with pytest.raises((InvalidRows, UnknownFormat)):
            decode_arrow(body[:size])


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (b"not arrow at all", UnknownFormat, "no Arrow IPC stream"),
        (b"\xff\xff\xff\xff\x00\x00\x00\x00", UnknownFormat, "no Arrow IPC stream"),
        (sample() + b"junk", InvalidRows, "4 bytes of junk after the last stream"),
        (sample()[:-8] + b"\x01" * 8, InvalidRows, "is no Arrow IPC message"),
        (stream({"at_ns": [NOW]}, {}), InvalidRows, "no kvscope.kind in its schema's metadata"),
        (stream({"at_ns": [NOW]}, {"kvscope.kind": "sample"}), InvalidRows, "no kvscope.contract"),
        (stream({"at_ns": [NOW]}, {**METADATA, "kvscope.kind": "prompt"}), InvalidRows, "'prompt', which is no kind"),
        (stream({"at_ns": [NOW]}, {**METADATA, "kvscope.contract": "2"}), UnknownFormat, "event contract 2"),
        (stream({"at_ns": [NOW]}, {**METADATA, "kvscope.contract": "new"}), InvalidRows, "'new'"),
        (stream({"at_ns": [NOW]}), InvalidRows, "column name .* is missing; expected a text"),
        (sample(at_ns=pa.nulls(2)), InvalidRows, "column at_ns .* is missing"),
        (sample(**{f"new_{i}": pa.nulls(2) for i in range(MAX_COLUMNS)}), InvalidRows, "has 1027 columns"),
    ],
)
def test_each_kind_of_damage_has_its_own_words(body: bytes, error: type[Exception], words: str) -> None:
    """The refusal says what is wrong with the body and where."""
    with pytest.raises(error, match=words):
        decode_arrow(body)


def test_an_unknown_kind_lists_the_known_ones() -> None:
    """Whoever mistyped a kind reads the right one in the answer."""
    with pytest.raises(InvalidRows, match="request step block route transfer worker check sample mark"):
        decode_arrow(stream({"at_ns": [NOW]}, {**METADATA, "kvscope.kind": "requests"}))


def test_the_second_stream_is_named_by_its_place() -> None:
    """Damage in a later stream is told by that stream's number and byte."""
    whole = sample()
    with pytest.raises(InvalidRows, match=f"stream 1, byte {len(whole)} has no kvscope.kind"):
        decode_arrow(whole + stream({"at_ns": [NOW]}, {}))


def test_a_compressed_bomb_is_refused_before_it_is_unfolded() -> None:
    """One megabyte of one letter, a few kilobytes when compressed, is too large for 100 kB and fine for 2 MB."""
    body = stream({"at_ns": [NOW], "name": ["a" * 10**6], "value": [1.0]}, compression="lz4")
    assert len(body) < 10_000
    with pytest.raises(TooLarge, match="larger than allowed once decompressed"):
        decode_arrow(body, max_decoded_bytes=100_000)
    assert decode_arrow(body, max_decoded_bytes=2_000_000).num_rows == 1


def test_a_claimed_size_is_believed_for_the_limit_only() -> None:
    """A buffer that claims to unfold to 2**60 bytes is refused by its claim, without trying."""
    body = bytearray(stream({"at_ns": [NOW], "name": ["a" * 4000], "value": [1.0]}, compression="lz4"))
    at = body.index(struct.pack("<q", 4000) + b'\x04"M\x18')
    body[at : at + 8] = struct.pack("<q", 1 << 60)
    with pytest.raises(TooLarge):
        decode_arrow(bytes(body), max_decoded_bytes=1 << 30)


def test_a_dictionary_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many short keys that all stand for one long text would unfold to gigabytes."""
    monkeypatch.setattr("engine_probe.wire.cast.MAX_DICTIONARY_BYTES", 1_000)
    names = pa.DictionaryArray.from_arrays(pa.array([0, 0], pa.int8()), pa.array(["a" * 600]))
    with pytest.raises(TooLarge, match="may unfold to 1200 bytes"):
        decode_arrow(sample(name=names))


def test_very_many_tiny_messages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a message costs more than its bytes: their number is limited, over all streams of a body."""
    monkeypatch.setattr(ipc_frames, "MAX_MESSAGES", 3)
    assert decode_arrow(sample()).num_rows == 2
    with pytest.raises(TooLarge, match="more than 3 Arrow messages"):
        decode_arrow(sample() + sample())


def test_rows_that_no_bytes_stand_for_are_refused() -> None:
    """A batch that claims more rows than its buffers hold is refused, and no memory is taken for them."""
    body = bytearray(sample())
    frames = ipc_frames.split_streams(bytes(body))
    assert frames[0].num_rows == 2
    at = body.rindex(struct.pack("<q", 2), 0, len(body) - 100)
    body[at : at + 8] = struct.pack("<q", 1 << 40)
    with pytest.raises(InvalidRows):
        decode_arrow(bytes(body))


def test_columns_without_values_are_not_sent() -> None:
    """Absent means null, so a wholly unknown column costs no bytes; required ones are always there."""
    body = encode_arrow({"sample": table_from_rows("sample", [{"at_ns": NOW, "name": "a", "value": 1.0}])})
    with pa.ipc.open_stream(body) as reader:
        assert reader.schema.names == ["at_ns", "name", "value"]


def test_a_table_that_is_not_the_contract_is_not_encoded() -> None:
    """A sender's own mistake is told where it is made."""
    with pytest.raises(InvalidRows, match="column colour is no column of this kind"):
        encode_arrow({"sample": pa.table({"at_ns": [NOW], "name": ["a"], "value": [1.0], "colour": ["red"]})})
    with pytest.raises(InvalidRows, match="no kind of row"):
        encode_arrow({"prompt": pa.table({"at_ns": [NOW]})})


def test_an_empty_body_is_no_rows() -> None:
    """A batch of nothing is nothing."""
    assert decode_arrow(b"").num_rows == 0
