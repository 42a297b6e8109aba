"""`kvscope dashboards build|check|publish`: Grafana dashboards as code."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collector.terminal.asking import TokenOption
from collector.terminal.output import JsonOption, emit, emit_json, printable, say
from collector.terminal.slo_goal import SloGoalOption, slo_goal_of
from engine_probe.errors import EXIT_FINDING, BoardsMissing, UsageError

if TYPE_CHECKING:
    from dashboards.check import Checked
    from dashboards.publish import Note

DEFAULT_GRAFANA = "http://127.0.0.1:3000"
DEFAULT_COLLECTOR = "http://127.0.0.1:8321"


def register(app: typer.Typer) -> None:
    """Add the verb `dashboards`."""
    group = typer.Typer(help="Grafana dashboards as code: build, check, publish.", no_args_is_help=True)
    group.command("build")(build)
    group.command("check")(check)
    group.command("publish")(publish)
    app.add_typer(group, name="dashboards")


def build(
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to.", show_default="dashboards/generated of the source")
    ] = None,
    slo_goal: SloGoalOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write every dashboard as JSON that Grafana imports. The same source gives the same bytes."""
    from dashboards.build import FOLDER, write

    folder = FOLDER if out is None else out
    try:
        paths = write(folder, slo_goal_of(slo_goal))
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error}; name another folder with --out") from error
    if as_json:
        emit_json({"folder": str(folder), "files": [path.name for path in paths]})
    else:
        emit("\n".join(str(path) for path in paths))


