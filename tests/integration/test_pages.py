"""Every page in a real browser: filled, silent, within its width, reached by keyboard; kept as pictures."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect

from collector.pages.frame import WAYS
from collector.pages.overview import MOST_WATCHERS
from tests.browser import browser_page
from tests.conftest import Ended
from tests.integration.collector_harness import Collector, request_row, running, step_row

AWAITED = "main :text-matches(' …$')"
"""What says that it is looking: pictures of pages are of whole ones."""
SQL = "SELECT worker, count(*) AS n FROM request GROUP BY worker ORDER BY worker"


@dataclass(frozen=True)
class Shown:
    """A page, and what must be on it once it is filled."""

    path: str
    text: str
    charts: int = 0


PAGES = {
    "overview": Shown("/", "imported runs"),
    "requests": Shown("/requests?window=suspect&sort=ttft", "100 so far, in suspect"),
    "request": Shown("/requests/{slowest}?window=suspect", "Seen by the engine", charts=3),
    "diagnosis": Shown("/diagnosis?baseline=baseline&suspect=suspect", "hotspot_straggler", charts=3),
    "workers": Shown("/workers?suspect=suspect&baseline=baseline", "straggler", charts=4),
    "kv": Shown("/kv?window=suspect&worker=w1&colour=state", "KV map", charts=3),
    "capacity": Shown("/capacity?window=suspect", "of the prompt blocks could be found", charts=1),
    "experiments": Shown("/experiments", "2 runs, the newest first", charts=1),
    "alerts": Shown("/alerts", "Nothing is open."),
    "sql": Shown(f"/sql?sql={quote(SQL)}", "4 rows in", charts=1),
    "runbook": Shown("/runbooks/premature_eviction", "their prefill was paid twice"),
    "sight": Shown("/sight?window=suspect", "changes of TTFT, TPOT, E2E can be judged"),
}


@pytest.fixture(scope="module")
def lab_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two windows of the lab: one worker was slow in the second."""
    import subprocess
    import sys

    folder = tmp_path_factory.mktemp("pages")
    store = folder / "lab.duckdb"
    cli = [sys.executable, "-c", "from collector.cli import main; main()"]
    subprocess.run([*cli, "lab", "run", "hotspot_straggler", "-o", folder / "lab"], check=True, capture_output=True)
    for run in ("baseline", "suspect"):
        words = ["import", folder / "lab" / run, "--run", run, "--store", store]
        subprocess.run([*cli, *words], check=True, capture_output=True)
    return store


@pytest.fixture(scope="module")
def lab(lab_store: Path) -> Iterator[Collector]:
    with running(lab_store) as collector:
        yield collector


@contextmanager
def opened(url: str, shown: Shown, **how: int) -> Iterator[tuple[Page, list[str]]]:
    """The page, once its text and its charts are there."""
    with browser_page(**how) as (page, complaints):
        page.goto(url + shown.path)
        page.get_by_text(shown.text).first.wait_for(timeout=60_000)
        if shown.charts:
            page.locator(".chart .main-svg").nth(shown.charts - 1).wait_for(timeout=60_000, state="attached")
        expect(page.locator(AWAITED)).to_have_count(0, timeout=60_000)
        yield page, complaints


def kept(page: Page, name: str) -> None:
    """Keep the picture where SCREENSHOTS says, for people to look at: `make test` sets it to build/screenshots."""
    folder = os.environ.get("SCREENSHOTS")
    if folder:
        page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


@pytest.mark.server
@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [1280, 390])
def test_page_is_filled_silent_and_within_its_width(name: str, width: int, lab: Collector) -> None:
    """On a desk and on a phone: no error in the console, nothing refused by the policy, no sideways scrolling."""
    slowest = lab.client.get("/api/v1/requests?window=suspect&sort=ttft&limit=1").json()["requests"][0]["request_id"]
    shown = Shown(PAGES[name].path.format(slowest=slowest), PAGES[name].text, PAGES[name].charts)
    with opened(lab.url, shown, width=width) as (page, complaints):
        kept(page, f"{name}-{width}")
        assert complaints == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("nav [aria-current]").count() == 1
        assert page.locator("h1").count() == 1
        unnamed = (
            "[...document.querySelectorAll('.chart .main-svg')].filter(one => !one.closest('[aria-label]')).length"
        )
        assert page.evaluate(unnamed) == 0, "a chart without a sentence"
        unlabelled = "[...document.querySelectorAll('main input, main select, main textarea')].filter(one => !one.labels.length && !one.ariaLabel).length"
        assert page.evaluate(unlabelled) == 0, "a field without a name"
        without_unit = "[...document.querySelectorAll('.chart .ytitle')].filter(one => !one.textContent.trim()).length"
        assert page.evaluate(without_unit) == 0


