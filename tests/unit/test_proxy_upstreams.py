"""Which upstream is asked, for how long a connection is trusted, and what headers say of a request."""

from __future__ import annotations

import ssl
from typing import Any, cast

import pytest

from engine_probe.errors import UsageError
from engine_probe.proxy.heads import parse_request, parse_response
from engine_probe.proxy.recording import api_of
from engine_probe.proxy.tags import MAX_CHARS, answer_labels, parse_tags, request_columns
from engine_probe.proxy.upstreams import Balancer, Upstream, parse_upstream
from engine_probe.proxy.why import why_lost, why_unreachable


def upstreams(count: int) -> list[Upstream]:
    return [parse_upstream(f"up{number}=http://127.0.0.1:{number + 1}") for number in range(count)]


def chosen(balancer: Balancer, tried: list[Upstream] | None = None, now_s: float = 0.0) -> str | None:
    choice = balancer.choose(tried or [], now_s)
    return None if choice is None else choice.upstream.name


@pytest.mark.parametrize(
    ("text", "name", "host", "port", "prefix"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", "127.0.0.1", 8000, b""),
        ("127.0.0.1:8000", "127.0.0.1:8000", "127.0.0.1", 8000, b""),
        ("http://gpu7:8000/v1/", "gpu7:8000", "gpu7", 8000, b""),
        ("w0=http://gpu7:8000", "w0", "gpu7", 8000, b""),
        ("http://gateway/openai", "gateway:80", "gateway", 80, b"/openai"),
        ("https://api.example.com/v1", "api.example.com:443", "api.example.com", 443, b""),
        ("http://[::1]:8000", "::1:8000", "::1", 8000, b""),
    ],
)
def test_an_address_names_its_upstream(text: str, name: str, host: str, port: int, prefix: bytes) -> None:
    """As `kvscope attach` names workers: host and port, or what was said before the equals sign."""
    upstream = parse_upstream(text)
    assert (upstream.name, upstream.host, upstream.port, upstream.prefix) == (name, host, port, prefix)
    assert (upstream.tls is not None) == text.startswith("https")


@pytest.mark.parametrize("text", ["=http://h", " =http://h", "http://me:secret@h:1", "a=http://me:secret@h:1"])
def test_an_upstream_without_a_name_or_with_a_password_is_refused(text: str) -> None:
    """A worker has a name, clients bring the keys; a password that was given is not repeated."""
    with pytest.raises(UsageError) as caught:
        parse_upstream(text)
    assert "secret" not in str(caught.value) + str(caught.value.facts)


def test_certificates_are_checked_unless_said_otherwise() -> None:
    """`--insecure` is the one way to switch it off."""
    checked, unchecked = parse_upstream("https://a"), parse_upstream("https://a", verify=False)
    assert checked.tls is not None
    assert checked.tls.verify_mode == ssl.CERT_REQUIRED
    assert unchecked.tls is not None
    assert unchecked.tls.verify_mode == ssl.CERT_NONE


def test_round_robin_takes_turns() -> None:
    """Whatever is open."""
    balancer = Balancer(upstreams(3), "round_robin")
    balancer.upstreams[1].outstanding = 99
    assert [chosen(balancer) for _ in range(6)] == ["up0", "up1", "up2"] * 2


def test_least_outstanding_breaks_ties_in_turn() -> None:
    """An idle fleet is used evenly; a busy worker is spared."""
    balancer = Balancer(upstreams(3))
    assert [chosen(balancer) for _ in range(3)] == ["up0", "up1", "up2"]
    balancer.upstreams[0].outstanding = 1
    assert [chosen(balancer) for _ in range(4)] == ["up1", "up1", "up2", "up1"]


def test_what_was_tried_is_not_chosen_again() -> None:
    """Until none is left."""
    balancer = Balancer(upstreams(2))
    first = balancer.upstreams[0]
    assert chosen(balancer, [first]) == "up1"
    assert chosen(balancer, balancer.upstreams) is None


