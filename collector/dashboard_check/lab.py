"""A collector, a fleet that lives now, and a real Prometheus that scrapes it: where `dashboards check` asks its questions."""

from __future__ import annotations

import logging
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

import httpx
import pyarrow as pa

from collector import serving
from collector.app import create_app
from collector.dashboard_check.feed import Tables, feed, odd_requests
from collector.settings import load_settings
from dashboards.api_check import check_api
from dashboards.build import Target
from dashboards.check import Checked, Prometheus, Span, check
from engine_probe import listening
from engine_probe.errors import CollectorError, ServerUnreachable, UsageError
from engine_probe.wire.codec import ARROW_CONTENT_TYPE, encode_arrow

log = logging.getLogger(__name__)

READY_S: Final = 30.0
SETTLING_S: Final = 12.0
"""The ledger waits some seconds for steps, and a scrape has to see it."""
SCRAPE: Final = """\
global:
  scrape_interval: 1s
scrape_configs:
  - job_name: kvscope
    static_configs:
      - targets: ["{address}"]
"""


@dataclass(slots=True)
class Lab:
    """What runs. error: what the feed ended with, None while it goes well."""

    collector_url: str
    prometheus_url: str
    started_ns: int
    feeding: Thread
    error: BaseException | None = None


def ask_everything(lab: Lab, asked: Sequence[Target], interval: str) -> list[Checked]:
    """Wait for the end of the feed, then ask for every expression over all of that time, and the API every query of the tables.

    Asking afterwards, over a range, does not depend on how fast the questions are. Raises what the feed ended with.
    """
    lab.feeding.join()
    if lab.error is not None:
        raise lab.error
    time.sleep(SETTLING_S)
    now_ns = time.time_ns()
    with Prometheus(lab.prometheus_url) as server:
        found = check(server, asked, interval, Span(lab.started_ns / 1e9, now_ns / 1e9, 2.0))
    middle_ns = (lab.started_ns + now_ns) // 2
    typed = {"$baseline": f"{lab.started_ns}/{middle_ns}", "$suspect": f"{middle_ns}/{now_ns}"}
    with httpx.Client(base_url=lab.collector_url, trust_env=False) as client:
        return found + check_api(client, asked, f"{lab.started_ns}/{now_ns}", typed)


@contextmanager
def running_lab(seconds: float) -> Iterator[Lab]:
    """Start all three, and feed for `seconds`. Raises UsageError without a Prometheus, ServerUnreachable where it does not start."""
    program = shutil.which("prometheus")
    if program is None:
        raise UsageError(
            "no program `prometheus` is installed here; install it (Debian: apt-get install prometheus), or name a server "
            "that scrapes a collector with --prometheus"
        )
    with tempfile.TemporaryDirectory(prefix="kvscope-dashboards-") as folder:
        place = Path(folder)
        with _collector(place) as url, _prometheus(program, place, url.removeprefix("http://")) as prometheus_url:
            stopping = Event()
            lab = Lab(url, prometheus_url, time.time_ns(), Thread())
            lab.feeding = Thread(target=_feed, args=(lab, seconds, stopping), daemon=True)
            lab.feeding.start()
            try:
                yield lab
            finally:
                stopping.set()
                lab.feeding.join(READY_S)


@contextmanager
def _collector(place: Path) -> Iterator[str]:
    settings = load_settings(
        store_url=str(place / "kvscope.duckdb"),
        metrics={"ledger_interval_s": 2.0, "ledger_lookback_s": 120.0, "ledger_max_busy_ratio": 1.0},
        retention={"disk_budget_bytes": 50_000_000_000},
    )
    with listening.listen("127.0.0.1", 0) as sock:
        server = serving.make_server(create_app(settings), settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        try:
            deadline = time.monotonic() + READY_S
            while not server.started:
                if not thread.is_alive() or time.monotonic() > deadline:
                    raise CollectorError("the collector of the check did not start; see its messages above")
                time.sleep(0.01)
            yield listening.url_of(sock)
        finally:
            server.should_exit = True
            thread.join(READY_S)


@contextmanager
def _prometheus(program: str, place: Path, address: str) -> Iterator[str]:
    (place / "prometheus.yml").write_text(SCRAPE.format(address=address), encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    command = [
        program,
        f"--config.file={place / 'prometheus.yml'}",
        f"--storage.tsdb.path={place / 'prometheus'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
    ]
    with (place / "prometheus.log").open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + READY_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                told = (place / "prometheus.log").read_text(errors="replace").splitlines()[-3:]
                raise ServerUnreachable(f"{program} did not start: {' / '.join(told)}", url=url)
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", timeout=2, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _feed(lab: Lab, seconds: float, stopping: Event) -> None:
    """On a thread of its own; what goes wrong is kept for who waits."""
    try:
        with httpx.Client(base_url=lab.collector_url, timeout=READY_S, trust_env=False) as client:
            sender = _Sender(client)
            odd = odd_requests()

            def send(tables: Tables) -> None:
                sender.send(tables)
                method, path, options = next(odd)
                client.request(method, path, **options)

            feed(send, seconds, stopping)
    except BaseException as error:
        lab.error = error
        log.exception("feeding failed")


class _Sender:
    """Sends batches with an identity, as a probe does; every tenth number is left out, as when a batch is lost."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._number = 0

    def send(self, tables: dict[str, pa.Table] | Tables) -> None:
        self._number += 2 if self._number % 10 == 9 else 1
        headers: dict[str, Any] = {
            "Content-Type": ARROW_CONTENT_TYPE,
            "Kvscope-Source": "dashboard-feed",
            "Kvscope-Epoch": "check",
            "Kvscope-Seq": str(self._number),
            "Kvscope-Sent-Ns": str(time.time_ns()),
        }
        self._client.post("/v1/events", content=encode_arrow(tables), headers=headers).raise_for_status()
