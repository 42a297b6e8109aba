"""Alerting over HTTP: Alertmanager's webhook is answered with a diagnosis, and what the collector remembers outlives it."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from collector.alerting.intake import end_unheard
from collector.api.alerts import AlertRows, TakenAll
from collector.pages.runbooks import html_of
from engine_probe.errors import AlertMisuse, StoreBusy
from store.alert_book import AlertBook
from store.alert_rows import Changes, Delivery
from store.open import open_store
from tests.alert_receiver import Mailbox, mailbox
from tests.conftest import Ended
from tests.integration.collector_harness import Collector, request_row, running

S = 1_000_000_000
NEVER = "0001-01-01T00:00:00Z"
QUIET = {"enabled": False, "settle_s": 0.0}


def _message(started_ns: int, status: str = "firing", **labels: str) -> dict[str, Any]:
    """What Alertmanager 0.25 sends, with the members that nobody here needs."""
    at = datetime.fromtimestamp(started_ns / S, UTC).isoformat().replace("+00:00", "Z")
    ended = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    alert = {
        "status": status,
        "labels": {"alertname": "SlowFirstTokens", "metric": "ttft", **labels},
        "annotations": {"summary": "slow"},
        "startsAt": at,
        "endsAt": NEVER if status == "firing" else ended,
        "generatorURL": "http://prometheus.example/graph",
        "fingerprint": "2f4c6a8e0b1d3f57",
    }
    common = {
        "receiver": "kvscope",
        "externalURL": "http://alertmanager.example",
        "groupLabels": {},
        "commonLabels": {},
    }
    return {"version": "4", "groupKey": "{}", "truncatedAlerts": 0, "status": status, "alerts": [alert], **common}


def _rows(now_ns: int) -> list[dict[str, Any]]:
    """Half an hour of requests, ten a second for a minute at a time; in the newest five minutes twice as slow."""
    rows = []
    for minute in range(30):
        for number in range(60):
            arrival = now_ns - (30 - minute) * 60 * S + number * S
            ttft = (200 if minute >= 25 else 100) * S // 1000 + (number % 7) * S // 1000
            last = arrival + ttft + S // 5
            times = {"arrival_ns": arrival, "first_token_ns": arrival + ttft, "last_token_ns": last, "at_ns": last}
            rows.append(request_row(f"r{minute}-{number}", **times))
    return rows


def _send(collector: Collector, document: Any, **headers: str) -> Any:
    return collector.client.post("/api/v1/alerts/webhook", json=document, headers=headers)


def test_alertmanager_gets_a_finding_and_a_report_link(tmp_path: Path) -> None:
    """The window of its alert is diagnosed; the alert is kept with the verdict, and the link leads to the report."""
    now_ns = time.time_ns()
    with running(tmp_path / "k.duckdb", alerts=QUIET) as collector:
        collector.post({"request": _rows(now_ns)}).raise_for_status()
        answer = _send(collector, _message(now_ns - 60 * S))
        assert answer.status_code == 200, answer.text
        TypeAdapter(TakenAll).validate_json(answer.content)
        (taken,) = answer.json()["alerts"]
        assert taken["because"] is None
        assert taken["finding"]["suspect"].partition("/")[0] == str(_whole(now_ns - 60 * S) - 300 * S)
        assert taken["finding"]["alert_id"] == taken["alert_id"]
        report = collector.client.get(taken["report"].removeprefix(collector.url))
        assert (report.status_code, report.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert taken["report"].startswith(collector.url)
        shown = collector.client.get("/api/v1/alerts", params={"origin": "alertmanager"})
        TypeAdapter(AlertRows).validate_json(shown.content)
        (alert,) = shown.json()["alerts"]
        assert (alert["state"], alert["alert_id"]) == ("firing", taken["alert_id"])
        assert alert["annotations"]["kvscope_verdict"] == taken["finding"]["verdict"]
        assert alert["annotations"]["source"] == "http://prometheus.example/graph"
        assert alert["annotations"]["summary"] == "slow"


def _whole(at_ns: int) -> int:
    """As ISO 8601 with microseconds says it."""
    return (
        int(datetime.fromisoformat(datetime.fromtimestamp(at_ns / S, UTC).isoformat()).timestamp() * 1e6 + 0.5) * 1000
    )


def test_the_report_of_an_alert_is_written_from_the_command_line(tmp_path: Path, kvscope: Callable[..., Ended]) -> None:
    """`kvscope report --alert ID`, through the collector and from its store: the alert's own windows; one that is not there is said."""
    now_ns = time.time_ns()
    with running(tmp_path / "k.duckdb", alerts=QUIET) as collector:
        collector.post({"request": _rows(now_ns)}).raise_for_status()
        (taken,) = _send(collector, _message(now_ns - 60 * S)).json()["alerts"]
        asked = ["report", "--alert", taken["alert_id"], "-o", tmp_path / "served.html", "--json"]
        served = kvscope(*asked, "--url", collector.url)
    assert served.code == 0, served.err
    assert json.loads(served.out)["verdict"] == taken["finding"]["verdict"]
    stored = ["report", "--store", tmp_path / "k.duckdb", "-o", tmp_path / "stored.md", "--json"]
    assert json.loads(kvscope(*stored, "--alert", taken["fingerprint"]).out)["verdict"] == taken["finding"]["verdict"]
    assert taken["finding"]["verdict"][:20] in (tmp_path / "stored.md").read_text()
    missing = kvscope(*stored, "--alert", "nothing")
    assert (missing.code, "there is no alert nothing" in missing.err) == (2, True)
    both = kvscope(*stored, "--alert", taken["alert_id"], "--suspect", "-15m/now")
    assert (both.code, "has its own windows" in both.err) == (2, True)


