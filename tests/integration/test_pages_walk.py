"""What a stranger meets on the pages: the way from an alert to the report, odd names, missing columns, other zones, no mouse."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect

from diagnosis.lab.run import Order, run_lab
from tests.browser import browser_page
from tests.integration.collector_harness import Collector, request_row, running, step_row
from tests.integration.test_pages import kept
from tests.live_rows import NS, Windows

pytestmark = [pytest.mark.server, pytest.mark.timeout(280)]

FAST = {
    "interval_s": 1.0,
    "window_s": 30.0,
    "hold_s": 8.0,
    "settle_s": 0.0,
    "cool_down_s": 600.0,
    "metrics": "ttft",
    "min_regret_s": 0.01,
    "max_busy_ratio": 1.0,
}
LONG = "tenant-with-no-end-" * 15
NAMES = (
    "<script>document.title='taken'</script>",
    "<b>bold</b> & \"quoted\" 'twice'",
    "عميل \u05d0\u05d1",
    "🚀 漢字 tenant",
    LONG,
)
EVERY_PAGE = (
    "/",
    "/diagnosis",
    "/requests",
    "/requests/only",
    "/workers",
    "/kv",
    "/capacity?window=-1h/now",
    "/experiments",
    "/alerts",
    "/sql?sql=SELECT%20*%20FROM%20request",
    "/sight",
)


@pytest.fixture(scope="module")
def alarmed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    """Quiet traffic, then a tenant that is pinned to one worker; an alert fires."""
    made = Windows(
        run_lab(Order("hotspot_affinity", severity="strong", requests=2600)), 0, ("request", "step", "route", "worker")
    )
    story = made.moved(time.time_ns() - 40 * NS - made.fault_ns)
    with running(tmp_path_factory.mktemp("walk") / "k.duckdb", alerts=FAST) as collector:
        for rows in (story.baseline, story.suspect):
            collector.post_tables(rows, source="lab").raise_for_status()
        deadline = time.monotonic() + 150
        while not _symptom(collector):
            assert time.monotonic() < deadline, "no alert fired"
            time.sleep(0.5)
        yield collector


def _symptom(collector: Collector) -> Any:
    firing = collector.client.get("/api/v1/alerts", params={"state": "firing"}).json()["alerts"]
    return [alert for alert in firing if alert["labels"]["alertname"] == "KvscopeLatencyRegression"]


def _settled(page: Page) -> None:
    """Nothing is being looked for any more."""
    page.wait_for_load_state("networkidle")
    expect(page.locator("main")).not_to_contain_text(
        re.compile("Looking …|Running …|Judging:|Replaying every|Following every")
    )


def test_from_an_alert_to_the_cause_to_the_report(alarmed: Collector) -> None:
    """The overview says what fires; from there it is links all the way: alerts, diagnosis, the report, the runbook, a slow request."""
    with browser_page() as (page, complaints):
        page.goto(alarmed.url)
        kept(page, "walk-1-overview")
        page.get_by_role("link", name="KvscopeLatencyRegression").first.click()
        row = page.locator("#open tr").filter(has_text="KvscopeLatencyRegression").first
        row.wait_for()
        kept(page, "walk-2-alerts")
        runbook = row.get_by_role("link", name="runbook").get_attribute("href")
        assert runbook is not None
        assert alarmed.client.get(runbook).status_code == 200
        row.get_by_role("link", name="diagnosis").click()
        page.locator("#answer .verdict").wait_for(timeout=60_000)
        page.locator("#answer h3", has_text="hotspot_affinity").wait_for()
        page.locator("#over-time .main-svg").first.wait_for(timeout=60_000)
        kept(page, "walk-3-diagnosis")
        page.locator("#answer article a[href^='/requests/']").first.click()
        page.get_by_text("Seen by the").first.wait_for(timeout=30_000)
        kept(page, "walk-4-request")
        page.go_back()
        report = page.get_by_role("link", name="the postmortem")
        report.wait_for(timeout=60_000)
        with page.expect_popup() as opened:
            report.click()
        asked: list[str] = []
        opened.value.on("request", lambda request: asked.append(request.url))
        opened.value.locator("#root-cause").wait_for(timeout=60_000)
        kept(opened.value, "walk-5-report")
        assert "hotspot_affinity" in opened.value.locator("body").inner_text()
        opened.value.reload()
        assert {url.partition("?")[0] for url in asked} <= {f"{alarmed.url}/api/v1/reports"}
        assert complaints == []


def test_latest_verdict_leads_back_to_its_own_windows(alarmed: Collector) -> None:
    """The row of the overview asks for the windows as they were judged, not for a quarter of an hour that ends now."""
    alarmed.client.get("/api/v1/diagnosis", params={"baseline": "-2m/-1m", "suspect": "-1m/now"})
    (newest, *_) = alarmed.client.get("/api/v1/findings").json()["findings"]
    with browser_page() as (page, _):
        page.goto(alarmed.url)
        page.locator("tr", has_text=newest["verdict"][:30]).get_by_role("link", name="diagnosis").first.click()
        expect(page.locator("input[name=suspect]")).to_have_value(newest["judged"]["suspect"])
        page.locator("#answer .verdict").wait_for(timeout=60_000)
    assert re.fullmatch(r"\d{19}/\d{19}", newest["judged"]["suspect"])


def test_names_from_outside_are_text_everywhere(tmp_path: Path) -> None:
    """Tags, quotes, letters from right to left, emoji, 300 characters: shown as they are, and no page grows wider for them."""
    now = time.time_ns()
    with running(tmp_path / "s.duckdb", alerts={"enabled": False}) as collector:
        rows, steps = [], []
        for number, name in enumerate(NAMES * 4):
            at = now - (number + 1) * 10 * NS
            row = request_row(
                f"{name}/{number}?#%", vantage="engine", worker=name, tenant=name, model=name, session_id=name
            )
            row |= {"arrival_ns": at, "first_token_ns": at + NS // 10, "last_token_ns": at + NS, "at_ns": at + NS}
            rows.append(row)
            steps.append(step_row(number, worker=name, at_ns=at + NS, num_running=1, blocks_used=3, blocks_total=9))
        collector.post({"request": rows, "step": steps}, source=NAMES[1]).raise_for_status()
        asked = quote('SELECT tenant, count(*) AS "<b>n</b>" FROM request GROUP BY ALL')
        one = quote(rows[0]["request_id"], safe="")
        for path in (
            "/",
            "/requests",
            f"/requests/{one}",
            "/workers",
            f"/sql?sql={asked}",
            f"/kv?worker={quote(LONG)}",
            "/diagnosis",
        ):
            with browser_page(width=390) as (page, complaints):
                page.goto(collector.url + path)
                _settled(page)
                kept(page, f"names-{path.strip('/').partition('?')[0][:8] or 'overview'}")
                assert page.title() != "taken"
                assert page.locator("main b", has_text=re.compile("^bold$")).count() == 0, path
                assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
                assert complaints == [], path
        with browser_page() as (page, _):
            page.goto(f"{collector.url}/workers")
            page.locator("#ttft .legendtext").nth(4).wait_for(timeout=30_000)
            legend = (
                page.locator("#ttft .legendtext").all_inner_texts()
                or page.locator("#ttft .legendtext").all_text_contents()
            )
            assert any(text.startswith("<script>") for text in page.locator("#ttft .legendtext").all_text_contents()), (
                legend
            )
            assert all(len(text) <= 40 for text in page.locator("#ttft .legendtext").all_text_contents())


def test_one_request_that_tells_only_what_it_must(tmp_path: Path) -> None:
    """Every page is filled by it, or says why it is not; none fails, and what is unknown is a dash and not a zero."""
    now = time.time_ns()
    with running(tmp_path / "s.duckdb", alerts={"enabled": False}) as collector:
        only = {
            "request_id": "only",
            "vantage": "engine",
            "state": "aborted",
            "arrival_ns": now - 60 * NS,
            "at_ns": now - 59 * NS,
        }
        collector.post({"request": [only]}, source="test").raise_for_status()
        for path in EVERY_PAGE:
            with browser_page() as (page, complaints):
                page.goto(collector.url + path)
                _settled(page)
                kept(page, f"only-{path.strip('/').partition('?')[0].replace('/', '-') or 'overview'}")
                shown = page.locator("main").inner_text()
                assert "undefined" not in shown, path
                assert "NaN" not in shown, path
                assert "[object" not in shown, path
                assert [said for said in complaints if "400" not in said and "422" not in said] == [], path
                empty = "[...document.querySelectorAll('main .chart')].filter(one => !one.hidden && !one.textContent.trim() && !one.querySelector('.main-svg')).map(one => one.id)"
                assert page.evaluate(empty) == ([] if path != "/capacity?window=-1h/now" else ["curve"]), path


def test_times_are_those_of_the_reader_with_utc_beside(alarmed: Collector) -> None:
    """In Kolkata half past five hours later; charts tell UTC where one points; the page says whose times they are."""
    with browser_page(timezone_id="Asia/Kolkata") as (page, _):
        page.goto(f"{alarmed.url}/requests?window=-1h/now")
        cell = page.locator("#list tbody time").first
        cell.wait_for(timeout=30_000)
        local, utc = cell.inner_text(), cell.get_attribute("title") or ""
        assert "(UTC+05:30)" in page.locator("#zone").inner_text()
        hours = [int(text[11:13]) * 60 + int(text[14:16]) for text in (local, utc)]
        assert (hours[0] - hours[1]) % (24 * 60) == 330
        page.goto(f"{alarmed.url}/diagnosis?suspect=-10m/now&baseline=-20m/-10m")
        page.locator("#over-time .main-svg").first.wait_for(timeout=60_000)
        drawn = page.evaluate("document.querySelector('#over-time').data[0]")
        assert drawn["hovertext"][0].endswith("UTC")
        assert "%{hovertext}" in drawn["hovertemplate"]


def test_live_pages_leave_the_reader_where_they_are(alarmed: Collector) -> None:
    """What is renewed every few seconds keeps the focus: on the overview and on the alerts."""
    with browser_page() as (page, _):
        page.goto(alarmed.url)
        page.locator("#now a").first.focus()
        page.evaluate("document.querySelector('#now').firstElementChild.id = 'before'")
        expect(page.locator("#before")).to_have_count(0, timeout=20_000)
        assert page.evaluate("document.activeElement.getAttribute('href')") == "/alerts"
        page.goto(f"{alarmed.url}/alerts")
        page.locator("#open a").first.focus()
        page.wait_for_timeout(11_000)
        assert page.evaluate("document.activeElement.tagName") == "A"
