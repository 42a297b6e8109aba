"""The API's description: complete, sound, and true - examples are accepted and answers match their models."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.openapi.models import OpenAPI
from fastapi.routing import APIRoute
from pydantic import TypeAdapter

from collector.app import create_app
from collector.settings import load_settings
from tests.integration.collector_harness import Collector, request_row, running, step_row

DESIGNED = {
    ("post", "/v1/events"),
    ("post", "/v1/traces"),
    ("post", "/v1/metrics"),
    ("get", "/api/v1/requests"),
    ("get", "/api/v1/requests/{request_id}"),
    ("get", "/api/v1/requests/{request_id}/timeline"),
    ("get", "/api/v1/requests/{request_id}/perfetto"),
    ("get", "/api/v1/perfetto"),
    ("get", "/api/v1/otlp"),
    ("get", "/api/v1/now"),
    ("get", "/api/v1/kv"),
    ("get", "/api/v1/runs"),
    ("get", "/api/v1/sight"),
    ("get", "/live"),
    ("get", "/live/once"),
    ("get", "/api/v1/series"),
    ("get", "/api/v1/diagnosis"),
    ("get", "/api/v1/findings"),
    ("get", "/api/v1/alerts"),
    ("post", "/api/v1/alerts/webhook"),
    ("get", "/api/v1/alerts/silences"),
    ("post", "/api/v1/alerts/silences"),
    ("delete", "/api/v1/alerts/silences/{silence_id}"),
    ("get", "/api/v1/alerts/deliveries"),
    ("post", "/api/v1/alerts/deliveries/replay"),
    ("post", "/api/v1/alerts/deliveries/discard"),
    ("get", "/api/v1/runbooks/{name}"),
    ("get", "/api/v1/hotspots"),
    ("get", "/api/v1/capacity"),
    ("get", "/api/v1/reports"),
    ("get", "/api/v1/marks"),
    ("post", "/api/v1/marks"),
    ("post", "/api/v1/sql"),
    ("get", "/metrics"),
    ("get", "/healthz"),
    ("get", "/readyz"),
    ("get", "/"),
}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    made: dict[str, Any] = create_app(load_settings()).openapi()
    return made


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    with running(tmp_path_factory.mktemp("openapi") / "kvscope.duckdb") as made:
        now = time.time_ns() - 60_000_000_000
        rows = {
            "request": [
                request_row(
                    f"a{i}",
                    arrival_ns=now + i,
                    first_token_ns=None,
                    last_token_ns=None,
                    at_ns=now,
                    prompt_blocks=[1, i],
                )
                for i in range(40)
            ],
            "step": [step_row(1, at_ns=now)],
            "route": [{"request_id": "a1", "at_ns": now, "chosen": "w0"}],
        }
        made.post(rows).raise_for_status()
        yield made


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, by_method in document["paths"].items():
        for method, operation in by_method.items():
            yield method, path, operation


def test_every_designed_route_is_described_and_no_other(document: dict[str, Any]) -> None:
    """Scripts rely on these names."""
    assert {(method, path) for method, path, _ in operations(document)} == DESIGNED


def test_description_is_a_sound_openapi_document(document: dict[str, Any]) -> None:
    """It parses as OpenAPI 3.1, every reference leads somewhere, operation ids are distinct."""
    OpenAPI.model_validate(document)
    assert document["openapi"].startswith("3.1")
    references = re.findall(r"'\$ref': '#/components/schemas/([^']+)'", str(document))
    assert set(references) <= set(document["components"]["schemas"])
    assert references
    ids = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(ids) == len(set(ids))


def test_every_operation_says_what_it_does_and_what_its_parameters_mean(document: dict[str, Any]) -> None:
    """Summary, description, a 2xx answer with a schema; path parameters are in the path."""
    for method, path, operation in operations(document):
        assert operation["summary"], path
        assert operation["description"], path
        good = [answer for status, answer in operation["responses"].items() if status.startswith("2")]
        assert good, (method, path)
        assert all(content["schema"] for answer in good for content in answer["content"].values()), (method, path)
        named = {p["name"] for p in operation.get("parameters", []) if p["in"] == "path"}
        assert named == set(re.findall(r"{(\w+)}", path))


def test_every_operation_documents_its_errors_as_problems(document: dict[str, Any]) -> None:
    """401, 403 and 503 everywhere but at the health checks; each error with the problem schema and an example."""
    for method, path, operation in operations(document):
        errors = {status: answer for status, answer in operation["responses"].items() if status[0] in "45"}
        if path not in ("/healthz", "/readyz"):
            assert {"401", "403", "503"} <= set(errors), (method, path)
        if operation.get("parameters") and path.startswith("/api/"):
            assert "400" in errors, (method, path)
        for status, answer in errors.items():
            content = answer["content"]["application/problem+json"]
            assert content["schema"] == {"$ref": "#/components/schemas/Problem"}, (path, status)
            for name, example in content["examples"].items():
                assert example["value"]["type"] == f"urn:kvscope:error:{name}"
                assert example["value"]["status"] == int(status)


def test_ingest_documents_every_refusal_of_the_design(document: dict[str, Any]) -> None:
    """400, 408, 413, 415, 422, 429, 507 and 503, beside who may send."""
    for path in ("/v1/events", "/v1/traces", "/v1/metrics"):
        statuses = set(document["paths"][path]["post"]["responses"])
        assert {"200", "400", "401", "403", "408", "413", "415", "422", "429", "503", "507"} == statuses


def test_examples_of_bodies_are_accepted(collector: Collector) -> None:
    """Every example body of every route is taken as it stands; a model's own examples too."""
    sent = 0
    document = collector.app.openapi()
    for method, path, operation in operations(document):
        for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
            schema = _resolved(document, content["schema"])
            for example in [*([content["example"]] if "example" in content else []), *schema.get("examples", [])]:
                headers = {"content-type": media_type}
                if isinstance(example, str):
                    answer = collector.client.request(method, path, content=example, headers=headers)
                else:
                    answer = collector.client.request(method, path, json=example, headers=headers)
                assert answer.is_success, (path, media_type, answer.text)
                sent += 1
    assert sent >= 5


