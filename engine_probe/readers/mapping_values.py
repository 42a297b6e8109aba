"""One value of a log line -> one value of a column: where it is found, how it is read, in which unit.

A rule of a mapping file is compiled once into a `Rule`; `take` then finds the field and converts it to what the column
holds (ns, s, tokens, a word). Invariants: an absent field, null, and the words that mean nothing (`-`, empty) are
unknown, never zero; instants are computed in whole ns, never through a float.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from engine_probe.events import Column

SCALE_NS: Final = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
CLF: Final = "%d/%b/%Y:%H:%M:%S %z"
PICKS: Final = ("first", "last", "sum", "max", "min", "count")
MAX_TEXT: Final = 4_096
_NOTHING: Final = frozenset(("", "-"))
_TRUTHS: Final = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}  # fmt: skip
_INT_MAX: Final = 1 << 63
_HUGE: Final = Decimal("1e30")
_NUMBERS: Final = frozenset((int, float, str, Decimal))

Record = Mapping[str, Any]
Conditions = Mapping[tuple[str, ...], re.Pattern[str]]
"""Path of a field -> pattern that it has to match as a whole."""


class BadValue(ValueError):
    """A value is not what its rule says; the message is a clause that begins with 'is'."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How one column (or label) is filled. `line` is where it stands in the mapping file.

    fields    paths tried in order: dotted, a number is a position in a list
    constant  the value itself, where no field is read
    unit      s, ms, us, ns, percent: of the value, for durations, instants and ratios
    time      iso8601, unix, clf, or a strptime format: of the value, for instants
    zone      of instants without one, as an offset from UTC
    pattern   of the text only the first group counts; no match is unknown
    cases     (pattern over the whole text, value); the first that matches
    split, pick  of a text that holds several values: which
    plus, minus  rules of durations (or numbers) added and taken away
    when      only in lines whose fields match these patterns; unknown in others
    """

    name: str
    line: int | None
    fields: tuple[tuple[str, ...], ...] = ()
    constant: Any = None
    unit: str | None = None
    time: str | None = None
    zone: timezone = UTC
    pattern: re.Pattern[str] | None = None
    cases: tuple[tuple[re.Pattern[str], Any], ...] = ()
    default: Any = None
    split: str | None = None
    pick: str = "first"
    plus: tuple[Rule, ...] = ()
    minus: tuple[Rule, ...] = ()
    when: Conditions = field(default_factory=dict)
    read: Callable[[Rule, Any], Any] = field(default=lambda rule, value: value)

    def take(self, record: Record) -> Any:
        """The column's value in this record; None where it is unknown. Raises BadValue."""
        if self.when and not fulfils(record, self.when):
            return None
        value = self._find(record)
        if value is not None and self.split is not None:
            value = self._pick(str(value))
        if value is not None and self.pattern is not None:
            match = self.pattern.search(_text(value))
            value = None if match is None else match[1] if self.pattern.groups else match[0]
            value = None if value in _NOTHING else value
        if self.cases:
            value = self._case(value)
        if value is None:
            return None
        found = [self.read(self, item) for item in value] if isinstance(value, list) else self.read(self, value)
        for rules, sign in ((self.plus, 1), (self.minus, -1)):
            for rule in rules:
                other = rule.take(record)
                if other is None or found is None:
                    return None
                found = found + sign * other
        return found

    def _find(self, record: Record) -> Any:
        if not self.fields:
            return self.constant
        for path in self.fields:
            value = record.get(path[0]) if len(path) == 1 else lookup(record, path)
            if value is not None and not (type(value) is str and value.strip() in _NOTHING):
                return value
        return None

    def _pick(self, text: str) -> Any:
        parts = [part.strip() for part in re.split(self.split or ",", text)]
        parts = [part for part in parts if part not in _NOTHING]
        if self.pick == "count":
            return len(parts)
        if not parts:
            return None
        if self.pick in ("first", "last"):
            return parts[0 if self.pick == "first" else -1]
        numbers = [decimal(part) for part in parts]
        return str(sum(numbers) if self.pick == "sum" else max(numbers) if self.pick == "max" else min(numbers))

    def _case(self, value: Any) -> Any:
        text = "" if value is None else _text(value)
        for pattern, told in self.cases:
            if pattern.fullmatch(text):
                return told
        return self.default


def lookup(record: Any, path: Sequence[str]) -> Any:
    """The value at a path; None where something on the way is absent or of another kind."""
    for step in path:
        if type(record) is dict:
            record = record.get(step)
        elif type(record) is list and step.isascii() and step.isdigit() and len(step) < 7:
            record = record[int(step)] if int(step) < len(record) else None
        else:
            return None
    return record


