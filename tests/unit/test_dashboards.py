"""Dashboards as code: committed JSON is what the source makes; every query is sound before any server sees it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from collector.app import create_app
from collector.settings import load_settings
from dashboards import promql
from dashboards.api_check import _has
from dashboards.build import SUBJECTS, Target, build, panels, stored, targets
from dashboards.check import Prometheus, Span, as_asked, check
from engine_probe.errors import ServerUnreachable
from store import metric_catalogue as names

DOCUMENTS = {name: json.loads(text) for name, text in stored().items()}
TARGETS = list(targets(stored()))
SPAN = Span(0.0, 60.0, 5.0)
BUILT_IN = {"__rate_interval", "__from", "__to", "__value"}


def test_committed_dashboards_are_what_the_source_makes() -> None:
    """Built again, byte by byte: run `kvscope dashboards build` after a change."""
    assert build() == stored()
    assert len(DOCUMENTS) == len(SUBJECTS)


def test_the_overview_turns_red_where_more_than_the_goal_leaves_is_missed() -> None:
    """99 % unless the settings say another; the panel says which goal it is held to."""
    found = {}
    for goal in (0.99, 0.999):
        document = json.loads(build(goal)["kvscope-overview.json"])
        (panel,) = (panel for panel in panels(document) if panel["title"] == "SLO missed")
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        found[goal] = (steps[-1]["value"], f"{goal * 100:g} % should meet it" in panel["description"])
    assert found == {0.99: (0.01, True), 0.999: (0.001, True)}


def test_tables_of_raw_events_are_narrowed_by_the_variables_of_their_dashboard() -> None:
    """Each parameter of a pattern is a variable that the dashboard has, matched as PromQL matches it; of requests all are there."""
    narrowed = {}
    for target in TARGETS:
        if target.query is not None:
            params = {one["key"]: one["value"] for one in target.query["url_options"].get("params", ())}
            chosen = {key.removesuffix("_matches") for key in params if key.endswith("_matches")}
            assert all(params[f"{name}_matches"] == f"${{{name}:regex}}" for name in chosen)
            narrowed[target.dashboard, target.panel] = chosen
    assert narrowed["kvscope-overview", "Slowest to the first token"] == {"model", "worker", "tenant"}
    assert narrowed["kvscope-overview", "Alerts"] == {"model", "worker", "tenant"}
    assert narrowed["kvscope-routing", "Hotspots of this time"] == {"worker"}
    assert narrowed["kvscope-routing", "Open requests"] == {"worker"}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_panel_says_what_it_shows_and_has_its_own_place(name: str) -> None:
    """A title, a description, a unit where it has numbers; no two panels on the same spot; refIds that differ."""
    document = DOCUMENTS[name]
    places: set[tuple[int, int]] = set()
    for panel in panels(document):
        assert panel["title"], panel
        assert len(panel["description"]) > 8, panel["title"]
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert not cells & places, f"{panel['title']} lies on another panel"
        places |= cells
        refs = [target["refId"] for target in panel["targets"]]
        assert all(refs)
        assert len(set(refs)) == len(refs), panel["title"]
        if panel["type"] in ("timeseries", "stat", "bargauge"):
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_variable_of_a_query_is_one_of_its_dashboard(name: str) -> None:
    """A variable that a dashboard does not have would stand in the query as text, and match nothing."""
    document = DOCUMENTS[name]
    known = {one["name"] for one in document["templating"]["list"]} | BUILT_IN
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(document["panels"])))
    assert used <= known, used - known
    offered = {one["name"] for one in document["templating"]["list"] if one["type"] in ("query", "textbox")}
    assert offered <= used, f"{offered - used} can be chosen and changes nothing"


def test_every_metric_of_a_query_is_in_the_catalogue_with_its_labels() -> None:
    """Names and labels in every expression, those of variables too."""
    for target in TARGETS:
        if target.expr is None:
            continue
        for name, matchers in re.findall(r"\b(kvscope_\w+)(?:\{([^}]*)\})?", target.expr):
            family = names.family_of(name)
            labels = set(re.findall(r"(\w+)=~", matchers))
            assert labels <= {*family.labels, "le"}, (target.panel, name)


def _schemas() -> Iterator[tuple[str, set[str], dict[str, Any]]]:
    document = create_app(load_settings()).openapi()
    for path, operations in document["paths"].items():
        if "get" in operations:
            known = {one["name"] for one in operations["get"].get("parameters", ())}
            yield path, known, operations["get"]["responses"]["200"]


def test_every_api_query_is_one_that_the_api_has() -> None:
    """Path and parameters are in its own description, and the panel says that it reads raw events."""
    known = {path: params for path, params, _ in _schemas()}
    asked = [target for target in TARGETS if target.query is not None]
    assert asked
    for target in asked:
        query: dict[str, Any] = target.query or {}
        assert query["url"] in known, target.panel
        params = {one["key"] for one in query["url_options"].get("params", ())}
        assert params <= known[query["url"]], (target.panel, params - known[query["url"]])
    for document in DOCUMENTS.values():
        for panel in panels(document):
            if any("expr" not in target for target in panel["targets"]):
                assert "Infinity" in panel["description"], panel["title"]


def test_columns_of_a_verdict_are_those_that_a_verdict_has() -> None:
    """Held against the committed example; other answers are asked for columns by `dashboards check` while rows come."""
    verdict = json.loads((Path(__file__).parents[1] / "data" / "golden" / "verdict.json").read_text())
    asked = [target.query for target in TARGETS if target.query and target.query["url"] == "/api/v1/diagnosis"]
    assert len(asked) == 4
    for query in asked:
        rows = verdict[query["root_selector"]]
        assert rows
        for column in query["columns"]:
            assert any(_has(row, column["selector"]) for row in rows), column


def test_dashboards_that_make_the_collector_judge_do_not_ask_all_the_time() -> None:
    """A diagnosis, hotspots or a replay of a window takes seconds: not every 30 of them, for every open browser."""
    judged = {"/api/v1/diagnosis", "/api/v1/hotspots", "/api/v1/capacity"}
    seldom = {target.dashboard for target in TARGETS if target.query and target.query["url"] in judged}
    assert seldom == {"kvscope-routing", "kvscope-experiments"}
    for document in DOCUMENTS.values():
        assert (document["refresh"] in ("", "5m")) == (document["uid"] in seldom), document["uid"]


def test_ids_of_requests_lead_to_their_timeline() -> None:
    """Every column of request ids has the link."""
    found = 0
    for document in DOCUMENTS.values():
        for panel in panels(document):
            columns = [c["text"] for target in panel["targets"] for c in target.get("columns", ())]
            if "request" in columns:
                override = next(o for o in panel["fieldConfig"]["overrides"] if o["matcher"]["options"] == "request")
                (links,) = [p["value"] for p in override["properties"] if p["id"] == "links"]
                assert links[0]["url"] == "${collector}/requests/${__value.raw:percentencode}"
                found += 1
    assert found >= 3


def test_a_family_is_asked_for_by_its_own_labels_only() -> None:
    """What does not exist cannot be asked for."""
    assert promql.rate(names.TTFT, "le", series=names.TTFT.bucket) == (
        'sum by (le) (rate(kvscope_time_to_first_token_seconds_bucket{model=~"$model", worker=~"$worker"}[$__rate_interval]))'
    )
    assert promql.select(names.INGEST_ROWS) == "kvscope_ingest_rows_total"
    assert promql.select(names.ROUTES, worker="w0") == 'kvscope_routes_total{worker=~"w0"}'
    with pytest.raises(ValueError, match=r"has no label tier"):
        promql.select(names.TTFT, tier="host")
    with pytest.raises(ValueError, match=r"no part of"):
        promql.select(names.TTFT, names.E2E.bucket)


def test_catalogue_names_carry_their_units_and_bound_every_label() -> None:
    """Counters end in `_total`, durations are seconds; a label without a bound is not in it; no name twice."""
    found = names.families()
    assert len({family.name for family in found}) == len(found)
    for family in found:
        assert re.fullmatch(r"kvscope_[a-z0-9_]+", family.name)
        assert (family.type == "counter") == family.name.endswith("_total")
        assert not re.search(r"_(ms|milliseconds|us|ns|percent)\b", family.name)
        assert family.doc
        assert set(family.labels) <= set(names.BOUNDED), family
    assert set(names.BOUNDED) == {label for family in found for label in family.labels}
    with pytest.raises(KeyError, match=r"no metric kvscope_typo"):
        names.family_of("kvscope_typo")
    with pytest.raises(ValueError, match=r"no bucket up to 0.3333"):
        names.le(0.3333)
    with pytest.raises(ValueError, match=r"is a counter"):
        _ = names.REQUESTS.bucket


def _prometheus(answers: dict[str, Any]) -> Prometheus:
    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=answers[request.url.params["query"]])

    return Prometheus("http://p", httpx.Client(transport=httpx.MockTransport(handle)))


def test_an_expression_is_ok_empty_or_broken() -> None:
    """Data at any instant of the span is data; a NaN is none: a ratio without a denominator draws nothing."""

    def matrix(*series: list[str]) -> dict[str, Any]:
        result = [{"metric": {}, "values": [[at, value] for at, value in enumerate(values)]} for values in series]
        return {"status": "success", "data": {"resultType": "matrix", "result": result}}

    prometheus = _prometheus(
        {
            "a": matrix(["NaN", "1"], ["NaN"]),
            "b": matrix(),
            "c": matrix(["NaN", "NaN"]),
            "d(": {"status": "error", "errorType": "bad_data", "error": "parse error"},
        }
    )
    asked = [Target("d", expr, "A", expr, None) for expr in ("a", "b", "c", "d(")]
    found = check(prometheus, asked, "10s", SPAN)
    assert [one.status for one in found] == ["ok", "empty", "empty", "broken"]
    assert found[0].num_series == 1
    assert found[3].error == "parse error"


def test_a_prometheus_that_is_away_is_said_to_be() -> None:
    """With what to do."""
    refused = r"no Prometheus answers at http://127.0.0.1:1.*--prometheus"
    with Prometheus("http://127.0.0.1:1") as prometheus, pytest.raises(ServerUnreachable, match=refused):
        prometheus.query("up", SPAN)


def test_variables_become_what_all_means() -> None:
    """Grafana's interval, and `.*` for every choice."""
    assert as_asked('rate(x{worker=~"$worker"}[$__rate_interval])', "10s") == 'rate(x{worker=~".*"}[10s])'