def test_examples_of_parameters_are_accepted(collector: Collector) -> None:
    """Each documented example value, with what is required beside it, is understood (run names aside: not imported)."""
    document = collector.app.openapi()
    asked = 0
    for method, path, operation in operations(document):
        if method != "get":
            continue
        parameters = [p for p in operation.get("parameters", []) if p["in"] == "query"]
        required = {p["name"]: _example(p) for p in parameters if p.get("required")}
        for parameter in parameters:
            if _example(parameter) is None or parameter["name"] in ("baseline", "suspect"):
                continue
            url = path.replace("{request_id}", "a1")
            params = {**required, parameter["name"]: _example(parameter)}
            answer = collector.client.get(url, params=params)
            # The diagnosis of a store without two windows may find nothing to compare: that is no misunderstanding.
            fine = answer.is_success or (
                path in ("/api/v1/diagnosis", "/api/v1/reports") and "bad-window" in answer.text
            )
            assert fine, (path, params, answer.text)
            asked += 1
    assert asked >= 8


@pytest.mark.parametrize(
    "path",
    [
        "/healthz",
        "/readyz",
        "/api/v1/requests",
        "/api/v1/requests?state=open",
        "/api/v1/requests/a1",
        "/api/v1/requests/a1/timeline",
        "/api/v1/requests/a1/perfetto",
        "/api/v1/perfetto?sort=ttft",
        "/api/v1/series?metric=requests&by=worker",
        "/api/v1/findings",
        "/api/v1/alerts?state=all",
        "/api/v1/alerts/silences",
        "/api/v1/alerts/deliveries",
        "/api/v1/marks",
        "/api/v1/capacity?blocks=1,2,inf",
    ],
)
def test_answers_match_their_models(collector: Collector, path: str) -> None:
    """What is answered has exactly the documented fields, with the documented types."""
    answer = collector.client.get(path)
    assert answer.status_code == 200, answer.text
    route = _route(collector, path.partition("?")[0].replace("/a1", "/{request_id:text}"), "GET")
    model = route.response_model or route.responses[200]["model"]
    parsed = TypeAdapter(model).validate_json(answer.content)
    assert set(answer.json()) == set(parsed.model_dump())


def test_answers_of_posts_match_their_models(collector: Collector) -> None:
    """The same for what is sent."""
    for path, body, status in (
        ("/api/v1/marks", {"mark": "fault"}, 201),
        ("/api/v1/sql", {"sql": "SELECT 1 AS a, 'x' AS b"}, 200),
        (
            "/api/v1/alerts/silences",
            {"matchers": ['worker="w1"', "cause=~hot.*"], "duration_s": 60, "created_by": "ann"},
            201,
        ),
        ("/v1/events", {"events": {"step": [step_row(1)]}}, 200),
        ("/v1/events", {"events": {"step": [step_row(2, new_column=1)]}}, 200),
    ):
        answer = collector.client.post(path, json=body)
        assert answer.status_code == status, answer.text
        model = _route(collector, path, "POST").responses[status]["model"]
        parsed = TypeAdapter(model).validate_json(answer.content)
        assert set(answer.json()) == set(parsed.model_dump(exclude_unset=True))


def test_undocumented_methods_and_paths_are_problems_too(collector: Collector) -> None:
    """404 and 405 speak the same language."""
    missing = collector.client.get("/api/v2/requests")
    assert (missing.status_code, missing.json()["type"]) == (404, "urn:kvscope:error:not-found")
    wrong = collector.client.delete("/v1/events")
    assert (wrong.status_code, wrong.headers["content-type"]) == (405, "application/problem+json")
    assert "POST" in wrong.json()["detail"]


def test_unforeseen_error_is_a_problem_without_its_text(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of ours tells its traceback to the log and not to the network."""

    def broken() -> bytes:
        raise RuntimeError("secret path /etc/kvscope")

    monkeypatch.setattr(collector.app.state.services.metrics_page, "render", broken)
    answer = collector.client.get("/metrics")
    assert (answer.status_code, answer.headers["content-type"]) == (500, "application/problem+json")
    assert "secret" not in answer.text


def _route(collector: Collector, path: str, method: str) -> APIRoute:
    for route in _all_routes(collector.app.routes):
        if route.path == path and method in (route.methods or ()):
            return route
    raise AssertionError(f"no route {method} {path}")


def _all_routes(routes: Any) -> Iterator[APIRoute]:
    for route in routes:
        if isinstance(route, APIRoute):
            yield route
        elif hasattr(route, "original_router"):
            yield from _all_routes(route.original_router.routes)


def _resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    found: dict[str, Any] = document["components"]["schemas"][name] if name else schema
    return found


def _example(parameter: dict[str, Any]) -> Any:
    examples = parameter["schema"].get("examples") or parameter.get("examples") or [None]
    return examples[0]
