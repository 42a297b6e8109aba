"""One POST to a receiver: to an address that was checked, with TLS verified for the name, with an end to its patience.

What a receiver answers is text of others, and so are the addresses that it redirects to: whatever they hold is a failed delivery and
no other error. Nothing of the environment is read (no proxy: a proxy would connect for us to where the guard would not). A redirect is followed where
it keeps method and body (307, 308), each hop checked as the first, never from https to http; to another origin the message goes
without what was secret for the first. Any other redirect is a failure that names where it pointed.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import quote, urljoin, urlsplit

from alerts.address_guard import Networks, Resolve, checked_addresses
from engine_probe.errors import AddressRefused, DeliveryFailed

MOST_HOPS: Final = 3
MOST_ANSWER: Final = 4_096
FOLLOWED: Final = (307, 308)
TRIED_AGAIN: Final = frozenset({408, 425, 429})
"""Client errors that pass; any other 4xx will be the same next time."""


_IN_PATHS: Final = "!#$%&'()*+,/:;=?@[]~"
"""Left as they are in a path: what is quoted already is not quoted twice."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the receiver said; the body's beginning alone."""

    status: int
    body: str


@dataclass(frozen=True, slots=True)
class _Target:
    """A URL in the parts that a connection needs; `host` as DNS has it, `path` in ASCII."""

    scheme: str
    host: str
    port: int
    path: str
    netloc: str

    @property
    def origin(self) -> tuple[str, str, int]:
        """Who may see what is secret for it."""
        return self.scheme, self.host, self.port


def post(
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    secret_headers: Mapping[str, str],
    allowed: Networks,
    timeout_s: float,
    context: ssl.SSLContext | None = None,
    resolve: Resolve | None = None,
    now_s: Callable[[], float] | None = None,
) -> Answer:
    """Send; the answer where it is 2xx. Raises AddressRefused, DeliveryFailed (`is_final`: no sense in trying again).

    secret_headers  sent to the URL's own origin alone
    timeout_s       for all of it, however slowly bytes drip
    """
    end_s = time.monotonic() + timeout_s
    target = _target(url)
    first = target.origin
    for _ in range(MOST_HOPS + 1):
        sent = {**headers, **(secret_headers if target.origin == first else {})}
        status, found, text = _once(url, target, body, sent, allowed, end_s, context, resolve)
        if 200 <= status < 300:
            return Answer(status, text)
        if status not in FOLLOWED or "location" not in found:
            raise _refused(url, status, found, text, now_s)
        url, target = _next(url, target, found["location"])
    raise DeliveryFailed(f"{_told(url)}: more than {MOST_HOPS} redirects", status=None, is_final=True)


def _next(url: str, now: _Target, location: str) -> tuple[str, _Target]:
    """Where a redirect leads. Raises AddressRefused for what is no http, or loses TLS; DeliveryFailed for what is no address."""
    try:
        there = urljoin(url, location)
    except ValueError as error:
        raise _no_address(f"{_told(url)} leads to an address that is none", error) from error
    scheme = there.partition(":")[0].lower()
    if scheme != "https" and now.scheme == "https":
        raise AddressRefused(f"{_told(url)} leads to {_told(there)}, without TLS: not sent", host=_told(there))
    if scheme not in ("http", "https"):
        raise AddressRefused(f"{_told(url)} leads to {_told(there)}, which is no http: not sent", host=_told(there))
    return there, _target(there)


