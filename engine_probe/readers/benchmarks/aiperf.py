"""AIPerf's `profile_export.jsonl`: one object a request, and the run's summary beside it where it was kept.

Instants are Unix ns of the load generator's host. `x_request_id` was sent as X-Request-Id and joins the engine's own
rows. `request_latency` ends at the last chunk with content, `request_end_ns` at the end of the request. Gaps between
chunks come as `inter_chunk_latency`, in ms. Warm-up requests carry `labels.phase = warmup`. A unit that is not known is
refused, never guessed. Source: aiperf 0.13.0 `common/models/record_models.py`, `metrics/types`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from engine_probe.errors import UnknownFormat
from engine_probe.readers.benchmarks import rows as shared
from engine_probe.readers.benchmarks.document import Document
from engine_probe.readers.lines import decode_json, document, text_lines
from engine_probe.readers.marks import window_marks
from engine_probe.readers.source import FoundWindow, Notes, ReadOptions
from engine_probe.schema import table_from_rows

if TYPE_CHECKING:
    import pyarrow as pa

TOOL: Final = "aiperf"
RECORDS: Final = "profile_export.jsonl"
SUMMARY: Final = "profile_export_aiperf.json"
_LARGEST: Final = 1e30
_TO_SECONDS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0}
_COUNTS: Final = ("tokens", "count", "token", "requests")


class _Metric(msgspec.Struct):
    value: Any = None
    unit: str | None = None


class _Metadata(msgspec.Struct):
    request_start_ns: int
    request_end_ns: int | None = None
    x_request_id: str | None = None
    x_correlation_id: str | None = None
    session_num: int | None = None
    conversation_id: str | None = None
    turn_index: int | None = None
    credit_issued_ns: int | None = None
    request_ack_ns: int | None = None
    benchmark_phase: str | None = None
    was_cancelled: bool = False
    cancellation_time_ns: int | None = None


class _Error(msgspec.Struct):
    code: int | None = None
    type: str | None = None
    message: str | None = None


class _Record(msgspec.Struct):
    metadata: _Metadata
    metrics: dict[str, _Metric] = {}
    error: _Error | None = None


_DECODER: Final = msgspec.json.Decoder(_Record)


class AiPerf:
    """A run: its records, and its summary where it is known."""

    format = "AIPerf run"

    def __init__(self, records: Path, summary: Path | None = None) -> None:
        self._records = records
        self._summary = summary
        self.files = [records] if summary is None else [records, summary]

    def chunks(self, options: ReadOptions, notes: Notes) -> Iterator[Mapping[str, pa.Table]]:
        """`request` rows in the file's order, the measured window as marks, and the tool's own figures as samples."""
        facts = Document(document(self._summary), self._summary.name) if self._summary else None
        model = None if facts is None else _model(facts)
        first = last = None
        for tables in shared.chunked(self._rows(model, notes)):
            table = tables["request"]
            measured = [
                (row["arrival_ns"], row["at_ns"])
                for row in table.select(["arrival_ns", "at_ns", "labels"]).to_pylist()
                if ("phase", "warmup") not in row["labels"]
            ]
            for arrival_ns, at_ns in measured:
                first = arrival_ns if first is None else min(first, arrival_ns)
                last = at_ns if last is None else max(last, at_ns)
            yield tables
        if first is None or last is None:
            return
        window = FoundWindow("profiling", first, last + 1)
        notes.windows.append(window)
        tables = {"mark": table_from_rows("mark", window_marks(window))}
        if facts is not None:
            tables["sample"] = table_from_rows("sample", figures(facts, TOOL, last))
        else:
            notes.not_told.append(f"model and the tool's own figures: no {SUMMARY} lies beside the records")
        yield tables

    def _rows(self, model: str | None, notes: Notes) -> Iterator[dict[str, Any]]:
        num_without_id = 0
        for number, line in text_lines(self._records):
            where = f"{self._records.name}, line {number}"
            record: _Record = decode_json(_DECODER, line, where, line=number)
            num_without_id += record.metadata.x_request_id is None
            yield {"model": model, **_row(record, where, number)}
        if num_without_id:
            notes.not_told.append(f"request ids: {num_without_id} records have no x_request_id and join nothing")


def _row(record: _Record, where: str, number: int) -> dict[str, Any]:
    told = record.metadata
    metrics = _Metrics(record.metrics, where)
    ended_ns = told.request_end_ns or told.cancellation_time_ns
    prompt = metrics.count("usage_prompt_tokens", "input_sequence_length")
    output = metrics.count("usage_completion_tokens", "output_sequence_length")
    ttft_s = metrics.seconds("time_to_first_token")
    gaps = metrics.seconds_list("inter_chunk_latency")
    seen = shared.streamed(told.request_start_ns, ttft_s, gaps, output, where)
    latency_s = metrics.seconds("request_latency")
    if latency_s is not None:
        seen["last_token_ns"] = told.request_start_ns + round(latency_s * 1e9)
    if seen and not gaps:
        seen.pop("token_ns", None)  # one instant of several: only the first and the last chunk are told
        seen.pop("token_counts", None)
    if told.was_cancelled:
        state: dict[str, Any] = {
            "state": "aborted",
            "error": shared.failure(None if record.error is None else record.error.message)["error"],
        }
    elif record.error is not None:
        state = _failed(record.error)
    else:
        state = {"state": "finished", "http_status": 200}
    labels = {}
    if told.benchmark_phase is not None:
        labels["phase"] = told.benchmark_phase
    if told.credit_issued_ns is not None and told.request_start_ns > told.credit_issued_ns:
        labels["client_queue_s"] = f"{(told.request_start_ns - told.credit_issued_ns) / 1e9:.6f}"
    return {
        "vantage": "client",
        "request_id": told.x_request_id or f"{TOOL}-{number}",
        "labels": labels,
        "session_id": told.x_correlation_id or told.conversation_id,
        "turn": told.turn_index,
        "arrival_ns": told.request_start_ns,
        **seen,
        "end_ns": ended_ns,
        "at_ns": ended_ns or seen.get("last_token_ns") or told.request_start_ns,
        "prompt_tokens": prompt,
        **shared.prefix_sizes(prompt, metrics.count("usage_prompt_cache_read_tokens")),
        "output_tokens": output,
        **state,
    }


def _failed(error: _Error) -> dict[str, Any]:
    found = shared.failure(error.message)
    if error.code is not None and 100 <= error.code < 600:
        found["http_status"] = error.code
        found["state"] = "rejected" if error.code in shared.REJECTED else "failed"
    if error.type and found["error"] and error.type not in found["error"]:
        found["error"] = f"{error.type}: {found['error']}"
    return found


class _Metrics:
    """The metrics of one record, each brought from its own unit to the contract's."""

    def __init__(self, metrics: Mapping[str, _Metric], where: str) -> None:
        self._metrics = metrics
        self._where = where

    def seconds(self, name: str) -> float | None:
        """A duration in s."""
        metric = self._metrics.get(name)
        if metric is None or metric.value is None:
            return None
        return self._convert(metric.value, self._factor(metric, name), name)

    def seconds_list(self, name: str) -> Sequence[float]:
        """A list of durations in s; empty where there is none."""
        metric = self._metrics.get(name)
        if metric is None or metric.value is None:
            return []
        if not isinstance(metric.value, list):
            raise UnknownFormat(f"{self._where}: {name} is no list.", key=name)
        factor = self._factor(metric, name)
        return [self._convert(value, factor, name) for value in metric.value]

    def count(self, *names: str) -> int | None:
        """The first of these metrics that is there, as a count."""
        for name in names:
            metric = self._metrics.get(name)
            if metric is not None and metric.value is not None:
                value = metric.value
                if isinstance(value, bool) or not isinstance(value, int | float) or value != value or value % 1:
                    raise UnknownFormat(f"{self._where}: {name} is {str(value)[:60]!r}, expected a count.", key=name)
                return shared.count(int(value), self._where, name)
        return None

    def _factor(self, metric: _Metric, name: str) -> float:
        factor = _TO_SECONDS.get((metric.unit or "").lower())
        if factor is None:
            raise UnknownFormat(f"{self._where}: {name} has the unit {metric.unit!r}, expected a time.", key=name)
        return factor

    def _convert(self, value: Any, factor: float, name: str) -> float:
        # the value alone is bounded first: an integer of hundreds of digits cannot be multiplied by a float
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _LARGEST
        if not is_number or value * factor >= shared.LONGEST_S:
            raise UnknownFormat(f"{self._where}: {name} is {str(value)[:60]!r}, expected a duration.", key=name)
        return float(value) * factor


