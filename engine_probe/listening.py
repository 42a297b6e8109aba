"""A socket of this machine that listens, before anything else is begun: an address that cannot be had is said first.

Invariant: who connects from `listen` on waits, and is answered once somebody serves.
"""

from __future__ import annotations

import errno
import socket

from engine_probe.errors import CannotListen, UsageError

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on the address. Raises CannotListen (taken, not allowed), UsageError (no such address)."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError, OverflowError) as error:
        raise UsageError(f"{host} port {port} is no address of this machine: {error}", host=host) from error
    family, kind, protocol, _, address = found
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        why = {
            errno.EADDRINUSE: "another process listens there; stop it, or choose another port with --port",
            errno.EACCES: "this user may not; choose a port above 1023 with --port",
            errno.EADDRNOTAVAIL: "this machine has no such address; choose one of its own with --host",
        }.get(error.errno or 0, str(error))
        raise CannotListen(f"cannot listen on {host} port {port}: {why}", host=host, port=port) from error
    return sock


def url_of(sock: socket.socket) -> str:
    """URL under which a bound socket is reached from this machine."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