def test_what_comes_again_has_the_finding_that_it_had_and_an_end_needs_none(tmp_path: Path) -> None:
    """A repeat makes no second diagnosis, also after a restart; resolved ends the episode with its finding; a new start is new."""
    now_ns = time.time_ns()
    path = tmp_path / "k.duckdb"
    with running(path, alerts=QUIET) as collector:
        collector.post({"request": _rows(now_ns)}).raise_for_status()
        first = _send(collector, _message(now_ns - 60 * S)).json()["alerts"][0]
        again = _send(collector, _message(now_ns - 60 * S)).json()["alerts"][0]
        assert again["finding"] == first["finding"]
        assert len(collector.client.get("/api/v1/findings").json()["findings"]) == 1
    with running(path, alerts=QUIET) as collector:
        assert collector.client.get("/api/v1/findings").json()["findings"] == [first["finding"]]
        again = _send(collector, _message(now_ns - 60 * S)).json()["alerts"][0]
        assert again["finding"] == first["finding"]
        ended = _send(collector, _message(now_ns - 60 * S, "resolved")).json()["alerts"][0]
        assert (ended["status"], ended["finding"], ended["alert_id"]) == (
            "resolved",
            first["finding"],
            first["alert_id"],
        )
        assert collector.client.get("/api/v1/alerts").json()["alerts"] == []
        new = _send(collector, _message(now_ns - 30 * S)).json()["alerts"][0]
        assert new["alert_id"] != first["alert_id"]
        assert new["finding"]["id"] == first["finding"]["id"] + 1


def test_that_no_verdict_can_be_made_is_an_answer(tmp_path: Path) -> None:
    """An empty store: 200 with the reason, or Alertmanager would send it for ever; the alert is kept all the same."""
    with running(tmp_path / "k.duckdb", alerts=QUIET) as collector:
        (taken,) = _send(collector, _message(time.time_ns() - 60 * S)).json()["alerts"]
        assert (taken["finding"], taken["report"]) == (None, None)
        assert "no requests" in taken["because"] or "baseline" in taken["because"]
        (alert,) = collector.client.get("/api/v1/alerts").json()["alerts"]
        assert alert["annotations"]["kvscope_because"] == taken["because"]


def test_busy_is_503_which_alertmanager_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """429 would be the end of the message: Alertmanager takes any 4xx as a refusal for good."""

    def busy(*_: Any) -> Any:
        raise StoreBusy("all readers are busy", retry_after_s=1)

    with running(tmp_path / "k.duckdb", alerts=QUIET) as collector:
        monkeypatch.setattr("collector.api.alerts.take_in", busy)
        answer = _send(collector, _message(time.time_ns()))
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:kvscope:error:not-ready")
        assert answer.headers["retry-after"] == "5"


def test_what_alertmanager_tells_of_no_more_ends(tmp_path: Path) -> None:
    """An Alertmanager that is gone ends nothing by itself: after 26 hours of silence nobody knows that it goes on."""
    now_ns = time.time_ns()
    with running(tmp_path / "k.duckdb", alerts=QUIET) as collector:
        _send(collector, _message(now_ns)).raise_for_status()
        book = AlertBook(collector.app.state.services.store)
        end_unheard(book, now_ns + 25 * 3_600 * S)
        assert [alert.state for alert in book.alerts()] == ["firing"]
        end_unheard(book, now_ns + 27 * 3_600 * S)
        assert [alert.state for alert in book.alerts()] == ["resolved"]


def test_our_own_messages_do_not_come_in_again(tmp_path: Path) -> None:
    """A receiver that is this collector would make a circle."""
    with running(tmp_path / "k.duckdb", alerts=QUIET) as collector:
        answer = _send(collector, _message(time.time_ns()), **{"Kvscope-Delivery": "msg_1"})
        assert (answer.status_code, answer.json()["type"]) == (400, "urn:kvscope:error:alert-misuse")


