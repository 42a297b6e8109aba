"""Posting OTLP bodies to a backend: again after a while where it is busy, an error that says what it said where it refuses.

Source: OTLP 1.x, "OTLP/HTTP Response": 429, 502, 503 and 504 may be retried, Retry-After is kept to; 200 with
`partial_success` means that some spans were not taken.
"""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import httpx
import msgspec

from collector.intake.otlp_answer import PROTOBUF
from engine_probe.errors import BackendRefused, BackendUnreachable, UsageError
from engine_probe.sending.backoff import Backoff
from engine_probe.wire.codec import JSON_CONTENT_TYPE

TRACES_PATH: Final = "/v1/traces"
TRIES: Final = 6
BUSY: Final = frozenset({429, 502, 503, 504})
MOST_WAIT_S: Final = 60.0
MOST_WORDS: Final = 200
"""Characters of what a backend says that are passed on."""


def traces_url(url: str) -> str:
    """`http://host:4318` or a whole address; `/v1/traces` is added to one without a path. Raises UsageError."""
    try:
        parts = urlsplit(url)
        is_sound = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_sound = False
    if not is_sound:
        raise UsageError(f"{url!r} is no address of an OTLP/HTTP backend; expected http://host:4318", url=url)
    return url.rstrip("/") + TRACES_PATH if parts.path.rstrip("/") == "" else url


class Answer(NamedTuple):
    """What a backend that took a body says of it: spans that it left out, and its words, of them or as a warning."""

    not_taken: int
    words: str


class Backend:
    """A backend that takes OTLP over HTTP."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        timeout_s: float = 30.0,
        sleep: Callable[[float], None] = time.sleep,
        transport: httpx.BaseTransport | None = None,
        on_wait: Callable[[str], None] = lambda why: None,
    ) -> None:
        """`sleep` and `transport` are replaced by tests. `on_wait` is told why a body has to be sent again."""
        self.url = traces_url(url)
        self._sleep, self._on_wait = sleep, on_wait
        self._client = httpx.Client(
            headers={"Content-Type": PROTOBUF, "Content-Encoding": "gzip", **headers},
            timeout=timeout_s,
            transport=transport,
        )

    def send(self, body: bytes) -> Answer:
        """What the backend says of this body, once it took it. Raises BackendUnreachable, BackendRefused."""
        packed, backoff = gzip.compress(body, 3), Backoff(0.5, 30.0)
        said = ""
        for attempt in range(TRIES):
            started = time.monotonic()
            try:
                answer = self._client.post(self.url, content=packed)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                said, least_s = str(error) or type(error).__name__, 0.0
            else:
                if answer.is_success:
                    return self._taken(answer)
                said = f"HTTP {answer.status_code} {_text(answer)}".strip()
                if answer.status_code not in BUSY:
                    raise BackendRefused(
                        f"{self.url} refuses the spans: {said}", url=self.url, status=answer.status_code
                    )
                least_s = _retry_after_s(answer)
            if attempt + 1 < TRIES:
                now = time.monotonic()
                backoff.fail(started, now, least_s)
                wait_s = max(0.0, backoff.resume_at_s - now)
                self._on_wait(f"{self.url} does not take spans ({said}); trying again in {wait_s:.1f} s")
                self._sleep(wait_s)
        raise BackendUnreachable(
            f"{self.url} does not take spans ({said}), tried {TRIES} times; is it an OTLP/HTTP backend?", url=self.url
        )

    def _taken(self, answer: httpx.Response) -> Answer:
        if answer.headers.get("content-type", "").startswith("text/html"):
            raise BackendRefused(
                f"{self.url} answers with a page for people, so it is no OTLP/HTTP backend; correct the address",
                url=self.url,
                status=answer.status_code,
            )
        return _partial(answer)

    def close(self) -> None:
        """Let the connection go."""
        self._client.close()


def _retry_after_s(answer: httpx.Response) -> float:
    try:
        return min(MOST_WAIT_S, max(0.0, float(answer.headers.get("Retry-After", "0"))))
    except ValueError:
        return 0.0  # a date: the doubling waits will do


def _partial(answer: httpx.Response) -> Answer:
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    media_type = answer.headers.get("content-type", "")
    try:
        if media_type.startswith(PROTOBUF):
            told = ExportTraceServiceResponse.FromString(answer.content).partial_success
            return Answer(int(told.rejected_spans), _line(told.error_message))
        if media_type.startswith(JSON_CONTENT_TYPE):
            partial: dict[str, Any] = (
                msgspec.json.decode(answer.content, type=dict[str, Any]).get("partialSuccess") or {}
            )
            return Answer(int(partial.get("rejectedSpans") or 0), _line(str(partial.get("errorMessage") or "")))
    except (DecodeError, msgspec.DecodeError, RecursionError, ValueError, TypeError, AttributeError):
        pass  # it took the body; what it says of it cannot be read
    return Answer(0, "")


def _line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text[:MOST_WORDS]).strip()


def _text(answer: httpx.Response) -> str:
    return _line(answer.text[:MOST_WORDS])