def figures(facts: Document, tool: str, at_ns: int) -> list[dict[str, Any]]:
    """Mean and P99 of each metric of a summary (`{unit, avg, p99, ...}`) as samples."""
    numbers: dict[str, float] = {}
    units: dict[str, str] = {}
    for key in facts.keys():  # noqa: SIM118  # a Document is no mapping
        metric = facts.part(key)
        if metric is None or "unit" not in metric:
            continue
        told = metric.scalars()
        for name in ("avg", "p99"):
            if name in told:
                numbers[f"{key}.{name}"] = told[name]
                units[f"{key}.{name}"] = metric.get("unit", str) or ""
    samples = shared.summary_samples(numbers, tool, at_ns)
    return [sample | {"labels": sample["labels"] | {"unit": units[sample["labels"]["wire"]]}} for sample in samples]


def _model(facts: Document) -> str | None:
    """The model's name in the summary's copy of the configuration, wherever this release keeps it."""
    config = facts.part("input_config")
    if config is None:
        return None
    for key in ("endpoint", "models"):
        part = config.part(key)
        if part is None:
            continue
        for name in ("model_names", "items"):
            if name in part:
                found = part.get(name, list[Any]) or []
                first = found[0] if found else None
                name_of = first.get("name") if isinstance(first, dict) else first
                return name_of if isinstance(name_of, str) else None
    return None
