"""The engines or APIs behind the proxy: their addresses, their kept-alive connections, and which of them is asked next.

An idle connection is used for a bounded time: servers of engines close theirs after 5 s, and a request that crosses such a close
on the wire could not be sent again; what speaks TLS stands behind a load balancer that waits longer, and its connections are
dear. Some servers promise to keep a connection and close it after every streamed answer (llama-server, 2026): after a stream it
is left alone for a moment, and an upstream that was seen to do so gets a new connection after each. An upstream that refused a connection is asked last for a growing while,
never not at all: if all are down, all are tried.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

from engine_probe.errors import UsageError

if TYPE_CHECKING:
    from engine_probe.proxy.upstream_side import UpstreamConnection

IDLE_S: Final = 2.5
TLS_IDLE_S: Final = 25.0
MAX_IDLE: Final = 512
SETTLE_S: Final = 0.05
"""Between the end of a stream and the next request on its connection: a close that was on its way has come by then."""
FIRST_DOWN_S: Final = 1.0
MAX_DOWN_S: Final = 30.0

Policy = Literal["least_outstanding", "round_robin"]
POLICIES: Final[tuple[Policy, ...]] = ("least_outstanding", "round_robin")


@dataclass(slots=True)
class Upstream:
    """One of them. `name` goes into rows as the worker; `prefix` is put before the client's path; `tls` None: plain HTTP."""

    name: str
    url: str
    host: str
    port: int
    prefix: bytes
    host_header: bytes
    tls: ssl.SSLContext | None
    outstanding: int = 0
    failures: int = 0
    down_until_s: float = 0.0
    closes_after_streams: bool = False
    idle: list[UpstreamConnection] = field(default_factory=list)

    @property
    def idle_s(self) -> float:
        """How long a connection may have been idle."""
        return IDLE_S if self.tls is None else TLS_IDLE_S

    def take_idle(self, now_s: float) -> UpstreamConnection | None:
        """A connection that is still good: the one used last or, where that settles, the one used first; None for none."""
        for place in (-1, 0):
            while self.idle:
                connection = self.idle[place]
                is_good = self._is_good(connection, now_s)
                if is_good and now_s < connection.usable_from_s:
                    break
                del self.idle[place]
                if is_good:
                    return connection
                connection.close()
        return None

    def give_back(self, connection: UpstreamConnection, now_s: float, *, is_stream: bool = False) -> None:
        """Keep a connection whose answer is complete. is_stream: it had no length, but an end."""
        if len(self.idle) >= MAX_IDLE or (is_stream and self.closes_after_streams):
            connection.close()
            return
        connection.idle_since_s = now_s
        connection.usable_from_s = now_s + SETTLE_S if is_stream else now_s
        connection.resume_reading()
        self.idle.append(connection)

    def sweep(self, now_s: float) -> None:
        """Close what has been idle too long."""
        kept = []
        for connection in self.idle:
            if self._is_good(connection, now_s):
                kept.append(connection)
            else:
                connection.close()
        self.idle = kept

    def _is_good(self, connection: UpstreamConnection, now_s: float) -> bool:
        if connection.is_open:
            return now_s - connection.idle_since_s < self.idle_s
        if connection.closed_s < connection.usable_from_s:
            self.closes_after_streams = True
        return False

    def failed(self, now_s: float) -> bool:
        """It could not be connected to; True where that is news."""
        self.failures += 1
        self.down_until_s = now_s + min(FIRST_DOWN_S * 2 ** (self.failures - 1), MAX_DOWN_S)
        return self.failures == 1

    def answered(self) -> bool:
        """It could be connected to; True where that is news."""
        was_down, self.failures, self.down_until_s = self.failures > 0, 0, 0.0
        return was_down


@dataclass(frozen=True, slots=True)
class Choice:
    """Which upstream was chosen, and what was believed of each (rows for `route.candidates`)."""

    upstream: Upstream
    candidates: list[dict[str, Any]]


class Balancer:
    """Chooses among upstreams. Raises UsageError where two have one name, or the policy is not known."""

    def __init__(self, upstreams: Sequence[Upstream], policy: Policy = "least_outstanding") -> None:
        if not upstreams:
            raise UsageError("kvscope proxy needs at least one --upstream URL.")
        names = [upstream.name for upstream in upstreams]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UsageError(f"Two upstreams are called {twice[0]}; give them names: --upstream NAME=URL.")
        if policy not in POLICIES:
            raise UsageError(f"--policy is {policy!r}; expected {' or '.join(POLICIES)}.")
        self.upstreams = list(upstreams)
        self.policy = policy
        self._turn = 0

    def choose(self, tried: Sequence[Upstream], now_s: float) -> Choice | None:
        """The next to ask; None where all were tried. Those that are down come last."""
        left = [upstream for upstream in self.upstreams if upstream not in tried]
        if not left:
            return None
        candidates = [
            {"worker": one.name, "matched_tokens": None, "load": float(one.outstanding), "queue": None, "score": None}
            for one in left
        ]
        num = len(self.upstreams)
        turn, self._turn = self._turn, (self._turn + 1) % num
        in_turn = sorted(left, key=lambda one: (self.upstreams.index(one) - turn) % num)
        up = [one for one in in_turn if one.down_until_s <= now_s] or in_turn
        if self.policy == "least_outstanding":
            return Choice(min(up, key=lambda one: one.outstanding), candidates)
        return Choice(up[0], candidates)


def parse_upstream(text: str, verify: bool | ssl.SSLContext = True) -> Upstream:
    """`URL` or `NAME=URL` as on the command line. Raises UsageError."""
    from engine_probe.attach.fetch import normalise_url

    name, equals, url = text.partition("=")
    if not equals or "/" in name or ":" in name:
        name, url = "", text
    elif not name.strip():
        raise UsageError(f"{text!r} has no name before its `=`; expected NAME=http://host:port.")
    url = normalise_url(url)
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise UsageError(f"{text!r} is not an address: {error}. Expected http://host:port.", url=text) from error
    if parts.query or parts.fragment or parts.username:
        raise UsageError(  # a password belongs into no message
            f"The upstream at {parts.hostname!r} has more than host, port and path; clients bring keys and queries themselves."
        )
    host = parts.hostname or ""
    tls = None
    if parts.scheme == "https":
        tls = verify if isinstance(verify, ssl.SSLContext) else _context(verify)
    return Upstream(
        name=name or (f"{host}:{port}"),
        url=url,
        host=host,
        port=port,
        prefix=parts.path.rstrip("/").encode("ascii", "strict"),
        host_header=parts.netloc.encode("idna" if not parts.netloc.isascii() else "ascii"),
        tls=tls,
    )


def now_s() -> float:
    """The clock of idle connections and of upstreams that are down, s."""
    return time.monotonic()


def _context(verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
