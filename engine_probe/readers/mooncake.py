"""Mooncake traces (FAST'25 release): one request a line, with lengths and prefix ids but without any timing.

A line becomes a `request` at the client's vantage: arrival, prompt and output tokens, and `prompt_blocks` from
`hash_ids` (an id is one block of 512 tokens and equal ids mean equal prefixes up to there, which is what a chain hash
means; the last block may be partial and is kept, as the trace's own figures count it). Times are relative: they are
laid from 2025-01-01T00:00:00Z on, or from `--start`. Nothing is known of tokens, ends or hits: null. Source:
reference 16.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine_probe.errors import UnknownFormat
from engine_probe.readers.lines import json_lines
from engine_probe.readers.source import FoundWindow, Notes, ReadOptions
from engine_probe.schema import table_from_rows

if TYPE_CHECKING:
    import pyarrow as pa

ANCHOR_NS: Final = 1_735_689_600_000_000_000  # 2025-01-01T00:00:00Z
BLOCK_TOKENS: Final = 512
REQUIRED: Final = ("timestamp", "input_length", "output_length")
MOST_TOKENS: Final = (1 << 31) - 1
_CHUNK: Final = 5_000


class MooncakeTrace:
    """One `.jsonl` file of such lines."""

    format = "Mooncake trace"

    def __init__(self, path: Path) -> None:
        self.files = [path]

    def chunks(self, options: ReadOptions, notes: Notes) -> Iterator[Mapping[str, pa.Table]]:
        """`request` tables of 5,000 lines."""
        path = self.files[0]
        anchor = ANCHOR_NS if options.start_ns is None else options.start_ns
        rows: list[dict[str, Any]] = []
        first = last = None
        for number, line in json_lines(path, REQUIRED):
            row = _row(line, number, anchor, path.name)
            first = row["arrival_ns"] if first is None else min(first, row["arrival_ns"])
            last = row["arrival_ns"] if last is None else max(last, row["arrival_ns"])
            rows.append(row)
            if len(rows) >= _CHUNK:
                yield {"request": table_from_rows("request", rows)}
                rows = []
        if rows:
            yield {"request": table_from_rows("request", rows)}
        if first is not None and last is not None:
            notes.windows.append(FoundWindow("trace", first, last + 1))
        notes.not_told.append("timing: a trace tells arrivals and lengths; TTFT, ITL and hits are not in it")


def check_line(line: Mapping[str, Any], number: int, name: str) -> None:
    """Its timestamp, lengths and ids are what the format says, whoever reads them. Raises UnknownFormat."""
    where = f"{name}, line {number}"
    at_ms, ids = line["timestamp"], line.get("hash_ids")
    if not isinstance(at_ms, int | float) or isinstance(at_ms, bool) or not 0 <= at_ms < 1e13:
        raise UnknownFormat(f"{where}: timestamp is {at_ms!r}, expected milliseconds from the start.", line=number)
    for key in ("input_length", "output_length"):
        if type(line[key]) is not int or not 0 <= line[key] <= MOST_TOKENS:
            raise UnknownFormat(
                f"{where}: {key} is {line[key]!r}, expected a count of tokens, at most {MOST_TOKENS:,}.", line=number
            )
    if ids is not None and not (isinstance(ids, list) and all(type(i) is int and 0 <= i < 1 << 64 for i in ids)):
        raise UnknownFormat(f"{where}: hash_ids is not a list of block ids.", line=number)


def _row(line: Mapping[str, Any], number: int, anchor_ns: int, name: str) -> dict[str, Any]:
    check_line(line, number, name)
    at_ns = anchor_ns + round(line["timestamp"] * 1_000_000)
    session = line.get("session_id")
    return {
        "request_id": f"mooncake-{number}",
        "vantage": "client",
        "state": "finished",
        "at_ns": at_ns,
        "arrival_ns": at_ns,
        "prompt_tokens": line["input_length"],
        "output_tokens": line["output_length"],
        "session_id": None if session is None else str(session),
        "labels": {"block_tokens": str(BLOCK_TOKENS)},
        "prompt_blocks": line.get("hash_ids"),
    }
