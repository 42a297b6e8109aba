"""`POST /v1/traces`: OTLP/HTTP spans of requests become `request` rows, each span once.

An exporter drops a batch for good on a 4xx, so one bad span must not cost its neighbours: bad spans are left out and
told as `partialSuccess`, as the OTLP specification has it. A body that is no OTLP at all, or mostly bad, is refused.
Source: OTLP 1.x, "OTLP/HTTP Response"; vLLM's `llm_request` spans via engine_probe/adapters/otlp.py.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import Final

import pyarrow as pa
from starlette.requests import Request
from starlette.responses import Response

from collector.intake.body import Lease
from collector.intake.identity import Sender
from collector.intake.ingest import Arrival, Body, Ingest
from collector.intake.once import Key, SpanLedger
from collector.intake.otlp_answer import MEDIA_TYPES, SOURCE, answer_of_spans
from engine_probe.adapters.otlp import OtlpResult, decode_traces
from engine_probe.errors import InvalidRows
from engine_probe.wire.validate import validate

MAX_BAD_SPANS: Final = 32
"""Above so many, the body is refused: finding each costs a pass over the rest."""
_TRACE_BYTES = 16
_KEY_BYTES = _TRACE_BYTES + 8
_NO_TRACE, _NO_SPAN = bytes(_TRACE_BYTES), bytes(8)


class Traces:
    """The route, and the ledger of the spans that are stored."""

    def __init__(self, ingest: Ingest) -> None:
        self._ingest = ingest
        self._ledger: SpanLedger | None = None
        self._lock = threading.Lock()

    async def export(self, request: Request) -> Response:
        """`POST /v1/traces`."""
        content, media_type = await self._ingest.run(request, MEDIA_TYPES, self._apply)
        return Response(content, media_type=media_type)

    def _apply(self, arrival: Arrival, body: Body, lease: Lease) -> tuple[bytes, str]:
        with self._ingest.decoding():
            plain = self._ingest.open_body(arrival, body, lease)
            result = decode_traces(bytes(plain), arrival.media_type, arrival.received_ns)
            table, keys, reason = _sound_rows(result, arrival.received_ns)
        num_requests = result.num_spans - result.num_ignored
        num_new = self._store(arrival, table, keys) if keys else 0
        num_rejected = num_requests - len(keys)
        self._ingest.meters.spans(
            stored=num_new, duplicate=len(keys) - num_new, ignored=result.num_ignored, rejected=num_rejected
        )
        return answer_of_spans(arrival.media_type, num_rejected, reason), arrival.media_type

    def _store(self, arrival: Arrival, table: pa.Table, keys: Sequence[Key]) -> int:
        ends_ns = table.column("at_ns").to_pylist()

        def lookup(positions: Sequence[int]) -> Collection[Key]:
            times = [ends_ns[position] for position in positions]
            return self._stored(min(times), max(times))

        def commit(positions: Sequence[int]) -> None:
            rows = table if len(positions) == table.num_rows else table.take(pa.array(positions))
            sender = Sender(arrival.claim.source or SOURCE, None, arrival.claim.sent_ns)
            self._ingest.commit(sender, {"request": rows}, arrival.received_ns)

        return self._open_ledger().apply(keys, ends_ns, lookup, commit)

    def _open_ledger(self) -> SpanLedger:
        with self._lock:
            if self._ledger is None:
                newest = self._ingest.store.query("SELECT max(at_ns) FROM request WHERE run_id IS NULL").column(0)
                self._ledger = SpanLedger(newest[0].as_py() or 0)
            return self._ledger

    def _stored(self, first_ns: int, last_ns: int) -> set[Key]:
        """Keys of the stored spans that ended in [first_ns, last_ns]."""
        found = self._ingest.store.query(
            "SELECT trace_id || span_id AS span FROM (SELECT trace_id, labels['span_id'] AS span_id FROM request "
            "WHERE at_ns BETWEEN ? AND ? AND run_id IS NULL AND trace_id IS NOT NULL) WHERE span_id IS NOT NULL",
            [first_ns, last_ns],
        )
        return {bytes.fromhex(text) for text in found.column("span").to_pylist() if _is_key(text)}


def _sound_rows(result: OtlpResult, now_ns: int) -> tuple[pa.Table | None, list[Key], str]:
    """The rows that can be stored, their keys, and why others cannot."""
    table = result.tables().get("request")
    keys = list(result.span_ids)
    reason = ""
    if table is None:
        return None, [], reason
    # Both ids have their length, and neither is all zeros, which the specification calls invalid.
    good = [
        position
        for position, key in enumerate(keys)
        if len(key) == _KEY_BYTES and key[:_TRACE_BYTES] != _NO_TRACE and key[_TRACE_BYTES:] != _NO_SPAN
    ]
    if len(good) < len(keys):
        reason = "a span has no valid traceId and spanId"
        table, keys = table.take(pa.array(good, pa.int64())), [keys[position] for position in good]
    num_bad = 0
    while table.num_rows:
        try:
            validate("request", table, now_ns)
            break
        except InvalidRows as error:
            row, num_bad = error.facts.get("row"), num_bad + 1
            if not isinstance(row, int) or num_bad > MAX_BAD_SPANS:
                raise
            reason = error.message
            table = pa.concat_tables([table.slice(0, row), table.slice(row + 1)])
            del keys[row]
    return table, keys, reason


def _is_key(text: str) -> bool:
    return len(text) == 2 * _KEY_BYTES and all(digit in "0123456789abcdef" for digit in text)
