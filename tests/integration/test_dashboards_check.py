"""Every expression of every dashboard on the real Prometheus, over a fleet that lives now; and exemplars that name its requests."""

from __future__ import annotations

import time

import httpx
import pytest

from collector.dashboard_lab import running_lab
from dashboards.api_check import check_api
from dashboards.build import stored, targets
from dashboards.check import Prometheus, check_until
from store import metric_catalogue as names
from tests.servers import require

SECONDS = 40.0
LONGEST_S = 230.0


@pytest.mark.server
def test_every_expression_returns_data_while_a_fleet_is_fed() -> None:
    """None is broken, none stays empty; API queries hold what their tables ask for; a bucket's exemplar is a request's id."""
    require("prometheus")
    asked = list(targets(stored()))
    with running_lab(SECONDS) as lab, Prometheus(lab.prometheus_url) as server:
        ends = time.monotonic() + LONGEST_S
        found = check_until(
            server,
            asked,
            "15s",
            lambda: lab.error is not None or time.monotonic() > ends,
            lambda: time.sleep(1.0),
        )
        assert lab.error is None
        assert [(one.target.dashboard, one.asked, one.error) for one in found if one.status != "ok"] == []
        with httpx.Client(base_url=lab.collector_url, trust_env=False) as client:
            now_ns = time.time_ns()
            middle_ns = (lab.started_ns + now_ns) // 2
            typed = {"$baseline": f"{lab.started_ns}/{middle_ns}", "$suspect": f"{middle_ns}/{now_ns}"}
            answers = check_api(client, asked, f"{lab.started_ns}/{now_ns}", typed)
            assert [(one.asked, one.error) for one in answers if one.status == "broken"] == []
            exemplars = httpx.get(
                f"{lab.prometheus_url}/api/v1/query_exemplars",
                params={"query": names.TTFT.bucket, "start": lab.started_ns / 1e9, "end": now_ns / 1e9},
                trust_env=False,
            ).json()["data"]
            ids = {one["labels"]["request_id"] for series in exemplars for one in series["exemplars"]}
            assert ids
            timeline = client.get(f"/api/v1/requests/{ids.pop()}/timeline")
            assert timeline.status_code == 200
            assert timeline.json()["events"]
