"""A real Prometheus that scrapes what looks like a vLLM and a real node_exporter: followed live, and its past imported."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine_probe.adapters.host_reasons import observable
from engine_probe.attach.fetch import trust
from engine_probe.attach.follower import AttachOptions
from engine_probe.attach.prometheus_api import PrometheusApi
from engine_probe.attach.session import AttachSession
from engine_probe.errors import EngineUnreachable, UsageError
from engine_probe.readers.prometheus_server import ServerQuery, ServerSource
from engine_probe.readers.source import Notes, ReadOptions
from tests.attach_engine import FakeEngine, ListSink, page
from tests.servers import free_port, require, running, running_node_exporter, running_prometheus

pytestmark = pytest.mark.server
S = 1_000_000_000


def config(targets: Mapping[str, str]) -> str:
    """prometheus.yml that scrapes these (job -> host:port) every second."""
    jobs = "\n".join(f"- {{job_name: {job}, static_configs: [{{targets: ['{at}']}}]}}" for job, at in targets.items())
    return f"global: {{scrape_interval: 1s, scrape_timeout: 1s}}\nscrape_configs:\n{jobs}\n"


class Counting(threading.Thread):
    """An engine whose counter goes up by one a quarter of a second, and which restarts once it is told to."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(daemon=True)
        self.engine, self.count, self.start_s, self.ends = engine, 0.0, time.time() - 100, threading.Event()

    def run(self) -> None:
        while not self.ends.wait(0.25):
            self.count += 1
            self.engine.set_metrics(page(start_s=self.start_s, generation_tokens_total=self.count))


@pytest.fixture(scope="module")
def scene() -> Iterator[dict[str, Any]]:
    """A Prometheus that has scraped for some seconds, across a restart of the engine."""
    require("prometheus")
    engine = FakeEngine().start()
    counting = Counting(engine)
    counting.start()
    with running_node_exporter() as node:
        targets = {"vllm": f"127.0.0.1:{engine.port}", "node": node.removeprefix("http://")}
        with running_prometheus(config(targets)) as url:
            began_ns = time.time_ns()
            sink, stop = ListSink(), threading.Event()
            options = AttachOptions(url, b"s", "prometheus", matches=['{job=~"vllm|node"}'], interval_s=0.5, wait=True)
            api = PrometheusApi(url)
            while len(api.raw(['up{job=~"vllm|node"}'], began_ns, time.time_ns()).series) < 2:
                time.sleep(0.2)
            time.sleep(2.5)
            session = AttachSession(options, sink, lambda text: None, flush_s=0.05)
            thread = threading.Thread(target=session.run, args=(stop,))
            thread.start()
            time.sleep(5)
            counting.count, counting.start_s = 0.0, time.time()
            time.sleep(5)
            stop.set()
            thread.join(30)
            api.close()
            yield {"url": url, "sink": sink, "began_ns": began_ns, "worker": f"127.0.0.1:{engine.port}"}
    counting.ends.set()
    engine.stop()


def imported(url: str, start_ns: int, end_ns: int) -> tuple[dict[str, list[dict[str, Any]]], Notes]:
    """Rows by kind of the server's past."""
    query = ServerQuery(f"prometheus+{url}", ['{job=~"vllm|node"}'], start_ns, end_ns)
    notes, rows = Notes(), dict[str, list[dict[str, Any]]]()
    for tables in ServerSource(query).chunks(ReadOptions(), notes):
        for kind, table in tables.items():
            rows.setdefault(kind, []).extend(table.to_pylist(maps_as_pydicts="strict"))
    return rows, notes


def tokens(rows: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(row["at_ns"], row["value"]) for row in rows if row["name"] == "output_tokens_total"]


def test_what_was_followed_is_what_the_past_holds(scene: dict[str, Any]) -> None:
    """Instants and numbers of the live rows are exactly those of an import of the same stretch; none is missing."""
    live = tokens(scene["sink"].rows("sample"))
    rows, _ = imported(scene["url"], live[0][0], live[-1][0] + 1_000_000)
    assert live == tokens(rows["sample"])
    assert len(live) >= 8


