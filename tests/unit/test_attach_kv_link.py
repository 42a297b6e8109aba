"""Who binds, who connects, which port, and replay in both reply forms: over inproc sockets, no network."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from engine_probe.attach.kv_link import (
    END_SEQ,
    KvEndpoint,
    Replay,
    endpoints_from_option,
    endpoints_from_sources,
    engine_binds,
    offset_port,
    open_subscriber,
    read_message,
)
from engine_probe.errors import EngineUnreachable, UsageError


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///run/kv", True),
        ("inproc://kv", True),
        ("tcp://127.0.0.1:5557", False),
        ("tcp://collector:5557", False),
    ],
)
def test_who_binds_follows_the_engines_own_rule(endpoint: str, expected: bool) -> None:
    """A wildcard, ipc and inproc are bound by the engine; an address is connected to."""
    assert engine_binds(endpoint) is expected


def test_sources_of_two_ranks() -> None:
    """The engine's answer is resolved already: rank 1 has its own port; a wildcard stands for the engine's host."""
    sources = {
        "1": {"endpoint": "tcp://*:5558", "replay_endpoint": "tcp://*:5658", "topic": "kv"},
        "0": {"endpoint": "tcp://*:5557", "replay_endpoint": None, "topic": ""},
    }
    assert endpoints_from_sources(sources, "gpu7") == [
        KvEndpoint("tcp://gpu7:5557", False, None, "", 0),
        KvEndpoint("tcp://gpu7:5558", False, "tcp://gpu7:5658", "kv", 1),
    ]


def test_an_engine_that_connects_is_bound_for() -> None:
    """The vLLM 0.32 recordings' case: the endpoint is an address, so the subscriber binds it."""
    sources = {"0": {"endpoint": "tcp://127.0.0.1:15700", "replay_endpoint": None, "topic": "kv@worker-0@tiny"}}
    assert endpoints_from_sources(sources, "127.0.0.1") == [
        KvEndpoint("tcp://127.0.0.1:15700", True, None, "kv@worker-0@tiny", 0)
    ]


@pytest.mark.parametrize(
    "sources", [{}, {"0": {}}, {"0": {"endpoint": 7}}, {"x": {"endpoint": "tcp://*:1"}}, {"0": None}]
)
def test_sources_that_say_nothing_give_nothing(sources: dict[str, Any]) -> None:
    """Events off, or an answer of another form."""
    assert endpoints_from_sources(sources, "h") == []


def test_an_option_gives_one_endpoint_a_rank() -> None:
    """Port + rank, for events and for replay, as the engine does it."""
    assert endpoints_from_option("tcp://*:5557", "tcp://*:5600", "h", 2) == [
        KvEndpoint("tcp://h:5557", False, "tcp://h:5600", "", 0),
        KvEndpoint("tcp://h:5558", False, "tcp://h:5601", "", 1),
    ]
    assert endpoints_from_option("tcp://127.0.0.1:5557", None, "h") == [KvEndpoint("tcp://127.0.0.1:5557", True)]


def test_a_prefix_overrides_the_rule() -> None:
    """`connect:` and `bind:` say what this side does."""
    assert endpoints_from_option("connect:tcp://gpu7:5557", None, "h") == [KvEndpoint("tcp://gpu7:5557", False)]
    assert endpoints_from_option("bind:tcp://*:5557", None, "h") == [KvEndpoint("tcp://*:5557", True)]


@pytest.mark.parametrize(
    "text", ["", "5557", "tcp://*", "tcp://:5557", "http://h:1", "tcp://h:0", "tcp://h:99999", "ipc://"]
)
def test_an_option_that_is_no_endpoint_is_refused_with_an_example(text: str) -> None:
    """The message shows what is expected."""
    with pytest.raises(UsageError, match=r"tcp://\*:5557"):
        endpoints_from_option(text, None, "h")