@pytest.mark.server
def test_pages_have_something_to_say_where_nothing_is_stored(tmp_path: Path) -> None:
    """No chart is empty without a reason, and no page fails."""
    said = {
        "/": "Nothing is stored yet",
        "/requests": "No request matches",
        "/diagnosis": "No request is stored there",
        "/workers": "Nobody told P99 TTFT",
        "/kv": "No worker told its steps or blocks",
        "/capacity": "Choose a window or a run",
        "/experiments": "No run is imported",
        "/sight": "no latency can be judged",
        "/alerts": "Nothing is open",
    }
    with running(tmp_path / "empty.duckdb") as collector:
        for path, text in said.items():
            with opened(collector.url, Shown(path, text)):
                pass


@pytest.mark.server
def test_overview_follows_what_goes_on(tmp_path: Path) -> None:
    """Rows that arrive while it is open appear without loading it again; instants are told in UTC where one points."""
    with (
        running(tmp_path / "live.duckdb") as collector,
        opened(collector.url, Shown("/", "Live, as of")) as (page, heard),
    ):
        now = time.time_ns()
        row = request_row("r", vantage="engine", worker="w-page", model="m", arrival_ns=now, at_ns=now)
        row |= {"first_token_ns": now + 100_000_000, "last_token_ns": now + 300_000_000}
        step = step_row(1, worker="w-page", at_ns=now, num_running=3, num_waiting_prefill=2, oldest_wait_s=1.5)
        collector.post({"request": [row], "step": [step]}, source="page-test")
        page.get_by_text("w-page").first.wait_for(timeout=20_000)
        for title, value in (("running", "3"), ("waiting for prefill", "2"), ("oldest wait", "1.5 s")):
            tile = page.locator(".tile").filter(has=page.locator("dt", has_text=re.compile(f"^{title}$")))
            expect(tile.locator("dd")).to_have_text(value, timeout=20_000)
        # TTFT 100 ms, within 1.6 %
        assert re.search(r"(98|99|100|101)[.\d]* / (98|99|100|101)[.\d]* ms", page.locator("#now").inner_text())
        assert page.locator("#pulse time").get_attribute("title").endswith("UTC")
        assert heard == []


@pytest.mark.server
def test_a_reader_for_whom_the_stream_has_no_room_polls_until_it_has(tmp_path: Path) -> None:
    """The 33rd is answered with 503 and when to try again; the page says so, shows new rows all the same, and follows live when somebody left."""
    with running(tmp_path / "full.duckdb") as collector, ExitStack() as readers:
        held: list[Iterator[str]] = []
        for _ in range(MOST_WATCHERS):
            stream = readers.enter_context(collector.client.stream("GET", "/live", timeout=60))
            held.append(stream.iter_lines())  # a reader that is forgotten hangs up
            assert next(held[-1]) == "event: now"
        with collector.client.stream("GET", "/live") as refused:
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
            assert "urn:kvscope:error:too-many-readers" in refused.read().decode()
        pages = readers.enter_context(browser_page())
        page, _ = pages
        page.goto(collector.url + "/")
        page.get_by_text("Live tiles paused: too many readers, polling every 10 s").wait_for(timeout=20_000)
        now = time.time_ns()
        collector.post({"step": [step_row(1, worker="w-late", at_ns=now, num_running=3)]}, source="page-test")
        page.locator("#now").get_by_text("w-late").wait_for(timeout=30_000)
        stream.close()
        page.get_by_text("Live, as of").wait_for(timeout=30_000)


