"""GuideLLM's report (`benchmarks.json`): one document, a list of benchmarks, each with its requests by how they ended.

Instants are Unix seconds of the load generator's host. Report version 2 (0.8) and 1 (0.4 to 0.7) share the fields that
are read; reports of 0.3 and older have no `metadata` and name their instants directly. Requests keep the first and the
last token's instant, not those between: `token_ns` stays null. `response_id` is the engine's id and joins its own
rows; where the server gave none it is GuideLLM's. Requests sent before a benchmark's measured part carry
`labels.phase = warmup`. Source: guidellm 0.8.1 `schemas/base`, 0.5.3, 0.3.1 `benchmark/benchmark.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine_probe.adapters.vllm import normalise_request_id
from engine_probe.errors import UnknownFormat
from engine_probe.readers.benchmarks import rows as shared
from engine_probe.readers.benchmarks.document import Document
from engine_probe.readers.lines import document
from engine_probe.readers.marks import window_marks
from engine_probe.readers.source import Notes, ReadOptions
from engine_probe.schema import table_from_rows

if TYPE_CHECKING:
    import pyarrow as pa

TOOL: Final = "guidellm"
KNOWN_VERSIONS: Final = (1, 2)
_STATES: Final = {"successful": "finished", "incomplete": "aborted", "errored": "failed"}
_NO_TOKEN: Final = -1.0  # what 0.2 and 0.3 write for an instant that never came


class GuideLlm:
    """One report."""

    format = "GuideLLM report"

    def __init__(self, path: Path) -> None:
        self.files = [path]

    def chunks(self, options: ReadOptions, notes: Notes) -> Iterator[Mapping[str, pa.Table]]:
        """`request` rows of each benchmark, its window as marks, and the tool's own figures as samples."""
        path = self.files[0]
        report = Document(document(path), path.name)
        metadata = report.part("metadata")
        version = None if metadata is None else metadata.get("version", int)
        if metadata is not None and version not in KNOWN_VERSIONS:
            raise UnknownFormat(
                f"{path.name} is a GuideLLM report of version {version}; known are the versions 1 (0.4 to 0.7), 2 "
                "(0.8) and reports without one (0.3)."
            )
        notes.facts["guidellm"] = (metadata and metadata.get("guidellm_version", str)) or "0.3 or older"
        num_requests = 0
        for position, benchmark in enumerate(report.each("benchmarks")):
            name = f"benchmark-{position + 1}"
            rows = list(_rows(benchmark, is_old=metadata is None))
            num_requests += len(rows)
            yield from shared.chunked(iter(rows))
            window = shared.span_of(rows, name)
            if window is None:
                continue
            notes.windows.append(window)
            yield {"mark": table_from_rows("mark", window_marks(window))}
            if samples := _figures(benchmark, window.end_ns, name):
                yield {"sample": table_from_rows("sample", samples)}
        if not num_requests:
            raise UnknownFormat(f"{path.name} is a GuideLLM report without requests: nothing was sent, or kept.")
        notes.not_told.append("token times: the report keeps the first and the last token of a request, no others")


def _rows(benchmark: Document, *, is_old: bool) -> Iterator[dict[str, Any]]:
    scheduler = benchmark.part("scheduler_metrics")
    measured_from = None if scheduler is None else scheduler.get("measure_start_time", float)
    requests = benchmark.part("requests")
    if requests is None:
        return
    model = _model(benchmark)
    for ended, state in _STATES.items():
        for request in requests.each(ended):
            row = _old_row(request) if is_old else _row(request)
            started_s = row.pop("started_s")
            if row["arrival_ns"] is None:
                continue  # never sent: it was still in the load generator when the run ended
            if measured_from is not None and started_s < measured_from:
                row["labels"]["phase"] = "warmup"
            error = shared.failure(row.pop("error", None)) if state == "failed" else {}
            yield {
                "vantage": "client",
                "model": model,
                "state": state,
                **({"http_status": 200} if state == "finished" else {}),
                **row,
                **error,
            }


