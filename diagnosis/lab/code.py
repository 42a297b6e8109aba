"""Which code a run was made by: runs of two versions are two matrices, and whoever takes older ones for new is told."""

from __future__ import annotations

import ast
import platform
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diagnosis.lab.results import Result
    from diagnosis.lab.run import Order

PACKAGES = ("diagnosis", "engine_probe", "store")
"""What plays, stores and judges. More of them than a run needs, rather than less; comments and layout make no other version."""
IDLE = (
    "diagnosis/bundle.py",
    "diagnosis/capacity/",
    "diagnosis/experiments/",
    "diagnosis/lab/calibrate.py",
    "diagnosis/lab/confusion.py",
    "diagnosis/lab/coverage.py",
    "diagnosis/lab/page.py",
    "diagnosis/lab/plan.py",
    "diagnosis/lab/reliability.py",
    "diagnosis/lab/render.py",
    "diagnosis/lab/results.py",
    "diagnosis/lab/targets.py",
    "diagnosis/postmortem/",
    "diagnosis/report.py",
    "diagnosis/telling/text.py",
    "engine_probe/attach/",
    "engine_probe/engine/server/",
    "engine_probe/engine/torch_executor/",
    "engine_probe/load/",
    "engine_probe/proxy/",
    "engine_probe/readers/",
    "engine_probe/vllm/",
    "store/sandbox/",
    "store/sql_data.py",
)
"""What no run of the lab imports (a test holds it): pages, other engines, SQL for people."""
SOURCES = (".py", ".sql", ".toml")
LIBRARIES = ("numpy", "pyarrow", "duckdb")
DIGITS = 10
Key = tuple[str, str, int, int, str, bool]


@cache
def code_version() -> str:
    """DIGITS hexadecimal digits of what the sources say as they lie there now, and of the libraries whose arithmetic a result rests on."""
    told = sha256(platform.python_version().encode())
    for name in LIBRARIES:
        told.update(f"{name} {_version(name)}\n".encode())
    root = Path(__file__).parents[2]
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.suffix in SOURCES and not name.startswith(IDLE):
                told.update(f"{name}\0".encode() + _said(path) + b"\0")
    return told.hexdigest()[:DIGITS]


def _said(path: Path) -> bytes:
    """A module without its comments and its layout; another file as it is."""
    text = path.read_bytes()
    return ast.dump(ast.parse(text)).encode() if path.suffix == ".py" else text


def still_true(known: Iterable[Result], wanted: Sequence[Order]) -> tuple[list[Result], int]:
    """(of the known runs those that are wanted and were made by this code, how many are wanted but of other or unknown code)."""
    orders = {_key(order) for order in wanted if not order.independent}
    asked = [result for result in known if _key(result) in orders and result.outcome != "failed"]
    ours = [result for result in asked if result.code == code_version()]
    return ours, len(asked) - len(ours)


def without(wanted: Sequence[Order], known: Iterable[Result]) -> list[Order]:
    """What is left to be played."""
    have = {_key(result) for result in known}
    return [order for order in wanted if order.independent or _key(order) not in have]


def _key(run: Order | Result) -> Key:
    return (run.fault, run.severity, run.seed, run.requests, run.observe, run.marked)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
