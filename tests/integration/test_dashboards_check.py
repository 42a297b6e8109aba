"""Every expression of every dashboard on the real Prometheus, over a fleet that lives now; and exemplars that name its requests."""

from __future__ import annotations

import time

import httpx
import pytest

from collector.dashboard_check.lab import ask_everything, running_lab
from dashboards.build import stored, targets
from store import metric_catalogue as names
from tests.servers import require

SECONDS = 40.0


@pytest.mark.server
def test_every_expression_returns_data_while_a_fleet_is_fed() -> None:
    """None is broken, none stays empty; API queries hold what their tables ask for; a bucket's exemplar is a request's id."""
    require("prometheus")
    with running_lab(SECONDS) as lab:
        found = ask_everything(lab, list(targets(stored())), "15s")
        assert [(one.asked, one.error) for one in found if one.status == "broken"] == []
        empty = {one.asked for one in found if one.status == "empty"}
        assert [asked for asked in empty if not asked.startswith("GET ")] == []
        exemplars = httpx.get(
            f"{lab.prometheus_url}/api/v1/query_exemplars",
            params={"query": names.TTFT.bucket, "start": lab.started_ns / 1e9, "end": time.time()},
            trust_env=False,
        ).json()["data"]
        ids = {one["labels"]["request_id"] for series in exemplars for one in series["exemplars"]}
        assert ids
        timeline = httpx.get(f"{lab.collector_url}/api/v1/requests/{ids.pop()}/timeline", trust_env=False)
        assert timeline.status_code == 200
        assert timeline.json()["events"]
