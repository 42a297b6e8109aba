"""What msgspec says about a body, turned into a refusal that names kind, row, column, value and what was expected.

msgspec gives one sentence and a path (`$.events.request[3].prefill_s`). The value is read from the body again: this
happens only to a body that is refused, so it may be slow.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from engine_probe.errors import InvalidRows
from engine_probe.events import KINDS, column, column_names
from engine_probe.wire.row_errors import expectation, invalid_rows, unknown_kind

_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>.*)`)?$", re.DOTALL)
_ROW_PATH = re.compile(r"^\$\.events\.(?P<kind>\w+)\[(?P<row>\d+)\](?P<rest>.*)$", re.DOTALL)
_LINE_PATH = re.compile(r"^\$\[(?P<index>\d+)\](?P<rest>.*)$", re.DOTALL)
_FIELD = re.compile(r"field `(?P<name>.*)`", re.DOTALL)
_ESCAPE = re.compile(rb"\\(?:u(?P<code>[0-9a-fA-F]{4})|.)", re.DOTALL)
_ENVELOPE = '{"source", "epoch", "seq", "sent_ns", "events": {kind: [row, ...]}}'


def document_error(body: bytes, error: Exception) -> InvalidRows:
    """The refusal of a JSON document."""
    if not isinstance(error, msgspec.ValidationError):
        return _unreadable(error, body, None)
    what, path = _split(error)
    match = _ROW_PATH.match(path)
    if match is None:
        missing = _FIELD.search(what)
        if path == "$.events" and missing and "unknown field" in what:
            return unknown_kind(missing["name"])
        return invalid_rows(f"has the wrong shape at {path}: {what}", place="the document", expected=_ENVELOPE)
    kind, row = match["kind"], int(match["row"])
    try:
        content = msgspec.json.decode(body)["events"][kind][row]
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError):
        content = None
    return _row_error(kind, row, match["rest"], content, what, None)


def line_error(lines: bytes, error: Exception, skipped: int = 0) -> InvalidRows:
    """The refusal of an NDJSON body. skipped: lines before `lines` (the header)."""
    numbered = [(n, line) for n, line in enumerate(lines.split(b"\n"), start=1 + skipped) if line.strip()]
    if not isinstance(error, msgspec.ValidationError):
        for number, line in numbered:
            try:
                msgspec.json.decode(line)
            except (msgspec.DecodeError, RecursionError) as broken:
                return _unreadable(broken, line, f"line {number}")
        return _unreadable(error, lines, None)
    what, path = _split(error)
    match = _LINE_PATH.match(path)
    if match is None or int(match["index"]) >= len(numbered):
        number = numbered[0][0] if numbered else 1
        return invalid_rows(f"is neither a header nor a row: {what}", place=f"line {number}", expected=_header_words())
    number, line = numbered[int(match["index"])]
    try:
        content = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as broken:  # e.g. two values on one line
        return _unreadable(broken, line, f"line {number}")
    name = content.get("kind") if isinstance(content, dict) else None
    if name is None:
        return invalid_rows("has no kind", place=f"line {number}", expected=f"one of: {' '.join(KINDS)}")
    if not isinstance(name, str) or name not in KINDS:
        return unknown_kind(str(name), f"line {number}")
    row = sum(_kind_of(line) == name for _, line in numbered[: int(match["index"])])
    return _row_error(name, row, match["rest"], content, what, f"line {number}")


def _row_error(kind: str, row: int, rest: str, content: Any, what: str, place: str | None) -> InvalidRows:
    name = re.match(r"\.(\w+)", rest)
    missing = _FIELD.search(what)
    if name is None and missing is not None and "missing" in what:
        return invalid_rows(
            "is missing",
            kind=kind,
            row=row,
            column=missing["name"],
            expected=expectation(column(kind, missing["name"])),
            place=place,
        )
    if name is None:
        return invalid_rows(f"is no row: {what}", kind=kind, row=row, value=content, expected="an object", place=place)
    if name[1] not in column_names(kind):  # the kind of the error and the kind that was read last are not the same
        return invalid_rows(f"says its kind twice ({what})", kind=kind, row=row, expected="each key once", place=place)
    value: Any = content.get(name[1]) if isinstance(content, dict) else None
    inner = rest[name.end() :]
    for step in re.findall(r"\[(\d+)\]|\.(\w+)", inner):
        try:
            value = value[int(step[0])] if step[0] else value[step[1]]
        except (LookupError, TypeError):
            break
    if beyond := "out of range" in what:  # such a body cannot be read a second time to show the number
        value = "a number beyond every type"
    shown = value if beyond else msgspec.json.encode(value).decode("utf-8", "replace")
    problem = f"is {shown[:120]}" + (f" at {inner}" if re.fullmatch(r"(\[\d+\]|\.\w+)+", inner) else "")
    return invalid_rows(
        problem if beyond or what.startswith("Expected") else f"{problem} ({what})",
        kind=kind,
        row=row,
        column=name[1],
        value=value,
        expected=expectation(column(kind, name[1])),
        place=place,
    )


def _unreadable(error: Exception, raw: bytes, place: str | None) -> InvalidRows:
    if isinstance(error, RecursionError):
        return invalid_rows("is nested too deeply", place=place or "the body", expected="rows of plain columns")
    if half := _half_pair(raw):
        return invalid_rows(
            f"holds {half}, half of a surrogate pair",
            place=place or "the body",
            expected="whole characters: a text was cut within one",
        )
    return invalid_rows(
        f"is no sound JSON: {str(error)[:200]}",
        place=place or "the body",
        expected="JSON (NaN and Infinity are not JSON)",
    )


def _half_pair(raw: bytes) -> str | None:
    """The first escape of a surrogate that lacks its other half: what is left of a text that was cut within a character."""
    open_half: re.Match[bytes] | None = None
    for escape in _ESCAPE.finditer(raw):
        code = int(escape["code"] or b"0", 16)
        if open_half is not None:
            if not 0xDC00 <= code < 0xE000 or escape.start() != open_half.end():
                return open_half[0].decode()
            open_half = None
        elif 0xD800 <= code < 0xDC00:
            open_half = escape
        elif 0xDC00 <= code < 0xE000:
            return escape[0].decode()
    return None if open_half is None else open_half[0].decode()


def _split(error: Exception) -> tuple[str, str]:
    match = _AT.match(str(error))
    assert match is not None
    return match["what"], match["path"] or "$"


def _kind_of(line: bytes) -> Any:
    """The kind that a line names; None where it cannot be read (the row before it that is wrong is told first)."""
    try:
        content = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    return content.get("kind") if isinstance(content, dict) else None


def _header_words() -> str:
    return 'a header {"source", "epoch", "seq", "sent_ns"} or a row {"kind", ...}'
