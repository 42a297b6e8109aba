"""The page in a real browser: it renders, and its own content security policy refuses nothing of it."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.integration.collector_harness import request_row, running, step_row
from tests.servers import require


@pytest.mark.server
def test_page_renders_in_a_browser_with_nothing_refused(tmp_path: Path) -> None:
    """Rows that were sent are on the page as a browser shows it; its console stays silent."""
    chromium = require("chromium")
    with running(tmp_path / "kvscope.duckdb") as collector:
        now = time.time_ns()
        request = request_row("r", vantage="engine", worker="w-page", model="m", arrival_ns=now, at_ns=now)
        request |= {"first_token_ns": now + 100_000_000, "last_token_ns": now + 300_000_000}
        collector.post({"request": [request], "step": [step_row(1, worker="w-page", at_ns=now)]}, source="page-test")
        arguments = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        shown = subprocess.run(
            [str(chromium), *arguments, "--enable-logging=stderr", "--v=0", "--dump-dom", collector.url],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    assert "w-page" in shown.stdout
    assert "page-test" in shown.stdout
    # TTFT 100 ms, within 1.6 %
    assert re.search(r">(98|99|100|101)[.\d]* / (98|99|100|101)[.\d]* ms<", shown.stdout)
    assert "CONSOLE" not in shown.stderr, shown.stderr
    assert "Content Security Policy" not in shown.stderr, shown.stderr
