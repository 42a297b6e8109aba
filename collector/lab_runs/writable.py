"""Whether what a long command will write can be written, asked before it plays and not after."""

from __future__ import annotations

import os
from pathlib import Path

from engine_probe.errors import UsageError


def check_writable_folder(folder: Path) -> None:
    """Raises UsageError where this user cannot make this folder, or write into it."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise UsageError(f"{folder} cannot be made: {there} is no folder; give another", path=str(folder))
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{folder}: this user may not write into {there}; give another", path=str(folder))


def check_writable_file(path: Path, option: str) -> None:
    """Raises UsageError where this user cannot write a file of that name."""
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{option}: there is no folder {path.parent}; create it first", path=str(path))
    if path.is_dir():
        raise UsageError(f"{option}: {path} is a folder; give the name of a file", path=str(path))
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UsageError(f"{option}: this user may not write {path}; give another", path=str(path))