def fulfils(record: Record, conditions: Conditions) -> bool:
    """Whether every field is there and matches."""
    for path, pattern in conditions.items():
        value = lookup(record, path)
        if value is None or isinstance(value, list | dict) or not pattern.fullmatch(_text(value)):
            return False
    return True


def reader(column: Column | None) -> Callable[[Rule, Any], Any]:
    """How values of this column are read; None is a label."""
    if column is None or column.type == "string":
        return _read_text
    if column.type in ("int64", "list<int64>") and column.name.endswith("_ns"):
        return _read_instant
    if column.type in ("int64", "uint64", "list<int64>", "list<uint64>"):
        return _read_count
    if column.type == "float64":
        return _read_duration if column.unit == "s" else _read_number
    return _read_truth if column.type == "bool" else _read_text


def read_seconds(rule: Rule, value: Any) -> float:
    """A duration as part of another duration."""
    return float(_read_duration(rule, value))


def read_shift(rule: Rule, value: Any) -> int:
    """A duration in ns, as part of an instant."""
    return int((decimal(value) * SCALE_NS.get(rule.unit or "s", 1)).to_integral_value())


def decimal(value: Any) -> Decimal:
    """A finite number, exactly. Raises BadValue."""
    if type(value) in _NUMBERS:
        try:
            found = Decimal(value if type(value) is str else str(value))
            if -_HUGE < found < _HUGE:
                return found
        except InvalidOperation:  # no number at all, or NaN, which has no order
            pass
    raise BadValue(f"is {_shown(value)}, expected a number")


def offset(text: str) -> timezone:
    """`UTC`, `+02:00`, `-0500` -> a zone. Raises BadValue."""
    match = re.fullmatch(r"([+-])(\d{2}):?(\d{2})", text)
    if text.upper() in ("UTC", "Z"):
        return UTC
    if match is None:
        raise BadValue(f"is {text!r}, expected UTC or an offset like +02:00")
    sign = -1 if match[1] == "-" else 1
    return timezone(sign * timedelta(hours=int(match[2]), minutes=int(match[3])))


def _read_text(rule: Rule, value: Any) -> str:
    return _text(value)[:MAX_TEXT]


def _read_number(rule: Rule, value: Any) -> float:
    return float(decimal(value) / (100 if rule.unit == "percent" else 1))


def _read_duration(rule: Rule, value: Any) -> float:
    return float(decimal(value) * SCALE_NS.get(rule.unit or "s", 1) / SCALE_NS["s"])


def _read_count(rule: Rule, value: Any) -> int:
    if type(value) is str and value[:2] == "0x" and re.fullmatch(r"0x[0-9a-fA-F]{1,16}", value):
        return int(value.strip(), 16)
    number = decimal(value)
    if number != number.to_integral_value():
        raise BadValue(f"is {_shown(value)}, expected a whole number")
    return int(number)


def _read_truth(rule: Rule, value: Any) -> bool:
    found = _TRUTHS.get(str(value).strip().lower())
    if found is None:
        raise BadValue(f"is {_shown(value)}, expected true or false")
    return found


def _read_instant(rule: Rule, value: Any) -> int:
    if rule.time in (None, "unix"):
        at_ns = int((decimal(value) * SCALE_NS[rule.unit or "s"]).to_integral_value())
    else:
        at_ns = _parsed(rule, _text(value).strip())
    if not 0 < at_ns < _INT_MAX:
        raise BadValue(f"is {_shown(value)}, expected an instant after 1970")
    return at_ns


def _parsed(rule: Rule, text: str) -> int:
    """An instant told as a date. A fraction of a second keeps its nine digits."""
    fraction = 0
    if rule.time == "iso8601":
        match = re.search(r"(?<=\d)[.,](\d+)", text)
        if match is not None:
            fraction = int(match[1].ljust(9, "0")[:9])
            text = text[: match.start()] + text[match.end() :]
    try:
        if rule.time == "iso8601":
            at = datetime.fromisoformat(text)
        else:
            at = datetime.strptime(text, CLF if rule.time == "clf" else str(rule.time))
        at = at if at.tzinfo else at.replace(tzinfo=rule.zone)
        whole = int(at.replace(microsecond=0).timestamp())
    except (ValueError, OverflowError) as error:
        like = {"iso8601": "2026-11-29T13:20:53.123Z", "clf": "29/Nov/2026:13:20:53 +0000"}.get(
            str(rule.time), rule.time
        )
        raise BadValue(f"is {_shown(text)}, expected an instant like {like}") from error
    return whole * 1_000_000_000 + fraction + at.microsecond * 1_000


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    raise BadValue(f"is {_shown(value)}, expected a text or a number")


def _shown(value: Any) -> str:
    """A value in an error: short, and no structure, which might hold somebody's prompt."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return repr(value)[:60]
