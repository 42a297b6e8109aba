"""This machine: packages, clock, disk, folders, the secret of the block hashes."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import shutil
import struct
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Final

from collector.doctor.check import Check, State

AREA: Final = "machine"
LOW_DISK_BYTES: Final = 1 << 30
CLOCK_ERROR_S: Final = 0.1
_TIME_ERROR: Final = 5
EXTRAS: Final = {
    "service": ("fastapi", "duckdb", "uvicorn"),
    "lake": ("psycopg",),
    "engine": ("torch", "safetensors", "tokenizers"),
}
"""Packages by which an extra is known to be there; each is one that the extra brings."""
_PURPOSE: Final = {
    "service": "the collector, the store and every verdict",
    "lake": "a store for many machines",
    "engine": "the embedded engine",
}


def look(store: Path | None, spool: Path | None, salt: Path, env: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Checks of the machine that the doctor runs on. `store` None: the store is no file."""
    yield Check(
        AREA, "kvscope", "ok", f"{version('kvscope')} on Python {platform.python_version()}, {platform.system()}"
    )
    yield from packages()
    yield clock()
    for what, path in (("store folder", store.parent if store else None), ("spool folder", spool)):
        if path is not None:
            yield folder(what, path)
    yield secret(salt)
    if "KVSCOPE_OFF" in env:
        yield Check(AREA, "plugin", "note", "KVSCOPE_OFF is set here: the plugin in an engine started so does nothing.")


def packages() -> Iterator[Check]:
    """Which extras are installed; only `service` is needed for verdicts."""
    for extra, modules in EXTRAS.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        if not missing:
            yield Check(AREA, f"extra {extra}", "ok", f"installed: {_PURPOSE[extra]}")
        else:
            state: State = "fail" if extra == "service" else "note"
            text = f"not installed ({', '.join(missing)} missing): {_PURPOSE[extra]}"
            yield Check(AREA, f"extra {extra}", state, text, f"pip install '.[{extra}]' in kvscope's folder")


def clock() -> Check:
    """Whether the kernel holds its clock for synchronised, and how far it says it may be off."""
    answer = _adjtimex()
    if answer is None:
        return Check(AREA, "clock", "note", "this system does not tell whether its clock is synchronised")
    state, max_error_s = answer
    facts = {"max_error_s": max_error_s}
    if state == _TIME_ERROR:
        text = "the kernel holds the clock for unsynchronised; instants of several machines may not be joined"
        return Check(AREA, "clock", "warn", text, "start chrony, ntpd or systemd-timesyncd", facts)
    if max_error_s > CLOCK_ERROR_S:
        text = f"synchronised, but may be off by {max_error_s:.3f} s"
        return Check(AREA, "clock", "warn", text, "look at the time service's sources", facts)
    return Check(AREA, "clock", "ok", f"synchronised, at most {max_error_s * 1e3:.1f} ms off", facts=facts)


def _adjtimex() -> tuple[int, float] | None:
    """(state of the kernel clock, its largest error in s); None where the system has no such call."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        call = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None
    buffer = ctypes.create_string_buffer(256)  # struct timex of 64-bit Linux; modes = 0 only reads
    state = call(buffer)
    if state < 0:
        return None
    max_error_us = struct.unpack_from("q", buffer.raw, 24)[0]
    return int(state), max_error_us / 1e6


def folder(what: str, path: Path) -> Check:
    """Whether files can be made there, and how much room is left."""
    place = path if path.exists() else next((p for p in path.absolute().parents if p.exists()), Path("/"))
    if not os.access(place, os.W_OK | os.X_OK):
        do = f"give another folder, or let this user write to {place}"
        return Check(AREA, what, "fail", f"{place} cannot be written to", do)
    free = shutil.disk_usage(place).free
    facts = {"path": str(path), "free_bytes": free}
    if free < LOW_DISK_BYTES:
        text = f"{free / 1e9:.2f} GB free at {place}: a full disk stops ingest"
        return Check(AREA, what, "warn", text, "make room, or lower KVSCOPE_RETENTION__DISK_BUDGET_BYTES", facts)
    return Check(AREA, what, "ok", f"{place} can be written to, {free / 1e9:.1f} GB free", facts=facts)


def secret(path: Path) -> Check:
    """The salt of block hashes: everyone who hashes must have the same one, and nobody else may read it."""
    if not path.exists():
        return Check(AREA, "salt", "note", f"no {path} yet; the first attach makes one")
    try:
        mode = path.stat().st_mode & 0o777
        path.read_bytes()
    except OSError as error:
        return Check(AREA, "salt", "fail", f"{path} cannot be read: {error.strerror}", "give another --salt-file")
    if mode & 0o077:
        text = f"others can read {path} (mode {mode:o}): with it they can test guesses of a prompt"
        return Check(AREA, "salt", "warn", text, f"chmod 600 {path}")
    return Check(AREA, "salt", "ok", f"{path}, readable by its owner alone")
