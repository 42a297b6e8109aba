"""A child that was taken over says anything it likes: it is data of the right form, or one error of ours, and soon."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from typing import Any

import pyarrow as pa
import pytest

from engine_probe.errors import QueryKilled, StoreError
from engine_probe.schema import table_from_rows
from store.interface import Batch
from store.open import open_store
from store.sandbox import wire
from store.sandbox.arrow_rows import ArrowRows
from store.sandbox.narrow import Wanted
from store.sandbox.talk import Conversation
from store.sandbox.terms import MIB, SqlData, SqlLimits
from store.sandbox.told import Column, End, Needs, heard, say
from tests.store_rows import request

LIMITS = SqlLimits(timeout_s=20.0, memory_bytes=64 * MIB, max_result_bytes=4 * MIB)
ROWS = pa.record_batch({"a": pa.array([1, 2, 3]), "b": pa.array(["x", None, "y"])})
NEEDS, COLUMNS, END = say(Needs({}, [])), say([Column("a", "BIGINT")]), say(End(False, 0.1))


class Puppet:
    """In place of a child: says these frames, and lives on."""

    def __init__(self, frames: list[tuple[bytes, bytes | memoryview]]) -> None:
        self.socket, self._theirs = socket.socketpair()
        self._speaker = threading.Thread(target=self._speak, args=(frames,), daemon=True)
        self._speaker.start()

    def close(self) -> None:
        """Let go of it."""
        self.socket.close()
        self._theirs.close()
        self._speaker.join()

    @property
    def process(self) -> Puppet:
        """Itself."""
        return self

    def wait(self, timeout: float) -> int:
        """It does not end."""
        raise subprocess.TimeoutExpired("puppet", timeout)

    def _speak(self, frames: list[tuple[bytes, bytes | memoryview]]) -> None:
        with suppress(wire.Gone):
            wire.send(self._theirs, wire.READY)
            for kind, body in frames:
                wire.send(self._theirs, kind, body)


def answer(
    *frames: tuple[bytes, bytes | memoryview], form: str = "json", data: SqlData | None = None, max_rows: int = 1000
) -> Any:
    """What a statement answers of which the child says this."""
    with closing(Puppet(list(frames))) as puppet:
        conversation = Conversation(puppet, LIMITS, None)  # type: ignore[arg-type]  # a child but for its process
        run: Callable[[str, SqlData, int], Any] = conversation.json if form == "json" else conversation.arrow
        return run("SELECT 1", data or SqlData(), max_rows)


@pytest.fixture(scope="module")
def hot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, pa.Table]]:
    """A store's own hot rows: three requests."""
    with open_store(str(tmp_path_factory.mktemp("told") / "k.duckdb")) as store:
        store.append(Batch({"request": table_from_rows("request", [request(f"r{n}", n) for n in range(3)])}))
        yield store.sql_data().hot


