"""`kvscope engine serve`: the embedded engine behind OpenAI's HTTP API."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collector.terminal.output import JsonOption, emit_json, say
from collector.terminal.sink_options import SaltOption, SpoolOption, TokenOption
from engine_probe.errors import UsageError

if TYPE_CHECKING:
    from engine_probe.engine.config import EngineConfig
    from engine_probe.engine.server.assembly import Assembled
    from engine_probe.sending.sink import Sink


def register(group: typer.Typer) -> None:
    """Add the verb `engine serve`."""
    group.command("serve")(serve)


def serve(
    model: Annotated[
        Path | None,
        typer.Option(help="Folder with config.json, safetensors and tokenizer. Without it: a tiny seeded model."),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name under which clients ask for it; repeatable. Default: the folder's.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; others than this machine's need a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    token_file: Annotated[
        Path | None, typer.Option(help="File whose first line clients must bring as their api key.")
    ] = None,
    allow_unauthenticated: Annotated[
        bool, typer.Option("--allow-unauthenticated", help="Listen beyond this machine without a token.")
    ] = False,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="Page of another site that may use it, such as http://localhost:3000; repeatable. '*': all."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto (as published), float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch on a CPU. Default: torch's own.")] = None,
    seed: Annotated[int, typer.Option(help="Of requests that bring none, and of the tiny model's weights.")] = 0,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a KV block.")] = 16,
    num_blocks: Annotated[int | None, typer.Option(min=1, help="KV blocks. Default: what memory holds.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Longest context, tokens. Default: the model's.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most requests that run at once.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens of a step.")] = 2048,
    chunked_prefill: Annotated[
        bool,
        typer.Option(
            "--enable-chunked-prefill/--no-enable-chunked-prefill", help="Long prompts in parts, beside decodes."
        ),
    ] = True,
    scheduling_policy: Annotated[str, typer.Option(help="fcfs, shortest or priority.")] = "fcfs",
    preemption: Annotated[str, typer.Option(help="recompute, or swap to host memory.")] = "recompute",
    swap_blocks: Annotated[int, typer.Option(min=0, help="Host blocks for --preemption swap.")] = 0,
    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching", help="Prompts find the blocks of earlier ones."
        ),
    ] = True,
    eviction: Annotated[str, typer.Option(help="Which cached block goes first: lru, lfu, fifo or length.")] = "lru",
    ttl: Annotated[str | None, typer.Option(help="Cached blocks unused for longer are given up.")] = None,
    timeout: Annotated[str | None, typer.Option(help="Requests older than this end with an error.")] = None,
    worker: Annotated[str, typer.Option(help="Name of this engine in everything it records.")] = "w0",
    to: Annotated[
        str | None,
        typer.Option("--collector", "--to", help="Record to this collector, such as http://127.0.0.1:8321."),
    ] = None,
    store: Annotated[str | None, typer.Option(help="Record into this store.")] = None,
    record: Annotated[Path | None, typer.Option(help="Record into Parquet files under this folder.")] = None,
    token: TokenOption = None,
    spool: SpoolOption = None,
    salt_file: SaltOption = None,
    kv_events: Annotated[
        str | None,
        typer.Option(help="Publish KV events, token ids among them: a port, or tcp://ADDRESS:PORT, connect:tcp://..."),
    ] = None,
    kv_replay: Annotated[str | None, typer.Option(help="Answer what a subscriber missed: a port or endpoint.")] = None,
    kv_topic: Annotated[str, typer.Option(help="Topic of the KV events.")] = "",
    drain: Annotated[str, typer.Option(help="Longest wait for open requests when it stops.")] = "30s",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
    as_json: JsonOption = False,
) -> None:
    """Serve a model over OpenAI's API with vLLM's metrics and KV events, every step and block recorded.

    Without --collector, --store or --record nothing is kept but what /metrics shows. Stops on Ctrl+C or SIGTERM, after the
    requests under way.
    """
    from collector import logs
    from collector.terminal.sinks import seconds_of

    if kv_replay is not None and kv_events is None:
        raise UsageError("--kv-replay answers what was missed of --kv-events; give both")
    drain_s = seconds_of("--drain", drain)
    ttl_s = None if ttl is None else seconds_of("--ttl", ttl)
    timeout_s = None if timeout is None else seconds_of("--timeout", timeout)
    logs.configure(log_level)
    try:
        from engine_probe.engine.config import EngineConfig
        from engine_probe.engine.scheduler import SchedulerConfig
        from engine_probe.engine.server.assembly import ServerOptions, assemble
        from engine_probe.engine.server.cross_origin import checked_origins
        from engine_probe.engine.server.guard import check_address, is_loopback
        from engine_probe.engine.server.kv_publisher import is_reached_by_others
        from engine_probe.engine.server.model import load_model
        from engine_probe.engine.server.serving import Server
        from engine_probe.engine.server.serving import serve as run
        from engine_probe.engine.torch_executor.device import use_threads
        from engine_probe.engine.torch_executor.executor import TorchOptions
        from engine_probe.listening import listen, url_of
    except ImportError as error:
        raise UsageError(
            f"the engine needs the package {error.name or 'torch'}: pip install '.[service,engine]' in kvscope's folder"
        ) from error

    client_token = None if token_file is None else read_token(token_file)
    check_address(host, has_token=client_token is not None, allow_unauthenticated=allow_unauthenticated)
    origins = checked_origins(
        allow_origin or (), has_token=client_token is not None, allow_unauthenticated=allow_unauthenticated
    )
    for name, endpoint in (("--kv-events", kv_events), ("--kv-replay", kv_replay)):
        if endpoint is not None and is_reached_by_others(endpoint) and not allow_unauthenticated:
            raise UsageError(
                f"{name} {endpoint} lets other machines read the token ids of prompts, and KV events know no token; bind "
                "it on 127.0.0.1, or say --allow-unauthenticated"
            )
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        chunked_prefill=chunked_prefill,
        policy=scheduling_policy,
        preemption=preemption,
    )
    config = EngineConfig(
        worker=worker,
        block_size=block_size,
        prefix_caching=prefix_caching,
        eviction=eviction,
        ttl_s=ttl_s,
        swap_blocks=swap_blocks,
        timeout_s=timeout_s,
        scheduler=scheduler,
        salt=_salt(salt_file),
    )
    options = TorchOptions(
        device=device,
        dtype=dtype,
        block_size=block_size,
        num_blocks=num_blocks,
        num_host_blocks=swap_blocks,
        max_context=max_model_len,
    )
    if threads is not None:
        use_threads(threads)
    sock = listen(host, port)
    with sock:
        served = load_model(model, options, names=tuple(served_model_name or ()), seed=seed)
        sink, records = open_rows(to, store, record, worker, token, spool)
        assembled = assemble(
            served,
            config,
            sink,
            ServerOptions(
                kv_events=kv_events,
                kv_replay=kv_replay,
                kv_topic=kv_topic,
                token=client_token,
                checks_host=is_loopback(host),
                origins=origins,
                records=records,
            ),
        )
        url = url_of(sock)

        def ready() -> None:
            for line in welcome(url, assembled, to or store or (str(record) if record else None), client_token):
                say(line)
            if as_json:
                emit_json(facts(url, assembled))

        try:
            run(Server(assembled.app, assembled.front, drain_s=drain_s, on_ready=ready), sock)
        finally:
            assembled.close()
    _end(assembled, sink, spool)


def open_rows(
    to: str | None, store: str | None, record: Path | None, worker: str, token: str | None, spool: Path | None
) -> tuple[Sink, bool]:
    """Where rows go, and whether they are kept at all. Raises UsageError where two places are named."""
    from collector.terminal.sinks import open_sink
    from engine_probe.sending.sink import FileSink, NoSink

    if sum(place is not None for place in (to, store, record)) > 1:
        raise UsageError("Give one of --collector, --store and --record.")
    if record is not None:
        return FileSink(record), True
    if to is None and store is None:
        return NoSink(), False
    return open_sink(to, store, f"engine/{worker}", token, spool), True


def read_token(path: Path) -> str:
    """The first line of the file. Raises UsageError where there is none."""
    try:
        token = path.read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the token file {path} cannot be read: {error}") from error
    if not token:
        raise UsageError(f"the token file {path} is empty; its first line is the token")
    return token


def facts(url: str, assembled: Assembled) -> dict[str, Any]:
    """What a program that started the server wants to know."""
    front, executor = assembled.front, assembled.engine.executor
    return {
        "url": url,
        "models": list(front.model.names),
        "device": str(front.model.executor.device),
        "max_context": front.max_context,
        "num_blocks": executor.num_blocks,
        "block_size": assembled.engine.config.block_size,
        "kv_events": None if assembled.publisher is None else assembled.publisher.endpoint,
        "kv_replay": None if assembled.publisher is None else assembled.publisher.replay_endpoint,
    }


def welcome(url: str, assembled: Assembled, rows: str | None, token: str | None) -> list[str]:
    """What a person who has just started it wants to know."""
    config: EngineConfig = assembled.engine.config
    told = facts(url, assembled)
    size = told["num_blocks"] * config.block_size
    lines = [
        f"kvscope engine at {url}/v1: {', '.join(told['models'])} on {told['device']}",
        f"  context  {told['max_context']:,} tokens; KV {told['num_blocks']:,} blocks of {config.block_size} ({size:,} tokens)",
        f"  rows     {rows or 'not recorded (--collector URL, --store PATH or --record FOLDER keeps them)'}",
        f"  access   {'with the token only' if token else 'no token'}",
        f"  metrics  {url}/metrics",
    ]
    if told["kv_events"]:
        lines.append(f"  KV events {told['kv_events']}, replay {told['kv_replay'] or 'none'}")
    return [
        *lines,
        f'  try      curl {url}/v1/completions -H "Content-Type: application/json" -d \'{{"prompt": "hello"}}\'',
        "  stop     Ctrl+C",
    ]


def _salt(path: Path | None) -> bytes:
    from engine_probe.attach.salt import default_path, read_salt

    return read_salt(path or default_path())


def _end(assembled: Assembled, sink: Sink, spool: Path | None) -> None:
    """Say what was not delivered, and end with its code."""
    from collector.terminal.sinks import exit_code_of, undelivered

    left = undelivered(sink, spool)
    if left:
        say(left)
    say("kvscope engine: stopped")
    raise typer.Exit(exit_code_of(sink, spool, assembled.recorder.lost))
