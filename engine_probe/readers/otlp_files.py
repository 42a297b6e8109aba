"""OTLP as files: JSON lines as the OpenTelemetry Collector's file exporter writes them, spans and metrics in any mix.

A line (or a whole file of one object) is a request of OTLP/HTTP JSON: `resourceSpans` become `request` rows,
`resourceMetrics` become `sample` rows, by the same decoders as at the collector's `/v1/traces` and `/v1/metrics`. Spans
seen twice are one row. Invariant: what is no request and no number is counted and said, never guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine_probe.adapters.genai_names import TABLES
from engine_probe.adapters.otlp import decode_traces
from engine_probe.adapters.otlp_points import decode_points
from engine_probe.adapters.otlp_series import SeriesBook
from engine_probe.errors import UnknownFormat
from engine_probe.readers.lines import document, text_lines
from engine_probe.readers.scrapes import sample_table
from engine_probe.readers.sniff import HEAD_BYTES, top_keys
from engine_probe.readers.source import CHUNK_ROWS, Notes, ReadOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from engine_probe.adapters.metric_names import Row

JSON: Final = "application/json"


class OtlpFile:
    """One file of OTLP JSON."""

    format = "OTLP JSON"

    def __init__(self, path: Path) -> None:
        self.files = [path]

    def chunks(self, options: ReadOptions, notes: Notes) -> Iterator[Mapping[str, pa.Table]]:
        """`request` tables a line, `sample` tables of up to 50,000 rows."""
        from engine_probe.adapters.registry import adapters

        book = SeriesBook((*TABLES, *(table for one in adapters() for table in one.tables)))
        seen: set[bytes] = set()
        samples: list[Row] = []
        num_spans = num_others = num_repeated = 0
        for where, body in _bodies(self.files[0]):
            keys = top_keys(body[:HEAD_BYTES])
            try:
                if "resourceSpans" in keys:
                    result = decode_traces(body, JSON, options.start_ns or 0, worker=options.worker)
                    num_spans += result.num_spans
                    num_others += result.num_ignored
                    if tables := _new(result.tables(), result.span_ids, seen):
                        yield tables
                elif "resourceMetrics" in keys:
                    prepared = book.prepare(decode_points(body, JSON, options.start_ns or 0))
                    book.apply(prepared)
                    num_repeated += prepared.num_repeated
                    notes.left_out += [f"{where}: {reason}" for reason in prepared.refused[:3]]
                    samples += prepared.rows
                elif "resourceLogs" not in keys:
                    raise UnknownFormat("it has none of resourceSpans, resourceMetrics, resourceLogs.")
            except UnknownFormat as error:
                raise UnknownFormat(f"{where}: {error.message}", **error.facts) from error
            if len(samples) >= CHUNK_ROWS:
                yield {"sample": sample_table(samples)}
                samples = []
        if samples:
            yield {"sample": sample_table(samples)}
        notes.facts["spans"] = num_spans
        if num_others:
            notes.left_out.append(f"spans: {num_others} of {num_spans} are no requests to a model")
        if num_repeated:
            notes.left_out.append(f"metrics: {num_repeated} points stand in the file twice and count once")


def _bodies(path: Path) -> Iterator[tuple[str, bytes]]:
    """(where, JSON text) of every line; of the whole file where its first line is not one object."""
    lines = text_lines(path)
    first = next(lines, None)
    if first is None:
        raise UnknownFormat(f"{path.name} holds nothing but empty lines.")
    if not first[1].rstrip().endswith(b"}"):
        yield path.name, document(path)
        return
    yield f"{path.name}, line {first[0]}", first[1]
    for number, line in lines:
        yield f"{path.name}, line {number}", line


def _new(tables: dict[str, Any], span_ids: list[bytes], seen: set[bytes]) -> dict[str, pa.Table]:
    """The rows of spans that were not seen yet."""
    import pyarrow as pa

    if not tables:
        return {}
    kept = []
    for position, span_id in enumerate(span_ids):
        if span_id not in seen:
            seen.add(span_id)
            kept.append(position)
    table = tables["request"]
    table = table if len(kept) == table.num_rows else table.take(pa.array(kept, pa.int64()))
    return {"request": table} if table.num_rows else {}
