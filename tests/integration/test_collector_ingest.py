"""`POST /v1/events` of a real collector: what is stored, what is refused, and what a sender reads when it is."""

from __future__ import annotations

import gzip
import socket
import struct
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pyarrow as pa
import pytest

from engine_probe.errors import DiskFull, StoreBusy
from engine_probe.schema import arrow_schema, table_from_rows
from engine_probe.wire.codec import encode_arrow, encode_ndjson
from store.interface import Batch, Receipt
from tests.integration.collector_harness import ARROW, JSON, NOW_NS, Collector, request_row, running, step_row

NDJSON = {"content-type": "application/x-ndjson"}


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    folder: Path = tmp_path_factory.mktemp("collector")
    limits = {"max_body_bytes": 1 << 20, "max_decoded_bytes": 8 << 20, "max_text_bytes": 2 << 20}
    with running(folder / "kvscope.duckdb", ingest=limits, server={"body_idle_timeout_s": 0.3}) as made:
        yield made


def fresh() -> str:
    """A name no other test uses."""
    return f"test-{uuid.uuid4().hex[:12]}"


def problem(answer: httpx.Response, status: int, name: str) -> dict[str, Any]:
    """The problem document of an answer that must be this error."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert document["type"] == f"urn:kvscope:error:{name}", document
    assert document["status"] == status
    assert len(document["detail"]) > 20
    return document


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_arrow_batch_is_on_disk_when_200_comes(collector: Collector, compression: str | None) -> None:
    """Rows of several kinds in one Arrow body are committed, with plain and with compressed buffers."""
    source = fresh()
    tables = {
        "request": table_from_rows("request", [request_row(f"{source}-{i}") for i in range(3)]),
        "step": table_from_rows("step", [step_row(i) for i in range(2)]),
    }
    headers = ARROW | {"kvscope-source": source, "kvscope-epoch": "e", "kvscope-seq": "0"}
    answer = collector.client.post("/v1/events", content=encode_arrow(tables, compression), headers=headers)
    assert answer.status_code == 200
    assert answer.json()["accepted"] == {"request": 3, "step": 2}
    assert answer.json()["duplicate"] is False
    assert abs(answer.json()["received_ns"] - time.time_ns()) < 60e9
    assert collector.count("request", f"source = '{source}'") == 3
    assert collector.count("step", f"source = '{source}'") == 2


def test_json_and_ndjson_store_the_same_rows_as_arrow(collector: Collector) -> None:
    """One row sent three ways gives three equal rows."""
    row = request_row("same", labels={"product": "chat"}, token_ns=[NOW_NS + 1, NOW_NS + 2], prompt_blocks=[2**64 - 1])
    sources = [fresh() for _ in range(3)]
    collector.post({"request": [row]}, source=sources[0]).raise_for_status()
    document = {"source": sources[1], "events": {"request": [row]}}
    collector.client.post("/v1/events", content=msgspec.json.encode(document), headers=JSON).raise_for_status()
    lines = encode_ndjson({"request": table_from_rows("request", [row])}, {"source": sources[2]})
    collector.client.post("/v1/events", content=lines, headers=NDJSON).raise_for_status()
    columns = ", ".join(arrow_schema("request").names)
    stored = [
        collector.store.query(f"SELECT {columns} FROM request WHERE source = ?", [source]).to_pylist()
        for source in sources
    ]
    assert len(stored[0]) == 1
    assert stored[0] == stored[1] == stored[2]


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "zstd", "identity", ""])
def test_content_encodings_are_undone(collector: Collector, encoding: str) -> None:
    """gzip, zstd and plain bodies are read alike."""
    source = fresh()
    body = msgspec.json.encode({"source": source, "events": {"step": [step_row(1)]}})
    packed = (
        gzip.compress(body)
        if "gzip" in encoding
        else pa.compress(body, "zstd", asbytes=True)
        if "zstd" in encoding
        else body
    )
    answer = collector.client.post("/v1/events", content=packed, headers=JSON | {"content-encoding": encoding})
    assert answer.json()["accepted"] == {"step": 1}
    assert collector.count("step", f"source = '{source}'") == 1


def test_unknown_content_encoding_is_415(collector: Collector) -> None:
    """The answer lists the encodings that are known."""
    answer = collector.client.post("/v1/events", content=b"{}", headers=JSON | {"content-encoding": "br"})
    assert problem(answer, 415, "unknown-format")["known"] == ["identity", "gzip", "zstd"]


@pytest.mark.parametrize("media", ["text/plain", "application/octet-stream", ""])
def test_unknown_media_type_is_415(collector: Collector, media: str) -> None:
    """A body of another type, and one without a type, is not guessed at."""
    answer = collector.client.post("/v1/events", content=b"x", headers={"content-type": media})
    assert "application/json" in problem(answer, 415, "unknown-format")["detail"]


def test_repeated_batch_is_acknowledged_and_not_stored_again(collector: Collector) -> None:
    """A batch with an identity is applied once, whatever the repeat holds."""
    source = fresh()
    first = collector.post({"step": [step_row(1)]}, source=source, epoch="e", seq="7")
    again = collector.post({"step": [step_row(1), step_row(2)]}, source=source, epoch="e", seq="7")
    other = collector.post({"step": [step_row(3)]}, source=source, epoch="f", seq="7")
    assert (first.json()["duplicate"], again.json()["duplicate"], other.json()["duplicate"]) == (False, True, False)
    assert again.json()["accepted"] == {}
    assert collector.count("step", f"source = '{source}'") == 2


def test_batches_in_any_order_and_at_once_are_each_applied_once(collector: Collector) -> None:
    """Out-of-order and repeated numbers over eight connections leave each batch's row once and no number missing."""
    source = fresh()
    numbers = [3, 1, 0, 2, 7, 5, 6, 4, 3, 0, 7, 1] * 2

    def send(seq: int) -> bool:
        answer = collector.post({"step": [step_row(seq)]}, source=source, epoch="e", seq=str(seq))
        assert answer.status_code == 200
        return bool(answer.json()["duplicate"])

    with ThreadPoolExecutor(8) as pool:
        duplicates = list(pool.map(send, numbers))
    assert duplicates.count(False) == 8
    stored = collector.store.query("SELECT step FROM step WHERE source = ? ORDER BY step", [source])
    assert stored.column("step").to_pylist() == list(range(8))
    mine = next(info for info in collector.store.sources() if info.source == source)
    assert (mine.last_seq, list(mine.missing)) == (7, [])


