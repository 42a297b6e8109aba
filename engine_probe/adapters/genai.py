"""Spans by OpenTelemetry's GenAI conventions, of any SDK -> `request` rows: which attribute fills which column, as data.

A client span (kind CLIENT or INTERNAL) is what an application saw: vantage `client`. A span of kind SERVER, with
`gen_ai.server.*`, or of SGLang's own (`sglang_spans`) is what the server says of itself: vantage `engine`, its
`service.name` the worker. Each column
lists the attributes that tell it, the current name first, then deprecated ones and those of widespread instrumentations
from before the conventions. Agents, tools and retrievals are not requests. Invariants: prompts and answers
(`gen_ai.input.messages`, `gen_ai.prompt.*`, ...) are never read; an attribute of another type than the convention says
is unknown, never an error. Source: reference 15; semantic-conventions-genai `docs/gen-ai/client-inference.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from engine_probe.adapters import sglang_spans
from engine_probe.adapters.vllm import normalise_request_id

SERVER_KIND: Final = 2
"""SPAN_KIND_SERVER in OTLP."""
REJECTED: Final = frozenset((429, 503))

OPERATION: Final = ("gen_ai.operation.name", "llm.request.type", "openinference.span.kind")
OPERATIONS: Final = frozenset(
    ("chat", "text_completion", "generate_content", "embeddings", "completion", "embedding", "message", "llm", "rerank")
)
"""Operations that are one request to a model; any other (agents, tools, workflows, retrieval) is none."""

IDS: Final = ("gen_ai.response.id", "gen_ai.request.id")
MODELS: Final = ("gen_ai.response.model", "gen_ai.request.model", "llm.model_name")
PROVIDERS: Final = ("gen_ai.provider.name", "gen_ai.system", "llm.provider", "llm.system")
SESSIONS: Final = ("gen_ai.conversation.id", "session.id", "traceloop.association.properties.session_id")
PROMPTS: Final = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt")
OUTPUTS: Final = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion")
CACHED: Final = (
    "gen_ai.usage.cache_read.input_tokens",
    "gen_ai.usage.cache_read_input_tokens",
    "llm.token_count.prompt_details.cache_read",
)
FIRST_S: Final = (
    "gen_ai.response.time_to_first_chunk",
    "gen_ai.server.time_to_first_token",
    "gen_ai.latency.time_to_first_token",
)
PER_TOKEN_S: Final = ("gen_ai.server.time_per_output_token",)
STREAM: Final = ("gen_ai.request.stream", "llm.is_streaming", "gen_ai.is_streaming")
FINISH: Final = (
    "gen_ai.response.finish_reasons",
    "gen_ai.response.finish_reason",
    "gen_ai.completion.0.finish_reason",
)
STATUS: Final = ("http.response.status_code", "http.status_code")
ERROR: Final = ("error.type", "exception.type")
TEMPLATE: Final = ("gen_ai.prompt.name", "traceloop.prompt.key")
SERVER: Final = ("server.address", "net.peer.name")
ONLY_SERVER: Final = ("gen_ai.server.time_to_first_token", "gen_ai.server.time_per_output_token")

WANTED: Final = frozenset(
    name
    for names in (
        OPERATION, IDS, MODELS, PROVIDERS, SESSIONS, PROMPTS, OUTPUTS, CACHED, FIRST_S, PER_TOKEN_S, STREAM, FINISH,
        STATUS, ERROR, TEMPLATE, SERVER,
    )
    for name in names
) | sglang_spans.WANTED  # fmt: skip
"""Attributes that are looked at; a decoder may skip all others."""

CHUNK_EVENTS: Final = frozenset(
    (
        "gen_ai.content.completion.chunk",
        "llm.content.completion.chunk",
        "gen_ai.choice.chunk",
        "First Token Stream Event",
    )
)
"""Span events that some instrumentations write for each streamed chunk; only their instants are read."""

ENGINES: Final = frozenset(("vllm", "sglang", "llamacpp", "tensorrt-llm", "tgi", "ollama", "dynamo"))
"""Providers that are serving engines: they name `engine`; others (openai, anthropic, ...) are a label."""

Attributes = Mapping[str, Any]
_INT64_MAX: Final = (1 << 63) - 1
_LONGEST_S: Final = 2_678_400.0
_MAX_ERROR: Final = 300


def is_request(attributes: Attributes) -> bool:
    """Whether a span with these attributes is one request to a model."""
    operation = _first(attributes, OPERATION, _text)
    if operation is not None:
        return operation.lower() in OPERATIONS
    # Instrumentations from before `gen_ai.operation.name` tell it by the model and a usage alone.
    return _first(attributes, MODELS, _text) is not None and (
        _first(attributes, PROMPTS, _count) is not None or _first(attributes, PROVIDERS, _text) is not None
    )


def request_row(
    attributes: Attributes,
    *,
    trace_id: str,
    span_id: str,
    start_ns: int,
    end_ns: int,
    kind: int,
    failed: str | None,
    service: str | None,
    received_ns: int,
    chunk_ns: Sequence[int] = (),
) -> dict[str, Any]:
    """One `request` row; columns that are not known are absent.

    kind      the span's kind as OTLP numbers it      failed    its status message where its status is an error
    chunk_ns  instants of CHUNK_EVENTS                received_ns  stands in where the span has no usable end
    """
    is_sglang = sglang_spans.is_root(attributes)
    is_server = kind == SERVER_KIND or is_sglang or any(name in attributes for name in ONLY_SERVER)
    start = start_ns if 0 < start_ns <= _INT64_MAX else None
    end = end_ns if 0 < end_ns <= _INT64_MAX else None
    at_ns = end or received_ns
    arrival_ns = start or at_ns
    given = _first(attributes, IDS, _text)
    provider = _first(attributes, PROVIDERS, _text)
    prompt, output = _first(attributes, PROMPTS, _count), _first(attributes, OUTPUTS, _count)
    cached = _first(attributes, CACHED, _count)
    labels = {"span_id": span_id}
    if given is not None:
        labels["engine_request_id"] = given
    ending = _ending(attributes, failed)
    comes_whole = not is_server and ending["state"] == "finished" and _first(attributes, STREAM, _truth) is not True
    for key, text in (
        ("provider", provider),
        ("service", None if is_server else service),
        ("server", _first(attributes, SERVER, _text)),
        ("operation", _first(attributes, OPERATION, _text)),
        ("prompt_template", _first(attributes, TEMPLATE, _text)),
    ):
        if text is not None:
            labels[key] = text
    row: dict[str, Any] = {
        "worker": service if is_server else None,
        "at_ns": at_ns,
        "request_id": span_id if given is None else normalise_request_id(given),
        "vantage": "engine" if is_server else "client",
        "engine": provider.lower() if provider is not None and provider.lower() in ENGINES else None,
        "model": _first(attributes, MODELS, _text),
        "trace_id": trace_id or None,
        "generation_id": given,
        "session_id": _first(attributes, SESSIONS, _text),
        "labels": labels,
        "arrival_ns": arrival_ns,
        "end_ns": end,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "computed_tokens": prompt - cached if prompt is not None and cached is not None and cached <= prompt else None,
        "output_tokens": output,
        "finish_reason": _finish(attributes),
        **ending,
        **_tokens(attributes, arrival_ns, end, output, chunk_ns, comes_whole=comes_whole),
        **(sglang_spans.columns(attributes, arrival_ns) if is_sglang else {}),
    }
    return {key: value for key, value in row.items() if value is not None}


def _tokens(
    attributes: Attributes,
    arrival_ns: int,
    end_ns: int | None,
    output: int | None,
    chunk_ns: Sequence[int],
    *,
    comes_whole: bool,
) -> dict[str, Any]:
    """First and last token, and every chunk where events tell them."""
    chunks = sorted(at for at in chunk_ns if arrival_ns <= at <= _INT64_MAX)
    first_s = _first(attributes, FIRST_S, _seconds)
    first_ns = chunks[0] if chunks else None
    if first_s is not None:
        first_ns = arrival_ns + round(first_s * 1e9)
    each_s = _first(attributes, PER_TOKEN_S, _seconds)
    found: dict[str, Any] = {"first_token_ns": first_ns}
    if len(chunks) > 1:
        found |= {"token_ns": chunks, "last_token_ns": chunks[-1]}
        if output == len(chunks):
            found["token_counts"] = [1] * output
    elif first_ns is not None and each_s is not None and output:
        found["decode_s"] = each_s * (output - 1)
        last_ns = first_ns + round(found["decode_s"] * 1e9)
        found["last_token_ns"] = last_ns if end_ns is None else max(first_ns, min(last_ns, end_ns))
    elif first_ns is None and end_ns is not None and comes_whole:
        # An answer that was not streamed comes as a whole, with the end of the span.
        found["last_token_ns"] = end_ns
    return found


def _ending(attributes: Attributes, failed: str | None) -> dict[str, Any]:
    """`state`, `error` and `http_status`."""
    kind = _first(attributes, ERROR, _text)
    status = _first(attributes, STATUS, _status)
    if status is None and kind is not None:
        status = _status(kind)
    if failed is None and kind is None and (status is None or status < 400):
        return {"state": "finished", "http_status": status}
    said = [text for text in (kind, failed) if text]
    if len(said) == 2 and said[0] in said[1]:
        said = said[1:]
    lines = " ".join(": ".join(said).split())
    return {
        "state": "rejected" if status in REJECTED else "failed",
        "error": lines[:_MAX_ERROR] or "error",
        "http_status": status,
    }


def _finish(attributes: Attributes) -> str | None:
    """The first generation's reason."""
    for name in FINISH:
        value = attributes.get(name)
        if isinstance(value, list | tuple):
            value = value[0] if value else None
        if isinstance(value, str) and value:
            return value
    return None


def _first(attributes: Attributes, names: Sequence[str], read: Callable[[Any], Any]) -> Any:
    """The first of these attributes that is there and makes sense."""
    for name in names:
        value = attributes.get(name)
        if value is not None and (found := read(value)) is not None:
            return found
    return None


def _text(value: Any) -> str | None:
    return value if type(value) is str and value else None


def _count(value: Any) -> int | None:
    if type(value) is float and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value <= _INT64_MAX else None


def _seconds(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 <= value < _LONGEST_S else None


def _truth(value: Any) -> bool | None:
    return value if type(value) is bool else None


def _status(value: Any) -> int | None:
    if type(value) is str and value.isascii() and value.isdigit() and len(value) == 3:
        value = int(value)
    return value if type(value) is int and 100 <= value < 600 else None