def test_the_past_knows_the_restart(scene: dict[str, Any]) -> None:
    """The counter is stored as it is, and marks say that a process ended and another began."""
    rows, notes = imported(scene["url"], scene["began_ns"], time.time_ns())
    values = [value for _, value in tokens(rows["sample"])]
    assert any(b < a for a, b in pairwise(values))
    marks = [row["mark"] for row in rows["mark"] if row["worker"] == scene["worker"]]
    assert marks.count("worker_up") == 2
    assert "gap" in marks
    assert (notes.facts["targets_vllm"], notes.facts["targets_node"]) == (1, 1)
    assert {row["worker"] for row in rows["worker"]} == {scene["worker"]}


def test_a_real_host_is_seen_through_the_server(scene: dict[str, Any]) -> None:
    """CPU share, memory and network of node_exporter, nameless, with the host's own name; reasons are observable."""
    rows, _ = imported(scene["url"], scene["began_ns"], time.time_ns())
    host = [row for row in rows["sample"] if row["labels"].get("host")]
    shares = [row["value"] for row in host if row["name"] == "cpu_util"]
    assert shares
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert {row["worker"] for row in host} == {None}
    told = [(row["worker"], row["at_ns"], row["name"], row["labels"], row["value"]) for row in host]
    assert {"cpu_busy", "memory_pressure", "network"} <= observable(told)


def test_a_selector_that_is_none_is_refused_in_the_servers_words(scene: dict[str, Any]) -> None:
    """Real Prometheus' own parse error is shown."""
    with pytest.raises(UsageError, match="parse error"):
        list(
            ServerSource(ServerQuery(f"prometheus+{scene['url']}", ["rate(x"], 0, 300 * S)).chunks(
                ReadOptions(), Notes()
            )
        )


GEHEIM = "$2b$04$abcdefghijklmnopqrstuuPWRtT5yx7FBi4dcf6ROhboeNunUrLQ."
"""bcrypt of the password `geheim`, as Prometheus' web configuration wants it."""


@contextlib.contextmanager
def guarded_prometheus(folder: Path) -> Iterator[tuple[str, Path]]:
    """A Prometheus behind TLS and basic auth (user me, password geheim), and its authority."""
    program, openssl = require("prometheus"), shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed: no certificate can be made")
    key, certificate = folder / "key.pem", folder / "cert.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    made = [openssl, "req", "-x509", *curve, "-nodes", "-keyout", str(key), "-out", str(certificate), *subject]
    subprocess.run(made, check=True, capture_output=True)
    (folder / "web.yml").write_text(
        f"tls_server_config: {{cert_file: {certificate}, key_file: {key}}}\nbasic_auth_users: {{me: '{GEHEIM}'}}\n"
    )
    port = free_port()
    (folder / "p.yml").write_text(config({"self": f"127.0.0.1:{port}"}))
    command: list[str | Path] = [program, f"--config.file={folder}/p.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", f"--web.config.file={folder}/web.yml"]
    with running(command, folder / "log"):
        yield f"127.0.0.1:{port}", certificate


def test_a_server_behind_tls_and_a_password(tmp_path: Path) -> None:
    """With authority and user it answers; without them the sentence says what is missing; the password is not in it."""
    with guarded_prometheus(tmp_path) as (at, certificate):
        known = trust(certificate)
        api = PrometheusApi(f"https://me:geheim@{at}", verify=known)
        for _ in range(100):
            with contextlib.suppress(EngineUnreachable):
                if api.raw(["up"], time.time_ns() - 60 * S, time.time_ns()) and api.version():
                    break
            time.sleep(0.1)
        assert api.version()
        api.close()
        with (
            contextlib.closing(PrometheusApi(f"https://me:falsch@{at}", verify=known)) as wrong,
            pytest.raises(UsageError, match="answers 401") as caught,
        ):
            wrong.raw(["up"], 0, S)
        assert "falsch" not in caught.value.message
        with (
            contextlib.closing(PrometheusApi(f"https://me:geheim@{at}")) as trusting,
            pytest.raises(EngineUnreachable, match="--ca"),
        ):
            trusting.raw(["up"], 0, S)
