"""`POST /v1/metrics`: OTLP/HTTP metrics become `sample` rows under canonical names.

What a series means over time (sums of deltas, repetitions) is kept in a `SeriesBook`, one for the collector: rows are
prepared, committed, and only then remembered, under one lock, so that a refused export may come again and counts once.
As with traces, a bad point does not cost its neighbours: it is told as `partialSuccess`. Source: OTLP 1.x,
"OTLP/HTTP Response".
"""

from __future__ import annotations

import threading

from starlette.requests import Request
from starlette.responses import Response

from collector.intake.body import Lease
from collector.intake.identity import Sender
from collector.intake.ingest import Arrival, Body, Ingest
from collector.intake.otlp_answer import MEDIA_TYPES, SOURCE, answer_of_points
from engine_probe.adapters.genai_names import TABLES
from engine_probe.adapters.otlp_points import decode_points
from engine_probe.adapters.otlp_series import SeriesBook
from engine_probe.readers.scrapes import sample_table
from engine_probe.wire.validate import validate


class OtlpMetrics:
    """The route, and the series it remembers."""

    def __init__(self, ingest: Ingest) -> None:
        self._ingest = ingest
        self._book: SeriesBook | None = None
        self._lock = threading.Lock()

    async def export(self, request: Request) -> Response:
        """`POST /v1/metrics`."""
        content, media_type = await self._ingest.run(request, MEDIA_TYPES, self._apply)
        return Response(content, media_type=media_type)

    def _apply(self, arrival: Arrival, body: Body, lease: Lease) -> tuple[bytes, str]:
        with self._ingest.decoding():
            plain = self._ingest.open_body(arrival, body, lease)
            batch = decode_points(bytes(plain), arrival.media_type, arrival.received_ns)
        with self._lock:
            book = self._open_book()
            prepared = book.prepare(batch)
            if prepared.rows:
                table = sample_table(prepared.rows)
                validate("sample", table, arrival.received_ns)
                sender = Sender(arrival.claim.source or SOURCE, None, arrival.claim.sent_ns)
                self._ingest.commit(sender, {"sample": table}, arrival.received_ns)
            book.apply(prepared)
        num_rejected = len(prepared.refused)
        self._ingest.meters.points(
            stored=prepared.num_points - prepared.num_repeated - num_rejected,
            duplicate=prepared.num_repeated,
            rejected=num_rejected,
        )
        reason = prepared.refused[0] if prepared.refused else ""
        return answer_of_points(arrival.media_type, num_rejected, reason), arrival.media_type

    def _open_book(self) -> SeriesBook:
        """The tables of all engines too: collectors forward what they scraped from an engine's page."""
        if self._book is None:
            from engine_probe.adapters.registry import adapters

            self._book = SeriesBook((*TABLES, *(table for one in adapters() for table in one.tables)))
        return self._book
