"""Batches in: body -> decompressed -> decoded -> validated -> committed, then 200.

Idea: the event loop only moves bytes. Everything else of a batch runs on one thread of a bounded pool; decoding is
behind a small semaphore, waiting for the commit is not, so slow commits fill the pool and the next batch gets 429.
Invariant: 200 is sent after the store has committed. A batch is refused as a whole or applied as a whole, and once
where it has an identity. What is committed is shown on /metrics and in the live table; a duplicate is not shown again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
import pyarrow as pa
from starlette.requests import Request
from starlette.responses import Response

from collector.counts.fleet import Fleet
from collector.intake.body import Budget, Lease, decompress, read_body
from collector.intake.identity import Claim, Sender, single
from collector.live.latencies import Latencies
from collector.live.live import Live
from collector.live.meters import Meters
from collector.settings import IngestSettings, ServerSettings
from engine_probe.adapters.wire_names import canonical_samples
from engine_probe.errors import BadRequest, KvscopeError, NotReady, TooManyBatches, UnknownFormat
from engine_probe.wire.codec import (
    ARROW_CONTENT_TYPE,
    JSON_CONTENT_TYPE,
    NDJSON_CONTENT_TYPE,
    Decoded,
    decode_arrow,
    decode_json,
    decode_ndjson,
)
from engine_probe.wire.validate import validate
from store.interface import Batch, Receipt, Store

log = logging.getLogger(__name__)

Body = bytes | bytearray
MEDIA_TYPES: Final = (ARROW_CONTENT_TYPE, JSON_CONTENT_TYPE, NDJSON_CONTENT_TYPE)
_ALIASES: Final = {
    "application/ndjson": NDJSON_CONTENT_TYPE,
    "application/jsonl": NDJSON_CONTENT_TYPE,
    "application/x-jsonlines": NDJSON_CONTENT_TYPE,
    "application/protobuf": "application/x-protobuf",
}
_TEXT_COST = 8
"""Decoded JSON and protobuf take about so many times their text, as Python objects, before they are Arrow."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a body came: when (collector's clock, ns), as what media type, how encoded, and who says to have sent it."""

    received_ns: int
    media_type: str
    encoding: str
    claim: Claim


T = TypeVar("T")


