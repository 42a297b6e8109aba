"""What ingest costs: the collector's CPU per row over HTTP to committed, beside a bare INSERT of the same rows in this run.

Run: kvscope bench ingest [--json]. Both sides take turns, so a busy machine slows both, and a ratio is the median of the
rounds. A rate has nothing beside it, so it is that of the least disturbed round. CPU is that of the collector's whole
process (user and system, all threads) between the first byte of a batch and its 200; the sender's is not in it. The
bare side is DuckDB's `INSERT ... SELECT` of the same Arrow table into a file with the same settings. Gates and
stretches: design section 11.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pyarrow as pa

from bench.reference_rows import blocks, requests, scalar_events, spans
from engine_probe.wire.codec import ARROW_CONTENT_TYPE, JSON_CONTENT_TYPE, encode_arrow
from store.metrics import nearest_rank

REQUEST_ROWS, REQUEST_BATCHES = 2_000, 4
BLOCK_ROWS, BLOCK_BATCHES = 100_000, 3
JSON_ROWS, SPANS = 20_000, 4_000
HEAVY_QUERIES = 4
LOAD_S = 20.0
"""400 commits, of which a checkpoint (one each 256 MB, a second long) holds up one or two."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `met`: at the gate or better; `worst` and `best` of the rounds."""

    what: str
    value: float
    unit: str
    gate: float
    stretch: float
    met: bool
    worst: float
    best: float


