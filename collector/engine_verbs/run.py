"""`kvscope engine run`: a trace (or made-up traffic) through a fleet in virtual time, told in one screen.

Beside what the engines gave stands what caches alone would give (`diagnosis/routing_replay.py`): there nothing runs, so
nothing holds blocks; the distance is what running requests cost the cache.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collector.output import JsonOption, emit, emit_json, say
from engine_probe.errors import UsageError

if TYPE_CHECKING:
    from engine_probe.engine.fleet.build import FleetSettings
    from engine_probe.engine.fleet.run_summary import Served
    from engine_probe.engine.fleet.virtual_fleet import Tally
    from engine_probe.engine.traffic.call import Call

TELL_EVERY_S = 2.0
TRACE_BLOCK = 512
BLOCK = 16


def register(group: typer.Typer) -> None:
    """Add the verb `engine run`."""
    group.command("run")(run)


def run(
    trace: Annotated[Path | None, typer.Option(help="Mooncake trace to serve.", show_default="made-up traffic")] = None,
    workers: Annotated[int, typer.Option(help="Engines behind the router.")] = 1,
    policy: Annotated[str, typer.Option(help="Routing policy, as in `capacity --routing`.")] = "round_robin",
    model: Annotated[str, typer.Option(help="Name of a model, or its config.json.")] = "llama-3-8b",
    hardware: Annotated[str, typer.Option(help="A100, H100, H200, B200, L40S, or a JSON file.")] = "H100",
    tp: Annotated[int, typer.Option(help="Accelerators of one engine.")] = 1,
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
    out: Annotated[
        Path | None, typer.Option(help="Folder for every row, as Parquet (`kvscope import` reads it).")
    ] = None,
    name: Annotated[str | None, typer.Option("--run", help="Run id of the rows.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="Of traffic and of random choices.")] = 1,
    json: JsonOption = False,
) -> None:
    """Serve a trace with the embedded engine in virtual time: a fleet of H100s runs here in seconds.

    --json answers {hit_rate, max_over_mean_load, ttft, workers, tally, cache_only, ...}. Times are virtual.
    """
    from engine_probe.engine.config import EngineConfig
    from engine_probe.engine.fleet.build import FleetSettings, RouterSettings, build_fleet, recorders
    from engine_probe.engine.fleet.run_summary import SummarySink
    from engine_probe.engine.roofline.hardware import find_hardware
    from engine_probe.engine.roofline.model_shape import find_shape
    from engine_probe.engine.scheduler import SchedulerConfig
    from engine_probe.sink import FileSink

    usual = TRACE_BLOCK if trace is not None else BLOCK
    size = usual if block_size is None else block_size
    settings = FleetSettings(
        find_shape(model),
        find_hardware(hardware),
        num_workers=workers,
        tp=tp,
        num_blocks=blocks,
        engine=EngineConfig(
            block_size=size,
            prefix_caching=caching,
            eviction=eviction,
            scheduler=SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=budget),
        ),
        router=RouterSettings(policy=policy),
        in_flight=in_flight,
        seed=seed,
    )
    calls = _calls(trace, size, requests, rate, speed, seed)
    sink = SummarySink(None if out is None else FileSink(out))
    fleet = build_fleet(settings, sink, run_id=name, on_progress=_progress(len(calls)))
    began = time.perf_counter()
    tally = fleet.run(calls)
    for recorder in recorders(fleet):
        recorder.close()
    document = _document(settings, sink.served(), tally, time.perf_counter() - began)
    document["num_blocks"] = fleet.engines[0].kv.pool.num_blocks
    document["rows"] = sink.num_rows
    document["cache_only"] = _cache_only(calls, settings, document["num_blocks"]) if caching else None
    if json:
        emit_json(document)
    else:
        emit(render(document))
        if out is not None:
            say(f"rows are in {out}: kvscope import {out} --run NAME, then kvscope diagnose")


def render(document: dict[str, Any]) -> str:
    """What a person reads: one sentence, the fleet beside the caches alone, a row a worker."""
    tally, ttft = document["tally"], document["ttft"]
    lines = [
        f"{tally['finished']:,} of {document['requests']:,} requests finished in {_span(tally['virtual_s'])} of virtual "
        f"time ({document['speed']:,.0f} x real time): TTFT mean {_span(ttft['mean_s'])}, P99 {_span(ttft['p99_s'])}."
    ]
    ended = {"aborted": tally["aborted"], "rejected": tally["rejected"], "never served": tally["stuck"]}
    lines += [f"{count:,} {what}." for what, count in ended.items() if count]
    lines += [
        "",
        f"{document['policy']} over {len(document['workers'])} workers of {document['num_blocks']:,} blocks",
        "",
    ]
    lines.append(f"  {'':28} {'hit rate':>9}  {'max/mean load':>13}")
    lines.append(_figures("engines (requests hold blocks)", document))
    if document["cache_only"] is not None:
        lines.append(_figures("caches alone", document["cache_only"]))
    lines += ["", f"  {'worker':8} {'requests':>9} {'hit rate':>9} {'TTFT mean':>10} {'P99':>9} {'preemptions':>12}"]
    lines += [
        f"  {worker['worker']:8} {worker['requests']:>9,} {_share(worker['hit_rate']):>9} {_span(worker['ttft_mean_s']):>10} "
        f"{_span(worker['ttft_p99_s']):>9} {worker['preemptions']:>12,}"
        for worker in document["workers"]
    ]
    lines += ["", "Hit rate: prompt tokens found in the cache, of all. Load: prompt tokens computed."]
    return "\n".join(lines)


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


def _document(settings: FleetSettings, served: Served, tally: Tally, real_s: float) -> dict[str, Any]:
    import numpy as np

    names = [f"w{index}" for index in range(settings.num_workers)]
    worker = np.array([name or "" for name in served.worker])
    computed = [float(np.nansum(served.numbers["computed_tokens"][worker == name])) for name in names]
    mean = sum(computed) / len(computed)
    return {
        "hit_rate": _hit_rate(served, np.ones(len(worker), dtype=bool)),
        "max_over_mean_load": max(computed) / mean if mean else None,
        "ttft": _ttft(served.ttft_s),
        "requests": len(served.state),
        "policy": settings.router.policy,
        "speed": tally.virtual_s / real_s if real_s else None,
        "workers": [
            {
                "worker": name,
                "requests": int((worker == name).sum()),
                "hit_rate": _hit_rate(served, worker == name),
                "computed_tokens": tokens,
                "preemptions": int(np.nansum(served.numbers["num_preemptions"][worker == name])),
                **{f"ttft_{key}": value for key, value in _ttft(served.ttft_s[worker == name]).items()},
            }
            for name, tokens in zip(names, computed, strict=True)
        ],
        "tally": asdict(tally),
        "block_size": settings.engine.block_size,
        "model": settings.shape.name,
        "hardware": settings.hardware.name,
        "seed": settings.seed,
    }


def _hit_rate(served: Served, chosen: Any) -> float | None:
    import numpy as np

    prompt = np.where(np.isnan(served.numbers["cached_tokens"]), np.nan, served.numbers["prompt_tokens"])[chosen]
    total = float(np.nansum(prompt))
    return float(np.nansum(served.numbers["cached_tokens"][chosen])) / total if total else None


def _ttft(values: Any) -> dict[str, float | None]:
    import numpy as np

    from diagnosis.quantiles import nearest_rank

    known = values[~np.isnan(values)]
    if not len(known):
        return dict.fromkeys(("mean_s", "p50_s", "p95_s", "p99_s"))
    ranks = {f"p{q[2:]}_s": nearest_rank(known, q) for q in ("0.50", "0.95", "0.99")}
    return {"mean_s": float(known.mean()), **ranks}


def _cache_only(calls: list[Call], settings: FleetSettings, num_blocks: int) -> dict[str, Any]:
    """The same calls over caches in which nothing runs."""
    from diagnosis.block_cache import block_trace
    from diagnosis.routing_replay import replay_routing

    replay = replay_routing(
        block_trace([call.blocks for call in calls]),
        settings.router.policy,
        settings.num_workers,
        num_blocks,
        seed=settings.seed,
    )
    return {
        "hit_rate": replay.hit_rate,
        "max_over_mean_load": replay.max_over_mean_load,
        "pooled_hit_rate": replay.pooled_hit_rate,
    }


def _progress(total: int) -> Any:
    """Counts calls, and says every few seconds how far it is."""
    state = {"done": 0, "told": time.monotonic()}

    def count(done: int) -> None:
        state["done"] += done
        if time.monotonic() - state["told"] >= TELL_EVERY_S:
            state["told"] = time.monotonic()
            say(f"{state['done']:,} of {total:,} calls")

    return count


def _figures(title: str, figures: dict[str, Any]) -> str:
    ratio = figures["max_over_mean_load"]
    return f"  {title:30} {_share(figures['hit_rate']):>7}  {'-' if ratio is None else f'{ratio:.2f}':>13}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _span(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:,.0f} s"
