"""How a row that breaks the contract is told: which kind, row, column and value, and what was expected instead.

Invariant: every `InvalidRows` raised through here carries the facts `kind`, `row`, `column`, `value`, `expected` and
`place`; one that does not apply is None. `row` counts from 0 within its kind, as a program would count it.
"""

from __future__ import annotations

from typing import Any

from engine_probe.errors import InvalidRows
from engine_probe.events import KINDS, Column

KNOWN_KINDS = " ".join(KINDS)

_WORDS = {
    "string": "a text",
    "int64": "a whole number (int64)",
    "uint64": "a whole number from 0 to 2**64 - 1 (uint64)",
    "float64": "a number (float64)",
    "bool": "true or false",
    "map<string,string>": "an object of texts (map<string,string>)",
    "list<string>": "a list of texts",
    "list<int64>": "a list of whole numbers (int64)",
    "list<uint64>": "a list of whole numbers from 0 to 2**64 - 1 (uint64)",
}


def invalid_rows(
    problem: str,
    *,
    kind: str | None = None,
    row: int | None = None,
    column: str | None = None,
    value: Any = None,
    expected: str | None = None,
    place: str | None = None,
) -> InvalidRows:
    """An `InvalidRows` whose message says where, what is there, and what was expected.

    problem   what is wrong, as a predicate of the place: "is null", "is -0.2"
    expected  what would have been right; the message ends with it
    place     where in the body (a byte, a line) when that says more than the row
    """
    where = []
    if kind is not None:
        where.append(kind if row is None else f"{kind} row {row}")
    elif row is not None:
        where.append(f"row {row}")
    if column is not None:
        where.append(f"column {column}")
    subject = ", ".join(where)
    if place is not None:
        subject = f"{subject} ({place})" if subject else place
    message = f"{subject} {problem}".strip()
    if expected:
        message += f"; expected {expected}"
    return InvalidRows(
        message, kind=kind, row=row, column=column, value=show(value), expected=expected, place=place, problem=problem
    )


def unknown_kind(name: str, place: str = "the body") -> InvalidRows:
    """The refusal of a kind of row that the contract does not know."""
    problem = f"names {show(name)!r}, which is no kind of row"
    return invalid_rows(problem, value=name, expected=f"one of: {KNOWN_KINDS}", place=place)


def expectation(column: Column) -> str:
    """What a column takes, in words: type, unit, allowed words, whether it may be null."""
    if column.type in _WORDS:
        words = _WORDS[column.type]
    else:
        inner = ", ".join(f"{name} ({type_})" for name, type_ in column.fields)
        words = f"a list of objects with {inner}" if column.type == "list<struct>" else f"an object with {inner}"
    if column.choices:
        words = f"one of: {' '.join(column.choices)}"
    elif column.unit:
        words += f" in {column.unit}"
    return words if column.required else f"{words}, or null where unknown"


def show(value: Any, limit: int = 120) -> Any:
    """A value as an error may carry it: numbers and short texts as they are, anything long cut off."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else _json(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def _json(value: Any) -> str:
    """As the sender wrote it, where JSON can say it."""
    import msgspec

    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, msgspec.MsgspecError):
        return repr(value)
