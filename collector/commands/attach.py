"""`kvscope attach vllm URL`: follow a running engine, and write what it shows to a collector or into a store."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from collector.terminal.output import DEFAULT_STORE, JsonOption, emit, emit_json, say
from collector.terminal.sink_options import DurationOption, SaltOption, SpoolOption, StoreOption, TokenOption, ToOption
from engine_probe.errors import UsageError

if TYPE_CHECKING:
    from engine_probe.attach.fleet import FleetSummary
    from engine_probe.attach.session import Summary

KINDS_HELP: Final = (
    "Kind of engine, router or exporter: vllm, sglang, llamacpp, dynamo, llm-d, dcgm, node, cadvisor, prometheus, ... "
    "(a wrong word lists them all); auto finds out."
)


def register(app: typer.Typer) -> None:
    """Add the verb `attach`."""

    @app.command("attach")
    def attach(
        engine: Annotated[str, typer.Argument(help=KINDS_HELP)],
        url: Annotated[
            str | None, typer.Argument(help="Its HTTP address, such as http://127.0.0.1:8000.", show_default=False)
        ] = None,
        targets: Annotated[
            str | None,
            typer.Option(
                help="Follow a fleet instead: file:PATH (Prometheus' file_sd format), dns:NAME:PORT or "
                "kubernetes:NAMESPACE?selector=app%3Dvllm&port=8000."
            ),
        ] = None,
        to: ToOption = None,
        store: StoreOption = None,
        token: TokenOption = None,
        spool: SpoolOption = None,
        worker: Annotated[
            str | None, typer.Option(help="Name of this engine. Default: the plugin's name for it, else host:port.")
        ] = None,
        worker_map: Annotated[
            list[str] | None,
            typer.Option("--map", help="Whose a series is: LABEL:VALUE=WORKER, such as gpu:0=worker-a. Repeatable."),
        ] = None,
        match: Annotated[
            list[str] | None,
            typer.Option(help="Of a Prometheus server: which series, such as '{job=\"vllm\"}'. Repeatable."),
        ] = None,
        worker_label: Annotated[
            str | None,
            typer.Option(help="Of a Prometheus server: label that names the worker. Default: pod, else instance."),
        ] = None,
        header: Annotated[
            list[str] | None, typer.Option(help="Of a Prometheus server: NAME: VALUE. Repeatable.")
        ] = None,
        interval: Annotated[str, typer.Option(help="Time between scrapes, such as 500ms, 1s, 1m.")] = "1s",
        duration: DurationOption = None,
        kv_events: Annotated[
            str | None,
            typer.Option(
                help="KV-event endpoint as in the engine's --kv-events-config. Default: asked from the engine "
                "(0.32 and later). Prefix bind: or connect: to say what this side shall do."
            ),
        ] = None,
        kv_replay: Annotated[str | None, typer.Option(help="Replay endpoint as in --kv-events-config.")] = None,
        block_rate: Annotated[
            float,
            typer.Option(
                "--block-rate",
                help="Share of the KV blocks to keep, above 0 to 1: each for its whole life, by its hash.",
            ),
        ] = 1.0,
        otlp_port: Annotated[
            int | None, typer.Option(min=0, max=65535, help="Receive the engine's spans on this port of 127.0.0.1.")
        ] = None,
        log: Annotated[
            Path | None, typer.Option(help="The engine's log file: start-up lines, and requests where it logs them.")
        ] = None,
        salt_file: SaltOption = None,
        engine_key: Annotated[
            str | None, typer.Option(envvar="KVSCOPE_ENGINE_KEY", help="API key of the engine.")
        ] = None,
        ca: Annotated[Path | None, typer.Option(help="Certificate authority of the engine's TLS.")] = None,
        insecure: Annotated[bool, typer.Option("--insecure", help="Do not check the engine's certificate.")] = False,
        wait: Annotated[bool, typer.Option("--wait", help="Wait for the engine where it is not up yet.")] = False,
        json: JsonOption = False,
    ) -> None:
        """Follow a running engine: metrics, KV events, spans, start-up log. Ctrl-C ends it and loses nothing."""
        from collector.terminal import attach_text
        from collector.terminal.server_options import headers_of
        from collector.terminal.sinks import (
            exit_code_of,
            open_sink,
            seconds_of,
            stop_on_signals,
            trouble_of,
            undelivered,
        )
        from engine_probe.adapters.registry import adapter
        from engine_probe.adapters.worker_map import WorkerMap
        from engine_probe.attach.fetch import trust
        from engine_probe.attach.fleet import Fleet
        from engine_probe.attach.follower import AUTO, AttachOptions
        from engine_probe.attach.names import source_name
        from engine_probe.attach.salt import default_path, read_salt
        from engine_probe.attach.session import AttachSession
        from engine_probe.attach.targets import targets_of

        if engine != "prometheus" and (match or worker_label or header):
            raise UsageError("--match, --worker-label and --header are for a Prometheus server.")
        if engine != AUTO:
            adapter(engine)  # a name that nobody knows is refused before anything is opened
        if (url is None) == (targets is None):
            raise UsageError("Give the engine's address, or --targets for a fleet.")
        if kv_replay is not None and kv_events is None:
            raise UsageError("--kv-replay needs --kv-events.")
        if log is not None and not log.exists():
            raise UsageError(f"The log {log} does not exist. Start the engine with its output going there.")
        options = AttachOptions(
            url=url or "",
            engine=engine,
            salt=read_salt(salt_file or default_path()),
            worker=worker,
            worker_map=WorkerMap.parse(worker_map or ()),
            matches=match or (),
            worker_label=worker_label,
            headers=headers_of(header or ()),
            interval_s=seconds_of("--interval", interval),
            duration_s=None if duration is None else seconds_of("--duration", duration),
            kv_events=kv_events,
            kv_replay=kv_replay,
            block_rate=block_rate,
            otlp_port=otlp_port,
            log=log,
            engine_key=engine_key,
            verify=trust(ca, insecure=insecure),
            wait=wait,
        )
        if targets is not None:
            _refuse_for_fleets(worker=worker, kv_events=kv_events, otlp_port=otlp_port, log=log, wait=wait or None)
            source = source_name("attach", targets)
        else:
            source = source_name("attach", worker or (url or "").rpartition("://")[2].rpartition("@")[2].rstrip("/"))
        where = None if targets is None else targets_of(targets)
        sink = open_sink(to, store, source, token, spool)
        target = to or store or DEFAULT_STORE
        summary: Summary | FleetSummary
        if where is None:
            session = AttachSession(options, sink, say, sink_trouble=lambda: trouble_of(sink))
            summary = session.run(stop_on_signals())
            text = attach_text.of_one(summary, target)
        else:
            fleet = Fleet(where, options, sink, say, sink_trouble=lambda: trouble_of(sink))
            summary = fleet.run(stop_on_signals())
            text = attach_text.of_fleet(summary, target)
        left = undelivered(sink, spool)
        if json:
            emit_json(asdict(summary) | {"undelivered": left})
        else:
            emit("\n".join([text, *([left] if left else [])]))
        raise typer.Exit(exit_code_of(sink, spool, summary.lost_rows))


def _refuse_for_fleets(**given: object) -> None:
    """Options that make sense for one engine only. Raises UsageError."""
    wrong = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]
    if wrong:
        raise UsageError(
            f"{', '.join(wrong)} is for one engine, not for --targets: names come from the targets, KV events from what "
            "each engine tells, spans go to the collector's /v1/traces."
        )