def check(
    prometheus: Annotated[
        str | None,
        typer.Option(
            help="Ask this Prometheus, which scrapes your collector.", show_default="one of its own, and a fleet"
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long its own fleet lives.", min=10, max=3600)] = 60.0,
    interval: Annotated[
        str | None, typer.Option(help="What stands for $__rate_interval.", show_default="15s, with --prometheus 5m")
    ] = None,
    slo_goal: SloGoalOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a real Prometheus every expression of every dashboard: does it parse, does it return data? Exit 1 where one does not.

    Without --prometheus it starts an installed Prometheus, a collector and a fleet that lives now (the embedded engine), and asks the
    collector's API every query of the tables too. With it, the last hour is asked for, and an expression may be empty because nothing tells it: that is said, and is no failure; that all of them are is one.
    """
    from dashboards.build import stored, targets

    documents = stored()
    if not documents:
        raise BoardsMissing("there are no generated dashboards; run kvscope dashboards build")
    asked = list(targets(documents))
    stale = _stale(documents, slo_goal_of(slo_goal))
    if prometheus is None:
        found = _in_lab(asked, seconds, interval or "15s")
    else:
        from dashboards.check import Prometheus, Span
        from dashboards.check import check as ask

        now_s = time.time()
        with Prometheus(prometheus) as server:
            found = ask(server, asked, interval or "5m", Span(now_s - 3600, now_s, 60.0))
    failed = [
        one for one in found if one.status == "broken" or (one.status == "empty" and _has_to_be_told(one, prometheus))
    ]
    if as_json:
        emit_json({"stale": stale, "checked": found, "failed": len(failed)})
    else:
        emit(_told(found, stale))
    is_blind = prometheus is not None and not any(one.status == "ok" for one in found)
    if is_blind:
        say(
            f"{prometheus} has nothing of a collector in the last hour: it scrapes none; add one to its scrape_configs "
            "(examples/monitoring/prometheus.yml)"
        )
    if failed or stale or is_blind:
        raise typer.Exit(EXIT_FINDING)


def publish(
    grafana: Annotated[str, typer.Option(help="Address of Grafana.", envvar="KVSCOPE_GRAFANA_URL")] = DEFAULT_GRAFANA,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File whose first line is a service account token of Grafana.", show_default="KVSCOPE_GRAFANA_TOKEN"
        ),
    ] = None,
    grafana_token: Annotated[str | None, typer.Option(envvar="KVSCOPE_GRAFANA_TOKEN", hidden=True)] = None,
    data_source: Annotated[str, typer.Option(help="Name of the Prometheus data source.")] = "kvscope Prometheus",
    prometheus: Annotated[
        str | None, typer.Option(help="Make that data source, leading here.", show_default="it has to be there")
    ] = None,
    api_source: Annotated[str, typer.Option(help="Name of the Infinity data source.")] = "kvscope API",
    collector: Annotated[
        str, typer.Option(help="Address of the collector, as Grafana and people reach it.", envvar="KVSCOPE_URL")
    ] = DEFAULT_COLLECTOR,
    token: TokenOption = None,
    annotations: Annotated[bool, typer.Option(help="Write marks and findings as annotations.")] = True,
    since: Annotated[str, typer.Option(help="How far back marks go.")] = "-24h",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="Do not verify Grafana's certificate.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Bring a Grafana to these dashboards: data sources, folder, dashboards, annotations. A second run changes nothing."""
    from dashboards.build import stored
    from dashboards.grafana import Grafana
    from dashboards.infinity import PLUGIN
    from dashboards.publish import Source, Wanted
    from dashboards.publish import publish as bring

    documents = stored()
    if not documents:
        raise BoardsMissing("there are no generated dashboards; run kvscope dashboards build")
    server = Grafana(grafana, _grafana_token(token_file, grafana_token), verify=not insecure)
    notes = _notes(collector, token, since) if annotations else []
    wanted = Wanted(
        documents,
        Source(data_source, "prometheus", prometheus),
        Source(api_source, PLUGIN, collector, token),
        collector.rstrip("/"),
        notes=notes,
    )
    steps = []
    for step in bring(server, wanted, dry_run=dry_run):
        steps.append(step)
        if not as_json:
            would = "would be " if dry_run and step.did != "unchanged" else ""
            emit(f"{step.what:12} {printable(step.name)}: {would}{step.did}")
    if as_json:
        emit_json({"grafana": server.url, "dry_run": dry_run, "steps": steps})


def _has_to_be_told(checked: Checked, prometheus: str | None) -> bool:
    """Our own fleet tells everything that Prometheus is asked for; that nothing is open and no alert fires is a good answer of the API."""
    return prometheus is None and checked.target.expr is not None


def _stale(documents: dict[str, str], slo_goal: float) -> list[str]:
    """Generated files that are not what the source makes."""
    from dashboards.build import build as make

    made = make(slo_goal)
    return sorted(name for name in {*made, *documents} if made.get(name) != documents.get(name))


def _in_lab(asked: Sequence[Any], seconds: float, interval: str) -> list[Checked]:
    from collector.dashboard_check.lab import ask_everything, running_lab

    say(f"starting a collector, a Prometheus and a fleet that lives for {seconds:.0f} s; this takes a little longer")
    with running_lab(seconds) as lab:
        return ask_everything(lab, asked, interval)


def _told(found: Sequence[Checked], stale: Sequence[str]) -> str:
    out = [f"{name}: not what the source makes; run kvscope dashboards build" for name in stale]
    for one in found:
        if one.status != "ok":
            why = f": {one.error}" if one.error else ""
            out.append(
                f"{one.status}: {one.target.dashboard} / {one.target.panel} {one.target.ref_id}{why}\n    {one.asked}"
            )
    counts = {status: sum(one.status == status for one in found) for status in ("ok", "empty", "broken")}
    out.append(
        f"{len(found)} queries: {counts['ok']} returned data, {counts['empty']} are empty, {counts['broken']} are broken"
    )
    return "\n".join(out)


def _grafana_token(path: Path | None, given: str | None) -> str:
    text = given or ""
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8-sig").partition("\n")[0]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the token file {path} cannot be read: {error}") from error
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable():
        raise UsageError(
            "a service account token of Grafana is needed: its file with --token-file, or KVSCOPE_GRAFANA_TOKEN"
        )
    return token


def _notes(collector: str, token: str | None, since: str) -> list[Note]:
    """Marks and findings of a collector, as they are to stand on the time axis."""
    from collector.terminal.client import CollectorClient

    client = CollectorClient(collector, token)
    marks = client.get("/api/v1/marks", {"window": f"{since}/now"})["marks"]
    findings = client.get("/api/v1/findings", {})["findings"]
    return [*_of_marks(marks), *_of_findings(findings)]


def _of_marks(marks: Sequence[dict[str, Any]]) -> Iterator[Note]:
    from dashboards.publish import Note

    for mark in marks:
        told = ": ".join(part for part in (mark["subject"], mark["text"]) if part)
        yield Note("mark", mark["at_ns"], None, f"{mark['mark']} {told}".strip(), (mark["mark"],))


def _of_findings(findings: Sequence[dict[str, Any]]) -> Iterator[Note]:
    from dashboards.publish import Note

    for finding in findings:
        if finding["status"] == "explained":
            causes = tuple(dict.fromkeys(cause["cause"] for cause in finding["causes"][:3]))
            yield Note("finding", finding["made_ns"], None, finding["verdict"], causes)
