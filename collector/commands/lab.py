"""`kvscope lab list|run|matrix|calibrate|coverage`: faults injected on purpose, the truth beside them, verdicts held against it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collector.lab_runs.playing import known_runs, play_runs, wanted_runs
from collector.lab_runs.publishing import beside, publish
from collector.lab_runs.seeds import seed_list
from collector.lab_runs.writable import check_writable_file, check_writable_folder
from collector.terminal.output import JsonOption, emit, emit_json, say
from collector.terminal.verb_list import VerbList
from engine_probe.errors import EXIT_FINDING, UsageError

if TYPE_CHECKING:
    from diagnosis.lab.results import Result

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
PAGE = Path("docs/confusion-matrix.md")


def register(app: typer.Typer) -> None:
    """Add the family `lab`."""
    family = typer.Typer(
        cls=VerbList, help="Inject one known fault, and see whether the diagnosis finds it.", no_args_is_help=True
    )
    family.command("list")(list_faults)
    family.command()(run)
    family.command()(matrix)
    family.command()(calibrate)
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
    check_writable_folder(output)
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
        typer.Option("--fault", help="Only this one; may be given again.", show_default="all that is published"),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Which seeds: 101:120, or 1,5,9, or how many (3).")] = "101:120",
    folder: Annotated[
        Path, typer.Option("-o", "--output", help="Folder of the manifest; what it holds is not run again.")
    ] = Path("lab-matrix"),
    severity: Annotated[
        str, typer.Option(help="all (mild, typical and strong), one of them, or a number in the fault's own unit.")
    ] = "all",
    requests: RequestsOption = NUM_REQUESTS,
    independent: IndependentOption = False,
    observe: ObserveOption = "full",
    processes: Annotated[int | None, typer.Option(min=1, help="Runs at a time.", show_default="one a core")] = None,
    keep_rows: Annotated[
        bool, typer.Option("--keep-rows", help="Keep each run's rows and truth (about 10 MB a run).")
    ] = False,
    page: Annotated[
        Path | None,
        typer.Option(
            help="Write the page, its data (.csv) and its diagram (.svg).",
            show_default="docs/confusion-matrix.md of what is published, else none",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Play nothing: figures and page from this .csv, or what the folder of a matrix has finished."
        ),
    ] = None,
    known: Annotated[
        Path | None,
        typer.Option(
            help="A .csv of runs: those that this very code made are taken from it, and the others are played."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Inject every fault, diagnose, and count how often the verdict is right, wrong or cannot tell.

    Without --fault, --severity, --observe and --independent it is the matrix that is published: all faults at three severities, pairs, runs
    in which nothing is wrong, and the same with less to see. Exit 1 where a promised figure is missed; of single faults where one was
    called by another's name.
    """
    from diagnosis.lab.code import without
    from diagnosis.lab.confusion import confusion
    from diagnosis.lab.matrix import finished
    from diagnosis.lab.results import Result, read
    from diagnosis.lab.results import results as of_documents

    whole = not fault and severity == "all" and observe == "full" and not independent
    if page is None and whole:
        page = PAGE if PAGE.parent.is_dir() else Path(PAGE.name)
    if page is not None:
        for path in (page, *beside(page)):
            check_writable_file(path, "--page")
    if data is not None and known is not None:
        raise UsageError("--from plays nothing, and --known says what need not be played; give one of them")
    if data is not None:
        results = of_documents(finished(data).values()) if data.is_dir() else read(data)
    else:
        wanted = wanted_runs(fault, seed_list(seeds), severity, requests, independent, observe, whole=whole)
        taken = [] if known is None else known_runs(known, wanted)
        played = of_documents(play_runs(without(wanted, taken), folder, processes, keep_rows=keep_rows))
        results = sorted([*taken, *played], key=Result.order)
    document = confusion(results)
    if page is not None:
        publish(page, document, results, data)
    _tell(document, results, json=json)
    missed = any(row["met"] is False for row in document["targets"])
    wrong = any(cell["wrong"] for cell in document["cells"] if cell["has_cause"])
    if document["failed"] or (missed if whole else wrong):
        raise typer.Exit(EXIT_FINDING)


def calibrate(
    seeds: Annotated[str, typer.Option(help="Which seeds; those of a published matrix must be others.")] = "1:20",
    folder: Annotated[
        Path, typer.Option("-o", "--output", help="Folder of the manifest; what it holds is not run again.")
    ] = Path("lab-calibration"),
    to: Annotated[
        Path | None, typer.Option(help="The file to write.", show_default="that of the installed diagnosis")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="`thresholds` (null runs alone) or `confidence`; the other part stays as it is.")
    ] = None,
    requests: RequestsOption = NUM_REQUESTS,
    processes: Annotated[int | None, typer.Option(min=1, help="Runs at a time.", show_default="one a core")] = None,
    json: JsonOption = False,
) -> None:
    """Measure what chance reaches where nothing is wrong, and what certainty is worth, and write diagnosis/calibration.toml.

    Thresholds of the causes and the scale of confidence are read from that file.
    """
    import tomllib

    from diagnosis.calibration import FILE, measured
    from diagnosis.lab.calibrate import PARTS, calibrated
    from diagnosis.lab.plan import TUNED_UP_TO, is_null, tuning

    if only is not None and only not in PARTS:
        raise UsageError(f"--only {only!r}: expected {' or '.join(PARTS)}")

    path, chosen = to or FILE, seed_list(seeds)
    if max(chosen) > TUNED_UP_TO:
        raise UsageError(
            f"--seeds {seeds!r}: seeds from {TUNED_UP_TO + 1} on are kept for what is published; tune on others"
        )
    check_writable_file(path, "--to")
    wanted = [order for order in tuning(chosen, requests) if only != "thresholds" or is_null(order.fault)]
    text = calibrated(play_runs(wanted, folder, processes), seeds, measured(), only)
    path.write_text(text, encoding="utf-8")
    say(f"calibration: {path}")
    if json:
        emit_json(tomllib.loads(text))
    else:
        emit(text)


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


def _tell(document: dict[str, Any], results: list[Result], *, json: bool) -> None:
    from dataclasses import asdict

    from diagnosis.lab.render import render_text

    if json:
        emit_json(document | {"results": [asdict(result) for result in results]})
    else:
        emit(render_text(document))