def needs(**wanted: Any) -> bytes:
    return json.dumps({"kinds": {"request": wanted}, "walls": []}).encode()


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b"\xff\xfe",
        b"[" * 500_000,
        b'{"kinds":' * 100_000,
        b'{"kinds": [], "walls": []}',
        b'{"kinds": {}, "walls": 5}',
        b'{"kinds": {"request": 5}, "walls": []}',
        b'{"kinds": {"\\ud800": {}}, "walls": []}',
        needs(columns=5),
        needs(columns="at_ns"),
        needs(columns=[["at_ns"]]),
        needs(columns=["at_ns"] * 100_000),
        needs(columns=[]),
        needs(columns=["at_ns FROM request; DROP TABLE request; --"]),
        needs(where={"at_ns": 5}),
        needs(where=[["at_ns", "="]]),
        needs(where=[[["at_ns"], "=", 5]]),
        needs(where=[["at_ns", ["="], 5]]),
        needs(where=[["at_ns", "=", {"a": 5}]]),
        needs(where=[["at_ns", "=", 1.5]]),
        needs(where=[["at_ns", "=", "1 OR true"]]),
        needs(where=[["at_ns", "=", 10**30]]),
        needs(where=[["at_ns", "=", 5]] * 40_000),
        needs(where=[["at_ns", "IN", list(range(100_000))]]),
        needs(where=[["request_id", "OR true; --", "x"]]),
        needs(order=[["at_ns", "", "; DROP TABLE request"]], limit=1),
        needs(order=[["at_ns", "ASC"]], limit=1),
        needs(order=[["at_ns", "", ""]] * 10_000, limit=1),
        needs(limit="1; DROP TABLE request"),
        needs(limit=10**18 * 10),
        needs(limit=-1),
        needs(limit=True),
        b'{"kinds": {"request": {"limit": 1' + b"0" * 5000 + b'}}, "walls": []}',
        b" " * (2 * MIB),
    ],
)
def test_needs_that_are_no_such_document_are_nonsense(hot: Mapping[str, pa.Table], document: bytes) -> None:
    """None of it becomes SQL, and none of it is an error of Python's."""
    started = time.monotonic()
    with pytest.raises(StoreError, match="answered nonsense"):
        answer((wire.NEEDS, document), data=SqlData(hot=hot))
    assert time.monotonic() - started < 10
    assert len(hot["request"]) == 3


@pytest.mark.parametrize(
    "document",
    [
        needs(where=[["error", "=", "'; DROP TABLE request; --"]]),
        needs(
            where=[["request_id", "IN", ["r1", "') OR (true"]]],
            order=[["at_ns", "DESC", "NULLS LAST"]],
            limit=2**63 - 1,
        ),
        b'{"kinds": {"nothing": {}, "sender": {}, "request; --": {}, "../x": {"limit": 1}}, "walls": []}',
    ],
)
def test_what_is_said_in_form_is_only_rows(hot: Mapping[str, pa.Table], document: bytes) -> None:
    """A value is a value, whatever is in it; kinds that there are not have no rows."""
    frames = [(wire.NEEDS, document), (wire.COLUMNS, COLUMNS), (wire.BATCH, b""), (wire.END, END)]
    assert (
        answer(*frames, data=SqlData(hot=hot))
        == b'{"columns":[{"name": "a", "type": "BIGINT"}],"rows":[],"truncated":false}'
    )
    assert len(hot["request"]) == 3


@pytest.mark.parametrize("form", ["json", "arrow"])
@pytest.mark.parametrize(
    "frames",
    [
        [(wire.COLUMNS, COLUMNS)],
        [(wire.NEEDS, NEEDS), (wire.COLUMNS, b'[["a", "BIGINT"]]')],
        [(wire.NEEDS, NEEDS), (wire.COLUMNS, b'{"name": "a"}')],
        [(wire.NEEDS, NEEDS), (wire.COLUMNS, b"[" * MIB)],
        [(wire.NEEDS, NEEDS), (wire.COLUMNS, COLUMNS), (wire.END, b"[]")],
        [(wire.NEEDS, NEEDS), (wire.COLUMNS, COLUMNS), (wire.END, b'{"truncated": 1, "elapsed_s": null}')],
        [(wire.NEEDS, NEEDS), (wire.COLUMNS, COLUMNS), (wire.END, b"{" * 2 * MIB)],
        [(wire.NEEDS, NEEDS), (wire.COLUMNS, COLUMNS), *[(wire.BATCH, b"")] * 2000],
        [(wire.ERROR, b"5")],
        [(wire.ERROR, b'{"what": ["refused"], "message": {}}')],
        [(wire.NEEDS, NEEDS), (wire.ERROR, b'{"what": "locked"}')],
        [(b"Z", b"")],
    ],
)
def test_frames_that_make_no_conversation_are_nonsense(frames: list[tuple[bytes, bytes]], form: str) -> None:
    """Each at its place: another kind, another document, more of them than rows could fill."""
    with pytest.raises(StoreError, match="answered nonsense"):
        answer(*frames, form=form)


