"""One story with a real vLLM, told once and judged by several tests: load, kill -9 in mid-load, restart, load again.

A real collector, a real `kvscope attach` and the plugin inside the engine watch it. Beside them stand witnesses that do
not use kvscope: the clients' own clocks and usage figures, the engine's /metrics read line by line, and the raw KV
events asked from the engine's replay socket and counted here.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from engine_probe.attach.otlp_receiver import OtlpReceiver
from tests import live_vllm
from tests.live_vllm import BLOCK_SIZE, MODEL_NAME, VllmServer, kv_events_config

NUM_BLOCKS = 40  # usable: 39. A request needs 8 for its prompt and 4 more to its end, and eight may run.
PREFIX_TOKENS, TAIL_TOKENS, OUTPUT_TOKENS = 160, 90, 100
COUNTERS = (
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_sum",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:e2e_request_latency_seconds_sum",
)


@dataclass(slots=True)
class Seen:
    """What the client saw of one request; `error` where it did not end well."""

    request_id: str
    prompt: list[int]
    send_ns: int
    first_ns: int = 0
    end_ns: int = 0
    usage: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(slots=True)
class RawEvents:
    """The engine's KV events of one life, counted without kvscope."""

    messages: int
    stored: int
    removed: int


@dataclass(slots=True)
class Life:
    """One measured stretch of load: its clients, the engine's counters around it, the raw events of its life."""

    begin_ns: int
    end_ns: int
    seen: list[Seen]
    before: dict[str, float]
    after: dict[str, float]
    events: RawEvents

    def gain(self, name: str) -> float:
        return self.after[name] - self.before[name]


@dataclass(slots=True)
class Story:
    """All that the tests judge."""

    store: str
    salt: bytes
    worker: str
    first: Life
    killed: list[Seen]
    kill_ns: int
    second: Life
    orphans: list[Seen]
    spans: list[dict[str, Any]]
    attach_code: int
    attach_said: str
    summary: dict[str, Any]
    engine_log: str


def prompt(number: int) -> list[int]:
    """One of four shared prefixes, and a tail of its own."""
    prefix = [3 + (number % 4) * 7 + (i * 5) % 101 for i in range(PREFIX_TOKENS)]
    return prefix + [200 + (number * 31 + i * i) % 290 for i in range(TAIL_TOKENS)]


def ask(server: VllmServer, request_id: str, tokens: list[int], timeout_s: float = 60.0) -> Seen:
    """One streaming completion, timed by the wall clock of this machine."""
    body = {
        "model": MODEL_NAME,
        "prompt": tokens,
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout_s)
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    seen = Seen(request_id, tokens, time.time_ns())
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk.get("choices") and not seen.first_ns:
                seen.first_ns = time.time_ns()
            seen.usage = chunk.get("usage") or seen.usage
        seen.end_ns = time.time_ns()
        if response.status != 200 or not seen.usage:
            seen.error = f"status {response.status}, usage {seen.usage}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        seen.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return seen


def load(server: VllmServer, name: str, count: int, concurrency: int = 12) -> list[Seen]:
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda n: ask(server, f"{name}-{n}", prompt(n)), range(count)))


def counters(server: VllmServer) -> dict[str, float]:
    return {name: server.counter(name) for name in COUNTERS}


def raw_events(port: int) -> RawEvents:
    """Everything the engine's replay buffer holds, counted; the buffer is larger than the whole load."""
    context: zmq.Context[Any] = zmq.Context()
    dealer: zmq.Socket[Any] = context.socket(zmq.DEALER)
    dealer.connect(f"tcp://127.0.0.1:{port}")
    dealer.send_multipart([b"", bytes(8)])
    found = RawEvents(0, 0, 0)
    while True:
        if not dealer.poll(10_000):
            raise RuntimeError("the engine's replay socket did not answer")
        frames = dealer.recv_multipart()
        if frames[-2] == b"\xff" * 8:
            break
        if int.from_bytes(frames[-2], "big") != found.messages:
            raise RuntimeError("the replay buffer does not begin at 0 or has a hole")
        found.messages += 1
        for event in msgspec.msgpack.decode(frames[-1])[1]:
            if event["type"] == "BlockStored":
                found.stored += len(event["block_hashes"])
            elif event["type"] == "BlockRemoved":
                found.removed += len(event["block_hashes"])
    context.destroy(linger=0)
    return found


