"""Summaries of AIPerf and GenAI-Perf without their records: `{metric: {unit, avg, p99, ...}}` -> `sample` rows.

Invariant: no `request` row is made out of a mean. What the tool would have to be told so that it keeps single requests
is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engine_probe.errors import UnknownFormat
from engine_probe.readers.benchmarks import rows as shared
from engine_probe.readers.benchmarks.aiperf import figures
from engine_probe.readers.benchmarks.document import Document
from engine_probe.readers.lines import document
from engine_probe.readers.source import Notes, ReadOptions
from engine_probe.schema import table_from_rows

if TYPE_CHECKING:
    import pyarrow as pa

_KEEP: Final = {
    "aiperf": "AIPerf keeps single requests in profile_export.jsonl (--export-level records): import that file",
    "genai-perf": "GenAI-Perf keeps single requests in profile_export.json beside the summary: import that file",
}


class Summary:
    """One summary file."""

    def __init__(self, path: Path, tool: str) -> None:
        self.files = [path]
        self.format = f"{tool} summary"
        self._tool = tool

    def chunks(self, options: ReadOptions, notes: Notes) -> Iterator[Mapping[str, pa.Table]]:
        """`sample` rows: mean and P99 of each metric."""
        path = self.files[0]
        facts = Document(document(path), path.name)
        at_ns = _ended_ns(facts)
        if at_ns is None:
            at_ns = shared.beginning(options)
            notes.assumed.append("instants: the summary tells none; it is laid at 2025-01-01, or at --start")
        samples = figures(facts, self._tool, at_ns)
        if not samples:
            raise UnknownFormat(f"{path.name} is a summary without one metric: nothing was measured, or kept.")
        notes.not_told.append(f"single requests: the summary has none. {_KEEP[self._tool]}")
        yield {"sample": table_from_rows("sample", samples)}


def _ended_ns(facts: Document) -> int | None:
    """End of the run where the summary tells it as ISO 8601; without a zone it is UTC."""
    text = next((facts.get(key, str) for key in ("end_time", "start_time") if key in facts), None)
    try:
        at = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return int(at.timestamp()) * 1_000_000_000 + at.microsecond * 1_000
