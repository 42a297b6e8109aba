"""One attach process follows 200 workers: its CPU and its lateness, each worker scraped once a second.

The workers are one server process that answers on 200 loopback addresses with a real vLLM page (731 lines) whose counters
move. Told: CPU seconds of the attach process per second (gate: one core), rows written, and how far the scrapes of a
worker lie apart. The machine's other core serves the pages.

Run: .venv/bin/python bench/fleet.py [--workers 200] [--seconds 30] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import re
import resource
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pyarrow as pa

ROOT: Final = Path(__file__).parents[1]
RECORDING: Final = ROOT / "tests" / "data" / "recordings" / "vllm-0.32.0-squeezed"
GATE_CORES: Final = 1.0


def run(workers: int = 200, seconds: float = 30.0, tell: Callable[[str], None] = print) -> dict[str, Any]:
    """Figures of one run; `met` against the gate of one core at one scrape a second."""
    from engine_probe.attach.fleet import Fleet
    from engine_probe.attach.follower import AttachOptions
    from engine_probe.attach.targets import FileTargets

    context = multiprocessing.get_context("spawn")
    port = context.Queue()
    server = context.Process(target=_serve, args=(port,), daemon=True)
    server.start()
    number = port.get(timeout=30)
    sink = CountingSink()
    with tempfile.TemporaryDirectory(prefix="kvscope-bench-") as folder:
        file = Path(folder) / "targets.json"
        addresses = [f"127.0.{1 + index // 250}.{1 + index % 250}:{number}" for index in range(workers)]
        file.write_text(json.dumps([{"targets": addresses, "labels": {"job": "bench"}}]))
        options = AttachOptions(url="", salt=b"bench", engine="vllm", interval_s=1.0)
        fleet, stop = Fleet(FileTargets(str(file)), options, sink, lambda _: None), threading.Event()
        thread = threading.Thread(target=fleet.run, args=(stop,))
        thread.start()
        try:
            tell(f"finding {workers} workers")
            while len(sink.scrapes) < workers:
                time.sleep(0.1)
            time.sleep(3.0)
            tell(f"following them for {seconds:g} s")
            before, begun, seen = _cpu(), time.monotonic(), sink.scrapes.copy()
            time.sleep(seconds)
            cpu, took, scrapes = _cpu() - before, time.monotonic() - begun, sink.scrapes - seen
        finally:
            stop.set()
            thread.join()
            server.kill()
    each = sorted(scrapes[address] / took for address in addresses)
    return {
        "workers": workers,
        "cores": round(cpu / took, 3),
        "gate_cores": GATE_CORES,
        "cpu_ms_a_scrape": round(cpu / max(scrapes.total(), 1) * 1e3, 2),
        "scrapes_per_s_of_a_worker": {"slowest": round(each[0], 2), "median": round(each[len(each) // 2], 2)},
        "rows_per_s": round(sink.rows / (time.monotonic() - sink.begun)),
        "met": cpu / took <= GATE_CORES and each[0] >= 0.9,
    }


class CountingSink:
    """Takes rows and counts: the collector's cost is another benchmark. One `requests_running` row is one scrape."""

    def __init__(self) -> None:
        self.scrapes: Counter[str] = Counter()
        self.rows = 0
        self.begun = time.monotonic()

    def write(self, tables: Mapping[str, pa.Table]) -> None:
        self.rows += sum(table.num_rows for table in tables.values())
        samples = tables.get("sample")
        if samples is not None:
            workers, names = samples["worker"].to_pylist(), samples["name"].to_pylist()
            self.scrapes.update(w for w, n in zip(workers, names, strict=True) if n == "requests_running")

    def close(self) -> None:
        """Nothing to let go of."""


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _page() -> str:
    from engine_probe.readers.lines import text_lines

    path = next(RECORDING.glob("*metrics*"))
    row = next(json.loads(line) for _, line in text_lines(path) if b"vllm:" in line)
    return str(row["text"])


def _serve(port: multiprocessing.Queue[int]) -> None:
    text = _page()
    moving = re.compile(
        r"^(vllm:(?:prompt_tokens|generation_tokens|iteration_tokens_total_count)\S* )\S+$", re.MULTILINE
    )
    start = time.monotonic()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split(b" ", 2)[1].decode()
                kind, body = "text/plain; version=0.0.4", ""
                if path == "/metrics":
                    body = moving.sub(rf"\g<1>{(time.monotonic() - start) * 100:.0f}", text)
                elif path in ("/version", "/v1/models", "/kv_event_sources"):
                    kind = "application/json"
                    answers = {"/version": {"version": "0.32.0"}, "/v1/models": {"data": []}}
                    body = json.dumps(answers.get(path, {}))
                data = body.encode()
                writer.write(
                    f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer, "0.0.0.0", 0, backlog=512)
        port.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    arguments = parser.parse_args()
    figures = run(arguments.workers, arguments.seconds, lambda _: None)
    if arguments.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name}: {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
