"""A fault of the lab in a serving collector, and what people get: a message with the reason and a link to the report.

Twice: by the collector's own evaluator, and by the real Prometheus and Alertmanager with the generated rules, whose webhook the
collector answers with a diagnosis. Times of the rules are shortened in the file, nothing else.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

from alerts import files
from diagnosis.lab.run import LabRun, Order, run_lab
from tests import servers
from tests.alert_receiver import Mailbox, mailbox
from tests.integration.collector_harness import Collector, running
from tests.live_rows import NS, Windows

pytestmark = [pytest.mark.server, pytest.mark.timeout(280)]

PATIENCE_S = 150
FAST = {
    "interval_s": 1.0,
    "window_s": 30.0,
    "hold_s": 8.0,
    "settle_s": 0.0,
    "cool_down_s": 60.0,
    "metrics": "ttft",
    "min_regret_s": 0.01,
    "max_busy_ratio": 1.0,
}


@cache
def _lab() -> LabRun:
    return run_lab(Order("hotspot_affinity", severity="strong", requests=2600))


def _story() -> Windows:
    """Quiet traffic, then a tenant that is pinned to one worker: for 40 s already, and going on."""
    made = Windows(_lab(), 0, ("request", "step", "route", "worker"))
    return made.moved(time.time_ns() - 40 * NS - made.fault_ns)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Collector, Mailbox, Windows]]:
    """A collector that was sent the story, and a receiver that it tells of everything."""
    servers.require("prometheus")
    servers.require("alertmanager")
    story = _story()
    with mailbox() as box:
        one = {
            "name": "box",
            "kind": "webhook",
            "url": box.url,
            "secret": "s",
            "allow_networks": ["127.0.0.0/8"],
            "origins": ["evaluator", "alertmanager"],
            "group_by": ["alertname", "worker"],
            "group_wait_s": 0,
            "group_interval_s": 1,
        }
        (tmp_path / "receivers.yml").write_text(json.dumps({"receivers": [one]}))
        alerts = {**FAST, "receivers_file": tmp_path / "receivers.yml"}
        metrics = {"ledger_interval_s": 1.0}
        with running(tmp_path / "kvscope.duckdb", alerts=alerts, metrics=metrics) as collector:
            for rows in (story.baseline, story.suspect):
                _send(collector, rows)
            yield collector, box, story


def _send(collector: Collector, rows: dict[str, pa.Table]) -> None:
    collector.post_tables(rows, source="lab").raise_for_status()


def _until(what: str, found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        answer = found()
        if answer:
            return answer
        time.sleep(0.25)
    raise AssertionError(f"{what} did not come within {PATIENCE_S} s")


def _told(box: Mailbox, name: str) -> dict[str, Any] | None:
    """The first alert of that name that a message told as firing."""
    for arrived in list(box.arrived):
        for alert in arrived.document["alerts"]:
            if alert["labels"]["alertname"] == name and alert["status"] == "firing":
                found: dict[str, Any] = alert
                return found
    return None


def test_the_evaluator_tells_of_a_fault_with_its_reason_and_a_report(
    served: tuple[Collector, Mailbox, Windows],
) -> None:
    """Hotspot claimed, confirmed by later rows, told with worker, remedy, runbook and report; its own symptom is not told."""
    collector, box, _ = served
    told = _until("the hotspot", lambda: _told(box, "KvscopeHotspotFound"))
    assert told["labels"]["cause"] == "hotspot_affinity"
    page = httpx.get(told["annotations"]["report"], timeout=60)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    window = page.url.params["suspect"]  # what the page's script asks for
    spots = collector.client.get("/api/v1/hotspots", params={"suspect": window}).json()
    assert spots["hotspots"][0]["subject"]["id"] == told["labels"]["worker"]
    book = httpx.get(told["annotations"]["runbook_url"], timeout=60)
    assert book.headers["content-type"].startswith("text/html")
    assert "hotspot_affinity" in book.text
    symptom = _until(
        "the symptom",
        lambda: [
            alert
            for alert in collector.client.get("/api/v1/alerts", params={"state": "firing"}).json()["alerts"]
            if alert["labels"]["alertname"] == "KvscopeLatencyRegression"
        ],
    )[0]
    assert symptom["labels"]["worker"] == told["labels"]["worker"]
    assert symptom["inhibited_by"]
    assert _told(box, "KvscopeLatencyRegression") is None
    report = httpx.get(symptom["annotations"]["report"], timeout=60)
    assert report.status_code == 200
    assert "hotspot_affinity" in report.text
    (finding,) = [f for f in collector.client.get("/api/v1/findings").json()["findings"] if f["alert_id"]]
    assert str(finding["id"]) == symptom["annotations"]["finding"]


def test_prometheus_and_alertmanager_get_the_reason_from_the_collector(
    served: tuple[Collector, Mailbox, Windows],
) -> None:
    """Scraped, fired, routed, sent to the collector's webhook, diagnosed, and passed on with verdict and report link."""
    collector, box, _ = served
    made = files.render(collector.url)
    rules = re.sub(r"(?m)^( *(?:for|keep_firing_for)): .*$", r"\1: 1s", made[files.RULES_FILE])
    routing = re.sub(r"(?m)^( *(?:group_wait|group_interval)): .*$", r"\1: 1s", made[files.ALERTMANAGER_FILE])
    with servers.running_alertmanager(routing) as alertmanager:
        scrape = {"job_name": "kvscope", "static_configs": [{"targets": [collector.url.removeprefix("http://")]}]}
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yml"],
            "scrape_configs": [scrape],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager.removeprefix("http://")]}]}]},
        }
        with servers.running_prometheus(json.dumps(config), {"rules.yml": rules}) as prometheus:
            told = _until("the hotspot by Alertmanager", lambda: _told(box, "KvscopeHotspot"))
            fired = httpx.get(f"{prometheus}/api/v1/alerts", timeout=10).json()["data"]["alerts"]
    assert "KvscopeHotspot" in {alert["labels"]["alertname"] for alert in fired}
    assert told["labels"]["cause"] == "hotspot_affinity"
    said = told["annotations"]
    assert told["labels"]["worker"] in said["kvscope_hotspots"]
    assert said["kvscope_verdict"]
    report = httpx.get(said["report"], timeout=60)
    assert report.status_code == 200
    assert report.headers["content-type"].startswith("text/html")
    kept = collector.client.get("/api/v1/alerts", params={"origin": "alertmanager"}).json()["alerts"]
    assert {alert["annotations"]["finding"] for alert in kept if "finding" in alert["annotations"]} & {
        str(finding["id"]) for finding in collector.client.get("/api/v1/findings").json()["findings"]
    }