def test_batch_that_skips_numbers_shows_what_is_missing(collector: Collector) -> None:
    """Numbers 0 and 3 arrived: 1 to 2 are missing, in the store and on /metrics."""
    source = fresh()
    for seq in ("0", "3"):
        collector.post({"step": [step_row(1)]}, source=source, epoch="e", seq=seq).raise_for_status()
    mine = next(info for info in collector.store.sources() if info.source == source)
    assert list(mine.missing) == [(1, 2)]
    assert collector.metric("kvscope_source_missing_batches", source=source) == 2


def test_idempotency_key_makes_json_without_identity_apply_once(collector: Collector) -> None:
    """The same key again is a duplicate; without a key the rows are stored again."""
    source = fresh()
    body = msgspec.json.encode({"source": source, "events": {"step": [step_row(1)]}})
    keyed = JSON | {"idempotency-key": "k-1"}
    answers = [collector.client.post("/v1/events", content=body, headers=keyed).json() for _ in range(2)]
    assert [answer["duplicate"] for answer in answers] == [False, True]
    assert collector.count("step", f"source = '{source}'") == 1
    for _ in range(2):
        assert collector.client.post("/v1/events", content=body, headers=JSON).json()["duplicate"] is False
    assert collector.count("step", f"source = '{source}'") == 3


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"source": "a", "epoch": "e"}, "lacks seq"),
        ({"epoch": "e", "seq": "1"}, "lacks source"),
        ({"source": "a", "epoch": "e", "seq": "-1"}, "whole number"),
        ({"source": "a", "epoch": "e", "seq": "1.5"}, "whole number"),
        ({"source": "a", "epoch": "e", "seq": str(2**63)}, "63 bits"),
        ({"source": "x" * 201, "epoch": "e", "seq": "1"}, "printable"),
        ({"source": "", "epoch": "e", "seq": "1"}, "printable"),
        ({"sent_ns": "soon"}, "Kvscope-Sent-Ns"),
    ],
)
def test_half_an_identity_is_refused(collector: Collector, headers: dict[str, str], said: str) -> None:
    """A sender that means to be applied once is told what its identity lacks."""
    answer = collector.post({"step": [step_row(1)]}, **headers)
    assert said in problem(answer, 400, "bad-request")["detail"]


