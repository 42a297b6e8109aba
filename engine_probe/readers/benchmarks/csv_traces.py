"""Public traces kept as CSV: Azure's LLM inference traces and BurstGPT -> `request` rows with arrivals and lengths.

Azure (2023, 2024; 2025 with NumImages): `TIMESTAMP,ContextTokens,GeneratedTokens`; the instant has no zone and is read
as UTC. BurstGPT: `Timestamp,[Session ID,Elapsed time,]Model,Request tokens,Response tokens,Total tokens,Log Type`;
seconds from 0:00 of its first day, laid from 2025-01-01 or `--start` on; `Elapsed time` (s) is when the answer was
complete; a request without response tokens failed, as its README says. Neither knows a first token: no TTFT, no ITL,
no hits. Without an end, `at_ns` is the arrival. Source: AzurePublicDataset, HPMLL/BurstGPT.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine_probe.errors import UnknownFormat
from engine_probe.readers.benchmarks import rows as shared
from engine_probe.readers.lines import text_lines
from engine_probe.readers.source import FoundWindow, Notes, ReadOptions
from engine_probe.schema import table_from_columns

if TYPE_CHECKING:
    import pyarrow as pa

AZURE: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURST: Final = ("Timestamp", "Model", "Request tokens", "Response tokens")
_ROWS_A_CHUNK: Final = 20_000
_COLUMNS: Final = (
    "request_id",
    "vantage",
    "state",
    "arrival_ns",
    "at_ns",
    "end_ns",
    "prompt_tokens",
    "output_tokens",
    "model",
    "workload",
    "session_id",
)

Cells = Mapping[str, str]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Trace:
    """How one dataset is read: its name for people and ids, the columns it must have, and a line's row."""

    title: str
    prefix: str
    needs: tuple[str, ...]
    row: Callable[[Cells, str, int], Row]
    is_relative: bool


class CsvTrace:
    """One CSV file of either dataset."""

    def __init__(self, path: Path, trace: _Trace) -> None:
        self.files = [path]
        self.format = trace.title
        self._trace = trace

    def chunks(self, options: ReadOptions, notes: Notes) -> Iterator[Mapping[str, pa.Table]]:
        """`request` tables of 20,000 lines."""
        anchor_ns = shared.beginning(options)
        kept: list[Row] = []
        first = last = None
        for number, cells in _lines(self.files[0], self._trace.needs):
            row = self._trace.row(cells, f"{self.files[0].name}, line {number}", anchor_ns)
            row["request_id"] = f"{self._trace.prefix}-{number - 1}"
            first = row["arrival_ns"] if first is None else min(first, row["arrival_ns"])
            last = row["at_ns"] if last is None else max(last, row["at_ns"])
            kept.append(row)
            if len(kept) >= _ROWS_A_CHUNK:
                yield {"request": _table(kept)}
                kept = []
        if first is None or last is None:
            raise UnknownFormat(f"{self.files[0].name} holds a header and no request.")
        if kept:
            yield {"request": _table(kept)}
        notes.windows.append(FoundWindow("trace", first, last + 1))
        notes.not_told.append("timing: the trace tells arrivals and lengths; TTFT, ITL and hits are not in it")
        if self._trace.is_relative:
            notes.assumed.append("instants: seconds from its first day, laid from 2025-01-01 or --start on")
        else:
            notes.assumed.append("instants: the file names no zone; they are read as UTC")


def azure(path: Path) -> CsvTrace:
    """Azure LLM inference trace, 2023 or 2024."""
    return CsvTrace(path, _Trace("Azure LLM inference trace", "azure", AZURE, _azure, is_relative=False))


def burst_gpt(path: Path) -> CsvTrace:
    """BurstGPT, with or without the columns of its later files."""
    return CsvTrace(path, _Trace("BurstGPT trace", "burstgpt", BURST, _burst, is_relative=True))


