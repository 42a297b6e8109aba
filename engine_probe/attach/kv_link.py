"""The ZMQ side of KV events: who binds and who connects, one port a data-parallel rank, and replay of what was missed.

The engine binds its PUB socket when the endpoint holds `*` or `::` (or is ipc, inproc) and connects otherwise, so the
subscriber does the opposite. A resolved endpoint cannot tell the two apart when the engine chose the port itself
(`tcp://*:0`): then binding here fails, and connecting is right. Replay asks the engine's ROUTER from a DEALER, since a
REQ may receive one reply only; both reply forms ([seq, payload] up to 0.25, [topic, seq, payload] after) are read from
their end. Source: vLLM 0.32.0 `distributed/kv_events.py`; reference 4.10.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import zmq

from engine_probe.digits import port_number, whole_number
from engine_probe.errors import EngineUnreachable, UsageError

END_SEQ: Final = (1 << 64) - 1
RECEIVE_HWM: Final = 200_000
REPLAY_TIMEOUT_S: Final = 5.0
MAX_RANK: Final = 100_000


@dataclass(frozen=True, slots=True)
class KvEndpoint:
    """Where one rank publishes. `bind`: we bind, since the engine connects. `replay`: where a DEALER may ask."""

    address: str
    bind: bool
    replay: str | None = None
    topic: str = ""
    rank: int = 0


def engine_binds(endpoint: str) -> bool:
    """Whether the engine binds this endpoint (vLLM's own rule)."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def endpoints_from_sources(sources: Mapping[str, Any], host: str) -> list[KvEndpoint]:
    """Endpoints from the answer of /kv_event_sources: rank -> publisher config, already resolved for each rank.

    A config may say by `bind` whether the engine binds; else vLLM's rule decides.
    """
    found = []
    for rank, config in sources.items():
        number = whole_number(str(rank), MAX_RANK)
        if number is None or not isinstance(config, Mapping) or not isinstance(config.get("endpoint"), str):
            continue
        replay = config.get("replay_endpoint")
        endpoint, told = config["endpoint"], config.get("bind")
        bind = not (told if isinstance(told, bool) else engine_binds(endpoint))
        found.append(
            KvEndpoint(
                address=_reachable(endpoint, host, bind=bind),
                bind=bind,
                replay=_reachable(replay, host) if isinstance(replay, str) else None,
                topic=str(config.get("topic") or ""),
                rank=number,
            )
        )
    return sorted(found, key=lambda endpoint: endpoint.rank)


def endpoints_from_option(text: str, replay: str | None, host: str, num_ranks: int = 1) -> list[KvEndpoint]:
    """Endpoints from the engine's own setting: `tcp://*:5557` or `tcp://host:5557`, rank r at port + r.

    A prefix `bind:` or `connect:` says what *we* shall do, whatever the rule. Raises UsageError.
    """
    mode, _, rest = text.partition(":")
    endpoint = rest if mode in ("bind", "connect") else text
    for name, value in (("--kv-events", endpoint), ("--kv-replay", replay)):
        if value is not None and not _is_endpoint(value):
            raise UsageError(
                f"{name} is {value!r}; expected what the engine's --kv-events-config has, such as tcp://*:5557.",
                value=value,
            )
    bind = mode == "bind" if mode in ("bind", "connect") else not engine_binds(endpoint)
    return [
        KvEndpoint(
            address=_reachable(offset_port(endpoint, rank), host, bind=bind),
            bind=bind,
            replay=None if replay is None else _reachable(offset_port(replay, rank), host),
            rank=rank,
        )
        for rank in range(num_ranks)
    ]


def offset_port(endpoint: str, rank: int) -> str:
    """tcp port + rank, as the engine does it."""
    if rank == 0 or not endpoint.startswith("tcp://"):
        return endpoint
    head, _, port = endpoint.rpartition(":")
    return f"{head}:{int(port) + rank}"


def open_subscriber(context: zmq.Context[Any], endpoint: KvEndpoint) -> tuple[zmq.Socket[Any], str]:
    """A SUB socket for one rank, and a sentence on how it is attached.

    Raises EngineUnreachable where neither binding nor connecting is possible.
    """
    sub: zmq.Socket[Any] = context.socket(zmq.SUB)
    sub.setsockopt(zmq.LINGER, 0)
    sub.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
    sub.setsockopt(zmq.RECONNECT_IVL, 50)
    sub.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    sub.setsockopt(zmq.SUBSCRIBE, endpoint.topic.encode())
    try:
        if endpoint.bind:
            try:
                sub.bind(_numeric(endpoint.address))
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EADDRINUSE, zmq.EADDRNOTAVAIL):
                    raise
                # The engine chose the port and bound it itself, or the endpoint names another machine.
                sub.connect(endpoint.address)
                return sub, f"connected to {endpoint.address} (it could not be bound here: {error.strerror})"
            return sub, f"bound {endpoint.address}, where the engine connects"
        sub.connect(endpoint.address)
    except (zmq.ZMQError, OSError, ValueError) as error:  # ValueError: a name that no resolver takes
        sub.close()
        raise EngineUnreachable(
            f"KV events at {endpoint.address} cannot be subscribed to ({error}); see the engine's --kv-events-config.",
            url=endpoint.address,
        ) from error
    return sub, f"connected to {endpoint.address}"


