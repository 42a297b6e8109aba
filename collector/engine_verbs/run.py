"""`kvscope engine run`: a trace, or made-up traffic, through a fleet of embedded engines, told in one screen."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collector.engine_runs.fleets import Asked, compute_run, virtual_run
from collector.terminal.output import JsonOption, emit, emit_json, say
from engine_probe.errors import UsageError

if TYPE_CHECKING:
    from engine_probe.engine.traffic.call import Call

TELL_EVERY_S = 2.0
TRACE_BLOCK = 512
BLOCK = 16
MODEL, HARDWARE = "llama-3-8b", "H100"


def register(group: typer.Typer) -> None:
    """Add the verb `engine run`."""
    group.command("run")(run)


def run(
    trace: Annotated[Path | None, typer.Option(help="Mooncake trace to serve.", show_default="made-up traffic")] = None,
    workers: Annotated[int, typer.Option(help="Engines behind the router.")] = 1,
    policy: Annotated[str, typer.Option(help="Routing policy, as in `capacity --routing`.")] = "round_robin",
    compute: Annotated[
        bool, typer.Option("--compute", help="Compute tokens: each worker a process with torch; time is real.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="Name of a model, or its config.json; with --compute a folder with safetensors.",
            show_default=f"{MODEL}; with --compute a tiny seeded one",
        ),
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="A100, H100, H200, B200, L40S, or a JSON file.", show_default=HARDWARE)
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Accelerators of one engine.", show_default="1")] = None,
    blocks: Annotated[
        int | None, typer.Option(help="KV blocks of each engine.", show_default="what the memory holds")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens in a block.", show_default="16; with --trace its own 512")
    ] = None,
    seats: Annotated[int, typer.Option(help="Sequences that run at once (max_num_seqs).")] = 256,
    budget: Annotated[int, typer.Option(help="Tokens of a step (max_num_batched_tokens).")] = 8192,
    caching: Annotated[bool, typer.Option(help="Prefix caching.")] = True,
    eviction: Annotated[str, typer.Option(help="lru, lfu, fifo or length.")] = "lru",
    requests: Annotated[
        int | None, typer.Option(help="How many calls.", show_default="all of the trace; 1000 made up")
    ] = None,
    rate: Annotated[float, typer.Option(help="Made-up traffic: calls a second.")] = 10.0,
    speed: Annotated[float, typer.Option(help="With --trace: 2 makes its calls come twice as fast.")] = 1.0,
    in_flight: Annotated[
        int | None,
        typer.Option(help="Closed loop: so many calls open at once.", show_default="calls come when they come"),
    ] = None,
    index_delay: Annotated[
        float | None, typer.Option(help="Seconds until the router hears of a block.", show_default="0.01")
    ] = None,
    index_loss: Annotated[
        float | None, typer.Option(help="Share of block events that it never hears of.", show_default="0")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for every row, as Parquet (`kvscope import` reads it).")
    ] = None,
    name: Annotated[str | None, typer.Option("--run", help="Run id of the rows.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="Of traffic and of random choices.")] = 1,
    json: JsonOption = False,
) -> None:
    """Serve a trace with the embedded engine in virtual time: a fleet of H100s runs here in seconds.

    --json answers {hit_rate, max_over_mean_load, ttft, workers, tally, cache_only, ...}. Times are virtual, unless
    --compute.
    """
    from collector.engine_runs.report import cache_only, render, run_document
    from engine_probe.engine.config import EngineConfig
    from engine_probe.engine.scheduler import SchedulerConfig

    usual = TRACE_BLOCK if trace is not None else BLOCK
    size = usual if block_size is None else block_size
    config = EngineConfig(
        block_size=size,
        prefix_caching=caching,
        eviction=eviction,
        scheduler=SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=budget),
    )
    calls = _calls(trace, size, requests, rate, speed, seed)
    progress = _progress(len(calls))
    asked = Asked(calls, config, workers, policy, blocks, in_flight, seed, out, name, progress, index_delay, index_loss)
    if compute:
        _refuse_virtual(hardware=hardware, tp=tp, in_flight=in_flight, index_delay=index_delay, index_loss=index_loss)
        ran = compute_run(asked, model)
    else:
        ran = virtual_run(asked, model or MODEL, hardware or HARDWARE, 1 if tp is None else tp)
    names = [f"w{index}" for index in range(workers)]
    document = run_document(ran.served, ran.tally, names, policy, ran.real_s, {**ran.facts, "seed": seed})
    document["cache_only"] = (
        cache_only(calls, policy, workers, ran.facts["num_blocks"], size, seed) if caching else None
    )
    if json:
        emit_json(document)
    else:
        emit(render(document))
        if out is not None:
            say(f"rows are in {out}: kvscope import {out} --run NAME, then kvscope diagnose")


def _refuse_virtual(**given: object) -> None:
    told = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]
    if told:
        raise UsageError(f"{' and '.join(told)}: for virtual time; with --compute the machine is the one here")


def _calls(
    trace: Path | None, block_size: int, requests: int | None, rate: float, speed: float, seed: int
) -> list[Call]:
    from engine_probe.engine.traffic.synthetic import Traffic
    from engine_probe.engine.traffic.trace import trace_calls

    if requests is not None and requests < 1:
        raise UsageError(f"--requests is {requests}; expected 1 or more")
    if trace is None:
        return list(Traffic(num_requests=requests or 1000, rate=rate, block_size=block_size, seed=seed).calls())
    calls = list(trace_calls(trace, block_size, speed=speed, limit=requests))
    if not calls:
        raise UsageError(f"{trace} holds no request")
    return sorted(calls, key=lambda call: call.at_ns)


def _progress(total: int) -> Any:
    """Counts calls, and says every few seconds how far it is."""
    state = {"done": 0, "told": time.monotonic()}

    def count(done: int) -> None:
        state["done"] += done
        if time.monotonic() - state["told"] >= TELL_EVERY_S:
            state["told"] = time.monotonic()
            say(f"{state['done']:,} of {total:,} calls")

    return count