def _spoilt(**changes: Any) -> dict[str, Any]:
    return {**_message(time.time_ns()), **changes}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (_spoilt(version="3"), "version"),
        (_spoilt(alerts=[]), "alerts"),
        (_spoilt(alerts=[{}]), "labels"),
        (_spoilt(alerts=[{"status": "maybe", "labels": {}, "startsAt": NEVER}]), "status"),
        (_spoilt(alerts=[{"status": "firing", "labels": {"a": 1}, "startsAt": NEVER}]), "labels"),
        (_spoilt(alerts=[{"status": "firing", "labels": {}, "startsAt": "2025-11-29T08:00:00"}]), "startsAt"),
        (_spoilt(alerts=_message(0)["alerts"] * 1001), "alerts"),
        ([], "body"),
    ],
)
def test_a_message_that_is_none_is_refused_with_what_is_wrong(tmp_path: Path, document: Any, said: str) -> None:
    """400 and the member's name; nothing is kept."""
    with running(tmp_path / "k.duckdb", alerts=QUIET) as collector:
        answer = _send(collector, document)
        assert answer.status_code == 400
        assert said in answer.json()["detail"]
        assert collector.client.get("/api/v1/alerts?state=all").json() == {"alerts": []}


def test_a_start_in_the_year_1_and_one_in_the_future_are_no_fault(tmp_path: Path) -> None:
    """Go's zero time, and a clock that is ahead: no verdict, and no traceback."""
    with running(tmp_path / "k.duckdb", alerts=QUIET) as collector:
        for text in (NEVER, "2200-01-01T00:00:00Z"):
            document = copy.deepcopy(_message(time.time_ns()))
            document["alerts"][0]["startsAt"] = text
            answer = _send(collector, document)
            assert answer.status_code == 200, answer.text
            assert answer.json()["alerts"][0]["finding"] is None


def test_alertmanagers_alerts_are_passed_on_with_the_verdict_to_who_asks_for_them(tmp_path: Path) -> None:
    """`origins: [alertmanager]`: the message has Alertmanager's labels and kvscope's annotations."""
    now_ns = time.time_ns()
    with mailbox() as box:
        one = {"name": "box", "kind": "webhook", "url": box.url, "allow_networks": ["127.0.0.0/8"], "group_wait_s": 0}
        (tmp_path / "r.yml").write_text(json.dumps({"receivers": [{**one, "origins": ["alertmanager"]}]}))
        with running(tmp_path / "k.duckdb", alerts={**QUIET, "receivers_file": tmp_path / "r.yml"}) as collector:
            collector.post({"request": _rows(now_ns)}).raise_for_status()
            _send(collector, _message(now_ns - 60 * S)).raise_for_status()
            deadline = time.monotonic() + 20
            while not box.arrived and time.monotonic() < deadline:
                time.sleep(0.02)
            assert collector.metric("kvscope_alerts", state="firing") == 1.0
        (arrived,) = box.arrived
    (alert,) = arrived.document["alerts"]
    assert alert["labels"]["alertname"] == "SlowFirstTokens"
    assert alert["annotations"]["kvscope_verdict"]


def test_a_message_left_by_a_killed_process_goes_out_at_the_next_start(tmp_path: Path) -> None:
    """It was in the outbox when the process ended; the next one delivers it under its id before anything else happens."""
    with mailbox() as box:
        one = {"name": "box", "kind": "webhook", "url": box.url, "allow_networks": ["127.0.0.0/8"]}
        (tmp_path / "r.yml").write_text(json.dumps({"receivers": [one]}))
        with open_store(str(tmp_path / "k.duckdb")) as store:
            left = Delivery("m1", "box", "{}", "waiting", "application/json", "{}", time.time_ns(), 0)
            AlertBook(store).save(Changes(deliveries=(left,)))
        with running(tmp_path / "k.duckdb", alerts={"receivers_file": tmp_path / "r.yml"}) as collector:
            deadline = time.monotonic() + 20
            while not box.arrived and time.monotonic() < deadline:
                time.sleep(0.02)
            while collector.metric("kvscope_alert_deliveries_total", receiver="box", result="delivered") is None:
                assert time.monotonic() < deadline
                time.sleep(0.02)
    assert [arrived.delivery_id for arrived in box.arrived] == ["m1"]


