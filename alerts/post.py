"""One POST to a receiver: to an address that was checked, with TLS verified for the name, with an end to its patience.

Nothing of the environment is read (no proxy: a proxy would connect for us to where the guard would not). A redirect is followed where
it keeps method and body (307, 308), each hop checked as the first, never from https to http; to another origin the message goes
without what was secret for the first. Any other redirect is a failure that names where it pointed.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

from alerts.address_guard import Networks, Resolve, checked_addresses
from engine_probe.errors import AddressRefused, DeliveryFailed

MOST_HOPS: Final = 3
MOST_ANSWER: Final = 4_096
FOLLOWED: Final = (307, 308)
TRIED_AGAIN: Final = frozenset({408, 425, 429})
"""Client errors that pass; any other 4xx will be the same next time."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the receiver said; the body's beginning alone."""

    status: int
    body: str


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
    first = _origin(url)
    for _ in range(MOST_HOPS + 1):
        sent = {**headers, **(secret_headers if _origin(url) == first else {})}
        status, found, text = _once(url, body, sent, allowed, timeout_s, context, resolve)
        if 200 <= status < 300:
            return Answer(status, text)
        if status not in FOLLOWED or "location" not in found:
            raise _refused(url, status, found, text, now_s)
        target = urljoin(url, found["location"])
        if urlsplit(target).scheme != "https" and urlsplit(url).scheme == "https":
            raise AddressRefused(f"{_told(url)} leads to {_told(target)}, without TLS: not sent", host=_told(target))
        if urlsplit(target).scheme not in ("http", "https") or not urlsplit(target).hostname:
            raise AddressRefused(
                f"{_told(url)} leads to {_told(target)}, which is no http: not sent", host=_told(target)
            )
        url = target
    raise DeliveryFailed(f"{_told(url)}: more than {MOST_HOPS} redirects", status=None, is_final=True)


def _once(
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    allowed: Networks,
    timeout_s: float,
    context: ssl.SSLContext | None,
    resolve: Resolve | None,
) -> tuple[int, dict[str, str], str]:
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    addresses = checked_addresses(host, port, allowed, resolve)
    connection = http.client.HTTPConnection(host, port)
    try:
        with _deadline(connection, timeout_s):
            connection.sock = _connect(addresses, port, timeout_s)
            if parts.scheme == "https":
                secure = context or ssl.create_default_context()
                wrapped = secure.wrap_socket(connection.sock, server_hostname=host, do_handshake_on_connect=False)
                connection.sock = wrapped  # before the handshake, which the deadline must be able to cut off too
                wrapped.do_handshake()
            netloc = parts.netloc.rpartition("@")[2]
            connection.request("POST", path, body, {"Host": netloc, "Connection": "close", **headers})
            answer = connection.getresponse()
            text = answer.read(MOST_ANSWER).decode("utf-8", "replace")
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, text
    except ssl.SSLCertVerificationError as error:
        why = f"{_told(url)}: its certificate is not to be trusted ({error.verify_message}); give ca_file where it is your own"
        raise DeliveryFailed(why, status=None, is_final=False) from error
    except (OSError, http.client.HTTPException) as error:
        why = "no answer in time" if isinstance(error, TimeoutError) else (str(error) or type(error).__name__)
        raise DeliveryFailed(f"{_told(url)}: {why}", status=None, is_final=False) from error
    finally:
        connection.close()


def _connect(addresses: list[str], port: int, timeout_s: float) -> socket.socket:
    """To the first of the checked addresses that takes the connection. An address is no name: nothing is resolved here."""
    failure: OSError = OSError("no address")
    for address in addresses:
        try:
            return socket.create_connection((address, port), timeout=timeout_s)
        except OSError as error:
            failure = error
    raise failure


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
        moment = parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    return max(0.0, moment.timestamp() - now_s()) if now_s is not None else None


def _origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or (443 if parts.scheme == "https" else 80)


def _told(url: str) -> str:
    """The URL without what may be secret in it: webhooks carry tokens in their paths."""
    parts = urlsplit(url)
    rest = "/..." if parts.path not in ("", "/") or parts.query else ""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{rest}"[:200]
