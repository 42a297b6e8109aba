"""The server's OpenAPI document: complete, sound, and true - answers are what it says, down to the last field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from fastapi.openapi.models import OpenAPI

from engine_probe.engine.server import openapi
from engine_probe.engine.server.assembly import ServerOptions
from tests.engine_server import NAME, Running, engine_server, served_model

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with engine_server(served_model(128), ServerOptions(kv_events="0", kv_replay="0")) as running:
        yield running


@pytest.fixture(scope="module")
def document(server: Running) -> dict[str, Any]:
    found: dict[str, Any] = server.client.get("/openapi.json").json()
    return found


def test_it_is_sound_and_has_every_route(document: dict[str, Any]) -> None:
    """FastAPI's own model reads it; each method of each path is in the table, and each entry of the table is served."""
    OpenAPI.model_validate(document)
    served = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert served == set(openapi.ROUTES)
    assert "HTTPValidationError" not in json.dumps(document)


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    """No schema is named that is not there."""
    names = [word.partition('"')[0] for word in json.dumps(document).split("#/components/schemas/")[1:]]
    assert set(names) <= set(document["components"]["schemas"])


def test_bodies_are_those_that_are_decoded(document: dict[str, Any]) -> None:
    """Fields and bounds of a completion: the type that decodes it, with everything that it acts on."""
    properties = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"prompt", "max_tokens", "n", "stop", "stream", "seed", "cache_salt"} <= set(properties)
    assert {"type": "integer", "minimum": 1, "maximum": 128} in properties["n"]["anyOf"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("post", "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 3, "n": 2}),
        ("post", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3}),
        ("get", "/v1/models", None),
        ("get", "/v1/models/{name}", None),
        ("post", "/tokenize", {"prompt": "hello", "return_token_strs": True}),
        ("post", "/detokenize", {"tokens": [104, 105]}),
        ("post", "/reset_prefix_cache", None),
        ("get", "/version", None),
        ("get", "/load", None),
        ("get", "/kv_event_sources", None),
    ],
)
def test_an_answer_is_what_is_described(server: Running, method: str, path: str, body: Any) -> None:
    """No field is missing, none is there that is not described, and every type is right."""
    answer = server.client.request(method, path.format(name=NAME), json=body)
    assert answer.status_code == 200, answer.text
    msgspec.json.decode(answer.content, type=openapi.ROUTES[method, path][1][openapi.JSON])


@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"continuous_usage_stats": True}])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_chunk_of_a_stream_is_what_is_described(server: Running, path: str, options: Any) -> None:
    """With usage at the end, in every chunk, or not at all; a chunk a token at least, also where its text is not there yet."""
    body = {"prompt": "hello"} if path == "/v1/completions" else {"messages": MESSAGES}
    answer = server.client.post(
        path, json={**body, "max_tokens": 4, "ignore_eos": True, "stream": True, "stream_options": options}
    )
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    assert len(lines) >= 4
    for line in lines:
        msgspec.json.decode(line, type=openapi.ROUTES["post", path][1][openapi.EVENTS])


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("post", "/v1/completions", {"prompt": "x", "n": 0}),
        ("post", "/v1/chat/completions", {}),
        ("get", "/v1/models/nobody", None),
        ("post", "/detokenize", {"tokens": [-1]}),
        ("get", "/nothing", None),
        ("get", "/v1/completions", None),
    ],
)
def test_a_refusal_is_the_error_that_is_described(server: Running, method: str, path: str, body: Any) -> None:
    """Every way to be wrong has one shape."""
    answer = server.client.request(method, path, json=body)
    assert answer.status_code in (400, 404, 405)
    msgspec.json.decode(answer.content, type=openapi.Error)