def test_one_that_is_down_comes_last_for_a_growing_while() -> None:
    """1 s, 2 s, 4 s, ... up to 30 s; an answer makes it as good as new. If all are down, all are tried."""
    balancer = Balancer(upstreams(2), "round_robin")
    bad, good = balancer.upstreams
    assert bad.failed(10.0)
    assert not bad.failed(10.0)
    assert {chosen(balancer, now_s=11.9) for _ in range(4)} == {"up1"}
    assert {chosen(balancer, now_s=12.1) for _ in range(4)} == {"up0", "up1"}
    for _ in range(9):
        bad.failed(20.0)
    assert bad.down_until_s == 50.0
    good.failed(20.0)
    assert {chosen(balancer, now_s=20.5) for _ in range(4)} == {"up0", "up1"}
    assert bad.answered()
    assert not bad.answered()
    assert {chosen(balancer, now_s=20.5) for _ in range(4)} == {"up0"}


class Connection:
    """As much of a connection as the pool asks for."""

    def __init__(self) -> None:
        self.is_open = True
        self.idle_since_s = self.usable_from_s = self.closed_s = 0.0

    def close(self) -> None:
        self.is_open = False

    def resume_reading(self) -> None:
        pass


@pytest.mark.parametrize(("url", "good_s", "bad_s"), [("http://a:1", 2.4, 2.6), ("https://a:1", 24.0, 26.0)])
def test_an_idle_connection_is_trusted_for_a_while(url: str, good_s: float, bad_s: float) -> None:
    """Shorter than engines' servers keep theirs; longer where a handshake is dear. The last used is taken first."""
    upstream = parse_upstream(url)
    first, second, third = (cast(Any, Connection()) for _ in range(3))
    for connection in (first, second, third):
        upstream.give_back(connection, 100.0)
    third.close()
    assert upstream.take_idle(100.0 + good_s) is second
    assert upstream.take_idle(100.0 + bad_s) is None
    assert not first.is_open


def test_after_a_stream_a_connection_settles_first() -> None:
    """A server may close it with the stream's end, whatever it promised: that close is on its way. One with a length need not."""
    upstream = parse_upstream("http://a:1")
    stream, whole = cast(Any, Connection()), cast(Any, Connection())
    upstream.give_back(whole, 100.0)
    upstream.give_back(stream, 100.0, is_stream=True)
    assert upstream.take_idle(100.01) is whole
    assert upstream.take_idle(100.01) is None
    assert upstream.take_idle(100.06) is stream


def test_a_burst_of_streams_opens_no_more_connections_than_settle() -> None:
    """One stream a millisecond for ten seconds: those that have settled are used again, however many others have not."""
    upstream = parse_upstream("http://a:1")
    opened = 0
    for millisecond in range(10_000):
        now = 100.0 + millisecond / 1000
        connection = upstream.take_idle(now)
        if connection is None:
            connection, opened = cast(Any, Connection()), opened + 1
        upstream.give_back(connection, now, is_stream=True)
    assert opened <= 52


def test_an_upstream_that_closes_after_streams_is_believed() -> None:
    """Once it was seen, no connection is kept after a stream; one that closed later, or idle as agreed, says nothing."""
    upstream = parse_upstream("http://a:1")
    late, early, next_one = (cast(Any, Connection()) for _ in range(3))
    for connection, closed_s in ((late, 101.0), (early, 100.001)):
        upstream.give_back(connection, 100.0, is_stream=True)
        connection.is_open, connection.closed_s = False, closed_s
        assert upstream.take_idle(102.0) is None
        assert upstream.closes_after_streams == (connection is early)
    upstream.give_back(next_one, 103.0, is_stream=True)
    assert (upstream.idle, next_one.is_open) == ([], False)


def test_a_sweep_closes_what_is_left_idle() -> None:
    """Also where nobody asks any more."""
    upstream = parse_upstream("http://a:1")
    old, new = cast(Any, Connection()), cast(Any, Connection())
    upstream.give_back(old, 100.0)
    upstream.give_back(new, 103.0)
    upstream.sweep(104.0)
    assert upstream.idle == [new]
    assert not old.is_open


def columns(*headers: str, tags: tuple[str, ...] = ()) -> dict[str, Any]:
    block = "\r\n".join(["POST /v1/completions HTTP/1.1", "Host: a", *headers, "", ""]).encode()
    return request_columns(parse_request(block), parse_tags(tags))


