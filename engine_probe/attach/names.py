"""Names of senders, and of the folders in which they keep what they could not send yet."""

from __future__ import annotations

from pathlib import Path

MAX_CHARS = 200


def source_name(*parts: str) -> str:
    """`("attach", "gpu7:8000")` -> `attach:gpu7:8000`: printable ASCII, at most 200 characters, as a source must be."""
    text = ":".join(parts).encode("ascii", "replace").decode()
    return "".join(c if c.isprintable() else "?" for c in text)[:MAX_CHARS]


def folder_name(source: str) -> str:
    """A name that any file system takes."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in source)


def spool_folder(base: Path | str | None, source: str) -> Path | None:
    """A folder below `base` that belongs to one source alone; None where nothing is kept on disk."""
    return Path(base) / folder_name(source) if base else None
