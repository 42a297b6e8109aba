"""Routers' logs: real lines of real programs become decisions, and nothing that a line does not tell is invented."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_probe.adapters.prometheus import parse_page
from engine_probe.adapters.registry import adapter, recognise
from engine_probe.adapters.router_log import (
    RouterLog,
    SglangRouterLog,
    StackRouterLog,
    VllmRouterLog,
    instant,
    worker_of_url,
)

SAMPLES = Path(__file__).parents[1] / "data" / "samples"


def decisions(reader: RouterLog, name: str) -> list[dict[str, object]]:
    found = []
    for line in (SAMPLES / name).read_text().splitlines():
        found += reader.feed(line).get("route", [])
    return found


def test_sglang_router_debug_lines_are_decisions() -> None:
    """Four requests, four rows, in whole seconds, colours and all; the worker is named as `attach` names it."""
    rows = decisions(SglangRouterLog("router"), "sglang_router.log")
    assert [row["request_id"] for row in rows] == ["req-0", "req-1", "req-2", "req-3"]
    assert {row["chosen"] for row in rows} <= {"10.0.0.1:8000", "10.0.0.2:8000"}
    assert all(isinstance(row["at_ns"], int) and row["at_ns"] % 1_000_000_000 == 0 for row in rows)
    assert {row["router"] for row in rows} == {"router"}


START = (
    "2026-11-29 21:57:25  INFO smg::server: src/server.rs:794: Starting router on 0.0.0.0:30000 | mode: Regular { worker_urls: "
    '["http://127.0.0.1:8080", "http://127.0.0.1:8081"] } | policy: CacheAware { cache_threshold: 0.3 } | max_payload: 512MB'
)
ASSIGNED = (
    "2026-11-29 21:57:26  INFO smg::policies::registry: src/policies/registry.rs:89: Assigning policy {} to new model m"
)
SENT = (
    '2026-11-29 21:57:38 DEBUG http_request{method=POST module="smg" request_id="r"}: smg::observability::events: '
    "src/observability/events.rs:58: Sending request url=http://127.0.0.1:8081"
)


@pytest.mark.parametrize(
    ("told", "policy"),
    [
        ([], None),
        ([START], "cache_aware"),
        ([START, ASSIGNED.format("cache_aware")], "cache_aware"),
        ([START, ASSIGNED.format("round_robin")], None),
        ([START, ASSIGNED.format("round_robin"), START], "cache_aware"),
    ],
)
def test_sglang_router_start_up_lines_name_the_policy(told: list[str], policy: str | None) -> None:
    """Of a router with one policy for all its models; with several, a decision does not say by which."""
    reader = SglangRouterLog("router")
    assert all(reader.feed(line) == {} for line in told)
    assert [row["policy"] for row in reader.feed(SENT)["route"]] == [policy]


def test_vllm_router_consistent_hash_names_the_request() -> None:
    """One row a request, although several lines speak of each."""
    rows = decisions(VllmRouterLog("router"), "vllm_router.log")
    assert [row["request_id"] for row in rows] == ["req-0", "req-1", "req-2", "req-3"]
    assert {row["policy"] for row in rows} == {"consistent_hash"}


def test_decisions_without_a_request_are_counted_and_left_out() -> None:
    """power_of_two tells the loads it compared, but not for whom: no row is made up."""
    reader = VllmRouterLog("router")
    assert decisions(reader, "vllm_router_power_of_two.log") == []
    assert reader.unnamed == 4


@pytest.mark.parametrize("session", ["", "with session id user-7 x "])
def test_production_stack_tells_instant_and_duration(session: str) -> None:
    """`Routing request ID [with session id S] to URL at T, process time = D`."""
    line = f"[2026-11-01 10:00:00,000] INFO: Routing request chatcmpl-r1 {session}to http://10.0.0.1:8000/ at 1793527200.25, "
    rows = StackRouterLog("stack").feed(line + "process time = 0.0041 (request.py:211:x)")["route"]
    expected = {"router": "stack", "policy": None, "at_ns": 1_793_527_200_250_000_000, "request_id": "r1"}
    assert rows == [expected | {"chosen": "10.0.0.1:8000", "decision_s": 0.0041}]


def test_instants_are_utc() -> None:
    """Both routers write UTC without saying so (seen under another time zone)."""
    expected = int(datetime(2026, 11, 29, 18, 12, 40, tzinfo=UTC).timestamp()) * 10**9
    assert instant("2026-11-29 18:12:40  INFO smg::server: x") == expected
    assert instant("2026-11-29T18:12:40.250Z x") == expected + 250_000_000
    assert instant("2026-13-29 18:12:40 x") is None
    assert instant("no instant here") is None


def test_a_worker_is_named_as_attach_names_it() -> None:
    """The address without its scheme."""
    assert worker_of_url("http://10.0.0.7:8000/") == "10.0.0.7:8000"
    assert worker_of_url("bare") == "bare"


@pytest.mark.parametrize("reader", [SglangRouterLog, VllmRouterLog, StackRouterLog])
@given(
    line=st.one_of(st.text(max_size=300), st.text("request_id=\"}]: Sending request url=' key->at 0123", max_size=300))
)
def test_strange_lines_are_no_decisions(reader: type[RouterLog], line: str) -> None:
    """Whatever a log holds, reading it never fails."""
    for row in reader("r").feed(line).get("route", []):
        assert row["request_id"]


@pytest.mark.parametrize(("engine", "total"), [("sglang-router", 4.0), ("vllm-router", 4.0)])
def test_pages_count_the_decisions(engine: str, total: float) -> None:
    """The real pages after four requests: each is recognised as its router's, and its counts add up."""
    page = parse_page((SAMPLES / f"{engine.replace('-', '_')}.prom").read_text())
    maker = recognise(page)
    assert maker is adapter(engine)
    counts: Counter[str] = Counter()
    for series, value, _ in page.samples:
        counts[series.name] += int(value)
    name = {"sglang-router": "smg_worker_selection_total", "vllm-router": "vllm_router_policy_decisions_total"}[engine]
    assert counts[name] == total
    facts = maker.facts(page, maker.discover(None, page))["0"]  # type: ignore[arg-type]
    assert facts["flags"] == {"policy": {"sglang-router": "cache_aware", "vllm-router": "consistent_hash"}[engine]}