class Program:
    """A kvscope process whose talk is kept."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        env = {key: value for key, value in os.environ.items() if not key.startswith("KVSCOPE_")}
        with self.out.open("wb") as out, self.err.open("wb") as err:
            command = [sys.executable, "-m", "collector.cli", *arguments]
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=env, cwd=live_vllm.ROOT)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def said(self) -> str:
        return self.err.read_text(errors="replace")

    def document(self) -> Any:
        return json.loads(self.out.read_text())


def wait_until(what: str, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} did not happen within {timeout_s:.0f} s")
        time.sleep(0.1)


def tell(folder: Path) -> Story:
    """Run the story in `folder`. Everything started is ended, whatever happens."""
    live_vllm.refresh_probe()
    store, salt_file = folder / "store.duckdb", folder / "salt"
    events_port, replay_port = live_vllm.free_port(), live_vllm.free_port()
    started: list[Callable[[], object]] = []
    try:
        collector = Program(folder, "collector", "serve", "--port", "0", "--store", str(store), "--json")
        started.append(collector.process.kill)
        wait_until("the collector's address", lambda: collector.out.read_text().rstrip().endswith("}"))
        url = collector.document()["url"]
        spans: list[dict[str, Any]] = []
        receiver = OtlpReceiver(0, "engine-0", spans.extend)
        receiver.start()
        started.append(receiver.stop)
        server = VllmServer(
            folder / "engine.log",
            num_blocks=NUM_BLOCKS,
            flags=[
                *("--kv-cache-metrics", "--kv-events-config", _events(events_port, replay_port)),
                *("--otlp-traces-endpoint", receiver.url),
            ],
            env={
                "KVSCOPE_URL": url,
                "KVSCOPE_WORKER": "engine-0",
                "KVSCOPE_SPOOL_DIR": str(folder / "spool"),
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
                "OTEL_BSP_SCHEDULE_DELAY": "500",
            },
        )
        started.append(server.kill)
        server.start()
        options = [
            "--to",
            url,
            "--interval",
            "250ms",
            "--log",
            str(server.log_path),
            "--salt-file",
            str(salt_file),
            "--json",
        ]
        attach = Program(folder, "attach", "attach", "vllm", server.url, *options)
        started.append(attach.process.kill)
        wait_until("attaching", lambda: "log        seen" in attach.said())

        first = _measured(server, "first", 36, replay_port)
        kill_ns, killed = _killed_in_mid_load(server)
        wait_until("the engine's death to be noticed", lambda: "The engine is down" in attach.said())
        server.start()
        wait_until("its return to be noticed", lambda: "The engine restarted" in attach.said())
        second = _measured(server, "second", 12, replay_port)
        code = attach.stop(signal.SIGINT)
        collector.stop()
        # The collector is gone: the engine must not care.
        orphans = load(server, "orphan", 4)
        server.stop()
        return Story(
            store=str(store),
            salt=salt_file.read_bytes().rstrip(b"\n"),
            worker="engine-0",
            first=first,
            killed=killed,
            kill_ns=kill_ns,
            second=second,
            orphans=orphans,
            spans=spans,
            attach_code=code,
            attach_said=attach.said(),
            summary=attach.document(),
            engine_log=server.log_path.read_text(errors="replace"),
        )
    finally:
        for end in reversed(started):
            end()


def _events(events_port: int, replay_port: int) -> str:
    # An address: the engine connects, so that kvscope must bind, and must be found again after the restart.
    return kv_events_config(f"tcp://127.0.0.1:{events_port}", f"tcp://127.0.0.1:{replay_port}")


def _measured(server: VllmServer, name: str, count: int, replay_port: int) -> Life:
    """Load from rest to rest; then long enough for every flush and a scrape."""
    before, begin_ns = counters(server), time.time_ns()
    seen = load(server, name, count)
    wait_until("the engine's rest", lambda: server.counter("vllm:num_requests_running") == 0)
    after, events = counters(server), raw_events(replay_port)
    time.sleep(2.0)
    return Life(begin_ns, time.time_ns(), seen, before, after, events)


def _killed_in_mid_load(server: VllmServer) -> tuple[int, list[Seen]]:
    """Load that would go on for minutes, and kill -9 while requests run; what was not sent by then is refused."""
    killed: list[Seen] = []
    thread = threading.Thread(target=lambda: killed.extend(load(server, "killed", 2_000)))
    thread.start()
    wait_until("some of the load to be done", lambda: server.counter("vllm:num_requests_running") > 0)
    time.sleep(2.0)
    kill_ns = time.time_ns()
    server.kill()
    thread.join(120)
    return kill_ns, killed


def block_hashes(seen: Sequence[Seen], salt: bytes) -> set[int]:
    """Chain hash of every full prompt block of these requests, worked out from the prompts."""
    from engine_probe.chain_hash import chain

    return {block for one in seen for block in chain(one.prompt, BLOCK_SIZE, salt)}
