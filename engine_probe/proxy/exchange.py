"""One request and its answer: joins a client's connection with an upstream's, and lets bytes through in both directions.

Order of work for every piece of an answer: take its instant, pass it on, only then look at it. A request goes to another
upstream only while nothing of it was sent (no connection came about), or, where it is safe to repeat, while nothing of an
answer has come back; once a byte came back it is never sent again. Either side's end reaches the other side: a client
that goes away ends the work upstream at once, an upstream that breaks off leaves the client's answer visibly unfinished.
Source for what may be repeated: RFC 9110, section 9.2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from engine_probe.proxy.dial import Dial
from engine_probe.proxy.framing import BadFraming, Body, ChunkedBody, LengthBody, UntilClose
from engine_probe.proxy.heads import END, MAX_HEAD_BYTES, BadHead, RequestHead, ResponseHead, parse_response, render
from engine_probe.proxy.refusals import refusal
from engine_probe.proxy.upstream_side import UpstreamConnection
from engine_probe.proxy.upstreams import Upstream, now_s
from engine_probe.proxy.why import why_lost

if TYPE_CHECKING:
    from engine_probe.proxy.client_side import ClientConnection
    from engine_probe.proxy.context import Context, Observer

IDEMPOTENT: Final = frozenset((b"GET", b"HEAD", b"OPTIONS", b"TRACE", b"PUT", b"DELETE"))
MAX_REPLAY_BYTES: Final = 1 << 20


class Exchange:
    """Made with a complete request head. `request_done`: the whole request came; `client` is told when all is over."""

    __slots__ = (
        "_answer",
        "_answer_body",
        "_body",
        "_buffer",
        "_client_ended",
        "_connection",
        "_context",
        "_dial",
        "_head",
        "_heard",
        "_held",
        "_is_over",
        "_is_raw",
        "_is_repeatable",
        "_keeps_client",
        "_now_ns",
        "_observer",
        "_sent_bytes",
        "_unseen",
        "client",
        "request_done",
        "request_id",
    )

    def __init__(
        self,
        context: Context,
        client: ClientConnection,
        head: RequestHead,
        request_id: str,
        observer: Observer | None,
    ) -> None:
        self.client = client
        self.request_id = request_id
        self._context = context
        self._now_ns = context.now_ns
        self._head = head
        self._body = head.body()
        self.request_done = self._body.done
        self._connection: UpstreamConnection | None = None
        self._dial = Dial(
            context,
            attach=self._attach,
            give_up=self._no_upstream,
            connecting=client.pause_reading,
            chosen=lambda *choice: self._observe(lambda observer: observer.routed(*choice)),
            failed=lambda reason: self._observe(lambda observer: observer.retried(reason)),
        )
        self._held: list[bytes] | None = []
        self._unseen: list[bytes] = []
        self._is_repeatable = head.method in IDEMPOTENT or (
            context.repeats_posts or head.get(b"idempotency-key") is not None
        )
        self._sent_bytes = 0
        self._buffer = b""
        self._answer: ResponseHead | None = None
        self._answer_body: Body = LengthBody(0)
        self._heard = False
        self._is_raw = False
        self._keeps_client = False
        self._client_ended = False
        self._is_over = False
        self._observer = observer

    def start(self) -> None:
        """Choose an upstream and connect. The client is read again once there is one."""
        self._dial.next()

    # The client's side

    def request_data(self, data: bytes) -> bytes:
        """Bytes from the client; what lies behind this request's body is given back."""
        pieces: list[bytes] = []
        try:
            used = self._body.feed(data, pieces)
        except BadFraming as error:
            self._refuse(400, f"The request's body cannot be read: {error}.", "bad request")
            return b""
        self.request_done = self._body.done
        mine = data if used == len(data) else data[:used]
        self._note_sent(mine)
        if self._connection is not None:
            self._connection.write(mine)
        self._unseen += pieces
        if self._connection is not None:
            self._look_at_request()
        return data[used:]

    def client_ended(self) -> None:
        """The client will send no more. It may still read: the upstream is told the same, and decides."""
        self._client_ended = True
        if not self.request_done:
            self._give_up("the client broke off in mid-request")
        elif self._connection is not None and not self._connection.write_eof():
            self._give_up("the client closed")

    def client_lost(self) -> None:
        """The client is gone: nobody reads the answer."""
        self._give_up("the client closed")

    def client_paused(self, is_paused: bool) -> None:
        """The client reads more slowly than the upstream sends (or keeps up again)."""
        if self._connection is not None:
            if is_paused:
                self._connection.pause_reading()
            else:
                self._connection.resume_reading()
        self._observe(lambda observer: observer.stalled(self._context.now_ns(), is_paused))

    def stop(self) -> None:
        """The proxy stops and waits no longer."""
        self._give_up("kvscope proxy was stopped")

    # Sending

    def _attach(self, connection: UpstreamConnection, upstream: Upstream) -> None:
        self._connection = connection
        connection.exchange = self
        connection.num_requests += 1
        self._buffer, self._heard = b"", False
        first_line = b"%b %b%b HTTP/1.%d" % (
            self._head.method,
            upstream.prefix,
            self._head.target,
            self._head.minor,
        )
        headers = self._context.request_headers(self._head, upstream, self.request_id)
        connection.write(render(first_line, headers) + b"".join(self._held or ()))
        if not self._is_repeatable:
            self._held = None
        if self._client_ended and not connection.write_eof():
            self._give_up("the client closed")
            return
        if self.client.is_write_paused:
            connection.pause_reading()
        if not connection.is_write_paused:
            self.client.resume_reading()
        self._look_at_request()

    def _look_at_request(self) -> None:
        """Only once it was passed on."""
        if self._unseen:
            pieces, self._unseen = self._unseen, []
            self._observe(lambda observer: observer.request_pieces(pieces))

    def _note_sent(self, data: bytes) -> None:
        """Keep what an upstream that comes later needs: all of it before there is one, and while it may be repeated."""
        self._sent_bytes += len(data)
        if self._held is None:
            return
        if self._connection is not None and (self._heard or self._sent_bytes > MAX_REPLAY_BYTES):
            self._held = None
        else:
            self._held.append(data)

    def _no_upstream(self) -> None:
        problems = self._dial.problems
        self._refuse(502, f"No upstream answers. {' '.join(problems)}", "no upstream answers", upstreams=problems)

    # The upstream's side

    def upstream_data(self, data: bytes) -> None:
        """Bytes of the answer."""
        now = self._now_ns()
        if self._answer is None:
            self._heard, self._held = True, None
            self._take_heads(data, now)
        else:
            self._take_body(data, b"", now)

    def upstream_ended(self, exc: Exception | None) -> None:
        """The upstream's connection is gone."""
        connection, self._connection = self._connection, None
        if self._is_over or connection is None:
            return
        if self._answer is None:
            self._lost_before_answer(exc)
        elif (exc is None and self._body_closed()) or self._answer_body.done:
            self._complete(connection, is_reusable=False)
        elif self._client_ended:
            self._end("aborted", "the client closed")
        else:
            self._end("failed", f"the upstream broke off in mid-answer ({why_lost(exc)})")
            if isinstance(self._answer_body, UntilClose) and exc is not None:
                self.client.reset()
            else:
                self.client.close()

    def _lost_before_answer(self, exc: Exception | None) -> None:
        reason = f"{self._url} took the request and broke off before it answered ({why_lost(exc)})."
        if self._client_ended:
            self._end("aborted", "the client closed")
            self.client.close()
        elif self._is_repeatable and not self._heard and self._held is not None:
            self._dial.again(reason)
        else:
            self._refuse(502, f"No answer. {reason}", "the upstream broke off before it answered")

    def _take_heads(self, data: bytes, now: int) -> None:
        """Interim answers (1xx) pass as they are; the final head is passed on with what follows it."""
        self._buffer += data
        while (end := self._buffer.find(END)) >= 0:
            block, rest = self._buffer[: end + 4], self._buffer[end + 4 :]
            try:
                answer = parse_response(block)
                if answer.status == 101:
                    raise BadHead("it changes the protocol without having been asked", 502)
            except BadHead as error:
                self._not_http(error.problem)
                return
            if answer.status < 200:
                self._buffer = rest
                if self._head.minor:
                    self.client.write(block)
                continue
            self._buffer = b""
            self._begin_answer(answer, rest, now)
            return
        if len(self._buffer) > MAX_HEAD_BYTES:
            self._not_http("its head is longer than 64 KiB")

    def _begin_answer(self, answer: ResponseHead, rest: bytes, now: int) -> None:
        self._answer = answer
        self._answer_body = answer.body(self._head.method)
        ends_with_close = isinstance(self._answer_body, UntilClose)
        self._keeps_client = not (self._head.wants_close or ends_with_close or self._context.is_draining)
        headers = self._context.answer_headers(answer, self.request_id)
        if not self._keeps_client:
            headers.append((b"Connection", b"close"))
        elif not self._head.minor:
            headers.append((b"Connection", b"keep-alive"))
        status_line = b"HTTP/1.1 %d %b" % (answer.status, answer.reason)
        self._observe(lambda observer: observer.answered(answer, now))
        self._take_body(rest, render(status_line, headers), now)

    def _take_body(self, data: bytes, head: bytes, now: int) -> None:
        pieces: list[bytes] = []
        is_broken = False
        num_bytes = used = len(data)
        if not self._is_raw:
            try:
                used = self._answer_body.feed(data, pieces)
            except BadFraming:
                is_broken = self._is_raw = True
        if used != num_bytes:
            data = data[:used]
        self.client.write(head + data if head else data)
        observer = self._observer
        if observer is not None:
            try:
                if pieces:
                    observer.payload(pieces, now)
                if is_broken:
                    observer.unreadable()
            except Exception as error:
                self._failed_to_look(error)
        if self._answer_body.done and not self._is_raw:
            assert self._connection is not None
            self._complete(self._connection, is_reusable=used == num_bytes)

    @property
    def _url(self) -> str:
        return "" if self._dial.upstream is None else self._dial.upstream.url

    def _body_closed(self) -> bool:
        return self._is_raw or self._answer_body.closed()

    def _not_http(self, problem: str) -> None:
        reason = f"{self._url} answers, but not in HTTP: {problem}."
        self._refuse(502, reason, "the upstream does not answer in HTTP")

    # Ends

    def _complete(self, connection: UpstreamConnection, *, is_reusable: bool) -> None:
        assert self._answer is not None
        upstream = self._dial.upstream
        self._connection, connection.exchange = None, None
        is_reusable = is_reusable and self.request_done and not self._answer.wants_close and not self._client_ended
        if upstream is not None and is_reusable and connection.is_open and not self._is_raw:
            upstream.give_back(connection, now_s(), is_stream=isinstance(self._answer_body, ChunkedBody))
        else:
            connection.close()
        self._end("failed" if self._is_raw else "complete", "the answer's framing is broken" if self._is_raw else None)
        self.client.exchange_over(keep=self._keeps_client and not self._is_raw, request_done=self.request_done)

    def _refuse(self, status: int, detail: str, error: str, **facts: object) -> None:
        """Answer in the upstream's place, where it has not begun to answer itself; else only the connection can say it."""
        begun = self._answer is not None
        keeps = self.request_done and not self._head.wants_close and not self._context.is_draining
        if not begun:
            head, body = refusal(status, detail, request_id=self.request_id, closes=not keeps, **facts)
            self.client.write(head if self._head.method == b"HEAD" else head + body)
        self._end("refused", error, status=None if begun else status)
        self.client.exchange_over(keep=keeps and not begun, request_done=self.request_done)

    def _give_up(self, reason: str) -> None:
        if not self._is_over:
            self._end("aborted", reason)
            self.client.close()

    def _end(self, how: str, error: str | None, status: int | None = None) -> None:
        """The one end of the exchange: frees the upstream and has the row made."""
        if self._is_over:
            return
        self._is_over = True
        self._held = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.exchange = None
            connection.abort()
        self._dial.close()
        now = self._context.now_ns()
        self._look_at_request()
        self._observe(lambda observer: observer.ended(how, error, status, now))
        self._observer = None

    def _observe(self, look: Callable[[Observer], None]) -> None:
        """Looking may fail; passing on may not."""
        if self._observer is not None:
            try:
                look(self._observer)
            except Exception as error:
                self._failed_to_look(error)

    def _failed_to_look(self, error: Exception) -> None:
        self._context.observer_failed(error)
        if self._observer is not None:
            self._observer.unreadable()
