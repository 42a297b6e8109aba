"""The border to DuckDB: its exceptions become ours here, once, and nowhere else.

Invariant: no `duckdb.Error` leaves the store. Every error says what happened, to which store, and what to do next.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb

from engine_probe.errors import (
    BatchRejected,
    DiskFull,
    KvscopeError,
    OutOfMemory,
    QueryKilled,
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreMisuse,
)

_NO_SPACE = re.compile(
    r"no space left|disk quota exceeded|file too large|enospc|edquot|efbig|max_temp_directory_size", re.I
)
_DAMAGE = re.compile(
    r"could not read enough bytes|corrupt|checksum|serializ|failed to load metadata|invalid block|replaying wal", re.I
)
_NO_MEMORY = re.compile(
    r"out of memory error|failed to (pin|allocate|resize|reserve)|could not (allocate|free up)", re.I
)
_OF_THE_FILE = (duckdb.IOException, duckdb.InternalException, duckdb.FatalException, duckdb.SerializationException)
_RESTORE = (
    "Move it (and its .wal file) away to start afresh, or restore a copy made with `kvscope store backup`; "
    "rows that were sealed are still in the Parquet folder beside it."
)
_AGAIN_S = 2
_HOLDER = re.compile(r"held in (?P<program>.*?) \(PID (?P<pid>\d+)\)")
_BEGINNINGS = {
    "INTERRUPT Error": duckdb.InterruptException,
    "Out of Memory Error": duckdb.OutOfMemoryException,
    "FATAL Error": duckdb.FatalException,
    "IO Error": duckdb.IOException,
    "INTERNAL Error": duckdb.InternalException,
    "Serialization Error": duckdb.SerializationException,
}
_BAD_ROWS = (
    duckdb.ConstraintException,
    duckdb.ConversionException,
    duckdb.OutOfRangeException,
    duckdb.TypeMismatchException,
)


@contextmanager
def border(url: str, *, writing: bool = False) -> Iterator[None]:
    """Turn DuckDB's and the system's exceptions into StoreErrors that name the store `url`."""
    try:
        yield
    except KvscopeError:
        raise
    except (duckdb.Error, OSError) as error:
        raise translate(_of_a_stream(error), url, writing=writing) from error


def translate(error: BaseException, url: str, *, writing: bool = False) -> StoreError:
    """The StoreError that says what `error` means for a reader or writer of the store."""
    text = str(error).strip() or type(error).__name__
    first_line = text.splitlines()[0]
    if _NO_SPACE.search(text):
        lost = "Nothing of the batch was kept; its sender keeps it and sends it again. " if writing else ""
        return DiskFull(
            f"No space is left for the store {url} ({first_line}). {lost}Reads go on. "
            "Free space, or run `kvscope store prune`.",
            url=url,
        )
    if isinstance(error, duckdb.InterruptException):
        return QueryKilled(f"A query on {url} was interrupted before it ended. Ask for a smaller window.", url=url)
    if writing and isinstance(error, _BAD_ROWS):
        return BatchRejected(f"The batch does not fit the tables of {url}: {first_line}. Correct the rows.", url=url)
    if is_short_of_memory(error):
        what, do = "query on", "Ask for a smaller window, or again later"
        if writing:
            what, do = "commit to", "Nothing of it was kept. Send it again under the same identity"
        return OutOfMemory(
            f"A {what} {url} found too little memory ({first_line}). {do}; or raise KVSCOPE_STORE_MEMORY_BYTES.",
            url=url,
            retry_after_s=_AGAIN_S,
        )
    if isinstance(error, _OF_THE_FILE) and _DAMAGE.search(first_line):
        return StoreDamaged(
            f"The store {url} is damaged: {first_line}. {_RESTORE}", url=url, error=type(error).__name__
        )
    return StoreError(f"The store {url} failed: {first_line}", url=url, error=type(error).__name__)


def _of_a_stream(error: Exception) -> Exception:
    """DuckDB's exception itself, where rows were read as a stream: Arrow's interface makes an OSError of its text."""
    if isinstance(error, OSError) and error.errno is None:
        for beginning, kind in _BEGINNINGS.items():
            if str(error).startswith(beginning):
                return kind(str(error))
    return error


def is_short_of_memory(error: BaseException) -> bool:
    """DuckDB's memory limit was reached. A commit that meets it at its end says so as a TransactionException."""
    return isinstance(error, duckdb.OutOfMemoryException) or (
        isinstance(error, duckdb.TransactionException) and bool(_NO_MEMORY.search(str(error)))
    )


def opening_error(error: BaseException, path: Path, *, read_only: bool) -> StoreError:
    """Why a DuckDB file could not be opened, and what to do about it."""
    text = str(error)
    if found := _HOLDER.search(text):
        pid = int(found["pid"])
        return StoreBusy(
            f"{path} is held by process {pid} ({_command_line(pid) or found['program']}), and a DuckDB file admits one "
            "process. Ask that process over HTTP (if it is `kvscope serve`), read the sealed Parquet files beside the "
            "database, or stop it and try again.",
            path=str(path),
            pid=pid,
            retry_after_s=5,
        )
    if "not a valid DuckDB database" in text:
        return StoreMisuse(
            f"{path} is a file, but not a DuckDB database. Give another path with --store, or move that file away.",
            path=str(path),
        )
    if re.search(r"permission denied|read-only file system|cannot open file .* in read-only", text, re.I):
        wanted = "read" if read_only else "written"
        return StoreMisuse(
            f"{path} cannot be {wanted}: permission denied. Give this user the right to the file and its folder, "
            "or another path with --store.",
            path=str(path),
        )
    if _NO_SPACE.search(text):
        return DiskFull(
            f"{path} cannot be opened: no space is left on its disk. Free space and try again.", path=str(path)
        )
    if "different configuration" in text:
        return StoreBusy(
            f"{path} is already open in this process with other settings. Close that store first, or pass it along.",
            path=str(path),
            retry_after_s=1,
        )
    if (
        re.search(r"version number|newer version|storage version|could not read|serializ", text, re.I)
        and "version" in text
    ):
        return StoreMisuse(
            f"{path} was written by another release of DuckDB that this one cannot read: {text.splitlines()[0]}. "
            "Use the kvscope release that wrote it to export it (`kvscope store export`).",
            path=str(path),
        )
    if not isinstance(error, _OF_THE_FILE) or not _DAMAGE.search(text):
        return StoreError(f"{path} cannot be opened: {text.splitlines()[0] if text else type(error).__name__}.")
    return StoreDamaged(
        f"{path} cannot be opened; it looks damaged: {text.splitlines()[0] if text else type(error).__name__}. {_RESTORE}",
        path=str(path),
    )


def no_database(path: Path) -> StoreError:
    """There is no file where one must be."""
    return StoreMisuse(
        f"There is no database at {path}. `kvscope import PATH` or `kvscope serve` makes one; "
        "or give the path of an existing one with --store.",
        path=str(path),
    )


def _command_line(pid: int) -> str | None:
    """Command line of a process on this machine, where the system tells it."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    text = b" ".join(words).decode(errors="replace")
    return " ".join(text.split())[:120] or None
