"""What is at PATH: a recording, a trace, pages, events. Content decides; names only tell what is worth opening."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from engine_probe.errors import UnknownFormat
from engine_probe.readers import events, mooncake, pages
from engine_probe.readers.lines import head
from engine_probe.readers.recording import Recording
from engine_probe.readers.source import Source

KNOWN = (
    "a recording folder (with scenario.json), a Mooncake trace (JSON lines), Prometheus text (a page or a folder of "
    "pages), NDJSON events, Parquet events, or a folder of them"
)
_HEAD_BYTES = 1 << 20


def open_source(path: Path) -> Source:
    """Recognise PATH. Raises UnknownFormat saying what was found and what would be known."""
    if not path.exists():
        raise UnknownFormat(f"There is nothing at {path}. Give the path of {KNOWN}.")
    try:
        return _folder(path) if path.is_dir() else _file(path)
    except PermissionError as error:
        raise UnknownFormat(f"{path} may not be read by this user: {error.strerror}.") from error


def _folder(path: Path) -> Source:
    if (path / "scenario.json").is_file():
        return Recording(path)
    files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
    rows = [p for p in files if _holds_events(p)]
    if rows:
        return events.EventFiles(rows, path, [p for p in files if p not in rows])
    kept = [p for p in files if p.name.removesuffix(".gz").endswith(pages.SUFFIXES) and p.stat().st_size]
    if kept:
        return pages.PageFiles(kept, [p for p in files if p not in kept])
    found = "nothing" if not files else f"{len(files)} files, the first {files[0].name}"
    raise UnknownFormat(f"The folder {path} holds nothing that is known (it holds {found}). Known are {KNOWN}.")


def _file(path: Path) -> Source:
    if path.name == "scenario.json":
        return Recording(path.parent)
    with path.open("rb") as stream:
        magic = stream.read(4)
    if not magic:
        raise UnknownFormat(f"{path} is empty. Was the copy complete?")
    if magic == b"PAR1" or path.name.endswith(events.PARQUET):
        return events.EventFiles([path], path)
    start = head(path, _HEAD_BYTES)
    if not start.strip():
        raise UnknownFormat(f"{path} holds nothing but empty lines.")
    if start.lstrip()[:1] in (b"{", b"["):
        return _json_file(path, start)
    if b"\0" not in start and _looks_like_page(start):
        return pages.PageFiles([path])
    raise UnknownFormat(f"{path} is nothing that is known (it begins with {start[:24]!r}). Known are {KNOWN}.")


def _holds_events(path: Path) -> bool:
    if path.name.endswith(events.PARQUET):
        return True
    if not path.name.endswith(events.NDJSON):
        return False
    try:
        return events.is_event_line(head(path, _HEAD_BYTES).lstrip().split(b"\n", 1)[0])
    except UnknownFormat:
        return True  # the reader says what is wrong with it


def _json_file(path: Path, start: bytes) -> Source:
    first = start.lstrip().split(b"\n", 1)[0]
    try:
        row: Any = msgspec.json.decode(first)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise UnknownFormat(
            f"{path}: the first line is not one whole JSON object ({error}). Known are JSON lines, one object a line."
        ) from error
    keys = set(row) if isinstance(row, dict) else set()
    if {"timestamp", "input_length"} <= keys:
        return mooncake.MooncakeTrace(path)
    if {"at_ns", "text"} <= keys and "kind" not in keys:
        return pages.ScrapeLog(path)
    if events.is_event_line(first):
        return events.EventFiles([path], path)
    shown = ", ".join(sorted(keys)[:8]) or "no keys"
    raise UnknownFormat(f"{path}: JSON lines with {shown} are not known. Known are {KNOWN}.")


def _looks_like_page(start: bytes) -> bool:
    """Some of its first lines are comments of a page, or a name and a number."""
    for line in start.split(b"\n")[:50]:
        words = line.split()
        if line.startswith((b"# HELP ", b"# TYPE ")):
            return True
        if len(words) >= 2 and not line.startswith(b"#"):
            try:
                float(line.rpartition(b"}")[2].split()[0] if b"}" in line else words[1])
            except (ValueError, IndexError):
                return False
            return True
    return False
