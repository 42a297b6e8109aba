"""The deployment's secret for block hashes: made once, from the system's randomness, in a file of its owner's alone.

It must be the same for every engine and every attach, or their blocks cannot be joined.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from engine_probe.errors import UsageError

MAX_BYTES: Final = 64
NEW_BYTES: Final = 32


def default_path(env: Mapping[str, str] = os.environ) -> Path:
    """Where the salt is kept: under XDG_DATA_HOME, else ~/.local/share."""
    base = env.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "kvscope" / "salt"


def read_salt(path: Path) -> bytes:
    """The salt in `path` (1 to 64 bytes, a newline at the end not counted); the file is made where it does not exist.

    Raises UsageError where it cannot be read or made, or has another size.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _make(path)
    except OSError as error:
        raise UsageError(
            f"The salt file {path} cannot be made ({error.strerror}); give another --salt-file."
        ) from error
    try:
        salt = path.read_bytes().rstrip(b"\r\n")
    except OSError as error:
        raise UsageError(
            f"The salt file {path} cannot be read ({error.strerror}); give another --salt-file."
        ) from error
    if not 0 < len(salt) <= MAX_BYTES:
        raise UsageError(f"The salt file {path} holds {len(salt)} bytes; expected 1 to {MAX_BYTES}.", path=str(path))
    return salt


def _make(path: Path) -> None:
    """Whole or not at all: of two attaches that make it at once the first wins, and no one reads half a salt."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(NEW_BYTES) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
    finally:
        new.unlink(missing_ok=True)
