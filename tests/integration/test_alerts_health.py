"""What alerting says about itself on `/metrics`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.collector_harness import running


def test_a_receiver_for_whom_nothing_waits_is_a_zero(tmp_path: Path) -> None:
    """A rule over the last 15 minutes sees only what is there: without the zeros between, a retry of a second looks like one of 15 minutes."""
    one = {"name": "box", "kind": "webhook", "url": "https://box.example/"}
    (tmp_path / "r.yml").write_text(json.dumps({"receivers": [one]}))
    settings = {"enabled": False, "receivers_file": tmp_path / "r.yml"}
    with running(tmp_path / "k.duckdb", alerts=settings) as collector:
        for state in ("waiting", "dead"):
            assert collector.metric("kvscope_alert_outbox_messages", receiver="box", state=state) == 0
