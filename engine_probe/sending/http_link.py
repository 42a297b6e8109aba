"""One kept-alive HTTP connection to a collector, owned by one worker thread.

Invariant: `post` returns an answer or raises `LinkDown`; a connection that the other side closed while it was idle is
made anew at once, which is safe because a batch that arrives twice is recognised.
"""

from __future__ import annotations

import contextlib
import http.client
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final
from urllib.parse import urlsplit

from engine_probe.errors import UsageError

EVENTS_PATH: Final = "/v1/events"
_MAX_ANSWER_BYTES: Final = 1 << 16
MAX_RETRY_AFTER_S: Final = 300.0


class LinkDown(Exception):
    """Nothing answers, or not in HTTP."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the collector said. retry_after_s: how long it asked us to wait, 0 where it did not."""

    status: int
    body: bytes
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Address:
    """Where batches go."""

    scheme: str
    host: str
    port: int | None
    path: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """`http://host:8321` or with a path; `/v1/events` is added where it is not there. Raises UsageError."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise UsageError(f"{url!r} is no address of a collector: {error}", url=url) from error
        if parts.scheme not in ("http", "https") or not host:
            raise UsageError(f"{url!r} is no address of a collector; expected http://host:8321", url=url)
        path = parts.path.rstrip("/")
        return cls(parts.scheme, host, port, path if path.endswith(EVENTS_PATH) else path + EVENTS_PATH)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}{'' if self.port is None else f':{self.port}'}{self.path}"


class Link:
    """A connection, opened when it is needed. timeout_s bounds each wait for the other side."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None

    def post(self, body: bytes, headers: dict[str, str]) -> Answer:
        """Send one batch. Raises LinkDown."""
        reused = self._connection is not None
        try:
            return self._post(body, headers)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if not reused or isinstance(error, TimeoutError):
                raise LinkDown(_words(error)) from error
        try:
            return self._post(body, headers)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise LinkDown(_words(error)) from error

    def close(self) -> None:
        """Close the connection; the next `post` opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _post(self, body: bytes, headers: dict[str, str]) -> Answer:
        connection = self._connection = self._connection or self._open()
        # A collector that refuses by the length answers before it has read everything: its answer counts.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request("POST", self._address.path, body=body, headers=headers)
        response = connection.getresponse()
        content = response.read(_MAX_ANSWER_BYTES)
        answer = Answer(response.status, content, _retry_after_s(response.getheader("Retry-After")))
        if response.will_close or not response.isclosed():
            self.close()
        return answer

    def _open(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._address.scheme == "https" else http.client.HTTPConnection
        return kind(self._address.host, self._address.port, timeout=self._timeout_s)


def _retry_after_s(text: str | None) -> float:
    """Seconds of a Retry-After header (a number or a date), at most five minutes; 0 where there is none."""
    if not text:
        return 0.0
    try:
        wait_s = float(text) if text.strip().isdigit() else parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(max(wait_s, 0.0), MAX_RETRY_AFTER_S)


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
