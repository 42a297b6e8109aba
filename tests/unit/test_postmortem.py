"""The postmortem: impact by hand, moments in order, charts that hold, and a file that needs nothing beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.postmortem import svg
from diagnosis.postmortem.html import render_html
from diagnosis.postmortem.incident import Told, incident
from diagnosis.postmortem.words import summary
from diagnosis.report import render_markdown
from diagnosis.telling.wording import seconds
from store.interface import Store
from store.metrics import Slo, SloRule, meets_rules_sql, meets_slo, slo_rules
from store.open import open_store
from tests.store_rows import START_NS, S, batch, request
from tests.verdicts import verdict as a_verdict

MINUTE = 60 * S
WINDOWS = {"baseline": (0, 60), "suspect": (120, 180)}


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store(":memory:") as opened:
        yield opened


def call(name: str, at_s: float, ttft_s: float, **facts: Any) -> dict[str, Any]:
    first = START_NS + round((at_s + ttft_s) * S)
    row = request(name, at_s, vantage="engine", worker="w0", first_token_ns=first, last_token_ns=first, output_tokens=1)
    return row | {"end_ns": first, "queue_s": ttft_s / 2, "prefill_s": ttft_s / 2} | facts


def verdict(**facts: Any) -> dict[str, Any]:
    """The document of tests/verdicts.py, about these two minutes."""
    told = a_verdict(vantage="engine", **facts).to_dict()
    windows = {
        side: told["windows"][side] | {"run": None, "start_ns": START_NS + a * S, "end_ns": START_NS + b * S}
        for side, (a, b) in WINDOWS.items()
    }
    return told | {"windows": told["windows"] | windows}


def put(store: Store) -> None:
    """Ten calls a window; then three of tenant x take 2 s (limit 1 s), one of y fails, one of code takes 0.7 s (limit 0.5 s)."""
    before = [call(f"b{n}", n, 0.1, tenant="x" if n < 5 else "y", session_id=f"s{n}") for n in range(10)]
    then = [call(f"t{n}", 120 + n, 2.0 if n < 3 else 0.1, tenant="x", session_id="s") for n in range(8)]
    then.append(call("t8", 128, 0.1, tenant="y", session_id="u", state="failed"))
    then.append(call("t9", 129, 0.7, tenant="z", session_id="v", workload="code"))
    marks = [
        {"at_ns": START_NS + 100 * S, "mark": "deployed", "text": "v2"},
        {"at_ns": START_NS + 300 * S, "mark": "gap"},
    ]
    store.append(batch({"request": before + then, "mark": marks}))


def test_impact_counts_requests_tenants_and_sessions_over_their_slo(store: Store) -> None:
    """3 + 1 failed + 1 of code = 5 of 10; goodput 10/60 before, 5/60 then."""
    put(store)
    told = incident(store, verdict())["impact"]
    then = told["suspect"]
    assert (then["requests"], then["over"], then["unfinished"]) == (10, 5, 1)
    assert (then["tenants_over"], then["tenants"], then["sessions_over"], then["sessions"]) == (3, 3, 3, 3)
    assert told["baseline"]["over"] == 0
    assert told["baseline"]["goodput_rps"] == pytest.approx(10 / 60)
    assert then["goodput_rps"] == pytest.approx(5 / 60)
    assert [(row["tenant"], row["suspect"]["over"]) for row in told["tenants"]] == [("x", 3), ("y", 1), ("z", 1)]
    assert told["tenants"][2]["baseline"] is None


def test_first_rule_that_fits_decides(store: Store) -> None:
    """A rule for tenant x allows 3 s: its three slow calls are fine then."""
    put(store)
    rules = slo_rules([SloRule("patient", Slo(ttft_s=3.0), tenant="x")])
    told = incident(store, verdict(), rules)["impact"]
    assert told["suspect"]["over"] == 2
    assert [rule["name"] for rule in told["slo"]] == ["patient", "interactive", "code", "batch"]


@given(
    ttft_s=st.floats(0.01, 5),
    tenant=st.sampled_from(["x", "o'neill", None]),
    workload=st.sampled_from(["code", "batch", "interactive", None]),
    state=st.sampled_from(["finished", "failed"]),
)
def test_rules_in_sql_say_what_the_function_says(
    ttft_s: float, tenant: str | None, workload: str | None, state: str
) -> None:
    """`meets_rules_sql` is `meets_slo` of the first rule that fits, whatever the names hold."""
    rules = slo_rules([SloRule("gold", Slo(ttft_s=0.5), tenant="o'neill")])
    row = call("a", 0, ttft_s, tenant=tenant, workload=workload, state=state)
    fits = next(r for r in rules if r.tenant in (None, tenant) and r.workload in (None, workload))
    with open_store(":memory:") as opened:
        opened.append(batch({"request": [row]}))
        (found,) = opened.query(f"SELECT {meets_rules_sql(rules)} AS met FROM request").to_pylist()
    assert found["met"] == meets_slo(row, fits.slo)


def test_moments_are_in_order_with_alerts_and_causes(store: Store) -> None:
    """The mark before the window is part of the story, the one after it is not."""
    put(store)
    told = verdict()
    told["causes"] = [cause | {"interval": None} for cause in told["causes"]]
    found = incident(store, told, alerts=[Told(START_NS + 150 * S, "P99 is high")])
    assert [moment["text"] for moment in found["moments"]] == [
        "deployed: v2",
        "the suspect window begins",
        "P99 is high",
        "the suspect window ends",
    ]


def test_slowest_requests_come_with_what_their_time_went_into(store: Store) -> None:
    """Two seconds, half in the queue and half in prefill; ties by id."""
    put(store)
    slowest = incident(store, verdict())["slowest"]
    assert [row["request_id"] for row in slowest[:4]] == ["t0", "t1", "t2", "t9"]
    assert slowest[0]["phases"] == {"queue": 1.0, "prefill": 1.0}


def test_every_number_can_be_asked_for_again(store: Store) -> None:
    """Each query runs as it stands and gives what the report says; names with quotes and NULs do not break it."""
    put(store)
    run = "o'neill \0 ?"
    other = [call(f"'{n}\0?", 120 + n, 2.0, tenant="x", run_id=run) for n in range(3)]
    store.append(batch({"request": other}))
    told = verdict()
    told["windows"]["suspect"]["run"] = run
    found = incident(store, told)
    assert found["impact"]["suspect"]["requests"] == len(found["slowest"]) == 3
    assert {of for query in found["queries"] for of in query["of"]} >= {"impact", "timeline", "slowest requests"}
    answers = [store.query(query["sql"]).to_pylist() for query in found["queries"] if "impact" in query["of"]]
    assert [rows[0]["over"] for rows in answers if "met" in rows[0]] == [0, 3]
    page = render_html(told, found, version="1")
    for query in found["queries"]:
        store.query(query["sql"])
        assert f'id="query-{query["hash"]}"' in page
    anchors = re.findall(r'href="#([^"]+)"', page)
    assert all(f'id="{anchor}"' in page for anchor in anchors)


def test_summary_is_three_sentences(store: Store) -> None:
    """What and why, whom it hurt, what to do."""
    put(store)
    told = verdict()
    said = summary(told, incident(store, told))
    assert len(said) == 3
    assert all(sentence.endswith(".") for sentence in said)
    assert "5 of 10 requests (50 %) were over their SLO, before it 0 %" in said[1]
    assert "3 of 3 tenants and 3 of 3 sessions" in said[1]


class Outside(HTMLParser):
    """Collects what a page would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag in {"script", "link", "img", "iframe", "object"} or (named.get("href") or "#")[0] != "#":
            self.found.append(f"{tag} {named}")