class Ingest:
    """The way in. `events` is the route; `run` and `commit` are shared with `/v1/traces`."""

    def __init__(
        self,
        store: Store,
        settings: IngestSettings,
        server: ServerSettings,
        meters: Meters,
        latencies: Latencies,
        live: Live,
        fleet: Fleet,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.store = store
        self.meters = meters
        self.settings = settings
        self.clock = clock
        self.budget = Budget(settings.memory_bytes, settings.retry_after_s)
        self.num_requests = 0
        self.num_batches = 0
        self.is_draining = False
        self._server = server
        self._latencies = latencies
        self._live = live
        self._fleet = fleet
        self._pool = ThreadPoolExecutor(settings.max_batches, thread_name_prefix="kvscope-ingest")
        self._decoding = threading.Semaphore(settings.decode_threads)

    async def events(self, request: Request) -> Response:
        """`POST /v1/events`."""
        answer = await self.run(request, MEDIA_TYPES, self._apply_events)
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def run(
        self, request: Request, media_types: tuple[str, ...], apply: Callable[[Arrival, Body, Lease], T]
    ) -> T:
        """Read a body of one of `media_types` within its bounds and `apply` it on a thread.

        Raises NotReady, TooManyBatches, UnknownFormat, BadRequest, TooLarge, BodyTimeout and whatever `apply` raises.
        """
        received_ns = self.clock()
        self.num_requests += 1
        try:
            with Lease(self.budget) as lease:
                arrival = self._arrival(request, media_types, received_ns)
                limit = self._limit(arrival.media_type)
                body = await read_body(
                    request.receive,
                    request.headers,
                    lease,
                    limit_bytes=min(limit, self.settings.max_body_bytes),
                    idle_s=self._server.body_idle_timeout_s,
                    total_s=self._server.body_timeout_s,
                )
                self.meters.received(len(body))
                self._require_slot()
                self.num_batches += 1
                try:
                    loop = asyncio.get_running_loop()
                    return await loop.run_in_executor(self._pool, apply, arrival, body, lease)
                finally:
                    self.num_batches -= 1
        except KvscopeError as error:
            self.meters.rejected(error, error.facts.pop("_rows", None))
            raise
        except asyncio.CancelledError:
            # The drain's time is over: better an answer that lets the sender keep its batch than a broken connection.
            raise NotReady(
                "the collector stopped before the batch was committed; send it again", retry_after_s=1
            ) from None
        finally:
            self.num_requests -= 1

    async def put(self, sender: Sender, tables: Mapping[str, pa.Table], received_ns: int) -> Receipt:
        """Commit rows that the collector itself was given (marks). Raises as `run` does."""
        self._require_running()
        self._require_slot()
        self.num_requests += 1
        self.num_batches += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, self.commit, sender, tables, received_ns)
        finally:
            self.num_batches -= 1
            self.num_requests -= 1

    def open_body(self, arrival: Arrival, body: Body, lease: Lease) -> Body:
        """The body decompressed, and room for decoding it taken."""
        plain = decompress(body, arrival.encoding, self._limit(arrival.media_type), lease.grow)
        if arrival.media_type != ARROW_CONTENT_TYPE:
            lease.grow(_TEXT_COST * len(plain))
        return plain

    def decoding(self) -> threading.Semaphore:
        """Held while a batch is decoded and validated: `with ingest.decoding():`."""
        return self._decoding

    def commit(self, sender: Sender, tables: Mapping[str, pa.Table], received_ns: int) -> Receipt:
        """Append, and show what is new. Raises StoreBusy, DiskFull, BatchRejected."""
        started = time.perf_counter()
        receipt = self.store.append(
            Batch(tables, sender.identity, sender.source, sender.sent_ns, received_ns), self.settings.commit_timeout_s
        )
        if receipt.duplicate:
            self.meters.duplicate()
            return receipt
        self.meters.committed(sender.source, tables, received_ns, time.perf_counter() - started)
        self._show(tables, received_ns)
        return receipt

    def close(self) -> None:
        """Wait for the batches that are on their way."""
        self._pool.shutdown(wait=True)

    def _show(self, tables: Mapping[str, pa.Table], received_ns: int) -> None:
        """The batch is on disk already: a defect here may cost a number on a page, never the sender's 200."""
        try:
            with self._decoding:
                started = time.perf_counter()
                self._live.observe(tables, received_ns)
                self._fleet.observe(tables)
                if "request" in tables:
                    self._latencies.observe(tables["request"], received_ns)
                self.meters.counted(time.perf_counter() - started)
        except Exception:
            log.exception("committed batch not shown")

    def _apply_events(self, arrival: Arrival, body: Body, lease: Lease) -> dict[str, Any]:
        with self._decoding:
            plain = self.open_body(arrival, body, lease)
            if not plain:
                raise BadRequest("the body is empty; send at least one batch of rows")
            decoded = self._decode(arrival.media_type, plain)
            sender = arrival.claim.with_body(decoded)
            tables = {kind: table for kind, table in decoded.tables.items() if table.num_rows}
            lease.grow(max(0, sum(table.nbytes for table in tables.values()) - lease.held_bytes))
            try:
                for kind, table in tables.items():
                    validate(kind, table, arrival.received_ns)
            except KvscopeError as error:
                error.facts["_rows"] = {kind: table.num_rows for kind, table in tables.items()}
                raise
            tables = canonical_samples(tables)
        if decoded.ignored_columns:
            self.meters.ignored(decoded.ignored_columns)
        receipt = self.commit(sender, tables, arrival.received_ns)
        answer: dict[str, Any] = {
            "accepted": dict(receipt.accepted),
            "duplicate": receipt.duplicate,
            "received_ns": receipt.received_ns,
        }
        if decoded.ignored_columns:
            answer["ignored_columns"] = decoded.ignored_columns
        return answer

    def _decode(self, media_type: str, plain: Body) -> Decoded:
        if media_type == ARROW_CONTENT_TYPE:
            return decode_arrow(plain, self.settings.max_decoded_bytes)
        return (decode_json if media_type == JSON_CONTENT_TYPE else decode_ndjson)(bytes(plain))

    def _arrival(self, request: Request, media_types: tuple[str, ...], received_ns: int) -> Arrival:
        self._require_running()
        self._require_slot()
        given = single(request.headers, "Content-Type") or ""
        media_type = _ALIASES.get(word := given.partition(";")[0].strip().lower(), word)
        if media_type not in media_types:
            raise UnknownFormat(
                f"Content-Type {given[:80]!r} is not taken here; send one of {', '.join(media_types)}",
                known=list(media_types),
            )
        encoding = ", ".join(request.headers.getlist("content-encoding"))
        return Arrival(received_ns, media_type, encoding, Claim.of(request.headers))

    def _limit(self, media_type: str) -> int:
        text = media_type != ARROW_CONTENT_TYPE
        return self.settings.max_text_bytes if text else self.settings.max_decoded_bytes

    def _require_running(self) -> None:
        if self.is_draining:
            raise NotReady(
                "the collector is stopping and takes no new batches; send again when it is back",
                retry_after_s=self.settings.retry_after_s,
            )

    def _require_slot(self) -> None:
        if self.num_batches >= self.settings.max_batches:
            raise TooManyBatches(
                f"{self.num_batches} batches wait to be committed, and no more fit; send again later",
                retry_after_s=self.settings.retry_after_s,
            )