def test_a_child_that_drips_ends_at_the_deadline() -> None:
    """Each byte comes before anybody loses patience, the last one never."""
    puppet = Puppet([])
    limits = SqlLimits(timeout_s=0.5)

    def drip() -> None:
        with suppress(OSError):
            for byte in wire._HEADER.pack(wire.NEEDS, 1000) + b" " * 1000:
                puppet._theirs.send(bytes([byte]))
                time.sleep(0.01)

    threading.Thread(target=drip, daemon=True).start()
    with closing(puppet), pytest.raises(QueryKilled, match=r"ran longer than 0\.5 s"):
        Conversation(puppet, limits, None).json("SELECT 1", SqlData(), 10)  # type: ignore[arg-type]  # as above


def stream(batch: pa.RecordBatch, times: int = 1, **options: Any) -> memoryview:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for _ in range(times):
            writer.write_batch(batch)
    return memoryview(sink.getvalue())


def test_batches_are_rows() -> None:
    """Also those of a type that is a dictionary, as an ENUM is."""
    frames = [(wire.NEEDS, NEEDS), (wire.COLUMNS, COLUMNS), (wire.BATCH, stream(ROWS.slice(0, 0)))]
    result = answer(*frames, (wire.BATCH, stream(ROWS)), (wire.BATCH, stream(ROWS)), (wire.END, END), form="arrow")
    assert result.table.to_pylist() == ROWS.to_pylist() * 2
    rows = ArrowRows(10, MIB)
    rows.take(stream(pa.record_batch({"a": pa.array(["x", "x"]).dictionary_encode()})))
    assert rows.table.to_pydict() == {"a": ["x", "x"]}


WIDE = pa.record_batch({"a": pa.array(["x" * MIB]).dictionary_encode()})


@pytest.mark.parametrize(
    "body",
    [
        memoryview(b""),
        memoryview(b"\xff" * 100),
        stream(ROWS)[:-100],
        stream(ROWS, times=2),
        stream(ROWS, compression="zstd"),
        stream(ROWS, compression="lz4", metadata_version=pa.ipc.MetadataVersion.V4),
        stream(WIDE, compression="zstd"),
        stream(pa.record_batch({"a": pa.nulls(10**7)})),
        stream(pa.record_batch({"a": pa.RunEndEncodedArray.from_arrays([2**30], [1])})),
        stream(pa.record_batch([pa.array(range(1000))] * 1000, names=[str(n) for n in range(1000)])),
        stream(pa.record_batch({"a": pa.array(range(11))})),
    ],
    ids=["empty", "noise", "torn", "two", "zstd", "lz4", "dictionary", "nulls", "runs", "bytes", "rows"],
)
def test_arrow_that_is_none_or_grows_is_nonsense(body: memoryview) -> None:
    """A kilobyte of zstd is a gigabyte of zeros; ten million nulls are no bytes at all; ten rows and a MiB were allowed."""
    with pytest.raises(ValueError, match=r"Arrow that is none|compressed|are allowed|more than one"):
        ArrowRows(10, MIB).take(body)


def test_a_schema_that_changes_midway_is_nonsense() -> None:
    """As are no rows at all, not even a batch that is empty."""
    other = pa.record_batch({"z": pa.array([1.5])})
    for bodies in ([ROWS, other], []):
        frames = [(wire.BATCH, stream(one)) for one in bodies]
        with pytest.raises(StoreError, match="answered nonsense"):
            answer((wire.NEEDS, NEEDS), (wire.COLUMNS, COLUMNS), *frames, (wire.END, END), form="arrow")


def test_a_document_is_heard_as_it_was_said() -> None:
    """Kinds with all that a statement can want of them."""
    said = Needs({"block": Wanted(["at_ns"], [("at_ns", "IN", [1, 2**62])], [("at_ns", "DESC", "")], 5)}, ["rlimits"])
    assert heard(memoryview(say(said)), Needs) == said
