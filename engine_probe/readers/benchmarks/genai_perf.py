"""GenAI-Perf's `profile_export.json` (written by perf_analyzer): experiments, each with its requests and every response.

Instants are Unix ns. A response counts as a chunk where it carries content; what it says is looked at for that and for
the `usage` object alone, and never kept. Token counts come from `usage`; GenAI-Perf's own come from a tokenizer over
the text, which is not run here: without `usage` they stay null. Answers of Triton's other endpoints, which are not
OpenAI chunks, count every response that is not empty. Source: genai-perf 0.0.16 `profile_data_parser`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from engine_probe.errors import UnknownFormat
from engine_probe.readers.benchmarks import rows as shared
from engine_probe.readers.benchmarks.document import Document
from engine_probe.readers.lines import document
from engine_probe.readers.marks import window_marks
from engine_probe.readers.source import Notes, ReadOptions
from engine_probe.schema import table_from_rows

if TYPE_CHECKING:
    import pyarrow as pa

TOOL: Final = "genai-perf"
_TEXTS: Final = ("response", "text_output", "output_ids")
_MIN_NS: Final = 10**17
_MAX_NS: Final = 9 * 10**18


class GenAiPerf:
    """One profile export."""

    format = "GenAI-Perf profile export"

    def __init__(self, path: Path) -> None:
        self.files = [path]

    def chunks(self, options: ReadOptions, notes: Notes) -> Iterator[Mapping[str, pa.Table]]:
        """`request` rows of each experiment, and its window as marks."""
        path = self.files[0]
        export = Document(document(path), path.name)
        num_requests = num_unsized = 0
        for position, experiment in enumerate(export.each("experiments")):
            load = experiment.part("experiment")
            rows = list(_rows(experiment, position))
            num_requests += len(rows)
            num_unsized += sum(row["output_tokens"] is None for row in rows)
            yield from shared.chunked(iter(rows))
            mode = None if load is None else load.get("mode", str)
            window = shared.span_of(rows, f"experiment-{position + 1}" + (f"-{mode}" if mode else ""))
            if window is not None:
                notes.windows.append(window)
                yield {"mark": table_from_rows("mark", window_marks(window))}
        if not num_requests:
            raise UnknownFormat(f"{path.name} is a GenAI-Perf export without requests: nothing was sent, or kept.")
        if num_unsized:
            notes.not_told.append(
                f"lengths: {num_unsized} answers carry no usage object; ask for it with --extra-inputs "
                '\'{"stream_options": {"include_usage": true}}\''
            )
        notes.not_told.append("request ids: perf_analyzer keeps none; nothing joins the engine's own rows")


def _rows(experiment: Document, position: int) -> Iterator[dict[str, Any]]:
    for number, request in enumerate(experiment.each("requests")):
        yield _row(request, f"{TOOL}-{position + 1}-{number}")


def _row(request: Document, request_id: str) -> dict[str, Any]:
    where = request.where
    arrival_ns = _instant(request.need("timestamp", int), where, "timestamp")
    response_ns = [
        _instant(at, where, "response_timestamps") for at in request.get("response_timestamps", list[int]) or []
    ]
    outputs: list[Any] = request.get("response_outputs", list[Any]) or []
    if len(outputs) != len(response_ns):
        raise UnknownFormat(f"{where}: {len(response_ns)} response_timestamps and {len(outputs)} response_outputs.")
    token_ns: list[int] = []
    usage: Mapping[str, Any] = {}
    for at_ns, output in zip(response_ns, outputs, strict=True):
        has_content, told = _look(output)
        usage = told or usage
        if has_content and (not token_ns or at_ns >= token_ns[-1]):
            token_ns.append(at_ns)
    prompt, output_tokens = _size(usage, "prompt_tokens", where), _size(usage, "completion_tokens", where)
    details = usage.get("prompt_tokens_details")
    cached = _size(details, "cached_tokens", where) if isinstance(details, dict) else None
    inputs = request.part("request_inputs")
    ended_ns = response_ns[-1] if response_ns else None
    return {
        "request_id": request_id,
        "vantage": "client",
        "state": "finished" if token_ns else "failed",
        "http_status": 200 if token_ns else None,
        "model": _model(inputs),
        "session_id": None if inputs is None else _text(inputs, "session_id"),
        "arrival_ns": arrival_ns,
        "first_token_ns": token_ns[0] if token_ns else None,
        "last_token_ns": token_ns[-1] if token_ns else None,
        "end_ns": ended_ns,
        "at_ns": arrival_ns if ended_ns is None else ended_ns,
        "token_ns": token_ns or None,
        "token_counts": [1] * len(token_ns) if token_ns and output_tokens == len(token_ns) else None,
        "prompt_tokens": prompt,
        **shared.prefix_sizes(prompt, cached),
        "output_tokens": output_tokens,
    }


def _look(output: Any) -> tuple[bool, Mapping[str, Any] | None]:
    """(whether this response carries content, its usage object)."""
    text = next((output[key] for key in _TEXTS if key in output), None) if isinstance(output, dict) else None
    if not isinstance(text, str):
        return bool(text), None
    has_content, usage = False, None
    for line in text.splitlines():
        body = line.strip().removeprefix("data:").strip()
        if not body or body == "[DONE]" or line.startswith(":"):
            continue
        try:
            chunk = msgspec.json.decode(body)
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            has_content = True  # plain text, or a chunk that was cut in two: it came, and was not empty
            continue
        has_content |= _has_content(chunk)
        if isinstance(chunk, dict) and isinstance(chunk.get("usage"), dict):
            usage = chunk["usage"]
    return has_content, usage


def _has_content(chunk: Any) -> bool:
    if not isinstance(chunk, dict):
        return bool(chunk)
    choices = chunk.get("choices")
    if not isinstance(choices, list):
        return any(bool(chunk.get(key)) for key in ("text_output", "generated_text", "text", "token"))
    for choice in choices:
        if isinstance(choice, dict):
            said = choice.get("delta") or choice.get("message") or choice
            if isinstance(said, dict) and any(
                said.get(key) for key in ("content", "text", "reasoning_content", "tool_calls")
            ):
                return True
    return False


def _size(usage: Mapping[str, Any], key: str, where: str) -> int | None:
    value = usage.get(key)
    return shared.count(value, where, key) if type(value) is int else None


def _model(inputs: Document | None) -> str | None:
    """The model named in the request's payload (a JSON text); the prompt beside it is not decoded."""
    payload = None if inputs is None else _text(inputs, "payload")
    if payload is None:
        return None
    try:
        return _Payload.decode(payload).model
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None


class _Named(msgspec.Struct):
    model: str | None = None


_Payload: Final = msgspec.json.Decoder(_Named)


def _text(inputs: Document, key: str) -> str | None:
    return inputs.get(key, str) if key in inputs else None


def _instant(at: int, where: str, key: str) -> int:
    if not _MIN_NS <= at < _MAX_NS:
        raise UnknownFormat(f"{where}: {key} is {at}, expected ns since 1970.", key=key)
    return at
