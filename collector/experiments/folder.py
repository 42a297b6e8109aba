"""The folder of an experiment: one folder a run with its rows as Parquet, the document, the report.

Invariant: nothing is removed but what an earlier experiment left there, by the list in its `experiment.json`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine_probe.errors import UsageError

DOCUMENT, REPORT = "experiment.json", "report.md"


def fresh(folder: Path) -> Path:
    """The folder, made where absent and without what an earlier experiment left. Raises UsageError where it holds other things."""
    import msgspec

    try:
        folder.mkdir(parents=True, exist_ok=True)
        told = folder / DOCUMENT
        if told.is_file():
            document = msgspec.json.decode(told.read_bytes())
            names = document.get("folders", []) if isinstance(document, dict) else []
            for name in names:
                if isinstance(name, str) and name and Path(name).name == name and not name.startswith("."):
                    shutil.rmtree(folder / name, ignore_errors=True)
            for name in (DOCUMENT, REPORT):
                (folder / name).unlink(missing_ok=True)
        left = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{folder} cannot be used: {reason}; give another --out", path=str(folder)) from error
    if left:
        raise UsageError(
            f"{folder} holds other things ({', '.join(left[:3])}{', ...' if len(left) > 3 else ''}); give an --out of its own",
            path=str(folder),
        )
    return folder


def claim(folder: Path, names: Sequence[str]) -> None:
    """Say which folders the experiment will write, before it does: an interrupted one can be cleaned up by the next."""
    _write(folder / DOCUMENT, {"folders": list(names)})


def finish(folder: Path, names: Sequence[str], document: Mapping[str, Any], report: str) -> None:
    """Write the document and the report."""
    _write(folder / DOCUMENT, {"folders": list(names), **document})
    (folder / REPORT).write_text(report, encoding="utf-8")


def _write(path: Path, document: Mapping[str, Any]) -> None:
    import msgspec

    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
