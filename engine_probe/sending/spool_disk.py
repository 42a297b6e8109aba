"""A spool's batches in a folder that outlives the process.

A batch is one file: a line that says what it is, a line of JSON about its segments, then the segments' bytes. It is
written aside and renamed, so kill -9 leaves whole files and at most one `.tmp`. Without `fsync` the last files may be
lost or torn by a power cut (never by the end of the process); a checksum finds torn ones.

Invariant: a number is never given twice within an epoch, else the collector would take new rows for a repeat. So the
highest number stays on disk (as `.done` once delivered); where it cannot be known, because the machine was rebooted or
files are gone, a new epoch begins, and old batches keep the epoch that they were first sent under.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, Final

from engine_probe.errors import ProbeError
from engine_probe.sending.parcels import Gap, Key, Segment, SegmentInfo
from engine_probe.sending.spool_files import Damaged, Stored, new_epoch

_MAGIC: Final = b"kvscope spool 1\n"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_MAX_HEADER_BYTES: Final = 1 << 20
MAX_ASIDE: Final = 64
"""Batches kept aside for a person to look at; older ones are deleted."""


class DiskFiles:
    """Batches in a folder that one sender at a time may use.

    fsync   True: a batch survives a power cut once `put` returned; False (default): it survives the process
    Raises ProbeError where the folder cannot be used, or another process uses it.
    """

    def __init__(self, folder: str | Path, *, fsync: bool = False) -> None:
        self._folder = Path(folder)
        self._fsync = fsync
        self._lock_fd: int | None = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock_fd = _lock(self._folder)
            self.epoch = self._old_epoch()
            numbers = [key.seq for key in self._keys((".batch", ".done")) if key.epoch == self.epoch]
            if not numbers:
                self.epoch = new_epoch()
                state = {"epoch": self.epoch, "boot": _boot_id()}
                self._write(self._folder / "state.json", json.dumps(state).encode())
        except OSError as error:
            self.close()
            raise ProbeError(
                f"the spool {self._folder} cannot be used: {error.strerror or error}; "
                "give each sender a folder of its own that it may write",
                path=str(self._folder),
            ) from error
        self.next_seq = max(numbers, default=-1) + 1
        self._highest = self.next_seq - 1

    def load(self) -> tuple[list[Stored], list[Key], list[Gap]]:
        for leftover in self._folder.glob("*.tmp"):
            leftover.unlink(missing_ok=True)
        found: dict[str, Stored] = {}
        damaged: list[Key] = []
        for key in self._keys((".batch",)):
            try:
                with self._path(key).open("rb") as file:
                    found[str(key)] = _header(key, file)[0]
            except (Damaged, OSError):
                damaged.append(key)
        for name, stored in list(found.items()):
            whole = found.get(stored.half_of or "")
            if whole is not None and name not in whole.halves:
                # The process ended between the two writes of a split: the whole batch still has these rows.
                self.remove(stored.key)
                del found[name]
        return sorted(found.values(), key=lambda stored: stored.key), damaged, self._gaps()

    def put(self, stored: Stored, segments: Sequence[Segment]) -> None:
        body = b"".join(segment.body for segment in segments)
        header = {
            "segments": [asdict(segment.info) for segment in segments],
            "halves": stored.halves,
            "half_of": stored.half_of,
            "is_tale": stored.is_tale,
            "crc": zlib.crc32(body),
        }
        self._write(self._path(stored.key), _MAGIC + json.dumps(header).encode() + b"\n" + body)
        if stored.key.epoch == self.epoch and stored.key.seq > self._highest:
            self._path(Key(self.epoch, self._highest), ".done").unlink(missing_ok=True)
            self._highest = stored.key.seq

    def read(self, stored: Stored) -> tuple[Segment, ...]:
        try:
            with self._path(stored.key).open("rb") as file:
                current, crc = _header(stored.key, file)
                body = file.read()
        except OSError as error:
            raise Damaged(str(error)) from error
        if zlib.crc32(body) != crc or len(body) != sum(info.num_bytes for info in current.infos):
            raise Damaged("checksum")
        segments, position = [], 0
        for info in current.infos:
            segments.append(Segment(info, body[position : position + info.num_bytes]))
            position += info.num_bytes
        return tuple(segments)

    def remove(self, key: Key) -> None:
        self._leave_number(key)
        self._path(key).unlink(missing_ok=True)

    def set_aside(self, key: Key, reason: str) -> None:
        aside = self._folder / "aside"
        aside.mkdir(exist_ok=True)
        self._leave_number(key)
        if self._path(key).exists():
            self._path(key).replace(aside / f"{key}.batch")
            (aside / f"{key}.txt").write_text(reason + "\n", encoding="utf-8")
        for old in sorted(aside.glob("*.batch"))[:-MAX_ASIDE]:
            old.unlink(missing_ok=True)
            old.with_suffix(".txt").unlink(missing_ok=True)

    def save_gaps(self, gaps: Sequence[Gap]) -> None:
        path = self._folder / "gaps.json"
        if gaps:
            self._write(path, json.dumps([asdict(gap) for gap in gaps]).encode())
        else:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _leave_number(self, key: Key) -> None:
        if key.epoch == self.epoch and key.seq == self._highest:
            self._path(key, ".done").touch()

    def _gaps(self) -> list[Gap]:
        try:
            return [Gap(**gap) for gap in json.loads((self._folder / "gaps.json").read_bytes())]
        except (OSError, ValueError, TypeError):
            return []

    def _old_epoch(self) -> str:
        try:
            state = json.loads((self._folder / "state.json").read_bytes())
            boot = _boot_id()
            return str(state["epoch"]) if boot and state["boot"] == boot else ""
        except (OSError, ValueError, TypeError, KeyError):
            return ""

    def _keys(self, suffixes: tuple[str, ...]) -> list[Key]:
        keys = []
        for path in self._folder.iterdir():
            epoch, _, seq = path.stem.rpartition("-")
            if path.suffix in suffixes and epoch and seq.isdigit():
                keys.append(Key(epoch, int(seq)))
        return keys

    def _path(self, key: Key, suffix: str = ".batch") -> Path:
        return self._folder / f"{key}{suffix}"

    def _write(self, path: Path, content: bytes) -> None:
        aside = path.with_name(path.name + ".tmp")
        try:
            with aside.open("wb") as file:
                file.write(content)
                if self._fsync:
                    file.flush()
                    os.fsync(file.fileno())
            aside.replace(path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        if self._fsync:
            folder = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def _header(key: Key, file: BinaryIO) -> tuple[Stored, int]:
    """A batch without its bytes, and their checksum; leaves the file where they begin. Raises Damaged."""
    if file.readline(len(_MAGIC)) != _MAGIC:
        raise Damaged("header")
    try:
        header = json.loads(file.readline(_MAX_HEADER_BYTES))
        infos = tuple(SegmentInfo(**info) for info in header["segments"])
        stored = Stored(key, infos, tuple(header["halves"]), header["half_of"], bool(header["is_tale"]))
        return stored, int(header["crc"])
    except (ValueError, TypeError, KeyError) as error:
        raise Damaged("header") from error


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _lock(folder: Path) -> int:
    """Hold the folder for this process. Raises ProbeError where another one holds it."""
    fd = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass
    except BlockingIOError as error:
        os.close(fd)
        raise ProbeError(
            f"the spool {folder} is used by another process; give each sender a folder of its own", path=str(folder)
        ) from error
    return fd
