"""Mapping files: which field of a log line fills which column of the contract, as TOML that people write.

    [input]                          how a line is read
    lines = "text"                   text (with `pattern`), json, or csv (with a header)
    pattern = '''^(?P<status>\\d+) (?P<seconds>\\S+)$'''    groups are fields; with json: the group `json` is the object
    only = { event = "request.finished" }                  lines whose field matches this pattern; others are left out
    unmatched = "skip"               lines that do not match `pattern` are counted and left out; default: refuse

    [row]
    kind = "request"                 which kind of row a line is

    [columns]                        column = field, or column = { field = ..., unit = ..., ... }
    http_status = "status"
    decode_s = { field = "seconds", unit = "ms" }

    [labels]                         keys of the column `labels`, by the same rules

What a rule may say is in `Rule`; `value` is a constant. A mistake in the file raises UsageError naming the file, its
line and the key. The mappings that come along are read by name: `--mapping nginx`.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path
from typing import Any, Final

from engine_probe.errors import UsageError
from engine_probe.events import KINDS, Column
from engine_probe.readers.mapping_values import (
    PICKS,
    SCALE_NS,
    BadValue,
    Conditions,
    Rule,
    offset,
    read_seconds,
    read_shift,
    reader,
)

FOLDER: Final = Path(__file__).parent / "mappings"
MAX_FILE_BYTES: Final = 1 << 20
_TABLES: Final = ("input", "row", "columns", "labels")
_INPUT: Final = ("lines", "pattern", "only", "unmatched")
_RULE: Final = ("field", "fields", "value", "unit", "time", "zone", "pattern", "cases", "default", "split", "pick", "plus", "minus", "when")  # fmt: skip
_LINES: Final = ("text", "json", "csv")
_OURS: Final = frozenset(("run_id", "labels"))


@dataclass(frozen=True, slots=True)
class LogMapping:
    """A mapping file, compiled."""

    path: Path
    lines: str
    pattern: re.Pattern[str] | None
    only: Conditions
    skips_unmatched: bool
    kind: str
    columns: Mapping[str, Rule]
    labels: Mapping[str, Rule]


def shipped() -> list[str]:
    """Names of the mappings that come along."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_mapping(name: str) -> LogMapping:
    """The mapping in the file `name`, or the one of that name that comes along. Raises UsageError."""
    path = Path(name)
    if not path.is_file():
        path = FOLDER / f"{name}.toml"
        if not (name.isidentifier() or re.fullmatch(r"[\w-]+", name)) or not path.is_file():
            raise UsageError(f"There is no mapping file {name}. Those that come along are: {', '.join(shipped())}.")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise UsageError(f"{path.name} is larger than {MAX_FILE_BYTES >> 10} KiB; that is no mapping file.")
    try:
        text = path.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path.name} is not TOML: {error}") from error
    return _Compiler(path, text).mapping(tables)