def test_receivers_that_cannot_work_stop_the_start(tmp_path: Path) -> None:
    """And not the first alert."""
    (tmp_path / "r.yml").write_text("receivers: [{name: a, kind: webhook, url: 'ftp://x/'}]")
    with (
        pytest.raises(AlertMisuse, match="receiver 'a' cannot work"),
        running(tmp_path / "k.duckdb", alerts={"receivers_file": tmp_path / "r.yml"}),
    ):
        pass


def test_runbooks_are_served_and_others_are_not_found(tmp_path: Path) -> None:
    """A cause's, a rule's, the evaluator's; another name is 404 with those that exist."""
    with running(tmp_path / "k.duckdb", alerts=QUIET) as collector:
        for name in ("premature_eviction", "KvscopeHotspot", "KvscopeLatencyRegression"):
            answer = collector.client.get(f"/api/v1/runbooks/{name}")
            assert answer.headers["content-type"].startswith("text/markdown")
            assert name in answer.text
        missing = collector.client.get("/api/v1/runbooks/nothing")
        assert (missing.status_code, "premature_eviction" in missing.json()["detail"]) == (404, True)


def test_a_person_who_follows_the_link_of_an_alert_reads_a_page(tmp_path: Path) -> None:
    """Markdown is drawn, a cause's link leads to its own page, and a name that is none is 404 with those that there are."""
    with running(tmp_path / "k.duckdb", alerts=QUIET) as collector:
        page = collector.client.get("/runbooks/KvscopePrematureEviction")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "<h3>KvscopePrematureEviction</h3>" in page.text
        assert 'href="/runbooks/premature_eviction"' in page.text
        assert "**" not in page.text
        for odd in (
            "%3Cb%3Ex%3C%2Fb%3E",
            "..%2F..%2Fetc",
            "a/b",
            "",
            "%00",
            "%FF",
            "%E2%80%AEx",
            "{{7*7}}",
            "premature_eviction%0A",
        ):
            missing = collector.client.get(f"/runbooks/{odd}")
            assert (missing.status_code, "/runbooks/premature_eviction" in missing.text) == (404, True)
            assert not any(said in missing.text for said in ("<b>x", "../etc", "{{"))


def test_html_in_a_runbook_is_text() -> None:
    """What stands in angle brackets is shown, and never run."""
    assert html_of("a <script>x</script> [b](javascript:y)") == (
        "<p>a &lt;script&gt;x&lt;/script&gt; [b](javascript:y)</p>\n"
    )


def test_a_message_survives_kill_9_while_its_receiver_is_away(tmp_path: Path) -> None:
    """The process is killed after attempts that failed; the next one delivers the same message under the same id."""
    box = Mailbox()
    box.listen()
    box.stop()
    one = {"name": "box", "kind": "webhook", "url": box.url, "allow_networks": ["127.0.0.0/8"], "group_wait_s": 0}
    (tmp_path / "r.yml").write_text(json.dumps({"receivers": [{**one, "origins": ["alertmanager"]}]}))
    with _process(tmp_path) as (process, url):
        httpx.post(f"{url}/api/v1/alerts/webhook", json=_message(time.time_ns()), timeout=60).raise_for_status()
        (waiting,) = _until(lambda: [d for d in _deliveries(url) if d["attempts"] > 0])
        process.kill()
        process.wait(10)
    box.listen()
    try:
        with _process(tmp_path) as (process, url):
            _until(lambda: box.arrived)
            (delivered,) = _until(lambda: [d for d in _deliveries(url) if d["state"] == "delivered"])
    finally:
        box.stop()
    assert [arrived.delivery_id for arrived in box.arrived] == [waiting["delivery_id"]] == [delivered["delivery_id"]]
    assert delivered["attempts"] == waiting["attempts"] + 1


def _deliveries(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/api/v1/alerts/deliveries", timeout=30).json()["deliveries"]
    return found


def _until(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (answer := found()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return answer


@contextmanager
def _process(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`kvscope serve` as a process of its own, and its URL."""
    settings = {
        "KVSCOPE_ALERTS__RECEIVERS_FILE": str(folder / "r.yml"),
        "KVSCOPE_ALERTS__RETRY_LIMIT_S": "2",
        "KVSCOPE_METRICS__LEDGER_INTERVAL_S": "none",
    }
    command = [
        sys.executable,
        "-m",
        "collector.cli",
        "serve",
        "--port",
        "0",
        "--store",
        str(folder / "k.duckdb"),
        "--json",
    ]
    log = (folder / "log").open("ab")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=os.environ | settings)
    try:
        assert process.stdout is not None
        text = b""
        while not text.rstrip().endswith(b"}"):
            line = process.stdout.readline()
            assert line, (folder / "log").read_text()
            text += line
        url = json.loads(text)["url"]
        _until(lambda: _is_up(url))
        yield process, url
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
        log.close()
        if process.stdout is not None:
            process.stdout.close()


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
