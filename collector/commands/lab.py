"""`kvscope lab list|run|matrix|coverage`: faults injected on purpose, the truth beside them, verdicts held against it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collector.output import JsonOption, emit, emit_json, say
from collector.verb_list import VerbList
from engine_probe.errors import EXIT_FINDING, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from diagnosis.lab.run import Order

SeverityOption = Annotated[
    str, typer.Option(help="mild, typical, strong, or a number in the fault's own unit (see `kvscope lab list`).")
]
RequestsOption = Annotated[int, typer.Option(min=1, help="Requests of each window, after the warm-up.")]
IndependentOption = Annotated[
    bool,
    typer.Option(
        "--independent/--paired",
        help="The baseline window is another draw of the traffic, as in life; the truth still comes from the paired run.",
    ),
]
ObserveOption = Annotated[
    str,
    typer.Option(
        help="What of the rows the diagnosis gets: full, otlp (spans and scraped metrics), client (the callers' alone), or "
        "lossy (1 % of the batches lost)."
    ),
]
NUM_REQUESTS = 2000


def register(app: typer.Typer) -> None:
    """Add the family `lab`."""
    family = typer.Typer(
        cls=VerbList, help="Inject one known fault, and see whether the diagnosis finds it.", no_args_is_help=True
    )
    family.command("list")(list_faults)
    family.command()(run)
    family.command()(matrix)
    family.command()(coverage)
    app.add_typer(family, name="lab")


def list_faults(json: JsonOption = False) -> None:
    """The faults that can be injected, what each changes, and what should be said of it."""
    from diagnosis.cause import all_causes
    from diagnosis.lab.catalogue import all_faults

    known = all_causes()
    rows = [
        {
            "fault": fault.name,
            "family": fault.family,
            "what": fault.what,
            "metric": fault.metric,
            "severity": {
                "mild": fault.severity.mild,
                "typical": fault.severity.typical,
                "strong": fault.severity.strong,
                "unit": fault.severity.unit,
            },
            "expected": list(fault.expected.causes),
            "acceptable": list(fault.expected.acceptable),
            "never": list(fault.expected.never),
            "nothing_is_to_be_named": fault.expected.is_silent,
            "cause_exists": any(name in known for name in fault.expected.causes),
        }
        for fault in all_faults().values()
    ]
    if json:
        emit_json(rows)
        return
    family = None
    for row in rows:
        if row["family"] != family:
            family = row["family"]
            emit(f"\n{family}")
        severity: Any = row["severity"]
        range_ = f"{severity['mild']:g} .. {severity['typical']:g} .. {severity['strong']:g} {severity['unit']}"
        emit(f"  {row['fault']:30} {row['what']} [{row['metric']}; {range_}]")
    emit("\nTwo at once: ONE+OTHER, for example slow_steps+cold_start")


def run(
    fault: Annotated[str, typer.Argument(help="A fault of `kvscope lab list`, or two of them: one+other.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write into; new or empty.")] = Path(
        "lab-run"
    ),
    severity: SeverityOption = "typical",
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 1,
    requests: RequestsOption = NUM_REQUESTS,
    independent: IndependentOption = False,
    observe: ObserveOption = "full",
    json: JsonOption = False,
) -> None:
    """Run the fleet without and with a fault; rows of both as Parquet for `kvscope import`, and the truth beside them."""
    from diagnosis.lab.run import Order, check_new, run_lab, write_lab

    check_new(output)
    order = Order(fault, severity, seed, requests, independent, observe)
    done = run_lab(order, say)
    files = write_lab(done, output)
    if json:
        emit_json({"folder": str(output), "files": [str(path) for path in files], "truth": done.truth})
        return
    emit(f"{done.fault.what}: {output}")
    for name, told in done.truth["attribution"].items():
        for metric, values in told.items():
            emit(
                f"  {name} owns of {metric}: mean {values['mean_s'] * 1e3:+.1f} ms (from {values['without']['mean_s'] * 1e3:.1f}), "
                f"P99 {values['p99_s'] * 1e3:+.1f} ms (from {values['without']['p99_s'] * 1e3:.1f})"
            )
    emit(
        f"Next: kvscope import {output}/baseline --run baseline; kvscope import {output}/suspect --run suspect; "
        f"kvscope diagnose --baseline baseline --suspect suspect --metric {done.fault.metric}"
    )


def matrix(
    fault: Annotated[
        list[str] | None,
        typer.Option("--fault", help="Only this one; may be given again.", show_default="all, and some pairs"),
    ] = None,
    seeds: Annotated[str, typer.Option(help="A number of seeds (3), or which: 1,5,9 or 1-20.")] = "3",
    folder: Annotated[
        Path, typer.Option("-o", "--output", help="Folder of the manifest; what it holds is not run again.")
    ] = Path("lab-matrix"),
    severity: SeverityOption = "typical",
    requests: RequestsOption = NUM_REQUESTS,
    independent: IndependentOption = False,
    observe: ObserveOption = "full",
    processes: Annotated[int | None, typer.Option(min=1, help="Cells at a time.", show_default="one a core")] = None,
    keep_rows: Annotated[
        bool, typer.Option("--keep-rows", help="Keep each cell's rows and truth (about 10 MB a cell).")
    ] = False,
    markdown: Annotated[Path | None, typer.Option(help="Write the matrix as Markdown too.")] = None,
    json: JsonOption = False,
) -> None:
    """Every fault, several seeds: diagnose each and count how often the verdict is right, wrong or cannot tell.

    Exit 1 where something was named that must not be, or a fault that has a cause was called by another's name.
    """
    from diagnosis.lab.confusion import confusion
    from diagnosis.lab.matrix import finished, orders, run_matrix
    from diagnosis.lab.render import render_markdown, render_text

    wanted = orders(
        fault, seed_list(seeds), severity=severity, requests=requests, independent=independent, observe=observe
    )
    if markdown is not None and not markdown.absolute().parent.is_dir():
        raise UsageError(f"--markdown: there is no folder {markdown.parent}; create it first", path=str(markdown))
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is no folder; give another for the manifest", path=str(folder))
    done = finished(folder)
    open_cells = sum(order.key() not in done for order in wanted)
    if open_cells < len(wanted):
        say(f"{len(wanted) - open_cells} of {len(wanted)} cells are finished already")
    results = _with_progress(wanted, folder, open_cells, processes, keep_rows, run_matrix)
    document = confusion(results)
    if markdown is not None:
        markdown.write_text(render_markdown(document), encoding="utf-8")
        say(f"matrix: {markdown}")
    if json:
        emit_json(document)
    else:
        emit(render_text(document))
    if any(row["wrong"] or row["failed"] for row in document["faults"] if row["has_cause"] or row["is_silent"]):
        raise typer.Exit(EXIT_FINDING)


def coverage(
    pairs: Annotated[int, typer.Option(min=10, help="Pairs of windows of each process.")] = 200,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 1,
    json: JsonOption = False,
) -> None:
    """How often the 95 % interval of the change of P99 holds the true change: independent, correlated and bursty requests.

    Exit 1 where it covers too rarely, or an interval is given that should have been refused.
    """
    from diagnosis.lab.coverage import check, render

    document = check(pairs, seed, say)
    if json:
        emit_json(document)
    else:
        emit(render(document))
    if not all(row["met"] for row in document["cases"]):
        raise typer.Exit(EXIT_FINDING)


def seed_list(text: str) -> list[int]:
    """`3`: 1 to 3; `1,5,9`; `1-20`; mixed. Raises UsageError."""
    found: list[int] = []
    try:
        if "," not in text and "-" not in text:
            found = list(range(1, int(text) + 1))
        else:
            for part in text.split(","):
                first, _, last = part.partition("-")
                found += range(int(first), int(last or first) + 1)
    except ValueError as error:
        raise UsageError(
            f"--seeds {text!r} is neither a number, nor a list like 1,5,9, nor a range like 1-20"
        ) from error
    if not 0 < len(found) <= 10_000:
        raise UsageError(f"--seeds {text!r} names {len(found)} seeds; give 1 to 10,000")
    return found


def _with_progress(
    wanted: list[Order],
    folder: Path,
    open_cells: int,
    processes: int | None,
    keep_rows: bool,
    run_matrix: Callable[..., list[dict[str, Any]]],
) -> list[dict[str, Any]]:
    """The matrix under a bar on stderr, and a line a cell where stderr is no terminal."""
    import sys

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console,
        disable=not sys.stderr.isatty(),
    )  # fmt: skip
    with bar:
        task = bar.add_task("cells", total=open_cells)

        def told(result: Mapping[str, Any]) -> None:
            bar.update(task, advance=1, description=f"{result['fault']}: {result['outcome']}")
            if not console.is_terminal:
                say(f"{result['fault']} seed {result['seed']}: {result['outcome']} ({result['why']})")

        return run_matrix(wanted, folder, processes=processes, keep_rows=keep_rows, on_result=told)