def run(rounds: int = 5, tell: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Every figure of ingest: `{"figures": [Row, ...], "rounds": n}`. Takes about two minutes."""
    with tempfile.TemporaryDirectory(prefix="kvscope-bench-") as folder:
        place = Path(folder)
        figures = [*_arrow(place, rounds, tell), *_text(place, rounds, tell), *_under_load(place, tell)]
    return {"figures": [asdict(figure) for figure in figures], "rounds": rounds}


def render(document: dict[str, Any]) -> str:
    """The figures as a table for people."""
    lines = [f"{'figure':58} {'value':>12} {'gate':>10} {'stretch':>10}"]
    for row in document["figures"]:
        value = f"{row['value']:,.2f}" if row["value"] < 100 else f"{row['value']:,.0f}"
        verdict = "met" if row["met"] else "MISSED"
        lines.append(
            f"{row['what']:58} {value:>12} {row['gate']:>10,g} {row['stretch']:>10,g}  {row['unit']}  {verdict}"
        )
    return "\n".join(lines)


def _arrow(folder: Path, rounds: int, tell: Callable[[str], None]) -> list[Row]:
    request_table, block_table = requests(REQUEST_ROWS), blocks(BLOCK_ROWS)
    bodies = {
        "plain": encode_arrow({"request": request_table}, None),
        "lz4": encode_arrow({"request": request_table}, "lz4"),
        "block": encode_arrow({"block": block_table}, None),
    }
    ratios: dict[str, list[float]] = {"plain": [], "lz4": []}
    rates: list[float] = []
    with _bare(folder / "bare.duckdb", request_table) as insert, _collector(folder / "arrow.duckdb") as collector:
        collector.send(bodies["plain"], ARROW_CONTENT_TYPE)
        insert()
        for number in range(rounds):
            tell(f"Arrow, round {number + 1} of {rounds}")
            for name in ratios:
                bare_s = _cpu(lambda: [insert() for _ in range(REQUEST_BATCHES)])
                cpu_s = collector.cpu(partial(collector.send_all, [bodies[name]] * REQUEST_BATCHES))
                ratios[name].append(cpu_s / bare_s)
            cpu_s = collector.cpu(lambda: collector.send_all([bodies["block"]] * BLOCK_BATCHES))
            rates.append(BLOCK_ROWS * BLOCK_BATCHES / cpu_s)
    return [
        _lower(f"Arrow request rows, {name}: CPU beside a bare INSERT", ratios[name], "x", 1.6, 1.25) for name in ratios
    ] + [_higher("narrow block events over HTTP to committed", rates, "events/s per core", 1e6, 1.5e6)]


def _text(folder: Path, rounds: int, tell: Callable[[str], None]) -> list[Row]:
    body = msgspec.json.encode({"events": {"step": scalar_events(JSON_ROWS)}})
    events: list[float] = []
    traces: list[float] = []
    with _collector(folder / "text.duckdb") as collector:
        collector.send(body, JSON_CONTENT_TYPE)
        collector.send(spans(100, 10_000), "application/x-protobuf", "/v1/traces")
        for number in range(rounds):
            tell(f"JSON and OTLP, round {number + 1} of {rounds}")
            events.append(2 * JSON_ROWS / collector.cpu(lambda: collector.send_all([body] * 2, JSON_CONTENT_TYPE)))
            trace = spans(SPANS, number + 1)
            cpu_s = collector.cpu(partial(collector.send, trace, "application/x-protobuf", "/v1/traces"))
            traces.append(SPANS / cpu_s)
    return [
        _higher("JSON events of ten scalar columns", events, "events/s per core", 110e3, 150e3),
        _higher("OTLP request spans, protobuf", traces, "spans/s per core", 40e3, 50e3),
    ]


def _under_load(folder: Path, tell: Callable[[str], None]) -> list[Row]:
    """Commit p99 (s, seen by the sender): alone, and while four clients ask heavy questions without a pause."""
    with _collector(folder / "load.duckdb") as collector:
        tell(f"commits alone, then under {HEAVY_QUERIES} heavy queries")
        for seed in range(20):
            collector.send(encode_arrow({"request": requests(2_000, seed)}), ARROW_CONTENT_TYPE)
        small = encode_arrow({"request": requests(200, 99)})
        alone = _commits(collector, small, LOAD_S)
        stop = threading.Event()
        asking = [threading.Thread(target=collector.ask_until, args=(stop,)) for _ in range(HEAVY_QUERIES)]
        for thread in asking:
            thread.start()
        loaded = _commits(collector, small, LOAD_S)
        stop.set()
        for thread in asking:
            thread.join()
    return [_tail("commit p99 alone", alone), _tail(f"commit p99 with {HEAVY_QUERIES} heavy queries", loaded)]


def _commits(collector: _Collector, body: bytes, seconds: float) -> list[float]:
    """How long each of a series of batches took, 20 a second where the collector keeps up."""
    took: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        started = time.monotonic()
        collector.send(body, ARROW_CONTENT_TYPE)
        took.append(time.monotonic() - started)
        time.sleep(max(0.0, 0.05 - took[-1]))
    return took


def _tail(what: str, took: list[float]) -> Row:
    tail = nearest_rank(took, "0.99") or 0.0
    return Row(what, tail, "s", 1.0, 0.3, tail <= 1.0, max(took), min(took))


class _Collector:
    """A collector in its own process, and a connection to it."""

    def __init__(self, pid: int, address: tuple[str, int]) -> None:
        self._pid = pid
        self._address = address
        self._connection = http.client.HTTPConnection(*address, timeout=60)

    def send(self, body: bytes, media_type: str, path: str = "/v1/events") -> None:
        """One batch, until it is committed."""
        self._connection.request("POST", path, body, {"Content-Type": media_type})
        answer = self._connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"the collector answered {answer.status}: {text[:500]!r}")

    def send_all(self, bodies: Sequence[bytes], media_type: str = ARROW_CONTENT_TYPE) -> None:
        """Batches one after another."""
        for body in bodies:
            self.send(body, media_type)

    def cpu(self, work: Callable[[], Any]) -> float:
        """CPU seconds of the collector's process during `work`."""
        before = self._cpu_s()
        work()
        return self._cpu_s() - before

    def ask_until(self, stop: threading.Event) -> None:
        """Ask for exact P99 of every gap between tokens, again and again."""
        connection = http.client.HTTPConnection(*self._address, timeout=120)
        while not stop.is_set():
            connection.request("GET", "/api/v1/series?metric=itl&stat=0.99&by=worker&step_s=1")
            connection.getresponse().read()
        connection.close()

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self._pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _collector(path: Path) -> Iterator[_Collector]:
    command = [sys.executable, "-m", "collector.cli", "serve", "--port", "0", "--store", str(path), "--json"]
    environment = os.environ | {"KVSCOPE_LOG__LEVEL": "error"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        try:
            assert process.stdout is not None
            text = b""
            while not text.rstrip().endswith(b"}"):
                line = process.stdout.readline()
                if not line:
                    raise RuntimeError(f"the collector ended with {process.wait()} before it listened")
                text += line
            url = json.loads(text)["url"]
            host, _, port = url.removeprefix("http://").rpartition(":")
            _await(host, int(port))
            yield _Collector(process.pid, (host, int(port)))
        finally:
            process.terminate()


def _await(host: str, port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            connection = http.client.HTTPConnection(host, port, timeout=5)
            connection.request("GET", "/readyz")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise RuntimeError("the collector did not become ready within a minute")
        time.sleep(0.05)


@contextmanager
def _bare(path: Path, table: pa.Table) -> Iterator[Callable[[], None]]:
    """`insert()`: a bare INSERT SELECT of the table, committed."""
    connection = duckdb.connect(str(path), config={"checkpoint_threshold": "256MB"})
    connection.register("incoming", table)
    connection.execute("CREATE TABLE request AS SELECT * FROM incoming LIMIT 0")
    yield lambda: void(connection.execute("INSERT INTO request SELECT * FROM incoming"))
    connection.close()


def void(_: Any) -> None:
    """Throw an answer away."""


def _cpu(work: Callable[[], Any]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


def _lower(what: str, values: list[float], unit: str, gate: float, stretch: float) -> Row:
    middle = statistics.median(values)
    return Row(what, middle, unit, gate, stretch, middle <= gate, max(values), min(values))


def _higher(what: str, values: list[float], unit: str, gate: float, stretch: float) -> Row:
    best = max(values)
    return Row(what, best, unit, gate, stretch, best >= gate, min(values), best)


if __name__ == "__main__":
    print(render(run(tell=lambda text: print(text, file=sys.stderr))))
