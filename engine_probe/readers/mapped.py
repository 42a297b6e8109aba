"""Access logs and JSON lines of any shape -> rows, by a mapping file.

Of a `request` row the mapping may leave to us: `vantage` (router: a log between client and engine), `state` (from
`http_status` and `error`), `at_ns` (the latest instant known), `request_id` (file and line, which joins nothing, and
is said). Its arrival must be known or computed: a log that only tells ends has no `arrival_ns`, and that is an error.
Invariant: a line is read whole or named with file and line, with the rule's own line in the mapping.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from engine_probe.errors import UnknownFormat
from engine_probe.events import KINDS
from engine_probe.readers.lines import decode_json, text_lines
from engine_probe.readers.mapping import LogMapping
from engine_probe.readers.mapping_values import BadValue, Rule, fulfils
from engine_probe.readers.source import Notes, ReadOptions
from engine_probe.schema import table_from_rows

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_A_CHUNK: Final = 5_000
_CANCELLED: Final = 499  # nginx: the client closed the connection
_REJECTED: Final = frozenset((429, 503))
_INSTANTS: Final = ("end_ns", "last_token_ns", "first_token_ns", "arrival_ns")
_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])


class MappedLog:
    """One file of lines, read by a mapping."""

    def __init__(self, path: Path, mapping: LogMapping) -> None:
        self.files = [path, mapping.path]
        self.format = f"log ({mapping.path.stem})"
        self._path = path
        self._mapping = mapping
        # at_ns last: where it can be completed, what it is completed from is what is missing.
        self._needs = sorted((c.name for c in KINDS[mapping.kind] if c.required), key=lambda name: name == "at_ns")
        self._header: list[str] | None = None

    def chunks(self, options: ReadOptions, notes: Notes) -> Iterator[Mapping[str, pa.Table]]:
        """Tables of 5,000 rows of the mapping's kind."""
        kept: list[dict[str, Any]] = []
        num_rows = num_unmatched = num_others = num_unnamed = 0
        for number, line in text_lines(self._path):
            where = f"{self._path.name}, line {number}"
            record = self._record(line, where, number)
            if record is None:
                num_unmatched += self._header is not None or self._mapping.lines != "csv"
                continue
            if not fulfils(record, self._mapping.only):
                num_others += 1
                continue
            row = self._row(record, where, number, options)
            num_unnamed += self._mapping.kind == "request" and row["request_id"] == self._name(number)
            kept.append(row)
            num_rows += 1
            if len(kept) >= _ROWS_A_CHUNK:
                yield {self._mapping.kind: table_from_rows(self._mapping.kind, kept)}
                kept = []
        if kept:
            yield {self._mapping.kind: table_from_rows(self._mapping.kind, kept)}
        if not num_rows:
            raise UnknownFormat(
                f"{self._path.name} gave no row by {self._mapping.path.name}: {num_unmatched} lines did not match its "
                f"pattern, {num_others} were not of the kind it reads."
            )
        for count, what in (
            (num_unmatched, "lines that do not match the pattern"),
            (num_others, "lines that `only` leaves out"),
        ):
            if count:
                notes.left_out.append(f"{count} {what}")
        if num_unnamed:
            notes.assumed.append(
                f"{num_unnamed} rows have no request id in the log; they are named by file and line, and nothing joins them"
            )

    def _record(self, line: bytes, where: str, number: int) -> Mapping[str, Any] | None:
        """The fields of a line; None where it is left out (or is the header)."""
        mapping = self._mapping
        if mapping.lines == "csv":
            return self._csv(line, where, number)
        text = line
        if mapping.pattern is not None:
            match = mapping.pattern.search(line.decode("utf-8", "replace"))
            if match is None:
                if mapping.skips_unmatched:
                    return None
                raise UnknownFormat(
                    f"{where} does not match the pattern of {mapping.path.name}; it begins with {line[:60]!r}. "
                    'If such lines are to be left out, say unmatched = "skip" in [input].',
                    line=number,
                )
            if mapping.lines == "text":
                return match.groupdict()
            text = (match["json"] or "").encode()
        found: Mapping[str, Any] = decode_json(_OBJECT, text, where, line=number)
        return found

    def _csv(self, line: bytes, where: str, number: int) -> Mapping[str, Any] | None:
        try:
            cells = next(csv.reader([line.decode("utf-8")], strict=True))
        except (UnicodeDecodeError, csv.Error) as error:
            raise UnknownFormat(f"{where} is not a line of CSV: {error}", line=number) from error
        if self._header is None:
            self._header = [cell.strip() for cell in cells]
            return None
        if len(cells) != len(self._header):
            raise UnknownFormat(
                f"{where} has {len(cells)} cells and the header {len(self._header)}. Is the file complete?", line=number
            )
        return dict(zip(self._header, cells, strict=True))

    def _row(self, record: Mapping[str, Any], where: str, number: int, options: ReadOptions) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for name, rule in self._mapping.columns.items():
            value = self._take(rule, record, where, number)
            if value is not None:
                row[name] = value
        labels = {name: self._take(rule, record, where, number) for name, rule in self._mapping.labels.items()}
        if kept := {name: value for name, value in labels.items() if value is not None}:
            row["labels"] = kept
        row.setdefault("worker", options.worker)
        if self._mapping.kind == "request":
            self._complete(row, number)
        elif "at_ns" not in row and options.at_ns is not None:
            row["at_ns"] = options.at_ns
        for name in self._needs:
            if row.get(name) is None:
                given = self._mapping.columns.get(name)
                told = (
                    "no rule of the mapping fills it" if given is None else f"its field is empty ({self._place(given)})"
                )
                raise UnknownFormat(f"{where}: {name} is not known: {told}.", line=number, column=name)
        return row

    def _complete(self, row: dict[str, Any], number: int) -> None:
        status = row.get("http_status")
        row.setdefault("vantage", "router")
        row.setdefault("request_id", self._name(number))
        if "state" not in row:
            if status in _REJECTED:
                row["state"] = "rejected"
            elif status == _CANCELLED:
                row["state"] = "aborted"
            else:
                row["state"] = "failed" if row.get("error") or (status or 0) >= 400 else "finished"
        if "at_ns" not in row:
            known = [row[name] for name in _INSTANTS if row.get(name) is not None]
            if known:
                row["at_ns"] = max(known)

    def _name(self, number: int) -> str:
        return f"{self._path.name}-{number}"

    def _take(self, rule: Rule, record: Mapping[str, Any], where: str, number: int) -> Any:
        try:
            return rule.take(record)
        except (BadValue, TypeError, OverflowError, ArithmeticError) as error:
            problem = str(error) if isinstance(error, BadValue) else "cannot be computed from these values"
            fields = " or ".join(".".join(path) for path in rule.fields) or "its value"
            raise UnknownFormat(f"{where}: {fields} {problem} ({self._place(rule)}).", line=number) from error

    def _place(self, rule: Rule) -> str:
        at = "" if rule.line is None else f", line {rule.line}"
        return f"{self._mapping.path.name}{at}: {rule.name}"