def test_tags_fill_columns_or_labels() -> None:
    """X-Kvscope-* by name; own headers as told."""
    found = columns(
        "X-Kvscope-Tenant: acme", "X-Kvscope-Feature: search", "X-Shop: eu", "X-Other: x", tags=("shop=X-Shop",)
    )
    assert found == {"tenant": "acme", "labels": {"feature": "search", "shop": "eu"}}


@pytest.mark.parametrize(
    "header",
    [
        "X-Kvscope-Turn: three",
        "X-Kvscope-Turn: -1",
        "X-Kvscope-Product: " + "x" * (MAX_CHARS + 1),
        "X-Kvscope-Product:",
        "X-Kvscope-9: x",
        "traceparent: 00-" + "0" * 32 + "-b7ad6b7169203331-01",
        "traceparent: rubbish",
        "X-Stainless-Retry-Count: many",
    ],
)
def test_a_header_that_makes_no_sense_is_left_out(header: str) -> None:
    """A tag is a short word, a turn a number; content does not come in this way."""
    assert columns(header) == {"labels": {}}


def test_tags_are_bounded() -> None:
    """A client that sends hundreds does not fill rows with them."""
    assert len(columns(*(f"X-Kvscope-T{number}: x" for number in range(300)))["labels"]) == 24


@pytest.mark.parametrize("text", ["tenant", "=X", "9x=X", "a b=X", "tenant=", "tenant=X Y", "tenant=X:"])
def test_a_tag_that_is_none_is_refused(text: str) -> None:
    """With the form that is expected."""
    with pytest.raises(UsageError, match="NAME=HEADER"):
        parse_tags([text])


def test_limits_of_an_api_become_labels() -> None:
    """OpenAI's, Anthropic's and plain ones, and the time it says it took."""
    lines = (
        "x-ratelimit-limit-requests: 60",
        "anthropic-ratelimit-input-tokens-remaining: 5",
        "retry-after-ms: 20",
        "openai-processing-ms: 7",
        "x-request-id: mine",
        "server: x",
    )
    head = parse_response("\r\n".join(["HTTP/1.1 200 OK", *lines, "", ""]).encode())
    assert answer_labels(head, "mine") == {
        "ratelimit_limit_requests": "60",
        "ratelimit_input_tokens_remaining": "5",
        "retry_after_ms": "20",
        "upstream_processing_ms": "7",
    }
    assert answer_labels(head, "other")["upstream_request_id"] == "mine"


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/chat/completions", "chat"),
        ("/openai/deployments/x/chat/completions?api-version=1", "chat"),
        ("/v1/completions/", "completions"),
        ("/v1/messages", "messages"),
        ("/v1/messages/count_tokens", None),
        ("/v1/responses", "responses"),
        ("/v1/responses/resp_1/cancel", None),
        ("/v1/embeddings", "embeddings"),
        ("/generate", "generate"),
        ("/", None),
        ("/v1/models", None),
    ],
)
def test_what_is_recorded_is_told_by_the_end_of_the_path(path: str, api: str | None) -> None:
    """Gateways put APIs below paths of their own."""
    assert api_of(parse_request(f"POST {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())) == api
    assert api_of(parse_request(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())) is None


def test_reasons_are_in_the_words_of_attach() -> None:
    """One family of messages, whoever could not connect."""
    assert "was not connected to within 5 s" in why_unreachable("http://a:1", TimeoutError(), 5.0)
    refused = why_unreachable("http://a:1", ConnectionRefusedError(111, "Connection refused"), 5.0)
    assert refused.startswith("Nothing answers at http://a:1 (")
    unknown = why_unreachable("http://a:1", OSError(-2, "Name or service not known"), 5.0)
    assert unknown.startswith("The name in http://a:1 is not known here")
    tls = why_unreachable("https://a:1", ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number"), 5.0)
    assert tls == "https://a:1 does not speak TLS; use http://a:1."
    assert why_lost(None) == "it closed the connection"
    assert why_lost(ConnectionResetError(104, "Connection reset by peer")) == "connection reset by peer"