def test_ipv6_hosts_are_bracketed() -> None:
    """The wildcard of an engine reached by an IPv6 address."""
    assert endpoints_from_option("tcp://*:5557", None, "::1")[0].address == "tcp://[::1]:5557"
    assert offset_port("ipc:///x", 3) == "ipc:///x"


def test_messages_are_read_from_their_end() -> None:
    """PUB message, both replay forms, and frames that are none of them."""
    seq = (7).to_bytes(8, "big")
    assert read_message([b"topic", seq, b"p"]) == (7, b"p")
    assert read_message([b"", seq, b"p"]) == (7, b"p")
    assert read_message([b"", b"topic", seq, b"p"]) == (7, b"p")
    assert read_message([b"x"]) is None
    assert read_message([b"seven", b"p"]) is None


class Router(threading.Thread):
    """A replay server with fixed batches; `with_topic` is the reply form of vLLM 0.26 and later."""

    def __init__(self, context: zmq.Context[Any], address: str, seqs: range, with_topic: bool) -> None:
        super().__init__(daemon=True)
        self.socket: zmq.Socket[Any] = context.socket(zmq.ROUTER)
        self.socket.bind(address)
        self.seqs = seqs
        self.topic = [b"kv"] if with_topic else []
        self.asked: list[int] = []

    def run(self) -> None:
        if not self.socket.poll(5000):
            return
        client, empty, start = self.socket.recv_multipart()
        self.asked.append(int.from_bytes(start, "big"))
        for seq in self.seqs:
            if seq >= self.asked[0]:
                self.socket.send_multipart([client, empty, *self.topic, seq.to_bytes(8, "big"), b"payload-%d" % seq])
        self.socket.send_multipart([client, empty, *(b"" for _ in self.topic), b"\xff" * 8, b""])
        self.socket.close()


@pytest.mark.parametrize("with_topic", [True, False])
def test_replay_gives_what_the_engine_still_keeps(context: zmq.Context[Any], with_topic: bool) -> None:
    """From the number asked for, in order, up to the end marker, in either reply form."""
    router = Router(context, "inproc://replay", range(3, 8), with_topic)
    router.start()
    assert list(Replay(context, "inproc://replay", 5)) == [(5, b"payload-5"), (6, b"payload-6"), (7, b"payload-7")]
    router.join(5)
    assert router.asked == [5]


def test_replay_from_nobody_ends_empty(context: zmq.Context[Any]) -> None:
    """An engine without replay costs the time-out and nothing else."""
    nobody = Replay(context, "inproc://nobody", 0, timeout_s=0.02)
    assert (list(nobody), nobody.answered) == ([], False)


def test_an_engine_that_keeps_nothing_has_answered(context: zmq.Context[Any]) -> None:
    """Only the end marker: there is nothing to give, but somebody is there."""
    router = Router(context, "inproc://empty", range(0), True)
    router.start()
    empty = Replay(context, "inproc://empty", 0)
    assert (list(empty), empty.answered) == ([], True)
    router.join(5)


def test_a_bound_port_is_connected_to_instead(context: zmq.Context[Any]) -> None:
    """The engine bound an address it chose itself (tcp://*:0): binding fails, connecting is right."""
    publisher: zmq.Socket[Any] = context.socket(zmq.PUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    address = f"tcp://127.0.0.1:{port}"
    sub, how = open_subscriber(context, KvEndpoint(address, bind=True))
    sub.close()
    publisher.close()
    assert how.startswith(f"connected to {address} (it could not be bound here")
    sub, how = open_subscriber(context, KvEndpoint("tcp://localhost:0", bind=False))
    sub.close()


def test_an_impossible_address_is_one_sentence(context: zmq.Context[Any]) -> None:
    """The name is not known: the message names the setting."""
    with pytest.raises(EngineUnreachable, match="--kv-events-config"):
        open_subscriber(context, KvEndpoint("tcp://no.such.host.invalid:5557", bind=True))


def test_the_end_marker_is_no_sequence() -> None:
    """Eight 0xFF bytes, unsigned."""
    assert int.from_bytes(b"\xff" * 8, "big") == END_SEQ