def _target(url: str) -> _Target:
    """Raises DeliveryFailed, for good, for a URL that names no host and port."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").lower()
        port = parts.port or (443 if parts.scheme == "https" else 80)
        host = host if host.isascii() else host.encode("idna").decode()
        netloc = parts.netloc.rpartition("@")[2]
        netloc = netloc if netloc.isascii() else f"{host}:{port}"
    except ValueError as error:  # of which what cannot be encoded is a kind
        raise _no_address(_told(url), error) from error
    if not host:
        raise _no_address(_told(url), ValueError("it names no host"))
    path = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=_IN_PATHS)
    return _Target(parts.scheme, host, port, path, netloc)


def _no_address(what: str, error: ValueError) -> DeliveryFailed:
    return DeliveryFailed(f"{what}: no address that a message could go to ({error})", status=None, is_final=True)


def _once(
    url: str,
    target: _Target,
    body: bytes,
    headers: Mapping[str, str],
    allowed: Networks,
    end_s: float,
    context: ssl.SSLContext | None,
    resolve: Resolve | None,
) -> tuple[int, dict[str, str], str]:
    addresses = checked_addresses(target.host, target.port, allowed, resolve)
    connection = http.client.HTTPConnection(target.host, target.port)
    try:
        connection.sock = _connect(addresses, target.port, end_s)
        with _deadline(connection, _left(end_s)):
            if target.scheme == "https":
                secure = context or ssl.create_default_context()
                wrapped = secure.wrap_socket(
                    connection.sock, server_hostname=target.host, do_handshake_on_connect=False
                )
                connection.sock = wrapped  # before the handshake, which the deadline must be able to cut off too
                wrapped.do_handshake()
            connection.request("POST", target.path, body, {"Host": target.netloc, "Connection": "close", **headers})
            answer = connection.getresponse()
            text = answer.read(MOST_ANSWER).decode("utf-8", "replace")
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, text
    except ssl.SSLCertVerificationError as error:
        why = f"{_told(url)}: its certificate is not to be trusted ({error.verify_message}); give ca_file where it is your own"
        raise DeliveryFailed(why, status=None, is_final=False) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = "no answer in time" if isinstance(error, TimeoutError) else (str(error) or type(error).__name__)
        raise DeliveryFailed(f"{_told(url)}: {why}", status=None, is_final=False) from error
    finally:
        connection.close()


def _connect(addresses: list[str], port: int, end_s: float) -> socket.socket:
    """To the first of the checked addresses that takes the connection, each in its share of the time: one that swallows what is sent
    to it leaves time for the next. An address is no name: nothing is resolved here."""
    failure: OSError = OSError("no address")
    for number, address in enumerate(addresses):
        share_s = _left(end_s) / (len(addresses) - number)
        try:
            connected = socket.create_connection((address, port), timeout=share_s)
        except OSError as error:
            failure = error
            continue
        connected.settimeout(_left(end_s))
        return connected
    raise failure


def _left(end_s: float) -> float:
    """Seconds until then. Raises TimeoutError once it is over."""
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no answer in time")
    return left_s


@contextmanager
def _deadline(connection: http.client.HTTPConnection, timeout_s: float) -> Iterator[None]:
    """Cut the connection off after `timeout_s`: the socket's own time-out begins again with every byte."""
    late = threading.Event()

    def cut() -> None:
        late.set()
        sock: Any = connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(timeout_s, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        if late.is_set():
            raise TimeoutError("no answer in time") from error
        raise
    finally:
        timer.cancel()


def _refused(
    url: str, status: int, found: Mapping[str, str], text: str, now_s: Callable[[], float] | None
) -> DeliveryFailed:
    if 300 <= status < 400:
        where = f" to {_told(urljoin(url, found['location']))}" if "location" in found else ""
        return DeliveryFailed(
            f"{_told(url)} answered {status}, a redirect{where} that would lose the message; give the final URL",
            status=status,
            is_final=True,
        )
    said = " ".join(text.split())[:200]
    again = status >= 500 or status in TRIED_AGAIN
    return DeliveryFailed(
        f"{_told(url)} answered {status}{f': {said}' if said else ''}",
        status=status,
        is_final=not again,
        retry_after_s=_retry_after(found.get("retry-after"), now_s) if again else None,
    )


def _retry_after(text: str | None, now_s: Callable[[], float] | None) -> float | None:
    """Seconds, or an HTTP date; None where it is neither."""
    if text is None:
        return None
    if text.strip().isascii() and text.strip().isdigit():
        return float(text[:9])
    try:
        moment_s = parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, ArithmeticError, LookupError):
        return None
    return max(0.0, moment_s - now_s()) if now_s is not None else None


def _told(url: str) -> str:
    """The URL without what may be secret in it: webhooks carry tokens in their paths. Of any text, also one that is no URL."""
    scheme, _, rest = url.partition(":")
    netloc, _, path = rest.removeprefix("//").partition("/")
    host, asked, _ = netloc.partition("#")[0].partition("?")
    return f"{scheme}://{host.rpartition('@')[2]}{'/...' if path or asked else ''}"[:200]
