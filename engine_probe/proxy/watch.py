"""Looks at one exchange: the request while it goes, the answer while it comes; at the end there is a row.

Everything here works on bytes that were passed on already, and keeps none: of a stream at most the event that is not whole
yet, of an answer in one piece at most `MAX_WHOLE_BYTES` (of a larger one a few values are picked while it passes). What
cannot be read is said in a label and costs the columns that would have come from it, never the instants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from engine_probe.adapters.tgi import ENGINE as TGI
from engine_probe.adapters.tgi import TIMINGS, timing_columns
from engine_probe.proxy.dialects import read_event, read_whole
from engine_probe.proxy.heads import RequestHead, ResponseHead
from engine_probe.proxy.inflate import Identity, Inflater, Unreadable, inflater
from engine_probe.proxy.order import Order
from engine_probe.proxy.pattern import Pattern
from engine_probe.proxy.peek import Peek
from engine_probe.proxy.reading import Reading
from engine_probe.proxy.rows import check_rows, request_row
from engine_probe.proxy.sse import SseParser
from engine_probe.proxy.tags import answer_labels
from engine_probe.proxy.upstreams import Choice, Upstream

if TYPE_CHECKING:
    from engine_probe.proxy.recording import Recording
    from engine_probe.proxy.tokenizing import Job

MAX_WHOLE_BYTES: Final = 1 << 18
_STREAM, _WHOLE, _UNREAD = range(3)
_ASKED: Final = ("model", "stream", "n", "max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
_PICKED: Final = ("id", "model", "object", "type")
_PICKED_OBJECTS: Final = ("usage", "timings", "metrics", "meta_info")


class Watch:
    """The observer of one request. `columns` come from its headers."""

    __slots__ = (
        "_inflate",
        "_is_plain",
        "_mode",
        "_num_alike",
        "_pattern",
        "_picked",
        "_recording",
        "_sse",
        "_stall_ns",
        "_stalled_since_ns",
        "_whole",
        "answer",
        "arrival_ns",
        "asked",
        "body_ns",
        "columns",
        "head",
        "is_stream",
        "job",
        "labels",
        "reading",
        "request_id",
        "retries",
        "upstream",
    )

    def __init__(
        self, recording: Recording, head: RequestHead, request_id: str, arrival_ns: int, columns: dict[str, Any]
    ) -> None:
        self.request_id = request_id
        self.arrival_ns = arrival_ns
        self.columns = columns
        self.labels: dict[str, str] = columns.pop("labels")
        self.head = head
        self.upstream: Upstream | None = None
        self.retries: list[str] = []
        self.answer: ResponseHead | None = None
        self.body_ns: int | None = None
        self.is_stream = False
        self.asked = Peek(_ASKED)
        self.reading = Reading(Order(request_id, recording.open_answers))
        self.job: Job | None = recording.new_job(head)
        self._recording = recording
        self._mode = _UNREAD
        self._inflate: Inflater | None = None
        self._is_plain = False
        self._pattern: Pattern | None = None
        self._num_alike = 0
        self._sse = SseParser()
        self._whole: bytearray | None = None
        self._picked: Peek | None = None
        self._stall_ns = 0
        self._stalled_since_ns: int | None = None

    def request_pieces(self, pieces: Sequence[bytes]) -> None:
        for piece in pieces:
            self.asked.feed(piece)
            if self.job is not None:
                self.job.keep(piece)

    def routed(self, choice: Choice, begun_ns: int, now_ns: int) -> None:
        self.upstream = choice.upstream
        self._recording.route(self.request_id, choice, begun_ns, now_ns)

    def retried(self, reason: str) -> None:
        self.retries.append(reason)

    def answered(self, head: ResponseHead, now_ns: int) -> None:
        self.answer = head
        self.labels.update(answer_labels(head, self.request_id))
        if self.job is not None and self.upstream is not None and head.status == 200:
            self._recording.submit(self.job, self.upstream)
        else:
            self.job = None
        self._take_times(head)
        kind = (head.get(b"content-type") or b"").partition(b";")[0].strip().lower()
        self.is_stream = kind == b"text/event-stream"
        if not self.is_stream and kind != b"application/json" and not kind.endswith(b"+json"):
            return
        self._inflate = inflater(head.get(b"content-encoding"))
        self._is_plain = isinstance(self._inflate, Identity)
        if self._inflate is None:
            self.labels["unreadable"] = "content-encoding"
        elif self.is_stream:
            self._mode = _STREAM
        else:
            self._mode, self._whole = _WHOLE, bytearray()

    def _take_times(self, head: ResponseHead) -> None:
        """TGI tells in the head of an answer in one piece how long it waited; nobody else sends both of these headers."""
        if head.get(b"x-validation-time") is not None and head.get(b"x-inference-time") is not None:
            self.reading.engine = TGI
            told = {name: value.decode("latin-1") for name in TIMINGS if (value := head.get(name.encode())) is not None}
            self.reading.columns.update(timing_columns(told))

    def payload(self, pieces: Sequence[bytes], now_ns: int) -> None:
        self.body_ns = now_ns
        if self._mode == _UNREAD or self._inflate is None:
            return
        try:
            for piece in pieces:
                if self._is_plain:
                    if self._pattern is not None and self._pattern.fits(piece):
                        self.reading.tokens.add_plain(now_ns)
                        self._num_alike += 1
                    else:
                        self._take(piece, now_ns)
                else:
                    for part in self._inflate.feed(piece):
                        self._take(part, now_ns)
        except Unreadable:
            self.labels["unreadable"] = "content-encoding"
            self._stop_reading()

    def stalled(self, now_ns: int, is_stalled: bool) -> None:
        if is_stalled:
            self._stalled_since_ns = now_ns
        elif self._stalled_since_ns is not None:
            self._stall_ns += now_ns - self._stalled_since_ns
            self._stalled_since_ns = None

    def unreadable(self) -> None:
        self.labels.setdefault("unreadable", "body")
        self._stop_reading()

    def ended(self, how: str, error: str | None, status: int | None, now_ns: int) -> None:
        self.stalled(now_ns, False)
        self._finish_reading(now_ns)
        self.reading.order.close()
        if self._stall_ns:
            self.labels["client_stall_s"] = f"{self._stall_ns / 1e9:.6f}"
        row = request_row(self, how, error, status, now_ns)
        for check in check_rows(self):
            self._recording.note("check", now_ns, check)
        self._recording.finish(row, self.job)

    def _take(self, part: bytes, now_ns: int) -> None:
        if self._mode != _STREAM:
            self._take_whole(part)
            return
        reading, sse = self.reading, self._sse
        if self._num_alike:
            reading.order.see_same(self._num_alike)
            self._num_alike = 0
        for name, data in sse.feed(part):
            read_event(reading, name, data, now_ns)
        self._pattern = reading.pattern if sse.is_between else None

    def _take_whole(self, part: bytes) -> None:
        if self._picked is not None:
            self._picked.feed(part)
            return
        assert self._whole is not None
        self._whole += part
        if len(self._whole) > MAX_WHOLE_BYTES:
            self._picked = Peek(_PICKED, _PICKED_OBJECTS)
            self._picked.feed(bytes(self._whole))
            self._whole.clear()

    def _finish_reading(self, now_ns: int) -> None:
        if self._mode == _STREAM:
            for event in self._sse.finish():
                read_event(self.reading, event.name, event.data, self.body_ns or now_ns)
        elif self._picked is not None:
            import msgspec

            read_whole(self.reading, msgspec.json.encode(self._picked.values))
        elif self._whole:
            read_whole(self.reading, bytes(self._whole))
        self._stop_reading()

    def _stop_reading(self) -> None:
        self._mode, self._whole, self._picked, self._inflate, self._pattern = _UNREAD, None, None, None, None
