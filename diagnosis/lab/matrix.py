"""Runs over the machine's cores: each finished one is a line of the manifest, and is not run again.

FOLDER/manifest.jsonl     a line a finished run, appended and synced; half a line (a machine that went down) is skipped
FOLDER/runs/KEY/          rows and truth of each run, where they are kept
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import IO, Any

from diagnosis import parallel
from diagnosis.lab.cell import run_cell
from diagnosis.lab.code import code_version
from diagnosis.lab.run import Order
from engine_probe.errors import UsageError

MANIFEST = "manifest.jsonl"


def finished(folder: Path) -> dict[str, dict[str, Any]]:
    """Results by key, from the manifest. Raises UsageError where the file is none of ours."""
    path = folder / MANIFEST
    if not path.exists():
        return {}
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_bytes().split(b"\n"):
        try:
            result = json.loads(line) if line else None
        except ValueError:
            continue  # a line that was cut short: its cell is run again
        if result is None:
            continue
        if not isinstance(result, dict) or not {"key", "fault", "outcome"} <= set(result):
            raise UsageError(f"{path} is not a matrix's manifest; give another folder", path=str(path))
        found[result["key"]] = result
    return found


def run_matrix(
    wanted: Sequence[Order],
    folder: Path,
    *,
    processes: int | None = None,
    keep_rows: bool = False,
    on_result: Callable[[dict[str, Any]], None] = lambda result: None,
) -> list[dict[str, Any]]:
    """Results of all that is wanted, in its order; what the manifest holds is not run again (and not told).

    processes   None: one a core. A cell that fails by a defect of ours stops the matrix; what is finished stays, but for the other
                runs of that fault and seed, which are played together.
    """
    if processes is not None and processes < 1:
        raise UsageError(f"processes is {processes}; expected 1 or more")
    folder.mkdir(parents=True, exist_ok=True)
    code = code_version()  # as it is now: what is changed meanwhile is not what is played
    done = finished(folder)
    todo = [order for order in wanted if order.key() not in done]
    with (folder / MANIFEST).open("ab") as manifest:
        _begin_line(manifest)
        for result in _results(todo, folder if keep_rows else None, min(processes or _cores(), max(len(todo), 1))):
            result = {**result, "code": code}
            manifest.write(json.dumps(result).encode() + b"\n")
            manifest.flush()
            os.fsync(manifest.fileno())
            done[result["key"]] = result
            on_result(result)
    return [done[order.key()] for order in wanted]


def _results(todo: Sequence[Order], keep: Path | None, processes: int) -> Iterable[dict[str, Any]]:
    """As they are finished."""
    shares = [
        [(order, None if keep is None else _emptied(keep / "runs" / order.key())) for order in orders]
        for orders in together(todo)
    ]
    if processes == 1:
        for share in shares:
            for order, folder in share:
                yield run_cell(order, folder)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=_begin) as pool:
        try:
            for future in as_completed([pool.submit(_share, share) for share in shares]):
                yield from future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise


def together(orders: Sequence[Order]) -> list[list[Order]]:
    """The same orders in shares for one process each: those that play the same fault by the same seed remember what they have in common."""
    shares: dict[tuple[str, int], list[Order]] = {}
    for order in orders:
        shares.setdefault((order.fault, order.seed), []).append(order)
    return list(shares.values())


def _share(share: Sequence[tuple[Order, Path | None]]) -> list[dict[str, Any]]:
    return [run_cell(order, folder) for order, folder in share]


def _begin() -> None:
    """A process among as many as there are cores: it works on one thread, and leaves Ctrl-C, which reaches a whole group of processes, to
    its parent, who alone says what became of the matrix."""
    import pyarrow as pa

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pa.set_cpu_count(1)
    parallel.alone()


def _begin_line(manifest: IO[bytes]) -> None:
    """What was cut short is closed, so that the next line is whole."""
    if manifest.tell():
        manifest.write(b"\n")


def _emptied(folder: Path) -> Path:
    """Rows of a cell that was cut short are written anew."""
    import shutil

    if folder.exists():
        shutil.rmtree(folder)
    return folder


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
