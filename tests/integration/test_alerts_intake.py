"""Alertmanager's webhook with messages that are not the usual one: over already, dressed up as ours, without a verdict."""

from __future__ import annotations

import time
from pathlib import Path

from tests.integration.collector_harness import running
from tests.integration.test_alerts_api import QUIET, S, _message, _rows, _send


def test_an_alert_that_is_told_only_when_it_is_over_is_diagnosed_until_its_end(tmp_path: Path) -> None:
    """The collector was away while it fired: the window ends with the alert, and what came since is none of it."""
    now_ns = time.time_ns()
    with running(tmp_path / "k.duckdb", alerts=QUIET) as collector:
        collector.post({"request": _rows(now_ns - 600 * S)}).raise_for_status()
        over = _message(now_ns - 720 * S, "resolved")
        over["alerts"][0]["endsAt"] = _message(now_ns - 600 * S)["alerts"][0]["startsAt"]
        (taken,) = _send(collector, over).json()["alerts"]
        assert taken["status"] == "resolved"
        assert taken["finding"] is not None, taken["because"]
        (alert,) = collector.client.get("/api/v1/alerts?state=resolved").json()["alerts"]
        assert int(alert["annotations"]["window"].partition("/")[2]) // S == (now_ns - 600 * S) // S
        again = _send(collector, over).json()["alerts"][0]
        assert again["finding"] == taken["finding"], "and once"
        assert len(collector.client.get("/api/v1/findings").json()["findings"]) == 1


def test_the_end_of_an_alert_without_a_verdict_says_why_there_is_none(tmp_path: Path) -> None:
    """Told when it began; not forgotten when it ends."""
    with running(tmp_path / "k.duckdb", alerts=QUIET) as collector:
        started_ns = time.time_ns() - 60 * S
        (first,) = _send(collector, _message(started_ns)).json()["alerts"]
        (ended,) = _send(collector, _message(started_ns, "resolved")).json()["alerts"]
        assert (ended["finding"], ended["because"]) == (None, first["because"])
        assert first["because"]


def test_an_alert_cannot_bring_its_own_verdict(tmp_path: Path) -> None:
    """Annotations with the names of ours: they are kept under other names, and the window is diagnosed."""
    theirs = {"finding": "7", "report": "javascript:alert(1)", "window": "x", "kvscope_verdict": "all is well"}
    now_ns = time.time_ns()
    with running(tmp_path / "k.duckdb", alerts=QUIET) as collector:
        message = _message(now_ns - 60 * S)
        message["alerts"][0]["annotations"] = theirs
        (taken,) = _send(collector, message).json()["alerts"]
        assert (taken["finding"], taken["report"]) == (None, None)
        assert taken["because"]
        (alert,) = collector.client.get("/api/v1/alerts").json()["alerts"]
        assert not theirs.keys() & alert["annotations"].keys()
        assert alert["annotations"]["alertmanager_kvscope_verdict"] == "all is well"
        collector.post({"request": _rows(now_ns)}).raise_for_status()
        (taken,) = _send(collector, message).json()["alerts"]
        assert taken["finding"]["metric"] == "ttft"
