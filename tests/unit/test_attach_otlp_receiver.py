"""The trace receiver answers as OTLP asks, counts a span once, and survives what is no trace."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from engine_probe.attach import otlp_receiver
from engine_probe.attach.otlp_receiver import OtlpReceiver
from engine_probe.errors import UsageError

NOW = 1_700_000_000_000_000_000


class Caught:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.receiver = OtlpReceiver(0, "w", self.rows.extend, clock=lambda: NOW)
        self.receiver.start()

    def post(self, body: bytes, path: str = "/v1/traces", **headers: str) -> tuple[int, bytes]:
        port = int(self.receiver.url.split(":")[2].partition("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        fields = {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        connection.request("POST", path, body, fields)
        response = connection.getresponse()
        answer = response.status, response.read()
        connection.close()
        return answer


@pytest.fixture
def caught() -> Iterator[Caught]:
    caught = Caught()
    yield caught
    caught.receiver.stop()


def body(*numbers: int) -> bytes:
    """One llm_request span a number, and one other span."""
    spans = [
        {
            "name": "llm_request",
            "traceId": f"{number:032x}",
            "spanId": f"{number:016x}",
            "startTimeUnixNano": str(NOW - 2_000_000_000),
            "endTimeUnixNano": str(NOW),
            "attributes": [
                {"key": "gen_ai.request.id", "value": {"stringValue": f"cmpl-r{number}-0"}},
                {"key": "gen_ai.latency.time_to_first_token", "value": {"doubleValue": 0.5}},
            ],
        }
        for number in numbers
    ]
    spans.append({"name": "Overall Loading", "traceId": "ff" * 16, "spanId": "ff" * 8})
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}).encode()


def test_spans_become_requests_of_the_worker(caught: Caught) -> None:
    """The name is that of the attach, the id that of the client, the first token at arrival + ttft."""
    assert caught.post(body(1, 2)) == (200, b"{}")
    assert [(row["request_id"], row["worker"]) for row in caught.rows] == [("r1", "w"), ("r2", "w")]
    assert caught.rows[0]["first_token_ns"] == NOW - 1_500_000_000
    assert (caught.receiver.requests, caught.receiver.ignored) == (2, 1)


def test_a_resent_span_counts_once(caught: Caught) -> None:
    """Exporters repeat a batch whose answer they missed."""
    for _ in range(2):
        caught.post(body(1))
    caught.post(body(1, 2))
    assert [row["request_id"] for row in caught.rows] == ["r1", "r2"]


def test_gzip_is_taken_and_a_bomb_is_not(caught: Caught, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small compressed, huge decompressed: refused at the bound."""
    assert caught.post(gzip.compress(body(1)), Content_Encoding="gzip")[0] == 200
    monkeypatch.setattr(otlp_receiver, "MAX_BODY_BYTES", 10_000)
    assert caught.post(gzip.compress(b"0" * 10_000_000), Content_Encoding="gzip")[0] == 413
    assert caught.post(b"0" * 20_000)[0] == 413
    assert len(caught.rows) == 1


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"{}", {"Content_Type": "text/html"}, 400),
        (b"\xff\xff", {"Content_Type": "application/x-protobuf"}, 400),
        (b"not gzip", {"Content_Encoding": "gzip"}, 400),
        (gzip.compress(b"{}")[:-4], {"Content_Encoding": "gzip"}, 400),
        (b"{}", {"Content_Encoding": "br"}, 400),
        (b"{}", {"path": "/v1/metrics"}, 404),
    ],
)
def test_what_is_no_trace_is_refused_and_the_next_one_is_taken(
    caught: Caught, content: bytes, headers: dict[str, str], status: int
) -> None:
    """A clear status, and the receiver goes on."""
    assert caught.post(content, **headers)[0] == status
    assert caught.post(body(7))[0] == 200


def test_a_sender_that_stops_midway_leaves_no_row(caught: Caught) -> None:
    """Half a body is no batch."""
    port = int(caught.receiver.url.split(":")[2].partition("/")[0])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(
            b"POST /v1/traces HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
        )
        connection.shutdown(socket.SHUT_WR)
        assert b"400" in connection.recv(1000)
    assert caught.post(body(1))[0] == 200
    assert len(caught.rows) == 1


@pytest.mark.parametrize(
    ("length", "status"), [(b"9" * 5000, b"400"), (b"\xb2", b"400"), (b"-1", b"400"), (b"9" * 18, b"413")]
)
def test_a_length_that_is_none_is_refused(caught: Caught, length: bytes, status: bytes) -> None:
    """Digits that Python knows and `int` refuses among them; one that is too much is refused before it is read."""
    port = int(caught.receiver.url.split(":")[2].partition("/")[0])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"POST /v1/traces HTTP/1.1\r\nHost: a\r\nContent-Length: " + length + b"\r\n\r\n")
        assert status in connection.recv(1000)


def test_a_taken_port_is_a_usage_error(caught: Caught) -> None:
    """Two attaches on one port: the second is told which option to change."""
    port = int(caught.receiver.url.split(":")[2].partition("/")[0])
    with pytest.raises(UsageError, match="--otlp-port"):
        OtlpReceiver(port, "w", caught.rows.extend)
