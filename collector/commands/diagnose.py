"""`kvscope diagnose` and `kvscope report`: which causes own the change between two windows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from collector.output import DEFAULT_STORE, JsonOption, StoreOption, emit, emit_json, say
from engine_probe.errors import EXIT_FINDING, EXIT_OK, UsageError

if TYPE_CHECKING:
    from diagnosis.verdict import Verdict

WindowOption = Annotated[
    str | None,
    typer.Option(
        help="A run's name, START/END (ISO 8601, ns, now, -15m) or NAME@START/END.", show_default="chosen by rule"
    ),
]
MetricOption = Annotated[str, typer.Option(help="ttft, tpot or e2e.")]
QuantileOption = Annotated[str, typer.Option(help="Decimal between 0 and 1.")]
VantageOption = Annotated[
    str | None, typer.Option(help="client, engine or router.", show_default="client's where both have it")
]
SeedOption = Annotated[int, typer.Option(help="Seed of the bootstrap; the same seed gives the same verdict.")]


def register(app: typer.Typer) -> None:
    """Add the two verbs."""
    app.command("diagnose")(diagnose)
    app.command("report")(report)


def diagnose(
    baseline: WindowOption = None,
    suspect: WindowOption = None,
    metric: MetricOption = "ttft",
    quantile: QuantileOption = "0.99",
    vantage: VantageOption = None,
    store: StoreOption = DEFAULT_STORE,
    seed: SeedOption = 0,
    bundle: Annotated[
        Path | None, typer.Option(help="Write an incident bundle: what another machine needs for the same verdict.")
    ] = None,
    from_bundle: Annotated[Path | None, typer.Option(help="Diagnose an incident bundle in place of a store.")] = None,
    show_sql: Annotated[bool, typer.Option("--sql/--no-sql", help="Show the SQL behind each number.")] = True,
    json: JsonOption = False,
) -> None:
    """Why did P99 change: which cause owns how much of it, and what to do.

    Without windows: the last 15 minutes against the same time on the last comparable day. Exit 1 where something changed.
    """
    verdict = _verdict(baseline, suspect, metric, quantile, vantage, store, seed, bundle, from_bundle)
    if json:
        emit_json(verdict.to_dict())
    else:
        from diagnosis.text import render

        emit(render(verdict.to_dict(), sql=show_sql))
    raise typer.Exit(EXIT_OK if verdict.status == "no_change" else EXIT_FINDING)


def report(
    baseline: WindowOption = None,
    suspect: WindowOption = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write (.md).")] = Path("kvscope-report.md"),
    metric: MetricOption = "ttft",
    quantile: QuantileOption = "0.99",
    vantage: VantageOption = None,
    store: StoreOption = DEFAULT_STORE,
    seed: SeedOption = 0,
    bundle: Annotated[Path | None, typer.Option(help="Write an incident bundle beside the report.")] = None,
    from_bundle: Annotated[Path | None, typer.Option(help="Report on an incident bundle in place of a store.")] = None,
    json: JsonOption = False,
) -> None:
    """Write the postmortem report of a diagnosis as Markdown."""
    from diagnosis.report import render_markdown

    if output.suffix.lower() not in (".md", ".markdown"):
        raise UsageError(
            f"the report is Markdown: give a file that ends in .md, not {output.name!r}", output=str(output)
        )
    verdict = _verdict(baseline, suspect, metric, quantile, vantage, store, seed, bundle, from_bundle)
    document = verdict.to_dict()
    try:
        output.write_text(render_markdown(document, version=_version()), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the report cannot be written to {output}: {error.strerror}", output=str(output)) from error
    if json:
        emit_json({"report": str(output), "status": verdict.status, "verdict": verdict.verdict})
    else:
        emit(verdict.verdict)
        say(f"report: {output}")


def _verdict(
    baseline: str | None,
    suspect: str | None,
    metric: str,
    quantile: str,
    vantage: str | None,
    store_url: str,
    seed: int,
    bundle: Path | None,
    from_bundle: Path | None,
) -> Verdict:
    from diagnosis import bundle as bundles
    from diagnosis.diagnose import diagnose as run
    from diagnosis.windows import parse_window
    from store.open import open_store

    if from_bundle is not None:
        if bundle is not None:
            raise UsageError("--bundle and --from-bundle exclude each other")
        return bundles.diagnose(from_bundle)
    now_ns = time.time_ns()
    store = open_store(store_url, read_only=True)
    try:
        windows = [None if text is None else parse_window(text, store, now_ns) for text in (baseline, suspect)]
        verdict = run(
            store, windows[0], windows[1], metric=metric, quantile=quantile, vantage=vantage, now_ns=now_ns, seed=seed
        )
        if bundle is not None:
            bundles.write(bundle, store, verdict, windows[0], windows[1], vantage=vantage, now_ns=now_ns, seed=seed)
            say(f"incident bundle: {bundle}")
        return verdict
    finally:
        store.close()


def _version() -> str:
    from importlib.metadata import version

    return version("kvscope")
