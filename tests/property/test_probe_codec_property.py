"""Whatever rows a probe has, the wire gives back the same: Arrow, JSON, NDJSON, and hostile bytes end in words."""

from __future__ import annotations

import contextlib

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_probe.errors import KvscopeError
from engine_probe.events import KINDS
from engine_probe.schema import arrow_schema, table_from_rows
from engine_probe.wire.codec import decode_arrow, decode_json, decode_ndjson, encode_arrow, encode_ndjson
from engine_probe.wire.json_codec import table_to_rows
from engine_probe.wire.validate import validate
from tests.strategies import NOW_NS, batches, rows, tables

FEW = settings(max_examples=40, deadline=None)


@pytest.mark.parametrize("kind", KINDS)
@FEW
@given(data=st.data())
def test_rows_survive_every_wire_format(kind: str, data: st.DataObject) -> None:
    """A table of any kind comes back equal from Arrow, JSON and NDJSON, and passes validation."""
    made = data.draw(st.lists(rows(kind), min_size=1, max_size=4))
    table = table_from_rows(kind, made)
    validate(kind, table, NOW_NS)
    assert decode_arrow(encode_arrow({kind: table})).tables[kind].equals(table)
    assert decode_json(msgspec.json.encode({"events": {kind: made}})).tables[kind].equals(table)
    assert decode_ndjson(encode_ndjson({kind: table})).tables[kind].equals(table)


@FEW
@given(batch=batches())
def test_a_batch_of_several_kinds_survives(batch: dict[str, pa.Table]) -> None:
    """Every kind of a batch comes back from one body, with the header where the format has one."""
    assert decode_arrow(encode_arrow(batch, None)).tables == batch
    decoded = decode_ndjson(encode_ndjson(batch, {"source": "s", "epoch": "e", "seq": 7, "sent_ns": 8}))
    assert decoded.tables == batch
    assert (decoded.source, decoded.epoch, decoded.seq, decoded.sent_ns) == ("s", "e", 7, 8)


@FEW
@given(data=st.data())
def test_sent_columns_in_any_order_and_split_are_the_same_table(data: st.DataObject) -> None:
    """Several streams of one kind, their columns shuffled, decode to their rows one after another."""
    first, second = data.draw(tables("step", 1)), data.draw(tables("step", 1))
    names = data.draw(st.permutations(first.schema.names))
    body = encode_arrow({"step": first}) + _stream("step", second.select(names))
    assert decode_arrow(body).tables["step"].equals(pa.concat_tables([first, second]))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_bodies_end_in_an_error_or_in_sound_tables(data: st.DataObject) -> None:
    """Flipped, cut and inserted bytes never crash: they are refused with an error of ours, or still conform."""
    kind = data.draw(st.sampled_from(list(KINDS)))
    body = bytearray(encode_arrow({kind: data.draw(tables(kind, 1))}, data.draw(st.sampled_from([None, "lz4"]))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
        if not body:
            return
    try:
        decoded = decode_arrow(bytes(body), max_decoded_bytes=1 << 24)
    except KvscopeError:
        return
    for name, table in decoded.tables.items():
        assert table.schema.equals(arrow_schema(name))
        table.validate(full=True)


@settings(max_examples=150, deadline=None)
@given(body=st.binary(max_size=64) | st.text(max_size=64).map(str.encode))
def test_arbitrary_bytes_are_refused_in_words(body: bytes) -> None:
    """Bytes that were never a body end in an error of ours whichever format they claim to have."""
    for decode in (decode_arrow, decode_json, decode_ndjson):
        with contextlib.suppress(KvscopeError):
            assert decode(body).num_rows == 0


@FEW
@given(table=tables("request", 1))
def test_lines_hold_no_nulls_and_name_their_kind(table: pa.Table) -> None:
    """What is unknown is not written, so a reader cannot take it for zero."""
    for row in table_to_rows("request", table):
        assert None not in row.values()
    first = msgspec.json.decode(encode_ndjson({"request": table}).splitlines()[0])
    assert first["kind"] == "request"


def _stream(kind: str, table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    schema = table.schema.with_metadata(arrow_schema(kind).metadata)
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(table.cast(schema))
    return bytes(sink.getvalue())
