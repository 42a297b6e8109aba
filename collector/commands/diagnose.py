"""`kvscope diagnose` and `kvscope report`: which causes own the change between two windows."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collector.terminal.asking import TokenOption, UrlOption, ask
from collector.terminal.output import DEFAULT_STORE, JsonOption, StoreOption, columns, emit, emit_json, say
from engine_probe.errors import EXIT_FINDING, EXIT_OK, UsageError

if TYPE_CHECKING:
    from collector.terminal.client import CollectorClient
    from diagnosis.telling.verdict import Verdict
    from store.interface import Store

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
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of the bootstrap; the same seed gives the same verdict.")]


BundleOption = Annotated[
    Path | None, typer.Option(help="Write an incident bundle: what another machine needs for the same verdict.")
]
FromBundleOption = Annotated[Path | None, typer.Option(help="Judge an incident bundle in place of a store.")]


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
    url: UrlOption = None,
    token: TokenOption = None,
    seed: SeedOption = 0,
    bundle: BundleOption = None,
    from_bundle: FromBundleOption = None,
    show_sql: Annotated[bool, typer.Option("--sql/--no-sql", help="Show the SQL behind each number.")] = True,
    json: JsonOption = False,
) -> None:
    """Why did P99 change: which cause owns how much of it, and what to do.

    Without windows: the last 15 minutes against the same time on the last comparable day. Exit 1 where something changed.
    """
    asked = Question(baseline, suspect, metric, quantile, vantage, store, url, token, seed, bundle, from_bundle)
    document = verdict_of(asked)
    if json:
        emit_json(document)
    else:
        from diagnosis.telling.text import render

        emit(render(document, sql=show_sql, width=columns()))
    raise typer.Exit(EXIT_OK if document["status"] == "no_change" and not document["causes"] else EXIT_FINDING)


def report(
    baseline: WindowOption = None,
    suspect: WindowOption = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="File to write: .html (self-contained) or .md.")
    ] = Path("kvscope-report.md"),
    metric: MetricOption = "ttft",
    quantile: QuantileOption = "0.99",
    vantage: VantageOption = None,
    store: StoreOption = DEFAULT_STORE,
    url: UrlOption = None,
    token: TokenOption = None,
    seed: SeedOption = 0,
    bundle: BundleOption = None,
    from_bundle: FromBundleOption = None,
    alert: Annotated[
        str | None,
        typer.Option(help="Of this alert: its windows and metric, by its id or fingerprint.", show_default=False),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write the postmortem: whom it hurt, when, why, with every number's query, and what to change. HTML or Markdown."""
    from diagnosis.postmortem.html import render_html
    from diagnosis.report import render_markdown

    renderers = {".html": render_html, ".htm": render_html, ".md": render_markdown, ".markdown": render_markdown}
    renderer = renderers.get(output.suffix.lower())
    if renderer is None:
        raise UsageError(
            f"the report is HTML or Markdown: give a file that ends in .html or .md, not {output.name!r}",
            output=str(output),
        )
    _writable(output, "report")
    if alert is not None:
        if baseline is not None or suspect is not None or from_bundle is not None:
            raise UsageError("an alert has its own windows: give --alert, or windows, or a bundle")
        of_alert = _question_of(alert, store, url, token)
        baseline, suspect = of_alert.get("baseline"), of_alert["suspect"]
        metric = of_alert.get("metric", metric)
    asked = Question(baseline, suspect, metric, quantile, vantage, store, url, token, seed, bundle, from_bundle, True)
    document, incident = case_of(asked)
    assert incident is not None, "it was asked for with the verdict"
    try:
        output.write_text(renderer(document, incident, version=_version()), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the report cannot be written to {output}: {error.strerror}", output=str(output)) from error
    if json:
        emit_json({"report": str(output), "status": document["status"], "verdict": document["verdict"]})
    else:
        emit(document["verdict"])
        say(f"report: {output}")


def _question_of(alert: str, store: str, url: str | None, token: str | None) -> dict[str, str]:
    """What the alert's report asks, from the store or the collector that has it."""
    from collector.alerting.answers import alert_rows, question_of

    def from_store() -> dict[str, Any]:
        from store.alert_book import AlertBook
        from store.open import open_store

        with open_store(store, read_only=True, must_exist=True) as opened:
            return alert_rows(AlertBook(opened), "all", None, 1000, time.time_ns())

    def from_collector(client: CollectorClient) -> dict[str, Any]:
        found: dict[str, Any] = client.get("/api/v1/alerts", {"state": "all", "limit": 1000})
        return found

    return question_of(ask(store, url, token, from_store, from_collector), alert)


@dataclass(frozen=True, slots=True)
class Question:
    """What was asked, and of whom: a bundle, a collector, or a store."""

    baseline: str | None
    suspect: str | None
    metric: str
    quantile: str
    vantage: str | None
    store: str
    url: str | None
    token: str | None
    seed: int
    bundle: Path | None
    from_bundle: Path | None
    with_incident: bool = False


Case = tuple[dict[str, Any], dict[str, Any] | None]
"""A verdict document, and its incident where that was asked for."""


def verdict_of(asked: Question) -> dict[str, Any]:
    """The verdict document."""
    return case_of(asked)[0]


def case_of(asked: Question) -> Case:
    """The verdict document, and the incident where it is asked for. A bundle is written from the store itself: the collector that holds it has to be stopped for that."""
    if asked.from_bundle is not None:
        from diagnosis import bundle as bundles

        if asked.bundle is not None:
            raise UsageError("--bundle and --from-bundle exclude each other")
        verdict, seen = bundles.look_into(asked.from_bundle, lambda store, found: _incident(store, found, asked))
        return verdict.to_dict(), seen
    if asked.bundle is not None:
        _writable(asked.bundle, "incident bundle")
        if asked.url is not None:
            raise UsageError(
                "--bundle copies rows out of the store: give --store, not --url (stop the collector meanwhile)"
            )
        return _from_store(asked)
    return ask(
        asked.store,
        asked.url,
        asked.token,
        lambda: _from_store(asked),
        lambda c: _from_collector(c, asked),
    )


def _runnable(document: dict[str, Any], asked: Question) -> dict[str, Any]:
    """The document whose next command reads the store that was asked, and not the one that would be taken unasked."""
    from shlex import quote

    experiment = document["next_experiment"]
    if experiment is None or not experiment["reads_store"] or asked.store == DEFAULT_STORE:
        return document
    command = f"{experiment['command']} --store {quote(asked.store)}"
    return {**document, "next_experiment": {**experiment, "command": command}}


def _writable(path: Path, what: str) -> None:
    """Say before a long diagnosis that its result could not be written."""
    if path.is_dir():
        raise UsageError(f"the {what} cannot be written to {path}: it is a folder; give a file", path=str(path))
    if not path.absolute().parent.is_dir():
        raise UsageError(
            f"the {what} cannot be written to {path}: there is no folder {path.parent}; create it first", path=str(path)
        )


def _incident(store: Store, verdict: Verdict, asked: Question) -> dict[str, Any] | None:
    from diagnosis.postmortem.incident import incident

    return incident(store, verdict.to_dict()) if asked.with_incident else None


def _from_collector(client: CollectorClient, asked: Question) -> Case:
    if asked.seed:
        raise UsageError("--seed needs the store itself: a collector judges with seed 0")
    names = ("baseline", "suspect", "metric", "quantile", "vantage")
    question = {name: getattr(asked, name) for name in names}
    if asked.with_incident:
        case = client.get("/api/v1/reports", {**question, "format": "json"})
        return case["verdict"], case["incident"]
    return client.get("/api/v1/diagnosis", question), None


def _from_store(asked: Question) -> Case:
    from diagnosis import bundle as bundles
    from diagnosis.diagnose import diagnose as run
    from diagnosis.windows import parse_window
    from store.open import open_store

    now_ns = time.time_ns()
    with open_store(asked.store, read_only=True) as store:
        base, suspect = (
            None if text is None else parse_window(text, store, now_ns) for text in (asked.baseline, asked.suspect)
        )
        verdict = run(
            store,
            base,
            suspect,
            metric=asked.metric,
            quantile=asked.quantile,
            vantage=asked.vantage,
            now_ns=now_ns,
            seed=asked.seed,
        )
        if asked.bundle is not None:
            bundles.write(
                asked.bundle, store, verdict, base, suspect, vantage=asked.vantage, now_ns=now_ns, seed=asked.seed
            )
            say(f"incident bundle: {asked.bundle}")
        return _runnable(verdict.to_dict(), asked), _incident(store, verdict, asked)


def _version() -> str:
    from importlib.metadata import version

    return version("kvscope")