@pytest.mark.server
def test_the_capacity_page_says_whether_caching_would_pay(lab: Collector) -> None:
    """Its sentence beside the numbers it rests on; where prompts do not tell their lengths, that."""
    with opened(lab.url, PAGES["capacity"]) as (page, _):
        page.locator("#caching").get_by_text("Would caching pay here?").wait_for(timeout=20_000)
        assert "look-up of a request" in page.locator("#caching").inner_text()


@pytest.mark.server
def test_collector_stops_while_somebody_watches(tmp_path: Path) -> None:
    """The stream of the overview ends with the collector and does not hold it up."""
    started = time.monotonic()
    with running(tmp_path / "s.duckdb") as collector, collector.client.stream("GET", "/live") as stream:
        lines = stream.iter_lines()
        assert next(lines) == "event: now"
        collector.server.handle_exit(signal.SIGTERM, None)
        list(lines)
    assert time.monotonic() - started < 60


@pytest.mark.server
def test_console_runs_by_keyboard_and_saves_csv(lab: Collector) -> None:
    """Ctrl+Enter runs the statement; the file has what the table shows, quoted where it must be."""
    with browser_page() as (page, complaints):
        page.goto(f"{lab.url}/sql")
        page.locator("textarea").fill("SELECT 'a,\"b\"' AS text, 1.5 AS number")
        page.locator("textarea").press("Control+Enter")
        page.get_by_text("1 row in").first.wait_for(timeout=60_000)
        with page.expect_download() as saved:
            page.get_by_role("button", name="CSV").click()
        assert saved.value.path().read_bytes() == b'text,number\r\n"a,""b""",1.5'
        page.locator("textarea").fill("SELECT nothing FROM request")
        page.get_by_role("button", name="Run", exact=True).click()
        page.get_by_role("alert").wait_for(timeout=60_000)
        assert "nothing" in page.get_by_role("alert").inner_text()
    assert [said for said in complaints if "400" not in said and "422" not in said] == []


@pytest.mark.server
def test_windows_are_chosen_by_dragging_over_the_chart(lab: Collector) -> None:
    """A drag over the middle of the chart writes an interval of the run into the suspect's field."""
    with opened(lab.url, Shown("/diagnosis", "Choose windows")) as (page, _):
        page.locator("input[name=suspect]").fill("suspect")
        page.locator("input[name=suspect]").press("Tab")
        page.locator("#over-time .main-svg").first.wait_for(timeout=60_000)
        box = page.locator("#over-time .nsewdrag").first.bounding_box()
        assert box is not None
        y = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + box["width"] * 0.4, y)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.7, y, steps=8)
        page.mouse.up()
        expect(page.locator("input[name=suspect]")).to_have_value(re.compile("@"), timeout=10_000)
        chosen = page.locator("input[name=suspect]").input_value()
    assert re.fullmatch(r"suspect@2026-\d\d-\d\dT[\d:.]+Z/2026-\d\d-\d\dT[\d:.]+Z", chosen)
    assert lab.client.get("/api/v1/requests", params={"window": chosen, "limit": 1}).status_code == 200


@pytest.mark.server
def test_keyboard_reaches_the_content_first(lab: Collector) -> None:
    """The first Tab offers the way past the list of pages."""
    with opened(lab.url, PAGES["alerts"]) as (page, _):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "to the content"
        page.keyboard.press("Enter")
        assert page.evaluate("location.hash") == "#main"


def test_every_page_has_its_way_and_headers(tmp_path: Path, kvscope: Callable[..., Ended]) -> None:
    """No page lets a script of another host or an inline one run; scripts are served with their type, and nothing else is."""
    with running(tmp_path / "s.duckdb") as collector:
        for way in WAYS:
            answer = collector.client.get(way.path)
            assert answer.status_code == 200, way
            policy = answer.headers["content-security-policy"]
            assert "script-src 'self';" in policy
            assert "default-src 'none'" in policy
            scripts = re.findall(r"<script[^>]*>", answer.text)
            assert all('src="/static/' in script for script in scripts), way
            for address in re.findall(r'(?:src|href)="(/static/[^"]+)"', answer.text):
                assert collector.client.get(address).status_code == 200, address
        assert collector.client.get("/static/../settings.py").status_code == 404
        assert collector.client.get("/static/plotly.min.js").headers["content-type"].startswith("text/javascript")