def test_identity_in_headers_and_body_must_agree(collector: Collector) -> None:
    """Two different numbers for one batch are refused; the same number twice is fine."""
    body = msgspec.json.encode({"source": "a", "epoch": "e", "seq": 1, "events": {}})
    headers = JSON | {"kvscope-seq": "2"}
    answer = collector.client.post("/v1/events", content=body, headers=headers)
    assert "'seq'" in str(problem(answer, 400, "bad-request")) or "seq is 2" in answer.text
    assert collector.client.post("/v1/events", content=body, headers=JSON | {"kvscope-seq": "1"}).status_code == 200


@pytest.mark.parametrize(
    ("kind", "row", "column", "value"),
    [
        ("request", request_row("r", prefill_s=float("nan")), "prefill_s", "nan"),
        ("request", request_row("r", prefill_s=float("inf")), "prefill_s", "inf"),
        ("request", request_row("r", queue_s=-0.5), "queue_s", -0.5),
        ("request", request_row("r", state="done"), "state", "done"),
        ("request", request_row("r", prompt_tokens=-1), "prompt_tokens", -1),
        ("request", request_row("r", arrival_ns=1_764_403_200), "arrival_ns", 1_764_403_200),
        ("request", request_row("r", arrival_ns=1_764_403_200_000), "arrival_ns", 1_764_403_200_000),
        ("request", request_row("r", arrival_ns=1_764_403_200_000_000), "arrival_ns", 1_764_403_200_000_000),
        ("step", step_row(1, at_ns=4_000_000_000_000_000_000), "at_ns", 4_000_000_000_000_000_000),
        ("step", step_row(1, padding_ratio=1.5), "padding_ratio", 1.5),
    ],
)
def test_bad_row_is_named_and_nothing_of_its_batch_is_stored(
    collector: Collector, kind: str, row: dict[str, Any], column: str, value: Any
) -> None:
    """422 names kind, row, column, value and what was expected; the good rows of the batch are not stored either."""
    source = fresh()
    good = request_row("good") if kind == "request" else step_row(0)
    answer = collector.post({kind: [good, good, row]}, source=source, epoch="e", seq="0")
    document = problem(answer, 422, "invalid-rows")
    assert (document["kind"], document["row"], document["column"]) == (kind, 2, column)
    assert str(document["value"]) == str(value)
    assert document["expected"]
    assert collector.count(kind, f"source = '{source}'") == 0
    repaired = collector.post({kind: [good]}, source=source, epoch="e", seq="0")
    assert repaired.json()["duplicate"] is False, "a refused batch must not use up its number"


