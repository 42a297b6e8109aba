"""Posting OTLP bodies to a backend: again after a while where it is busy, an error that says what it said where it refuses.

Source: OTLP 1.x, "OTLP/HTTP Response": 429, 502, 503 and 504 may be retried, Retry-After is kept to; 200 with
`partial_success` means that some spans were not taken.
"""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import urlsplit

import httpx

from collector.otlp_answer import PROTOBUF
from engine_probe.backoff import Backoff
from engine_probe.errors import BackendRefused, BackendUnreachable, UsageError

TRACES_PATH: Final = "/v1/traces"
TRIES: Final = 6
BUSY: Final = frozenset({429, 502, 503, 504})
MOST_WAIT_S: Final = 60.0


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


class Backend:
    """A backend that takes OTLP over HTTP."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        timeout_s: float = 30.0,
        sleep: Callable[[float], None] = time.sleep,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`sleep` and `transport` are replaced by tests."""
        self.url = traces_url(url)
        self._sleep = sleep
        self._client = httpx.Client(
            headers={"Content-Type": PROTOBUF, "Content-Encoding": "gzip", **headers},
            timeout=timeout_s,
            transport=transport,
        )

    def send(self, body: bytes) -> int:
        """Spans that the backend did not take of this body. Raises BackendUnreachable, BackendRefused."""
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
                    return _not_taken(answer)
                said = f"HTTP {answer.status_code} {_text(answer)}".strip()
                if answer.status_code not in BUSY:
                    raise BackendRefused(
                        f"{self.url} refuses the spans: {said}", url=self.url, status=answer.status_code
                    )
                least_s = _retry_after_s(answer)
            if attempt + 1 < TRIES:
                now = time.monotonic()
                backoff.fail(started, now, least_s)
                self._sleep(max(0.0, backoff.resume_at_s - now))
        raise BackendUnreachable(
            f"{self.url} does not take spans ({said}), tried {TRIES} times; is it an OTLP/HTTP backend?", url=self.url
        )

    def close(self) -> None:
        """Let the connection go."""
        self._client.close()


def _retry_after_s(answer: httpx.Response) -> float:
    try:
        return min(MOST_WAIT_S, max(0.0, float(answer.headers.get("Retry-After", "0"))))
    except ValueError:
        return 0.0  # a date: the doubling waits will do


def _not_taken(answer: httpx.Response) -> int:
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    if not answer.headers.get("content-type", "").startswith(PROTOBUF):
        return 0
    try:
        return int(ExportTraceServiceResponse.FromString(answer.content).partial_success.rejected_spans)
    except DecodeError:
        return 0


def _text(answer: httpx.Response) -> str:
    return "".join(c if c.isprintable() else " " for c in answer.text[:200]).strip()
