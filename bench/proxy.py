"""What the proxy adds: latency beside a direct connection, and CPU a chunk with 2,000 streams open on one core.

Three processes: an engine that streams (one chunk a stream and tick, the instant of sending inside), clients that read,
and between them nothing, a bare relay of bytes, or `kvscope proxy` with everything it does by default (rows into a sink that
keeps nothing). They take turns in one run. Latency is of short requests, one at a time; the best of several rounds counts,
since another process on the machine only adds. CPU is user and system of the process, all its threads. The bare relay is what
any proxy in this interpreter must spend: two system calls and a wake-up a chunk. Gates: at most 1 ms added; at most twice the
relay's CPU a chunk (a busy machine slows both alike), and every chunk of 2,000 streams arrives.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parent.parent
STREAMS: Final = 2000
CHUNKS, INTERVAL_S = 60, 0.25
ROUNDS, REQUESTS_A_ROUND = 20, 60
GATE_MS, GATE_RATIO, STRETCH_RATIO = 1.0, 2.0, 1.5
TOKENS_PER_S: Final = 10


def run(json: bool, tell: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measure; the same keys whatever `json` is (the verb prints them).

    added_median_ms       first byte of a short answer through the proxy minus directly, medians, best round
    ratio_median          the same as a ratio
    cpu_us_a_chunk        CPU of the proxy a chunk, STREAMS open
    open_cpu_us_a_request  CPU of the proxy to take a request, connect to the engine and begin the answer
    streams_a_core        streams of 10 tokens/s that one core keeps up with, as busy as the machine was
    cpu_ratio             the proxy's CPU a chunk over the bare relay's
    delay_p50_ms, ..p99   of chunks under way, direct and through the proxy, STREAMS open
    """
    with (
        _engine() as engine_port,
        _relay(engine_port) as (relay_port, relay_pid),
        _proxy(engine_port) as (proxy_port, pid),
    ):
        tell("latency of short requests, direct and through the proxy in turns")
        rounds = [(_short(engine_port), _short(proxy_port)) for _ in range(ROUNDS)]
        direct_s, through_s = min(rounds, key=lambda pair: pair[1] - pair[0])
        tell(f"{STREAMS} streams at once, direct")
        direct = _streams(engine_port, lambda: 0.0)
        tell(f"{STREAMS} streams at once, through the bare relay")
        relayed = _streams(relay_port, lambda: _cpu_s(relay_pid))
        relay_us = relayed["cpu_s"] / relayed["chunks_while_open"] * 1e6
        tell(f"{STREAMS} streams at once, through the proxy")
        through = _streams(proxy_port, lambda: _cpu_s(pid))
        cpu_us = through["cpu_s"] / through["chunks_while_open"] * 1e6
    added_ms = (through_s - direct_s) * 1e3
    return {
        "bench": "proxy",
        "added_median_ms": added_ms,
        "ratio_median": through_s / direct_s,
        "latency": {"gate_ms": GATE_MS, "met": added_ms <= GATE_MS},
        "streams": STREAMS,
        "chunks": through["chunks"],
        "chunks_expected": STREAMS * CHUNKS,
        "cpu_us_a_chunk": cpu_us,
        "relay_us_a_chunk": relay_us,
        "cpu_ratio": cpu_us / relay_us,
        "streams_a_core": 1e6 / cpu_us / TOKENS_PER_S,
        "open_cpu_us_a_request": through["open_cpu_s"] / STREAMS * 1e6,
        "cpu": {"gate": GATE_RATIO, "stretch": STRETCH_RATIO, "met": cpu_us <= GATE_RATIO * relay_us},
        "complete": {"met": through["chunks"] == direct["chunks"] == STREAMS * CHUNKS},
        "delay_p50_ms": {
            "direct": direct["delay_p50_s"] * 1e3,
            "relay": relayed["delay_p50_s"] * 1e3,
            "proxy": through["delay_p50_s"] * 1e3,
        },
        "delay_p99_ms": {
            "direct": direct["delay_p99_s"] * 1e3,
            "relay": relayed["delay_p99_s"] * 1e3,
            "proxy": through["delay_p99_s"] * 1e3,
        },
    }


@contextlib.contextmanager
def _engine() -> Iterator[int]:
    with _process("-m", "bench.proxy_peers", "engine", str(INTERVAL_S), str(CHUNKS)) as process:
        yield int(_line(process))


@contextlib.contextmanager
def _relay(engine_port: int) -> Iterator[tuple[int, int]]:
    with _process("-m", "bench.proxy_peers", "relay", str(engine_port)) as process:
        yield int(_line(process)), process.pid


@contextlib.contextmanager
def _proxy(engine_port: int) -> Iterator[tuple[int, int]]:
    code = f"import bench.proxy; bench.proxy.serve({engine_port})"
    with _process("-c", code) as process:
        yield int(_line(process)), process.pid


def serve(engine_port: int) -> None:
    """The proxy itself, in a process of its own: prints its port, serves until killed."""
    import threading

    from bench.probe import NullSink
    from engine_probe.proxy.session import ProxyOptions, ProxySession

    session = ProxySession(ProxyOptions(upstreams=[f"http://127.0.0.1:{engine_port}"]))
    session.run(NullSink(), threading.Event(), lambda url: print(url.rpartition(":")[2], flush=True))


def _short(port: int) -> float:
    """Median seconds from request to first byte of an answer of one chunk, on one kept-alive connection."""
    import socket

    from bench.proxy_peers import BODY

    request = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
    waits = []
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(REQUESTS_A_ROUND):
            started = time.perf_counter()
            sock.sendall(request)
            data = sock.recv(65536)
            waits.append(time.perf_counter() - started)
            while not data.endswith(b"\r\n0\r\n\r\n"):
                data += sock.recv(65536)
    return statistics.median(waits)


def _streams(port: int, cpu_s: Callable[[], float]) -> dict[str, Any]:
    """All streams from begin to end; `open_cpu_s`: CPU to open them all, `cpu_s`: from then to their end."""
    command = ("-m", "bench.proxy_peers", "clients", str(port), str(STREAMS), "/v1/chat/completions")
    with _process(*command) as process:
        begun = cpu_s()
        if _line(process) != "open\n":
            raise RuntimeError("the clients did not open their streams")
        opened = cpu_s()
        found: dict[str, Any] = json.loads(_line(process))
        return found | {"open_cpu_s": opened - begun, "cpu_s": cpu_s() - opened}


@contextlib.contextmanager
def _process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} did not start")
    return line


def _cpu_s(pid: int) -> float:
    """User and system time of a process, s (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