def test_wrong_unit_says_which_unit_it_looks_like(collector: Collector) -> None:
    """An instant in milliseconds is recognised as such."""
    answer = collector.post({"request": [request_row("r", arrival_ns=NOW_NS // 1_000_000)]})
    assert "milliseconds" in problem(answer, 422, "invalid-rows")["detail"]


def test_instants_up_to_a_day_ahead_are_taken_and_shown_as_lag(collector: Collector) -> None:
    """A sender whose clock is an hour ahead is stored; its lag on /metrics is negative by that hour."""
    source = fresh()
    ahead = time.time_ns() + 3_600_000_000_000
    assert collector.post({"step": [step_row(1, at_ns=ahead)]}, source=source, epoch="e", seq="0").status_code == 200
    lag = collector.metric("kvscope_source_lag_seconds", source=source)
    assert lag is not None
    assert -3600.5 < lag < -3590


def test_clock_offset_of_a_sender_is_shown(collector: Collector) -> None:
    """A batch sent by a clock 50 s ahead gives an offset of about 50 s."""
    source = fresh()
    sent = str(time.time_ns() + 50_000_000_000)
    collector.post({"step": [step_row(1)]}, source=source, epoch="e", seq="0", sent_ns=sent).raise_for_status()
    offset = collector.metric("kvscope_source_clock_offset_seconds", source=source)
    assert offset is not None
    assert 40 < offset <= 50


def test_unknown_kind_lists_the_known_ones(collector: Collector) -> None:
    """422 for a kind that is no kind, with all nine in the answer."""
    body = msgspec.json.encode({"events": {"requests": [{}]}})
    document = problem(collector.client.post("/v1/events", content=body, headers=JSON), 422, "invalid-rows")
    assert all(kind in document["detail"] for kind in ("request", "step", "block", "route", "mark"))


def test_unknown_columns_are_ignored_and_counted(collector: Collector) -> None:
    """A newer probe's column costs nothing but a count in the answer and on /metrics."""
    body = msgspec.json.encode({"events": {"step": [step_row(1, tensor_cores_busy=0.4), step_row(2)]}})
    answer = collector.client.post("/v1/events", content=body, headers=JSON)
    assert answer.json()["accepted"] == {"step": 2}
    assert answer.json()["ignored_columns"] == {"step.tensor_cores_busy": 1}
    assert collector.metric("kvscope_ingest_ignored_columns_total", column="step.tensor_cores_busy") == 1


def test_wrong_schema_names_the_column(collector: Collector) -> None:
    """An Arrow column of a type that cannot be the contract's is refused with both types."""
    schema = pa.schema(
        [("at_ns", pa.int64()), ("step", pa.int64()), ("duration_s", pa.string())],
        metadata={"kvscope.kind": "step", "kvscope.contract": "1"},
    )
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, schema) as writer:
        writer.write_table(pa.table([[NOW_NS], [1], ["fast"]], schema=schema))
    answer = collector.client.post("/v1/events", content=out.getvalue().to_pybytes(), headers=ARROW)
    document = problem(answer, 422, "invalid-rows")
    assert document["column"] == "duration_s"
    assert "string" in document["detail"]


def test_truncated_arrow_is_refused_wherever_it_ends(collector: Collector) -> None:
    """A stream cut anywhere, also between two messages, is no shorter batch but an error; nothing of it is stored."""
    source = fresh()
    body = encode_arrow({"step": table_from_rows("step", [step_row(i) for i in range(50)])})
    headers = ARROW | {"kvscope-source": source, "kvscope-epoch": "e"}
    for seq, length in enumerate([1, 7, 8, len(body) // 3, len(body) - 9, len(body) - 8, len(body) - 1]):
        answer = collector.client.post("/v1/events", content=body[:length], headers=headers | {"kvscope-seq": str(seq)})
        assert answer.status_code in (415, 422), (length, answer.text)
        assert answer.headers["content-type"] == "application/problem+json"
    assert collector.count("step", f"source = '{source}'") == 0


def test_hostile_arrow_bytes_are_refused_and_the_collector_lives(collector: Collector) -> None:
    """A body with any one byte of its first 600 overturned is stored whole or refused; nothing crashes."""
    body = bytearray(encode_arrow({"step": table_from_rows("step", [step_row(i) for i in range(4)])}))
    for position in range(0, min(len(body), 600), 7):
        hurt = body.copy()
        hurt[position] ^= 0xFF
        answer = collector.client.post("/v1/events", content=bytes(hurt), headers=ARROW)
        assert answer.status_code in (200, 413, 415, 422), (position, answer.text)
    assert collector.client.get("/healthz").status_code == 200


def test_body_over_the_limit_is_413_before_it_is_read(collector: Collector) -> None:
    """A declared length over the limit is refused with the limit and the size."""
    with socket.create_connection(collector.address, timeout=10) as connection:
        connection.sendall(
            b"POST /v1/events HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 99999999\r\nConnection: close\r\n\r\n"
        )
        answer = _read_all(connection)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'"limit_bytes":1048576' in answer
    assert b'"size_bytes":99999999' in answer


def test_chunked_body_over_the_limit_is_413(collector: Collector) -> None:
    """A body without a declared length is cut off at the limit."""

    def chunks() -> Iterator[bytes]:
        for _ in range(64):
            yield b"x" * 65536

    answer = collector.client.post("/v1/events", content=chunks(), headers=JSON)
    assert problem(answer, 413, "too-large")["limit_bytes"] == 1 << 20


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_bomb_is_stopped_at_the_limit(collector: Collector, encoding: str) -> None:
    """A small body that would become 256 MiB is refused when 2 MiB have come out of it."""
    zeros = b" " * (256 << 20)
    packed = gzip.compress(zeros, 1) if encoding == "gzip" else pa.compress(zeros, "zstd", asbytes=True)
    assert len(packed) < 1.5e6
    if len(packed) > 1 << 20:
        packed = packed[: 1 << 20]
    answer = collector.client.post("/v1/events", content=packed, headers=JSON | {"content-encoding": encoding})
    assert problem(answer, 413, "too-large")["limit_bytes"] == 2 << 20


def test_arrow_bomb_is_stopped_before_it_is_decompressed(collector: Collector) -> None:
    """lz4 buffers that would become 80 MB are refused by the sizes they claim."""
    values = pa.repeat(pa.scalar(NOW_NS), 5_000_000)
    schema = pa.schema(
        [("at_ns", pa.int64()), ("step", pa.int64())], metadata={"kvscope.kind": "step", "kvscope.contract": "1"}
    )
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(pa.table([values, values], schema=schema))
    body = out.getvalue().to_pybytes()
    assert len(body) < 1 << 20
    problem(collector.client.post("/v1/events", content=body, headers=ARROW), 413, "too-large")


def test_lz4_buffer_that_claims_terabytes_is_refused(collector: Collector) -> None:
    """The claimed size of a compressed buffer is not believed."""
    body = bytearray(encode_arrow({"step": table_from_rows("step", [step_row(i) for i in range(500)])}, "lz4"))
    size = struct.pack("<q", 500 * 8)
    assert size in body
    hurt = bytes(body).replace(size, struct.pack("<q", 1 << 42), 1)
    answer = collector.client.post("/v1/events", content=hurt, headers=ARROW)
    assert answer.status_code in (413, 422), answer.text


def test_few_bytes_a_row_do_not_unfold_to_many(collector: Collector) -> None:
    """Rows of one byte each become rows of every column of their kind: that size counts, not the one on the wire."""
    count = 1_000_000
    schema = pa.schema(
        [("at_ns", pa.int8()), ("step", pa.int8())], metadata={"kvscope.kind": "step", "kvscope.contract": "1"}
    )
    ones = pa.repeat(pa.scalar(1, pa.int8()), count)
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(pa.table([ones, ones], schema=schema))
    answer = collector.client.post("/v1/events", content=out.getvalue().to_pybytes(), headers=ARROW)
    problem(answer, 413, "too-large")


def test_empty_body_is_400(collector: Collector) -> None:
    """Nothing is not a batch."""
    problem(collector.client.post("/v1/events", content=b"", headers=JSON), 400, "bad-request")


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_cut_off_compression_is_400(collector: Collector, encoding: str) -> None:
    """A compressed body that ends in the middle is told as such."""
    body = b"{}" * 5000
    packed = gzip.compress(body) if encoding == "gzip" else pa.compress(body, "zstd", asbytes=True)
    answer = collector.client.post("/v1/events", content=packed[:-5], headers=JSON | {"content-encoding": encoding})
    assert "no sound" in problem(answer, 400, "bad-request")["detail"]


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"events": []}', b'{"events": {"step": {}}}', b"\xff\xfe", b"null"])
def test_malformed_json_is_422(collector: Collector, body: bytes) -> None:
    """What is no batch in JSON is refused with the place."""
    answer = collector.client.post("/v1/events", content=body, headers=JSON)
    problem(answer, 422, "invalid-rows")


def test_client_that_stops_in_mid_body_gets_408(collector: Collector) -> None:
    """Half a body and then silence: 408 after the idle time, and nothing is stored."""
    source = fresh()
    body = msgspec.json.encode({"source": source, "events": {"step": [step_row(1)]}})
    with socket.create_connection(collector.address, timeout=10) as connection:
        connection.sendall(_head(len(body)) + body[: len(body) // 2])
        answer = _read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"urn:kvscope:error:body-timeout" in answer
    assert collector.count("step", f"source = '{source}'") == 0


def test_client_that_hangs_up_in_mid_body_stores_nothing(collector: Collector) -> None:
    """Half a body and a closed connection: nothing is stored and no memory stays taken."""
    source = fresh()
    body = msgspec.json.encode({"source": source, "events": {"step": [step_row(1)]}})
    with socket.create_connection(collector.address, timeout=10) as connection:
        connection.sendall(_head(len(body)) + body[: len(body) // 2])
    budget = collector.app.state.services.ingest.budget
    deadline = time.monotonic() + 5
    while budget.used_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert budget.used_bytes == 0
    assert collector.count("step", f"source = '{source}'") == 0


def test_rejections_are_counted_by_reason(collector: Collector) -> None:
    """A refused batch shows on /metrics under its error's name, with the rows that could be decoded."""
    before = collector.metric("kvscope_ingest_rejected_rows_total", kind="step", reason="invalid-rows") or 0
    collector.post({"step": [step_row(1), step_row(2, duration_s=-1.0)]})
    after = collector.metric("kvscope_ingest_rejected_rows_total", kind="step", reason="invalid-rows")
    assert after == before + 2
    assert (collector.metric("kvscope_ingest_rejected_batches_total", reason="invalid-rows") or 0) >= 1


class Refusing:
    """A store whose appends fail as a full queue or a full disk does; everything else is the real one."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.failure: Exception | None = None

    def append(self, batch: Batch, timeout_s: float = 30.0) -> Receipt:
        if self.failure is not None:
            raise self.failure
        receipt: Receipt = self._store.append(batch, timeout_s)
        return receipt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_full_queue_is_429_and_full_disk_is_507_and_reads_go_on(tmp_path: Path) -> None:
    """What the store refuses reaches the sender as a status it can act on; with room again the batch is taken."""
    from store.open import open_store

    with open_store(str(tmp_path / "kvscope.duckdb")) as real:
        store = Refusing(real)
        with running(tmp_path / "unused", store=store) as collector:  # type: ignore[arg-type]
            store.failure = StoreBusy("the queue is full; send again in 3 s", retry_after_s=3)
            busy = collector.post({"step": [step_row(1)]}, source="a", epoch="e", seq="0")
            problem(busy, 429, "store-busy")
            assert busy.headers["retry-after"] == "3"
            store.failure = DiskFull("the disk is full; free some space")
            problem(collector.post({"step": [step_row(1)]}, source="a", epoch="e", seq="0"), 507, "disk-full")
            assert collector.client.get("/metrics").status_code == 200
            store.failure = None
            again = collector.post({"step": [step_row(1)]}, source="a", epoch="e", seq="0")
            assert again.json()["accepted"] == {"step": 1}


def test_too_many_batches_at_once_are_429_with_retry_after(tmp_path: Path) -> None:
    """While one batch waits for its commit and the limit is one, the next is refused at once, then taken."""
    import threading

    from store.open import open_store

    entered, leave = threading.Event(), threading.Event()

    class Slow(Refusing):
        def append(self, batch: Batch, timeout_s: float = 30.0) -> Receipt:
            entered.set()
            assert leave.wait(10)
            return super().append(batch, timeout_s)

    with (
        open_store(str(tmp_path / "kvscope.duckdb")) as real,
        running(tmp_path / "unused", store=Slow(real), ingest={"max_batches": 1}) as collector,  # type: ignore[arg-type]
    ):
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(collector.post, {"step": [step_row(1)]})
            assert entered.wait(10)
            refused = collector.post({"step": [step_row(2)]})
            problem(refused, 429, "too-many-batches")
            assert refused.headers["retry-after"] == "1"
            leave.set()
            assert first.result().status_code == 200
        assert collector.post({"step": [step_row(2)]}).status_code == 200


def test_memory_of_bodies_in_flight_is_bounded(tmp_path: Path) -> None:
    """A body that does not fit the memory of all bodies together is 429, though below the limit for one."""
    with running(tmp_path / "kvscope.duckdb", ingest={"memory_bytes": 1000}) as collector:
        answer = collector.post({"step": [step_row(i) for i in range(100)]})
        problem(answer, 429, "too-many-batches")
        assert collector.app.state.services.ingest.budget.used_bytes == 0


def _read_all(connection: socket.socket) -> bytes:
    """What comes until the collector closes the connection."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def _head(length: int) -> bytes:
    lines = ("POST /v1/events HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    return "\r\n".join((*lines, f"Content-Length: {length}", "", "")).encode()
