"""Which runs are wanted, which of them are known already, and the others played, under a bar."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from collector.lab_runs.writable import check_writable_folder
from collector.terminal.output import say
from engine_probe.errors import EXIT_FINDING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from diagnosis.lab.results import Result
    from diagnosis.lab.run import Order


def wanted_runs(
    fault: list[str] | None,
    seeds: list[int],
    severity: str,
    requests: int,
    independent: bool,
    observe: str,
    *,
    whole: bool,
) -> list[Order]:
    """The runs that are asked for."""
    from diagnosis.lab.fault import WORDS
    from diagnosis.lab.plan import chosen, published
    from diagnosis.lab.run import Order

    if whole:
        return published(seeds, requests)
    levels = WORDS if severity == "all" else (severity,)
    return chosen(fault, levels, seeds, Order("none", "typical", 1, requests, independent, observe))


def known_runs(known: Path, wanted: list[Order]) -> list[Result]:
    """Wanted runs that another matrix finished, where the code is still the same."""
    from diagnosis.lab.code import code_version, still_true
    from diagnosis.lab.results import read

    taken, others = still_true(read(known), wanted)
    say(f"{len(taken)} of {len(wanted)} runs are taken from {known}")
    if others:
        say(f"{others} that are there were made by other code than this ({code_version()}) and are played again")
    return taken


def play_runs(
    wanted: list[Order], folder: Path, processes: int | None, *, keep_rows: bool = False
) -> list[dict[str, Any]]:
    """Results of these runs, by manifest or by playing them, under a bar."""
    from diagnosis.lab.code import code_version
    from diagnosis.lab.matrix import finished, run_matrix

    check_writable_folder(folder)
    done = finished(folder)
    still_open = sum(order.key() not in done for order in wanted)
    if still_open < len(wanted):
        say(f"{len(wanted) - still_open} of {len(wanted)} runs are finished already")
    others = sum(done[order.key()].get("code") != code_version() for order in wanted if order.key() in done)
    if others:
        say(
            f"{others} of them were made by other code than this ({code_version()}) and are taken as they are; a new folder plays them again"
        )
    try:
        return _with_progress(wanted, folder, still_open, processes, keep_rows, run_matrix)
    except KeyboardInterrupt:
        kept = sum(order.key() in finished(folder) for order in wanted)
        say(f"stopped: {kept} of {len(wanted)} runs are kept in {folder}; the same command goes on from there")
        raise typer.Exit(EXIT_FINDING) from None


def _with_progress(
    wanted: list[Order],
    folder: Path,
    open_cells: int,
    processes: int | None,
    keep_rows: bool,
    run_matrix: Callable[..., list[dict[str, Any]]],
) -> list[dict[str, Any]]:
    """The matrix under a bar on stderr, and a line a run where stderr is no terminal; both say how long it will still take."""
    import sys
    from itertools import count
    from time import monotonic

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console,
        disable=not sys.stderr.isatty(),
    )  # fmt: skip
    begun, finished_now = monotonic(), count(1)
    with bar:
        task = bar.add_task("runs", total=open_cells)

        def told(result: Mapping[str, Any]) -> None:
            bar.update(task, advance=1, description=f"{result['fault']}: {result['outcome']}")
            if not console.is_terminal:
                n = next(finished_now)
                left_s = (open_cells - n) * (monotonic() - begun) / n
                say(
                    f"{result['fault']} {result['severity']} seed {result['seed']}: {result['outcome']} ({result['why']}); "
                    f"{n} of {open_cells}, about {left_s / 60:.0f} min left"
                )

        return run_matrix(wanted, folder, processes=processes, keep_rows=keep_rows, on_result=told)
