"""`kvscope attach vllm URL`: follow a running engine, and write what it shows to a collector or into a store."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from collector.output import DEFAULT_STORE, JsonOption, emit, emit_json, say
from engine_probe.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from engine_probe.attach.session import Summary
    from engine_probe.sink import Sink
    from store.interface import Store

KINDS_HELP: Final = (
    "Kind of engine, router or exporter: vllm, sglang, llamacpp, dynamo, llm-d, dcgm, node, cadvisor, prometheus, ... "
    "(a wrong word lists them all)."
)
SHOWN_COUNTERS: Final = (
    "requests_finished_total",
    "prompt_tokens_total",
    "output_tokens_total",
    "prefix_queries_tokens_total",
    "prefix_hits_tokens_total",
    "preemptions_total",
)


def register(app: typer.Typer) -> None:
    """Add the verb `attach`."""

    @app.command("attach")
    def attach(
        engine: Annotated[str, typer.Argument(help=KINDS_HELP)],
        url: Annotated[str, typer.Argument(help="Its HTTP address, such as http://127.0.0.1:8000.")],
        to: Annotated[
            str | None, typer.Option("--to", help="Collector to write to, such as http://127.0.0.1:8321.")
        ] = None,
        store: Annotated[
            str | None,
            typer.Option("--store", help=f"Store to write into instead of a collector.  [default: {DEFAULT_STORE}]"),
        ] = None,
        token: Annotated[str | None, typer.Option(envvar="KVSCOPE_TOKEN", help="Token of the collector.")] = None,
        spool: Annotated[
            Path | None,
            typer.Option(envvar="KVSCOPE_SPOOL_DIR", help="Folder that keeps rows while the collector is away."),
        ] = None,
        worker: Annotated[
            str | None, typer.Option(help="Name of this engine. Default: the plugin's name for it, else host:port.")
        ] = None,
        worker_map: Annotated[
            list[str] | None,
            typer.Option("--map", help="Whose a series is: LABEL:VALUE=WORKER, such as gpu:0=worker-a. Repeatable."),
        ] = None,
        interval: Annotated[str, typer.Option(help="Time between scrapes, such as 500ms, 1s, 1m.")] = "1s",
        duration: Annotated[str | None, typer.Option(help="Stop after this time; without it, on Ctrl-C.")] = None,
        kv_events: Annotated[
            str | None,
            typer.Option(
                help="KV-event endpoint as in the engine's --kv-events-config. Default: asked from the engine "
                "(0.32 and later). Prefix bind: or connect: to say what this side shall do."
            ),
        ] = None,
        kv_replay: Annotated[str | None, typer.Option(help="Replay endpoint as in --kv-events-config.")] = None,
        otlp_port: Annotated[
            int | None, typer.Option(min=0, max=65535, help="Receive the engine's spans on this port of 127.0.0.1.")
        ] = None,
        log: Annotated[Path | None, typer.Option(help="The engine's log file, for its start-up lines.")] = None,
        salt_file: Annotated[
            Path | None,
            typer.Option(envvar="KVSCOPE_SALT_FILE", help="Secret of the block hashes; made where it does not exist."),
        ] = None,
        engine_key: Annotated[
            str | None, typer.Option(envvar="KVSCOPE_ENGINE_KEY", help="API key of the engine.")
        ] = None,
        ca: Annotated[Path | None, typer.Option(help="Certificate authority of the engine's TLS.")] = None,
        insecure: Annotated[bool, typer.Option("--insecure", help="Do not check the engine's certificate.")] = False,
        wait: Annotated[bool, typer.Option("--wait", help="Wait for the engine where it is not up yet.")] = False,
        json: JsonOption = False,
    ) -> None:
        """Follow a running engine: metrics, KV events, spans, start-up log. Ctrl-C ends it and loses nothing."""
        from engine_probe.adapters.registry import adapter
        from engine_probe.adapters.worker_map import WorkerMap
        from engine_probe.attach.fetch import trust
        from engine_probe.attach.follower import AttachOptions
        from engine_probe.attach.names import source_name
        from engine_probe.attach.salt import default_path, read_salt
        from engine_probe.attach.session import AttachSession

        adapter(engine)  # a name that nobody knows is refused before anything is opened
        if to is not None and store is not None:
            raise UsageError("Give --to (a collector) or --store (a store), not both.")
        if kv_replay is not None and kv_events is None:
            raise UsageError("--kv-replay needs --kv-events.")
        if log is not None and not log.exists():
            raise UsageError(f"The log {log} does not exist. Start the engine with its output going there.")
        options = AttachOptions(
            url=url,
            engine=engine,
            salt=read_salt(salt_file or default_path()),
            worker=worker,
            worker_map=WorkerMap.parse(worker_map or ()),
            interval_s=_seconds("--interval", interval),
            duration_s=None if duration is None else _seconds("--duration", duration),
            kv_events=kv_events,
            kv_replay=kv_replay,
            otlp_port=otlp_port,
            log=log,
            engine_key=engine_key,
            verify=trust(ca, insecure=insecure),
            wait=wait,
        )
        source = source_name("attach", worker or url.rpartition("://")[2].rstrip("/"))
        sink = _open_sink(to, store, source, token, spool)
        session = AttachSession(options, sink, say, sink_trouble=lambda: _trouble(sink))
        summary = session.run(_stop_on_signals())
        undelivered = _undelivered(sink, spool)
        if json:
            emit_json(asdict(summary) | {"undelivered": undelivered})
        else:
            emit("\n".join([_text(summary, to or store or DEFAULT_STORE), *([undelivered] if undelivered else [])]))


class StoreSink:
    """Writes straight into a store: each write is one batch with an identity of its own."""

    def __init__(self, store: Store, source: str) -> None:
        from secrets import token_hex

        self._store = store
        self._source = source
        self._epoch = token_hex(16)
        self._seq = 0

    def write(self, tables: Mapping[str, pa.Table]) -> None:
        """Commit the tables. After an error the same tables must be offered again: they keep their identity."""
        from store.interface import Batch, BatchId

        self._store.append(Batch(tables, BatchId(self._source, self._epoch, self._seq), source=self._source))
        self._seq += 1

    def close(self) -> None:
        self._store.close()


def _open_sink(to: str | None, store: str | None, source: str, token: str | None, spool: Path | None) -> Sink:
    if to is not None:
        from engine_probe.attach.names import spool_folder
        from engine_probe.sink import HttpSink

        return HttpSink(to, source, token=token, spool_dir=spool_folder(spool, source))
    from store.open import open_store

    return StoreSink(open_store(store or DEFAULT_STORE), source)


def _trouble(sink: Sink) -> str | None:
    """Why a collector does not take rows at the moment; None where it takes them, or where there is none."""
    stats = getattr(sink, "stats", None)
    if stats is None or not stats.failures or not stats.pending_batches + stats.in_flight_batches:
        return None
    error: str | None = stats.last_error
    return error


def _undelivered(sink: Sink, spool: Path | None) -> str | None:
    """One sentence on what a collector did not take, after the sink was closed; None where it took everything."""
    stats = getattr(sink, "stats", None)
    if stats is None:
        return None
    held, dropped = stats.pending_batches + stats.in_flight_batches, sum(stats.dropped_rows.values())
    parts = []
    if held:
        parts.append(
            f"{held} batches " + ("stay in the spool for the next start" if spool else "were lost: give --spool")
        )
    if dropped:
        parts.append(f"{dropped:,} rows were dropped")
    return f"Not delivered: {'; '.join(parts)} ({stats.last_error or 'the collector was away'})." if parts else None


def _stop_on_signals() -> threading.Event:
    """An event that Ctrl-C or SIGTERM sets; a second one ends the process at once."""
    stop = threading.Event()

    def on_signal(number: int, _: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        say("Stopping: writing what is left. (Once more to stop at once.)")
        stop.set()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, on_signal)
    return stop


def _seconds(option: str, text: str) -> float:
    """`250ms`, `1s`, `1.5`, `2m`, `1h` -> seconds, more than 0."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)?", text.strip())
    value = float(match[1]) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[match[2] or "s"] if match else 0.0
    if not 0.05 <= value <= 31_536_000:
        raise UsageError(f"{option} is {text!r}; expected a time such as 500ms, 1s or 2m, of at least 50ms.")
    return value