def _row(request: Document) -> dict[str, Any]:
    where = request.where
    info = request.part("info")
    if info is None:
        raise UnknownFormat(f"{where} has no 'info'.")
    timings = info.part("timings") or info
    at = {key: _at(timings, key) for key in ("resolve_start", "first_token_iteration", "last_token_iteration")}
    started_s = timings.get("request_start", float) or timings.get("resolve_start", float)
    ended_ns = _at(timings, "request_end") or _at(timings, "resolve_end")
    arrival_ns = shared.epoch_ns(started_s, where, "request_start")
    prompt, output = _usage(request, "input_metrics"), _usage(request, "output_metrics")
    cached = None if prompt is None else shared.count(prompt.get("cached_tokens", int), where, "cached_tokens")
    prompt_tokens, output_tokens = _tokens(prompt), _tokens(output)
    own, given = request.get("request_id", str), request.get("response_id", str)
    first_ns, last_ns = at["first_token_iteration"], at["last_token_iteration"]
    has_session = info.get("conversation_id", str) is not None
    labels = {} if given is None or own is None else {"engine_request_id": given, "client_request_id": own}
    return {
        "started_s": started_s,
        "request_id": normalise_request_id(given) if given else own or where,
        "labels": labels,
        "session_id": info.get("conversation_id", str),
        "turn": info.get("turn_index", int) if has_session else None,
        "arrival_ns": arrival_ns,
        "first_token_ns": first_ns,
        "last_token_ns": last_ns,
        "end_ns": ended_ns,
        "at_ns": ended_ns or last_ns or arrival_ns,
        "prompt_tokens": prompt_tokens,
        **shared.prefix_sizes(prompt_tokens, cached),
        "output_tokens": output_tokens if output_tokens or first_ns is None else None,
        "error": info.get("error", str),
    }


def _old_row(request: Document) -> dict[str, Any]:
    """A request of 0.3: instants and lengths stand in the request itself."""
    where = request.where

    def at(key: str) -> int | None:
        value = request.get(key, float)
        return None if value == _NO_TOKEN else shared.epoch_ns(value, where, key)

    started_s, ended_ns = request.get("start_time", float), at("end_time")
    return {
        "started_s": started_s,
        "request_id": request.get("request_id", str) or where,
        "labels": {},
        "arrival_ns": at("start_time"),
        "first_token_ns": at("first_token_time"),
        "last_token_ns": at("last_token_time"),
        "end_ns": ended_ns,
        "at_ns": ended_ns or at("start_time"),
        "prompt_tokens": shared.count(request.get("prompt_tokens", int), where, "prompt_tokens"),
        "output_tokens": shared.count(request.get("output_tokens", int), where, "output_tokens"),
        "error": request.get("error", str),
    }


def _at(timings: Document, key: str) -> int | None:
    return shared.epoch_ns(timings.get(key, float), timings.where, key)


def _usage(request: Document, key: str) -> Document | None:
    return request.part(key)


def _tokens(usage: Document | None) -> int | None:
    """All tokens of one side, as GuideLLM counts them: text, image, video and audio."""
    if usage is None:
        return None
    kinds = [usage.get(f"{kind}_tokens", int) for kind in ("text", "image", "video", "audio")]
    known = [shared.count(kind, usage.where, "tokens") or 0 for kind in kinds if kind is not None]
    return sum(known) if known else None


def _model(benchmark: Document) -> str | None:
    config = benchmark.part("config")
    backend = None if config is None else config.part("backend")
    return None if backend is None else backend.get("model", str)


def _figures(benchmark: Document, at_ns: int, name: str) -> list[dict[str, Any]]:
    """Mean and P99 of each of the tool's metrics over its successful requests."""
    metrics = benchmark.part("metrics")
    numbers: dict[str, float] = {}
    for key in [] if metrics is None else metrics.keys():
        by_state = None if metrics is None else metrics.part(key)
        successful = None if by_state is None else by_state.part("successful")
        if successful is None:
            continue
        found = successful.scalars()
        percentiles = successful.part("percentiles")
        if "mean" in found:
            numbers[f"{key}.mean"] = found["mean"]
        if percentiles is not None and "p99" in (told := percentiles.scalars()):
            numbers[f"{key}.p99"] = told["p99"]
    return shared.summary_samples(numbers, TOOL, at_ns, {"window": name})
