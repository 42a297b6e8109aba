"""A webhook receiver for tests: a real HTTP server on loopback that answers as scripted, and dies and returns."""

from __future__ import annotations

import base64
import hmac
import json
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any

from alerts.receivers import Receiver, checked
from tests.loopback import Loopback

HERE = ("127.0.0.0/8",)


@dataclass(frozen=True)
class Arrived:
    """One message as it came; header names in lower case."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)

    @property
    def delivery_id(self) -> str:
        return self.headers["kvscope-delivery"]


@dataclass(frozen=True)
class Say:
    """What to answer. hang_up: nothing, after the message was read (the receiver has it, the sender does not know)."""

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b"ok"
    hang_up: bool = False
    drip_s: float | None = None


def verify(secret: str, found: dict[str, str], body: bytes, now_s: float) -> bool:
    """What a receiver does (Standard Webhooks): the signature is right, and no more than five minutes off."""
    try:
        timestamp = int(found["webhook-timestamp"])
        signed = f"{found['webhook-id']}.{timestamp}.".encode() + body
        given = found["webhook-signature"]
    except (KeyError, ValueError):
        return False
    key = base64.b64decode(secret.removeprefix("whsec_")) if secret.startswith("whsec_") else secret.encode()
    expected = base64.b64encode(hmac.digest(key, signed, "sha256")).decode()
    return abs(now_s - timestamp) <= 300 and f"v1,{expected}" in given.split()


class Mailbox:
    """`script(arrived, n)` answers the n-th message (from 0)."""

    def __init__(self, script: Callable[[Arrived, int], Say] = lambda *_: Say()) -> None:
        self.script = script
        self.arrived: list[Arrived] = []
        self.server = Loopback()

    @property
    def url(self) -> str:
        return f"{self.server.url}/hook"

    def listen(self, tls: ssl.SSLContext | None = None) -> None:
        box = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                found = Arrived(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
                box.arrived.append(found)
                say = box.script(found, len(box.arrived) - 1)
                if say.hang_up:
                    self.close_connection = True
                    return
                if say.drip_s is not None:
                    for letter in b"HTTP/1.1 200 OK\r\n":
                        self.wfile.write(bytes([letter]))
                        time.sleep(say.drip_s)
                    return
                self.send_response(say.status)
                for name, value in say.headers:
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(say.body)))
                self.end_headers()
                self.wfile.write(say.body)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server.listen(Handler, tls)

    def stop(self) -> None:
        self.server.stop()


@contextmanager
def mailbox(script: Callable[[Arrived, int], Say] = lambda *_: Say(), **listen: Any) -> Iterator[Mailbox]:
    """A receiver that listens until the block ends."""
    made = Mailbox(script)
    made.listen(**listen)
    try:
        yield made
    finally:
        made.stop()


def receiver(url: str, name: str = "box", **fields: Any) -> Receiver:
    """A webhook receiver on this machine; no waiting, no repeating."""
    timing = {"group_wait_s": 0.0, "group_interval_s": 0.0, "repeat_interval_s": 3600.0}
    return checked(
        Receiver(**{"name": name, "kind": "webhook", "url": url, "allow_networks": HERE, **timing, **fields})
    )
