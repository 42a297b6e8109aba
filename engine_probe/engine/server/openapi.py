"""The API's description: bodies from the types that decode them, answers from types that a test holds against real answers.

Invariant: every route is described with what it takes, what it answers, and how it fails; nothing here is used to serve.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from engine_probe.engine.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"


class _Said(msgspec.Struct, forbid_unknown_fields=True):
    """An answer: a field that is not described is a mistake."""


class CachedTokens(_Said):
    """cached_tokens: of the prompt, those found in the prefix cache."""

    cached_tokens: int


class UsageAnswer(_Said):
    """The prompt counts once, however many choices there are."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionChoice(_Said):
    """finish_reason: stop or length; null while a stream goes on."""

    index: int
    text: str
    logprobs: None
    finish_reason: str | None


class Completion(_Said):
    """Of `/v1/completions`, whole or a chunk of its stream (where usage stands only if it was asked for)."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer | msgspec.UnsetType | None = msgspec.UNSET


class ChatMessage(_Said):
    """The assistant's."""

    role: str
    content: str
    refusal: None


class ChatChoice(_Said):
    """finish_reason: stop or length."""

    index: int
    message: ChatMessage
    logprobs: None
    finish_reason: str


class ChatCompletion(_Said):
    """Of `/v1/chat/completions`, whole."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer


class ChatDelta(_Said):
    """What came since the last chunk; the role with a choice's first."""

    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(_Said):
    """finish_reason: in a choice's last chunk alone."""

    index: int
    delta: ChatDelta
    logprobs: None
    finish_reason: str | None


class ChatChunk(_Said):
    """Of a chat's stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageAnswer | msgspec.UnsetType | None = msgspec.UNSET


class ModelCard(_Said):
    """max_model_len: the longest context, tokens."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    permission: list[Any]


class ModelList(_Said):
    """What is served."""

    object: str
    data: list[ModelCard]


class Tokens(_Said):
    """token_strs: the text of each, where it was asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(_Said):
    """Of tokens."""

    prompt: str


class Reset(_Said):
    """blocks: cached ones that were forgotten."""

    success: bool
    blocks: int


class Version(_Said):
    """kvscope's release."""

    version: str
    engine: str


class Load(_Said):
    """Calls under way."""

    server_load: int


class KvSource(_Said):
    """A ZMQ endpoint of KV events, in the words of vLLM's settings. bind: it is bound here, and who wants to read connects."""

    enable_kv_cache_events: bool
    publisher: str
    endpoint: str
    bind: bool
    replay_endpoint: str | None
    buffer_steps: int
    hwm: int
    max_queue_size: int
    topic: str


class ErrorDetail(_Said):
    """param: the field that is wrong; code: a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(_Said):
    """In OpenAI's shape; in a stream that has begun it is the last event."""

    error: ErrorDetail


ROUTES: Final[dict[tuple[str, str], tuple[Any, dict[str, Any]]]] = {
    ("post", "/v1/completions"): (CompletionRequest, {JSON: Completion, EVENTS: Completion}),
    ("post", "/v1/chat/completions"): (ChatRequest, {JSON: ChatCompletion, EVENTS: ChatChunk}),
    ("get", "/v1/models"): (None, {JSON: ModelList}),
    ("get", "/v1/models/{name}"): (None, {JSON: ModelCard}),
    ("post", "/tokenize"): (TokenizeRequest, {JSON: Tokens}),
    ("post", "/detokenize"): (DetokenizeRequest, {JSON: Text}),
    ("post", "/reset_prefix_cache"): (None, {JSON: Reset}),
    ("get", "/health"): (None, {}),
    ("get", "/ping"): (None, {}),
    ("post", "/ping"): (None, {}),
    ("get", "/version"): (None, {JSON: Version}),
    ("get", "/load"): (None, {JSON: Load}),
    ("get", "/kv_event_sources"): (None, {JSON: dict[str, KvSource]}),
    ("get", "/metrics"): (None, {"text/plain": str}),
}
"""(method, path) -> (type of its body, content type -> type of its answer)."""


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of the app's routes. Raises KeyError for a route that ROUTES does not have."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    types = [one for body, answers in ROUTES.values() for one in (body, *answers.values()) if one is not None]
    schemas, components = msgspec.json.schema_components([*types, Error], ref_template="#/components/schemas/{name}")
    of_type = dict(zip(map(repr, [*types, Error]), schemas, strict=True))
    failed = {"description": "OpenAI's error", "content": {JSON: {"schema": of_type[repr(Error)]}}}
    for path, methods in document["paths"].items():
        for method, told in methods.items():
            body, answers = ROUTES[method, path]
            if body is not None:
                told["requestBody"] = {"required": True, "content": {JSON: {"schema": of_type[repr(body)]}}}
            content = {kind: {"schema": of_type[repr(answer)]} for kind, answer in answers.items()}
            told["responses"] = {
                "200": {"description": "Done", **({"content": content} if content else {})},
                "4XX": failed,
                "5XX": failed,
            }
    bearer = {"type": "http", "scheme": "bearer", "description": "where the server has a token"}
    document["components"] = {"schemas": components, "securitySchemes": {"token": bearer}}
    document["security"] = [{}, {"token": []}]
    return document