def test_html_needs_nothing_beside_it_and_names_cannot_be_markup(store: Store) -> None:
    """No script, no address; hostile names stay text; the same input gives the same bytes."""
    put(store)
    hostile = "<script>alert(1)</script>"
    store.append(batch({"request": [call(hostile, 130, 5.0, tenant="<img src=x>", worker='"w"')]}))
    told = verdict()
    page = render_html(told, incident(store, told), version="1")
    outside = Outside()
    outside.feed(page)
    assert outside.found == []
    assert "<script" not in page
    assert "&lt;img src=x&gt;" in page
    assert page == render_html(told, incident(store, told), version="1")
    for drawing in re.findall(r"<svg.*?</svg>", page, re.S):
        ElementTree.fromstring(drawing)


def test_markdown_has_the_same_sections(store: Store) -> None:
    """And is still what it was where no incident is given."""
    put(store)
    told = verdict()
    report = render_markdown(told, incident(store, told), version="1")
    for title in ("Impact", "Timeline", "Attribution of the change", "Causes", "Slowest requests", "Data quality"):
        assert f"\n## {title}\n" in report
    assert "| suspect | 10 | 5 | 1 |" in report
    assert "## Impact" not in render_markdown(told, version="1")


def test_window_without_requests_is_said(store: Store) -> None:
    """No chart is drawn of nothing."""
    told = verdict()
    page = render_html(told, incident(store, told), version="1")
    assert "No request of the suspect window is stored." in page
    assert "No request of these windows tells its TTFT" in page


def test_series_of_one_point_is_seen_and_names_stand_above_the_lines() -> None:
    """A window of one request has no line to draw; the names lie above the highest value."""
    drawing = ElementTree.fromstring(
        svg.lines({"baseline": [(0.0, 1.0), (9.0, 1.0)], "suspect": [(2.0, 9.0)]}, [], seconds, 10.0)
    )
    dots = [one for one in drawing.iter() if one.tag == "circle" and one.get("class") == "line1"]
    names = [float(one.get("y", 0)) for one in drawing.iter() if "legend" in one.get("class", "")]
    assert len(dots) == 1
    assert max(names) < float(dots[0].get("cy", 0)) - 12


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("no_change", "Nothing has to be changed"),
        ("explained", "cannot be said"),
        ("not_distinguishable", "cannot be said"),
    ],
)
def test_summary_promises_nothing_where_no_cause_is_named(store: Store, status: str, said: str) -> None:
    """That nothing has to be changed is said of windows that do not differ, and of no others."""
    put(store)
    told = verdict() | {"status": status, "causes": [], "next_experiment": None}
    assert said in summary(told, incident(store, told))[2]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=9), st.floats(0.001, 10))
def test_waterfall_holds_every_bar_within_its_frame(parts: list[float], start: float) -> None:
    """Whatever the signs of the parts, and each is named."""
    rows = [(f"row{place}", value) for place, value in enumerate(parts)]
    drawing = ElementTree.fromstring(svg.waterfall(start, rows, start + sum(parts), seconds))
    heights = [(float(one.get("y", 0)), float(one.get("height", 0))) for one in drawing.iter() if one.tag == "rect"]
    assert len(heights) == len(parts) + 2
    assert all(y >= 17.9 and y + height <= 320 - 96 + 1.1 for y, height in heights)
    assert all(f"row{place} " in str(drawing.get("aria-label")) for place in range(len(parts)))