def _text(summary: Summary, target: str) -> str:
    rows = ", ".join(f"{count:,} {kind}" for kind, count in sorted(summary.rows.items())) or "no rows"
    lines = [f"Followed {summary.worker} for {summary.seconds:.0f} s and wrote to {target}: {rows}."]
    gains = {name: summary.counter_gains[name] for name in SHOWN_COUNTERS if name in summary.counter_gains}
    if gains:
        lines.append(
            "In this time the engine counted: "
            + ", ".join(f"{name} +{gain:,.0f}" for name, gain in gains.items())
            + "."
        )
    if summary.restarts:
        lines.append(
            f"It restarted {summary.restarts} times; the counts above are of all its lives, as far as scraped."
        )
    for unseen in summary.unseen:
        seconds = (unseen["last_ns"] - unseen["first_ns"]) / 1e9
        lines.append(
            f"Not seen: the counters of at most {seconds:.1f} s before an end of the engine ({unseen['reason']})."
        )
    events = summary.kv_events or {}
    if events.get("lost_messages"):
        lines.append(f"Not seen: {events['lost_messages']:,} KV-event messages (each hole is a gap mark).")
    for kind, count in sorted(summary.lost_rows.items()):
        lines.append(f"Lost: {count:,} {kind} rows could not be written ({summary.sink_error or 'see the log'}).")
    return "\n".join(lines)