class _Compiler:
    """Turns the tables of one file into rules, and mistakes into errors with their line."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._lines = text.splitlines()

    def mapping(self, tables: Mapping[str, Any]) -> LogMapping:
        self._known(tables, _TABLES, ())
        given, row = self._table(tables, "input"), self._table(tables, "row")
        self._known(given, _INPUT, ("input",))
        self._known(row, ("kind",), ("row",))
        lines = self._word(given, "lines", _LINES, ("input",), "json")
        pattern = self._pattern(given["pattern"], ("input", "pattern")) if "pattern" in given else None
        if lines == "text" and (pattern is None or not pattern.groupindex):
            raise self._error(("input",), 'lines = "text" needs a pattern with named groups, like (?P<status>\\d+)')
        if lines == "json" and pattern is not None and "json" not in pattern.groupindex:
            raise self._error(("input", "pattern"), "a pattern for JSON lines needs the group (?P<json>...)")
        kind = self._word(row, "kind", tuple(KINDS), ("row",), "request")
        columns = {c.name: c for c in KINDS[kind]}
        rules = {}
        for name, told in self._table(tables, "columns").items():
            rules[name] = self._column(name, told, columns, kind)
        if not rules:
            raise self._error((), "has no [columns]: nothing would be read")
        labels = {
            name: self._rule(told, ("labels", name), None) for name, told in self._table(tables, "labels").items()
        }
        if labels and "labels" not in columns:
            raise self._error(("labels",), f"{kind} rows have no labels")
        fields = set(pattern.groupindex) if pattern is not None and lines == "text" else None
        if fields is not None:
            self._require_groups([*rules.values(), *labels.values()], fields)
        only = self._conditions(given.get("only", {}), ("input", "only"))
        skips = self._word(given, "unmatched", ("skip", "refuse"), ("input",), "refuse") == "skip"
        return LogMapping(self._path, lines, pattern, only, skips, kind, rules, labels)

    def _column(self, name: str, told: Any, columns: Mapping[str, Column], kind: str) -> Rule:
        column = columns.get(name)
        if column is None or name in _OURS:
            extra = "; labels stand in [labels]" if name == "labels" else self._like(name, columns)
            raise self._error(("columns", name), f"{kind} rows have no such column{extra}")
        if column.fields or column.type.startswith("map"):
            raise self._error(("columns", name), f"a column of type {column.type} cannot be filled from a log line")
        return self._rule(told, ("columns", name), column)

    def _rule(self, told: Any, place: tuple[str, ...], column: Column | None, read: Any = None) -> Rule:
        if isinstance(told, str):
            told = {"field": told}
        if not isinstance(told, dict):
            raise self._error(
                place, f"is {told!r}, expected a field's name or {{ field = ... }}; a constant is {{ value = ... }}"
            )
        self._known(told, _RULE, place)
        paths = [told["field"]] if "field" in told else told.get("fields", [])
        if not isinstance(paths, list) or not all(isinstance(path, str) and path for path in paths):
            raise self._error(place, "field is the name of a field, fields a list of names")
        if bool(paths) == ("value" in told):
            raise self._error(place, "needs either a field (or fields) or a value")
        is_instant = column is not None and column.name.endswith("_ns")
        unit = self._unit(told, place, column)
        time = told.get("time")
        if time is not None and not (is_instant and (time in ("iso8601", "unix", "clf") or "%" in str(time))):
            what = "iso8601, unix, clf or a format with %" if is_instant else "nothing: the column is no instant"
            raise self._error(place, f"time is {time!r}, expected {what}")
        if "pick" in told and told["pick"] not in PICKS:
            raise self._error(place, f"pick is {told['pick']!r}, expected one of {', '.join(PICKS)}")
        inner = read_shift if is_instant else read_seconds if column is not None and column.unit == "s" else None
        rule = Rule(
            name=".".join(place),
            line=self._line(place),
            fields=tuple(tuple(path.split(".")) for path in paths),
            constant=told.get("value"),
            unit=unit,
            time=None if time is None else str(time),
            zone=self._zone(told, place),
            pattern=self._pattern(told["pattern"], place) if "pattern" in told else None,
            cases=self._cases(told, place),
            default=told.get("default"),
            split=None if "split" not in told else self._pattern(told["split"], place).pattern,
            pick=told.get("pick", "first"),
            plus=self._parts(told, "plus", place, column, inner),
            minus=self._parts(told, "minus", place, column, inner),
            when=self._conditions(told.get("when", {}), place),
            read=read or reader(column),
        )
        if not paths:
            self._try(rule, place)
        return rule

    def _parts(
        self, told: Mapping[str, Any], key: str, place: tuple[str, ...], column: Column | None, read: Any
    ) -> tuple[Rule, ...]:
        """Rules of what is added or taken away: durations for instants and durations, numbers for numbers."""
        if key not in told:
            return ()
        given = told[key] if isinstance(told[key], list) else [told[key]]
        if column is None or column.type not in ("int64", "float64"):
            raise self._error(place, f"{key} is for numbers, durations and instants")
        return tuple(self._part(part, place, column, read) for part in given)

    def _part(self, told: Any, place: tuple[str, ...], column: Column, read: Any) -> Rule:
        """A part of an instant is a duration: it has a unit, and no time format."""
        told = {"field": told} if isinstance(told, str) else told
        if isinstance(told, dict) and column.name.endswith("_ns"):
            if "time" in told:
                raise self._error(place, "what is added to an instant is a duration: it has a unit and no time")
            unit = told.get("unit", "s")
            if unit not in SCALE_NS:
                raise self._error(place, f"unit is {unit!r}, expected one of {', '.join(SCALE_NS)}")
        return self._rule(told, place, column, read)

    def _unit(self, told: Mapping[str, Any], place: tuple[str, ...], column: Column | None) -> str | None:
        unit = told.get("unit")
        if unit is None:
            return None
        is_time = column is not None and column.unit in ("s", "ns since 1970-01-01 UTC")
        known = tuple(SCALE_NS) if is_time else ("percent",) if column is not None and column.type == "float64" else ()
        if unit not in known:
            raise self._error(place, f"unit is {unit!r}, expected {' or '.join(known) or 'none for this column'}")
        return str(unit)

    def _cases(self, told: Mapping[str, Any], place: tuple[str, ...]) -> tuple[tuple[re.Pattern[str], Any], ...]:
        cases = told.get("cases", {})
        if not isinstance(cases, dict):
            raise self._error(place, "cases is a table: pattern = value")
        return tuple((self._pattern(pattern, place), value) for pattern, value in cases.items())

    def _zone(self, told: Mapping[str, Any], place: tuple[str, ...]) -> Any:
        try:
            return offset(str(told["zone"])) if "zone" in told else UTC
        except BadValue as error:
            raise self._error(place, f"zone {error}") from error

    def _conditions(self, told: Any, place: tuple[str, ...]) -> Conditions:
        if not isinstance(told, dict) or not all(isinstance(value, str) for value in told.values()):
            raise self._error(place, "a condition is a table: field = pattern")
        return {tuple(path.split(".")): self._pattern(value, place) for path, value in told.items()}

    def _try(self, rule: Rule, place: tuple[str, ...]) -> None:
        """A constant is read once, so that a wrong one is known before the first line."""
        try:
            rule.read(rule, rule.constant)
        except BadValue as error:
            raise self._error(place, f"value {error}") from error

    def _require_groups(self, rules: Sequence[Rule], groups: set[str]) -> None:
        for rule in rules:
            for path in rule.fields:
                if path[0] not in groups:
                    known = ", ".join(sorted(groups))
                    raise UsageError(
                        f"{self._path.name}{_at(rule.line)}: {rule.name} reads the field {'.'.join(path)}, and the pattern "
                        f"has no such group; its groups are {known}."
                    )
            self._require_groups([*rule.plus, *rule.minus], groups)

    def _pattern(self, told: Any, place: tuple[str, ...]) -> re.Pattern[str]:
        try:
            return re.compile(told)
        except (re.error, TypeError, RecursionError, OverflowError) as error:
            raise self._error(place, f"{str(told)[:60]!r} is no regular expression: {error}") from error

    def _table(self, tables: Mapping[str, Any], name: str) -> dict[str, Any]:
        found = tables.get(name, {})
        if not isinstance(found, dict):
            raise self._error((name,), f"is no table; write [{name}]")
        return found

    def _word(
        self, table: Mapping[str, Any], key: str, known: Sequence[str], place: tuple[str, ...], default: str
    ) -> str:
        word = table.get(key, default)
        if word not in known:
            raise self._error((*place, key), f"is {word!r}, expected one of {', '.join(known)}")
        return str(word)

    def _known(self, table: Mapping[str, Any], known: Sequence[str], place: tuple[str, ...]) -> None:
        for key in table:
            if key not in known:
                raise self._error(
                    (*place, key), f"is not known there{self._like(key, known)}; known are {', '.join(known)}"
                )

    @staticmethod
    def _like(name: str, known: Any) -> str:
        close = difflib.get_close_matches(name, list(known), 1)
        return f"; did you mean {close[0]}?" if close else ""

    def _error(self, place: tuple[str, ...], problem: str) -> UsageError:
        where = ".".join(place)
        return UsageError(f"{self._path.name}{_at(self._line(place))}: {where + ' ' if where else 'it '}{problem}.")

    def _line(self, place: tuple[str, ...]) -> int | None:
        """Line of a key in its table, else of the table; TOML's own reader does not keep it."""
        table, at_table, last = "", None, None
        for number, text in enumerate(self._lines, 1):
            head = re.match(r"\s*\[\s*([\w.\"-]+)\s*\]", text)
            if head is not None:
                table = head[1].strip('"')
                if place and table.split(".")[0] == place[0]:
                    at_table = at_table or number
                    if len(place) > 1 and table == ".".join(place[:2]):
                        last = number
                continue
            key = re.match(r"\s*\"?([\w-]+)\"?\s*[=.]", text)
            if key is not None and len(place) > 1 and table == place[0] and key[1] == place[1]:
                last = number
            if key is not None and len(place) == 1 and not table and key[1] == place[0]:
                last = number
        return last or at_table


def _at(line: int | None) -> str:
    return "" if line is None else f", line {line}"
