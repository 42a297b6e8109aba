"""The proxy between real sockets: ends, stalls and odd corners of HTTP reach the other side as they happened."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from tests.proxy_lab import PATIENCE_S, Peer, body_of, lab, post, run

EVENT = b"data: {}\n\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
END = b"0\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def sized(peer: Peer) -> None:
    """Answers every request with `ok`."""
    while (await peer.request())[0]:
        await peer.send(OK)


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def test_a_stream_is_passed_on_while_it_runs() -> None:
    """A chunk is at the client before the upstream sends the next: nothing is held back."""

    async def upstream(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        for _ in range(3):
            await peer.send(CHUNK)
            await tick.acquire()
        await peer.send(END)

    tick = asyncio.Semaphore(0)

    async def story() -> None:
        async with lab(upstream) as here:
            client = await here.connect()
            await client.send(post(b"{}"))
            assert (await client.head()).startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
            for _ in range(3):
                assert await client.reader.readexactly(len(CHUNK)) == CHUNK
                tick.release()
            assert await client.rest() == END

    run(story)


def test_a_client_that_goes_away_ends_the_work_upstream() -> None:
    """Closing in mid-stream, by FIN or by reset, closes the upstream's connection while it still has tokens to send."""
    ended: list[bool] = []

    async def upstream(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        try:
            for _ in range(2000):
                await peer.send(CHUNK)
                await asyncio.sleep(0.005)
        except ConnectionError:
            ended.append(True)

    async def story() -> None:
        async with lab(upstream) as here:
            for how in ("close", "reset"):
                client = await here.connect()
                await client.send(post(b"{}"))
                await client.reader.readuntil(CHUNK)
                getattr(client, how)()
            await until(lambda: len(ended) == 2)
            assert [one.outstanding for one in here.context.balancer.upstreams] == [0]

    run(story)


def test_a_client_that_goes_away_before_the_first_token_is_seen_upstream() -> None:
    """During a long prefill nothing is written, so only the client's end can tell: the upstream reads it at once."""
    ended = asyncio.Event()

    async def upstream(peer: Peer) -> None:
        await peer.request()
        assert await peer.rest() == b""
        ended.set()

    async def story() -> None:
        async with lab(upstream) as here:
            client = await here.connect()
            await client.send(post(b"{}"))
            await until(lambda: here.context.balancer.upstreams[0].outstanding == 1)
            await asyncio.sleep(0.05)
            client.close()
            await asyncio.wait_for(ended.wait(), PATIENCE_S)
            await until(lambda: here.context.balancer.upstreams[0].outstanding == 0)

    run(story)


def test_a_client_that_closes_its_sending_half_only_still_gets_its_answer() -> None:
    """The upstream is told the same as it would be without a proxy; one that goes on answering is heard to the end."""

    async def upstream(peer: Peer) -> None:
        await peer.request()
        assert await peer.reader.read(1) == b"", "the half-close did not arrive"
        await peer.send(STREAM_HEAD, CHUNK, CHUNK, END)

    async def story() -> None:
        async with lab(upstream) as here:
            client = await here.connect()
            await client.send(post(b"{}", close=False))
            client.writer.write_eof()
            assert body_of(await client.rest()) == CHUNK * 2 + END

    run(story)


@pytest.mark.parametrize("how", ["close", "reset"])
def test_an_upstream_that_breaks_off_leaves_the_answer_visibly_unfinished(how: str) -> None:
    """What came is delivered, and the connection ends without the last chunk: no client takes it for a whole answer."""

    async def upstream(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD, CHUNK, CHUNK[:4])
        await asyncio.sleep(0.1)
        getattr(peer, how)()

    async def story() -> None:
        async with lab(upstream) as here:
            answer = await here.ask(post(b"{}", close=False))
            assert body_of(answer) == CHUNK + CHUNK[:4]

    run(story)


def test_a_reset_is_passed_on_where_only_it_tells_a_cut_off_body() -> None:
    """A body that ends with its connection ends well on FIN, and with a reset where the upstream's was one."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"

    async def upstream(peer: Peer) -> None:
        _, body = await peer.request()
        await peer.send(head, EVENT)
        await asyncio.sleep(0.1)
        (peer.reset if body == b"reset" else peer.close)()

    async def story() -> None:
        async with lab(upstream) as here:
            assert body_of(await here.ask(post(b"fin"))) == EVENT
            client = await here.connect()
            await client.send(post(b"reset"))
            await client.reader.readuntil(EVENT)
            with pytest.raises(ConnectionResetError):
                await client.reader.read()

    run(story)


def test_a_slow_reader_stops_the_upstream_and_costs_bounded_memory() -> None:
    """The upstream is read no faster than the client reads: of 64 MB only socket and transport buffers' worth is taken."""
    sent = [0]
    piece = b"x" * 65536

    async def upstream(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (1024 * len(piece)))
        for _ in range(1024):
            await peer.send(piece)
            sent[0] += len(piece)

    async def story() -> None:
        async with lab(upstream) as here:
            client = await here.connect()
            await client.send(post(b"{}"))
            await client.head()
            held = -1
            while held != sent[0]:
                held = sent[0]
                await asyncio.sleep(0.3)
            assert held < 32 << 20, "the upstream was read though nobody reads"
            body = await client.rest()
            assert len(body) == 1024 * len(piece)

    run(story)


def test_a_hundred_megabytes_of_prompt_stream_through() -> None:
    """A prompt is passed on while it comes, and is never whole in memory."""
    import tracemalloc

    size, piece = 100 << 20, b"y" * 65536
    got = [0]

    async def upstream(peer: Peer) -> None:
        await peer.head()
        while got[0] < size:
            data = await peer.reader.read(1 << 20)
            got[0] += len(data)
        await peer.send(OK)

    async def story() -> None:
        async with lab(upstream) as here:
            client = await here.connect()
            await client.send(post(b"", close=False).replace(b"Content-Length: 0", b"Content-Length: %d" % size))
            tracemalloc.start()
            for _ in range(size // len(piece)):
                client.writer.write(piece)
                await client.writer.drain()
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert await client.head()
            assert got[0] == size
            assert peak < 16 << 20

    run(story)


def test_100_continue_is_asked_and_answered_end_to_end() -> None:
    """The client's Expect reaches the upstream, the upstream's 100 the client; only then the body is sent."""

    async def upstream(peer: Peer) -> None:
        assert b"Expect: 100-continue\r\n" in await peer.head()
        await peer.send(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n")
        assert await peer.reader.readexactly(4) == b"body"
        await peer.send(OK)

    async def story() -> None:
        async with lab(upstream) as here:
            client = await here.connect()
            await client.send(post(b"body", "/v1/completions", "Expect: 100-continue").removesuffix(b"body"))
            assert await client.head() == b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
            assert await client.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
            await client.send(b"body")
            assert body_of(await client.rest()) == b"ok"

    run(story)


def test_an_early_refusal_reaches_a_client_that_is_still_sending() -> None:
    """An upstream that answers 413 in mid-body is heard, though the client has not finished and never will."""

    async def upstream(peer: Peer) -> None:
        await peer.head()
        await peer.send(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 4\r\n\r\nbig!")
        peer.close()

    async def story() -> None:
        async with lab(upstream) as here:
            client = await here.connect()
            await client.send(post(b"", close=False).replace(b"Content-Length: 0", b"Content-Length: 9000000"))
            for _ in range(8):
                await client.send(b"z" * 65536)
            head = await client.head()
            assert head.startswith(b"HTTP/1.1 413 Content Too Large\r\n")
            assert await client.reader.readexactly(4) == b"big!"

    run(story)


def test_a_head_request_is_answered_without_a_body_and_the_connection_stays() -> None:
    """A Content-Length in the answer to HEAD announces nothing that must be waited for."""

    async def upstream(peer: Peer) -> None:
        while (head := await peer.head()) != b"":
            length = b"Content-Length: 99\r\n" if head.startswith(b"HEAD") else b"Content-Length: 0\r\n"
            await peer.send(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n")

    async def story() -> None:
        async with lab(upstream) as here:
            client = await here.connect()
            await client.send(b"HEAD /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"Content-Length: 99\r\n" in await client.head()
            await client.send(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert b"Content-Length: 0\r\n" in await client.rest()

    run(story)


def test_connections_stay_on_both_sides() -> None:
    """Twenty requests of one client use one connection to the upstream, pipelined or one by one, in order."""
    connections = [0]

    async def upstream(peer: Peer) -> None:
        connections[0] += 1
        while (request := await peer.request())[0]:
            await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(request[1]) + request[1])

    async def story() -> None:
        async with lab(upstream) as here:
            client = await here.connect()
            for number in range(10):
                await client.send(post(b"%d" % number, close=False))
                await client.head()
                assert await client.reader.readexactly(1) == b"%d" % number
            await client.send(b"".join(post(b"%d" % number, close=number == 9) for number in range(10)))
            answers = await client.rest()
            assert [part.partition(b"\r\n\r\n")[2] for part in answers.split(b"HTTP/1.1 200 OK")[1:]] == [
                b"%d" % number for number in range(10)
            ]
            assert connections == [1]

    run(story)


def test_an_old_client_is_spoken_to_in_its_own_version() -> None:
    """HTTP/1.0 goes to the upstream as HTTP/1.0, so that it does not answer in chunks; keep-alive is kept where asked."""

    async def upstream(peer: Peer) -> None:
        while (head := await peer.head()) != b"":
            assert head.startswith(b"GET /x HTTP/1.0\r\n")
            await peer.send(OK)
            peer.close()

    async def story() -> None:
        async with lab(upstream) as here:
            assert b"\r\nConnection: close\r\n" in await here.ask(b"GET /x HTTP/1.0\r\n\r\n")
            client = await here.connect()
            for _ in range(2):
                await client.send(b"GET /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
                assert b"\r\nConnection: keep-alive\r\n" in await client.head()
                assert await client.reader.readexactly(2) == b"ok"

    run(story)


@pytest.mark.parametrize(
    ("request_bytes", "status", "words"),
    [
        (b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 501, "Upgrade to websocket"),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n", 501, "reverse proxy"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "HTTP/2"),
        (b"hello\r\n\r\n", 400, "first line"),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400, "length"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "hexadecimal"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 70000 + b"\r\n\r\n", 431, "64 KiB"),
    ],
)
def test_what_cannot_be_passed_on_is_refused_clearly(request_bytes: bytes, status: int, words: str) -> None:
    """One JSON body says what is wrong, for people, for problem+json readers and for SDKs; the connection ends."""

    async def story() -> None:
        async with lab(sized) as here:
            answer = await here.ask(request_bytes)
            assert answer.startswith(b"HTTP/1.1 %d " % status)
            document = json.loads(body_of(answer))
            assert document["status"] == status
            assert words.lower() in document["detail"].lower()
            assert document["error"]["message"] == "kvscope proxy: " + document["detail"]

    run(story)


def test_no_upstream_is_a_502_that_says_what_happened_to_each() -> None:
    """Every address that was tried is named with its reason, and the connection to the client stays."""

    async def story() -> None:
        async with lab(dead=2) as here:
            client = await here.connect()
            for _ in range(2):
                await client.send(post(b"{}", "/v1/completions", "X-Request-Id: abc", close=False))
                head = await client.head()
                assert head.startswith(b"HTTP/1.1 502 Bad Gateway\r\n")
                assert b"\r\nX-Request-Id: abc\r\n" in head
                length = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
                document = json.loads(await client.reader.readexactly(length))
                assert sorted(document["upstreams"]) == document["upstreams"] or len(document["upstreams"]) == 2
                for port in here.ports:
                    assert f"Nothing answers at http://127.0.0.1:{port} " in document["detail"]

    run(story)


def test_an_upstream_that_speaks_something_else_is_a_502() -> None:
    """The wrong port is told from a slow engine."""

    async def upstream(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
        await peer.rest()

    async def story() -> None:
        async with lab(upstream) as here:
            answer = await here.ask(post(b"{}"))
            assert answer.startswith(b"HTTP/1.1 502 ")
            assert "not in HTTP" in json.loads(body_of(answer))["detail"]

    run(story)


def test_a_dead_upstream_is_passed_over_before_anything_is_sent() -> None:
    """A refused connection moves the request to the next upstream, body and all; the client sees nothing of it."""

    async def story() -> None:
        async with lab(sized, dead=1, policy="round_robin") as here:
            for _ in range(4):
                assert body_of(await here.ask(post(b"p" * 100_000))) == b"ok"
            assert [one.failures > 0 for one in here.context.balancer.upstreams] == [True, False]

    run(story)


@pytest.mark.parametrize(
    ("options", "headers", "tries"),
    [({}, (), 1), ({"repeats_posts": True}, (), 2), ({}, ("Idempotency-Key: k",), 2)],
)
def test_a_post_that_was_sent_is_repeated_only_where_it_is_safe(
    options: dict[str, Any], headers: tuple[str, ...], tries: int
) -> None:
    """An upstream that took a POST may have worked on it: it goes to another only by option or by its Idempotency-Key."""
    asked: list[bytes] = []

    async def rude(peer: Peer) -> None:
        head, body = await peer.request()
        if head:
            asked.append(body)
            peer.reset()

    async def story() -> None:
        async with lab(rude, rude, **options) as here:
            answer = await here.ask(post(b"prompt", "/v1/completions", *headers))
            assert answer.startswith(b"HTTP/1.1 502 ")
            assert asked == [b"prompt"] * tries

    run(story)


def test_nothing_is_repeated_once_a_byte_came_back() -> None:
    """Half a head is an answer that has begun: also a GET is not sent again."""
    asked = [0]

    async def rude(peer: Peer) -> None:
        if await peer.head():
            asked[0] += 1
            await peer.send(b"HTTP/1.1 200 OK\r\nContent-")
            await asyncio.sleep(0.05)

    async def story() -> None:
        async with lab(rude, rude, repeats_posts=True) as here:
            answer = await here.ask(b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 502 ")
            assert asked == [1]

    run(story)


def test_a_get_on_a_connection_that_had_just_closed_is_sent_again_there() -> None:
    """An idle connection that the upstream closes as we use it costs a GET nothing."""
    served: list[int] = []

    async def upstream(peer: Peer) -> None:
        served.append(0)
        mine = len(served) - 1
        while await peer.head():
            served[mine] += 1
            if mine == 0 and served[mine] == 2:
                peer.reset()
                return
            await peer.send(OK)

    async def story() -> None:
        async with lab(upstream) as here:
            client = await here.connect()
            for _ in range(2):
                await client.send(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
                assert (await client.head()).startswith(b"HTTP/1.1 200 OK")
                await client.reader.readexactly(2)
            assert served == [2, 1]

    run(story)


def test_round_robin_takes_turns_and_least_outstanding_spares_the_busy() -> None:
    """Two policies over two upstreams: equal turns whatever their load, or the one with fewer open requests."""
    served = [0, 0]
    release = asyncio.Event()

    def upstream(number: int) -> Any:
        async def script(peer: Peer) -> None:
            while (request := await peer.request())[0]:
                served[number] += 1
                if request[1] == b"slow":
                    await release.wait()
                await peer.send(OK)

        return script

    async def story() -> None:
        nonlocal served
        async with lab(upstream(0), upstream(1), policy="round_robin") as here:
            for _ in range(6):
                await here.ask(post(b"fast"))
        assert served == [3, 3]
        served = [0, 0]
        async with lab(upstream(0), upstream(1)) as here:
            slow = asyncio.create_task(here.ask(post(b"slow")))
            await until(lambda: sum(served) == 1)
            busy = served.index(1)
            for _ in range(6):
                await here.ask(post(b"fast"))
            assert served[1 - busy] == 6
            release.set()
            await slow

    run(story)


def test_broken_chunking_is_passed_on_as_it_is_and_ends_the_connection() -> None:
    """A client that reads more leniently than we do gets all there is, as it would without a proxy."""
    wire = b"3\nabc\n0\n\nand more"

    async def upstream(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD, wire[:2], wire[2:])
        peer.close()

    async def story() -> None:
        async with lab(upstream) as here:
            assert body_of(await here.ask(post(b"{}", close=False))) == wire

    run(story)


def test_a_request_that_follows_a_stream_at_once_goes_on_another_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that promised to keep the connection and closes it with the stream would lose a POST, which is not repeated."""
    monkeypatch.setattr("engine_probe.proxy.upstreams.SETTLE_S", 60.0)
    connections = [0]

    async def upstream(peer: Peer) -> None:
        connections[0] += 1
        await peer.request()
        await peer.send(STREAM_HEAD + b"2\r\nok\r\n0\r\n\r\n")
        await peer.head()  # whatever comes now is lost

    async def story() -> None:
        async with lab(upstream) as here:
            client = await here.connect()
            for _ in range(3):
                await client.send(post(b"a", close=False))
                assert (await client.head()).startswith(b"HTTP/1.1 200 OK")
                assert await client.reader.readexactly(12) == b"2\r\nok\r\n0\r\n\r\n"
            assert connections == [3]

    run(story)


def test_bytes_behind_an_answer_are_not_passed_on_and_the_connection_is_not_trusted_again() -> None:
    """Two answers to one request (response splitting): the client gets one, the next request a connection of its own."""
    connections = [0]

    async def upstream(peer: Peer) -> None:
        connections[0] += 1
        while (await peer.request())[0]:
            await peer.send(OK + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")

    async def story() -> None:
        async with lab(upstream) as here:
            client = await here.connect()
            await client.send(post(b"a", close=False))
            await client.head()
            assert await client.reader.readexactly(2) == b"ok"
            await client.send(post(b"b"))
            assert body_of(await client.rest()) == b"ok"
            assert connections == [2]

    run(story)


def test_draining_lets_answers_finish_and_takes_no_more() -> None:
    """Ctrl-C: the stream under way ends as it should, an idle connection is closed, a new one is not taken."""
    go_on = asyncio.Event()

    async def upstream(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD, CHUNK)
        await go_on.wait()
        await peer.send(CHUNK, END)

    async def story() -> None:
        async with lab(upstream) as here:
            idle = await here.connect()
            client = await here.connect()
            await client.send(post(b"{}", close=False))
            await client.reader.readuntil(CHUNK)
            draining = asyncio.create_task(here.server.drain(PATIENCE_S))
            assert await idle.rest() == b""
            with pytest.raises(ConnectionRefusedError):
                await here.connect()
            go_on.set()
            assert await client.rest() == CHUNK + END
            assert await draining == 0

    run(story)


def test_draining_breaks_off_what_does_not_end_in_time() -> None:
    """After its time the rest is ended, on both sides, and counted."""
    ended = asyncio.Event()

    async def upstream(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD, CHUNK)
        await peer.rest()
        ended.set()

    async def story() -> None:
        async with lab(upstream) as here:
            client = await here.connect()
            await client.send(post(b"{}"))
            await client.reader.readuntil(CHUNK)
            assert await here.server.drain(0.1) == 1
            assert await client.rest() == b""
            await asyncio.wait_for(ended.wait(), PATIENCE_S)

    run(story)


def test_more_connections_than_it_takes_are_told_so() -> None:
    """503 with the reason, and those that are there go on."""

    async def story() -> None:
        async with lab(sized, max_open=2) as here:
            first, second = await here.connect(), await here.connect()
            await until(lambda: len(here.context.clients) == 2)
            assert (await here.ask(post(b"x"))).startswith(b"HTTP/1.1 503 ")
            for client in (first, second):
                await client.send(post(b"x"))
                assert body_of(await client.rest()) == b"ok"

    run(story)


def test_the_id_is_the_clients_or_a_new_one_and_both_sides_learn_it() -> None:
    """X-Request-Id passes through in both directions; where there is none, one is made and given to both."""
    heads: list[bytes] = []

    async def upstream(peer: Peer) -> None:
        while (head := (await peer.request())[0]) != b"":
            heads.append(head)
            extra = b"X-Request-ID: req_theirs\r\n" if b"theirs" in head else b""
            await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n" + extra + b"\r\n")

    async def story() -> None:
        async with lab(upstream) as here:
            given = await here.ask(post(b"", "/a", "X-Request-ID: my-id"))
            assert b"\r\nX-Request-ID: my-id\r\n" in heads[0]
            assert b"\r\nX-Request-Id: my-id\r\n" in given
            made = await here.ask(post(b"", "/b"))
            new = heads[1].partition(b"\r\nX-Request-Id: ")[2].partition(b"\r\n")[0]
            assert len(new) == 32
            assert b"\r\nX-Request-Id: " + new + b"\r\n" in made
            theirs = await here.ask(post(b"", "/theirs"))
            assert theirs.lower().count(b"x-request-id") == 1
            assert b"\r\nX-Request-ID: req_theirs\r\n" in theirs

    run(story)


def test_headers_for_the_proxy_stay_with_it() -> None:
    """X-Kvscope-* are read here and taken off; every other header passes, Host becomes the upstream's."""
    heads: list[bytes] = []

    async def upstream(peer: Peer) -> None:
        heads.append((await peer.request())[0])
        await peer.send(OK)

    async def story() -> None:
        async with lab(upstream) as here:
            await here.ask(post(b"", "/a", "X-Kvscope-Tenant: t", "X-Tenant: t", "Authorization: Bearer k"))
            assert b"kvscope" not in heads[0].lower()
            assert b"\r\nX-Tenant: t\r\nAuthorization: Bearer k\r\n" in heads[0]
            assert b"\r\nHost: 127.0.0.1:%d\r\n" % here.ports[0] in heads[0]

    run(story)


def test_an_exchange_that_is_over_is_let_go_of() -> None:
    """Answered, refused or cancelled: nothing keeps it, without waiting for the garbage collector."""
    import gc

    from engine_probe.proxy.exchange import Exchange

    async def story() -> None:
        async with lab(sized) as here, lab(dead=1) as dead:
            gc.collect()
            gc.disable()
            try:
                for _ in range(5):
                    await here.ask(post(b"x"))
                    await dead.ask(post(b"x"))
                    client = await here.connect()
                    await client.send(post(b"", close=False).replace(b"Content-Length: 0", b"Content-Length: 9"))
                    client.reset()
                await until(lambda: not here.context.clients and not dead.context.clients)
                # the loop's own last steps may still hold one
                await until(lambda: not any(isinstance(one, Exchange) for one in gc.get_objects()))
            finally:
                gc.enable()

    run(story)


def test_an_address_that_is_taken_is_told() -> None:
    """The message names the address and the option."""
    from engine_probe.errors import UsageError
    from engine_probe.proxy.server import ProxyServer

    async def story() -> None:
        async with lab(sized) as here:
            with pytest.raises(UsageError, match=rf"127.0.0.1:{here.port} cannot be listened on.*--listen"):
                await ProxyServer(here.context, "127.0.0.1", here.port).start()

    run(story)


def test_a_silent_machine_does_not_hold_a_stream_for_ever() -> None:
    """Both ends probe their connections (SO_KEEPALIVE)."""

    async def upstream(peer: Peer) -> None:
        await peer.request()
        await peer.rest()

    async def story() -> None:
        async with lab(upstream) as here:
            client = await here.connect()
            await client.send(post(b"{}"))
            await until(lambda: here.context.balancer.upstreams[0].outstanding == 1)
            (connection,) = here.context.clients
            assert connection.transport is not None
            sock = connection.transport.get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1

    run(story)