def _azure(cells: Cells, where: str, anchor_ns: int) -> Row:
    at_ns = _instant(cells["TIMESTAMP"], where)
    return {
        "vantage": "client",
        "state": "finished",
        "arrival_ns": at_ns,
        "at_ns": at_ns,
        "prompt_tokens": _count(cells, "ContextTokens", where),
        "output_tokens": _count(cells, "GeneratedTokens", where),
    }


def _burst(cells: Cells, where: str, anchor_ns: int) -> Row:
    arrival_ns = anchor_ns + round(_seconds(cells, "Timestamp", where, 1e9) * 1e9)
    output = _count(cells, "Response tokens", where)
    end_ns = None
    if cells.get("Elapsed time"):
        end_ns = arrival_ns + round(_seconds(cells, "Elapsed time", where, shared.LONGEST_S) * 1e9)
    return {
        "vantage": "client",
        "state": "finished" if output else "failed",
        "arrival_ns": arrival_ns,
        "at_ns": arrival_ns if end_ns is None else end_ns,
        "end_ns": end_ns,
        "prompt_tokens": _count(cells, "Request tokens", where),
        "output_tokens": output or None,
        "model": cells["Model"] or None,
        "workload": cells.get("Log Type") or None,
        "session_id": cells.get("Session ID") or None,
    }


def _lines(path: Path, needs: Sequence[str]) -> Iterator[tuple[int, Cells]]:
    """(line number, cells by column) of every line after the header. Raises UnknownFormat naming the line."""
    header: list[str] | None = None
    for number, line in text_lines(path):
        where = f"{path.name}, line {number}"
        try:
            cells = next(csv.reader([line.decode("utf-8")], strict=True))
        except (UnicodeDecodeError, csv.Error) as error:
            raise UnknownFormat(f"{where} is not a line of CSV: {error}", line=number) from error
        if header is None:
            header = [cell.strip() for cell in cells]
            missing = [name for name in needs if name not in header]
            if missing:
                raise UnknownFormat(f"{path.name} has no column {missing[0]!r}; its header is {', '.join(header)}.")
            continue
        if len(cells) != len(header):
            raise UnknownFormat(
                f"{where} has {len(cells)} cells and the header {len(header)}. Is the file complete?", line=number
            )
        yield number, dict(zip(header, cells, strict=True))


def _instant(text: str, where: str) -> int:
    """`2023-11-16 18:17:03.9799600`, perhaps with a zone -> ns; without one it is UTC."""
    head, dot, tail = text.strip().partition(".")
    digits = tail[: len(tail) - len(tail.lstrip("0123456789"))]
    try:
        at = datetime.fromisoformat(head + tail[len(digits) :])
        nanos = int(digits.ljust(9, "0")[:9]) if dot else 0
        at = at if at.tzinfo else at.replace(tzinfo=UTC)
        return int(at.timestamp()) * 1_000_000_000 + nanos
    except (ValueError, OverflowError) as error:
        raise UnknownFormat(f"{where}: TIMESTAMP {text[:40]!r} is no instant like 2023-11-16 18:17:03.97.") from error


def _seconds(cells: Cells, key: str, where: str, limit: float) -> float:
    try:
        value = float(cells[key])
    except ValueError:
        value = -1.0
    if not 0.0 <= value < limit:
        raise UnknownFormat(f"{where}: {key} is {cells[key][:40]!r}, expected seconds.", key=key)
    return value


def _count(cells: Cells, key: str, where: str) -> int:
    text = cells[key].strip().removesuffix(".0")
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise UnknownFormat(f"{where}: {key} is {cells[key][:40]!r}, expected a count of tokens.", key=key)
    return int(text)


def _table(rows: Sequence[Row]) -> pa.Table:
    """Column by column: these files have millions of narrow rows."""
    columns = {name: [row.get(name) for row in rows] for name in _COLUMNS}
    return table_from_columns("request", columns, len(rows))