def is_reachable(address: str, timeout_s: float = 1.0) -> bool:
    """Whether somebody listens there now; True for what is not TCP, since a file tells nothing of its reader."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    number = port_number(port)
    if not address.startswith("tcp://"):
        return True
    if number is None:
        return False
    try:
        with socket.create_connection((host.strip("[]"), number), timeout_s):
            return True
    except (OSError, UnicodeError):
        return False


def read_message(frames: list[bytes]) -> tuple[int, bytes] | None:
    """(seq, payload) of one PUB message or one replay reply, read from the end; None where it is neither."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        return None
    return int.from_bytes(frames[-2], "big"), frames[-1]


class Replay:
    """Iterates over (seq, payload) of every batch that the engine still keeps from `first_seq` on, in order.

    Ends without an error where the engine does not answer within `timeout_s`, or stops answering for as long;
    `answered` tells whether it said anything, if only that it keeps nothing.
    """

    def __init__(
        self, context: zmq.Context[Any], address: str, first_seq: int, *, timeout_s: float = REPLAY_TIMEOUT_S
    ) -> None:
        self._context = context
        self._address = address
        self._first_seq = first_seq
        self._timeout_s = timeout_s
        self.answered = False

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        dealer: zmq.Socket[Any] = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        try:
            dealer.connect(self._address)
            dealer.send_multipart([b"", self._first_seq.to_bytes(8, "big")])
            deadline = time.monotonic() + self._timeout_s
            while (left := deadline - time.monotonic()) > 0 and dealer.poll(int(left * 1000) + 1):
                message = read_message(dealer.recv_multipart())
                if message is None:
                    continue
                self.answered = True
                if message[0] == END_SEQ:
                    return
                yield message
                deadline = time.monotonic() + self._timeout_s
        except zmq.ZMQError:
            return
        finally:
            dealer.close()


def _is_endpoint(text: str) -> bool:
    if text.startswith(("ipc://", "inproc://")):
        return len(text.partition("://")[2]) > 0
    head, _, port = text.rpartition(":")
    return head.startswith("tcp://") and len(head) > len("tcp://") and port_number(port) is not None


def _reachable(endpoint: str, host: str, *, bind: bool = False) -> str:
    """An address that can be connected to: `*` and `::` stand for all of the engine's addresses, so use its host."""
    if bind:
        return endpoint
    wildcard = host if ":" not in host else f"[{host}]"
    for pattern in ("://*:", "://[::]:", "://:::", "://0.0.0.0:"):
        endpoint = endpoint.replace(pattern, f"://{wildcard}:")
    return endpoint


def _numeric(endpoint: str) -> str:
    """zmq binds addresses and interfaces, not host names."""
    head, _, port = endpoint.rpartition(":")
    name = head.removeprefix("tcp://")
    if not endpoint.startswith("tcp://") or name == "*" or name.startswith("["):
        return endpoint
    return f"tcp://{socket.gethostbyname(name)}:{port}"
