"""From what a watch saw to rows: one `request` a request, and a `check` for each piece that was out of place.

Instants are those of the wire as the proxy read it. The first token of an answer in one piece was seen by nobody, so it stays
unknown; its last came with the body's end. Invariant: every text in a row is a header that was configured to be
read, an identifier from the wire, or our own words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from engine_probe.adapters.llamacpp import ENGINE as LLAMA
from engine_probe.adapters.llamacpp import model_name
from engine_probe.adapters.vllm import normalise_request_id
from engine_probe.proxy.reading import identifier
from engine_probe.proxy.shapes import count
from engine_probe.recording.request_rows import RequestRow

if TYPE_CHECKING:
    from engine_probe.proxy.watch import Watch

REJECTED: Final = frozenset((429, 503))
"""As for load generators' logs (`readers/client_rows.py`)."""
_WITHOUT_TOKENS: Final = frozenset(("embeddings", "other"))
_LIMITS: Final = ("max_completion_tokens", "max_output_tokens", "max_tokens", "n_predict")
MAX_WORDS_CHARS: Final = 500


def request_row(watch: Watch, how: str, error: str | None, status: int | None, end_ns: int) -> RequestRow:
    """The row of one request. how, error, status: as the exchange ended."""
    reading, tokens = watch.reading, watch.reading.tokens
    told = dict(reading.columns)
    engine = reading.engine or _engine(watch)
    labels = dict(watch.labels)
    for name in ("cache_created", "reasoning"):
        if name in told:
            labels[f"{name}_tokens"] = str(told.pop(name))
    http_status = status if status is not None else watch.answer.status if watch.answer is not None else None
    state, words = _end(watch, how, error, http_status)
    last_ns = tokens.last_ns
    if last_ns is None and how == "complete" and not watch.is_stream and _is_whole_answer(watch):
        last_ns = watch.body_ns
    columns: dict[str, Any] = {
        **watch.columns,
        **told,
        "worker": None if watch.upstream is None else watch.upstream.name,
        "request_id": watch.request_id,
        "state": state,
        "engine": engine,
        "model": reading.model or _asked_model(watch),
        "labels": labels,
        "arrival_ns": watch.arrival_ns,
        "first_token_ns": tokens.first_ns,
        "last_token_ns": last_ns,
        "end_ns": end_ns,
        "finish_reason": reading.finish_reason,
        "http_status": http_status,
        "error": words,
        "retry_count": len(watch.retries),
        "fallback_reason": "; ".join(watch.retries)[:MAX_WORDS_CHARS] or None,
    }
    _label(watch, labels)
    return RequestRow(
        {name: value for name, value in columns.items() if value is not None},
        tokens.instants(),
        tokens.counts(columns.get("output_tokens")),
    )


def check_rows(watch: Watch) -> list[dict[str, Any]]:
    """One row a finding."""
    return [
        {
            "worker": None if watch.upstream is None else watch.upstream.name,
            "batch_id": watch.request_id,
            "check": check,
            "outcome": "failed",
            "sample_ids": [watch.request_id] if other is None else [watch.request_id, other],
            "leakage_test_result": what,
        }
        for check, what, other in watch.reading.order.findings
    ]


def _end(watch: Watch, how: str, error: str | None, status: int | None) -> tuple[str, str | None]:
    """State and error words."""
    reading = watch.reading
    if how == "aborted":
        return "aborted", error
    if how != "complete":
        return "failed", error
    if status is not None and status >= 400:
        return "rejected" if status in REJECTED else "failed", reading.error or f"HTTP {status}"
    if reading.error is not None:
        return "failed", reading.error
    if reading.finish_reason == "abort":
        return "aborted", None
    has_end = reading.has_end or reading.finish_reason is not None
    if watch.is_stream and reading.is_recognised and not has_end and "unreadable" not in watch.labels:
        return "failed", "the stream ended without saying that it was at its end"
    return "finished", None


def _label(watch: Watch, labels: dict[str, str]) -> None:
    reading, asked = watch.reading, watch.asked.values
    if reading.api is not None:
        labels["api"] = reading.api
    labels["stream"] = "true" if watch.is_stream or (watch.answer is None and asked.get("stream") is True) else "false"
    answer_id = reading.answer_id
    if answer_id is not None and normalise_request_id(answer_id) != watch.request_id:
        labels["engine_request_id"] = answer_id
    model = _asked_model(watch)
    if model is not None and reading.model is not None and model != reading.model:
        labels["requested_model"] = model
    if len(reading.tokens.choices) > 1:
        labels["choices"] = str(len(reading.tokens.choices))
    if reading.tokens.is_cut:
        labels["token_ns"] = "cut"
    limit = next((found for name in _LIMITS if (found := count(asked.get(name))) is not None), None)
    if limit is not None:
        labels["max_tokens"] = str(limit)
    if reading.num_unreadable and "unreadable" not in labels:
        labels["unreadable"] = "json"
    if reading.order.findings:
        labels["misplaced"] = " ".join(sorted({check for check, _, _ in reading.order.findings}))


def _is_whole_answer(watch: Watch) -> bool:
    """A good answer in one piece that holds tokens."""
    reading = watch.reading
    good = watch.answer is not None and watch.answer.status < 400 and reading.error is None
    return good and reading.is_recognised and reading.api not in _WITHOUT_TOKENS


def _asked_model(watch: Watch) -> str | None:
    asked = watch.asked.values.get("model")
    return identifier(model_name(asked)) if isinstance(asked, str) else None


def _engine(watch: Watch) -> str | None:
    """Only where the server says it itself."""
    server = watch.answer.get(b"server") if watch.answer is not None else None
    return LLAMA if server is not None and server.strip().lower().startswith(b"llama.cpp") else None
