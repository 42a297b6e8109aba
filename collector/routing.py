"""`kvscope capacity --routing`: one answer about a fleet's caches under a routing policy, as JSON or for a person."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from collector.terminal.output import say
from engine_probe.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from diagnosis.capacity.routing_replay import RoutingReplay

HOT = 1.5
"""From this ratio of the largest to the mean load on, the text says that one worker is hot."""
TELL_EVERY = 20_000


def routed(
    requests: pa.Table, workers: pa.Table, routing: str, num_workers: int, sizes: list[int | None] | None, seed: int
) -> tuple[RoutingReplay, int | None]:
    """(replay, tokens in a block). Raises UsageError where neither the options nor the data say one size."""
    from diagnosis.capacity.routing_replay import replay_routing
    from diagnosis.capacity.traces import cache_loads, common, pooled_load

    if sizes is None:
        own = common([load.num_blocks for load in cache_loads(requests, workers)])
        if own is None:
            raise UsageError("how many blocks has each worker? The data do not say: give --blocks N (or inf)")
        sizes = [own]
    if len(sizes) != 1:
        raise UsageError(f"--routing replays one size at a time; --blocks names {len(sizes)}")
    load = pooled_load(requests)
    replay = replay_routing(
        load.trace,
        routing,
        num_workers,
        sizes[0],
        seed=seed,
        counted=load.counted.tolist(),
        sessions=load.sessions,
        block_tokens=load.block_tokens or 512,
        watch=_progress(load.trace.num_requests),
    )
    return replay, load.block_tokens


def document(replay: RoutingReplay, seed: int) -> dict[str, Any]:
    """The JSON answer. Load: blocks that were not cached, summed over the trace."""
    per_worker = [asdict(worker) for worker in replay.workers]
    fields = {key: value for key, value in asdict(replay).items() if key != "workers"}
    return {**fields, "load": "uncached blocks", "seed": seed, "workers": len(per_worker), "per_worker": per_worker}


def render(replay: RoutingReplay, block_tokens: int | None) -> str:
    """What a person reads: what it hits, how evenly the work is spread, a row a worker, what is left out."""
    number = len(replay.workers)
    size = "without an end" if replay.blocks is None else f"of {replay.blocks:,} blocks"
    if replay.blocks is not None and block_tokens:
        size += f" ({replay.blocks * block_tokens:,} tokens)"
    if replay.hit_rate is None:
        return f"No block is asked for: nothing can be said of {replay.routing} here."
    lines = [f"{replay.routing} over {number} caches {size}: {replay.hit_rate:.1%} of the blocks are hits."]
    ratio = replay.max_over_mean_load
    if ratio is not None:
        lines.append(f"The busiest worker computes {ratio:.2f} times the mean.")
    pooled = "without an end" if replay.blocks is None else f"of all {replay.blocks * number:,} blocks"
    lines.append(f"One pooled cache {pooled} would hit {replay.pooled_hit_rate or 0.0:.1%}.")
    if ratio is not None and number > 1 and ratio >= HOT:
        hottest = max(replay.workers, key=lambda worker: worker.load_blocks)
        share = hottest.load_blocks / sum(worker.load_blocks for worker in replay.workers)
        lines.append(
            f"Worker {hottest.worker} is hot: {share:.0%} of the work. A load term (affinity_with_load) spreads it."
        )
    lines += [
        "",
        f"  {'worker':>6}  {'requests':>9}  {'asked for':>10}  {'hit rate':>8}  {'computed':>10}  {'of mean':>7}",
    ]
    for worker in replay.workers:
        rate = "-" if worker.hit_rate is None else f"{worker.hit_rate:.2%}"
        of_mean = "-" if worker.load_ratio is None else f"{worker.load_ratio:.2f}"
        lines.append(
            f"  {worker.worker:>6}  {worker.requests:>9,}  {worker.requested_blocks:>10,}  {rate:>8}  "
            f"{worker.load_blocks:>10,}  {of_mean:>7}"
        )
    lines += [
        "",
        "In blocks. Caches are LRU, the router knows them exactly, load is what was computed so far.",
        "Only prompts are replayed, without time: running requests hold blocks too, so an engine hits less.",
    ]
    return "\n".join(lines)


def _progress(total: int) -> Any:
    """Tells how far the replay is, on a terminal and where it is long."""
    if total <= TELL_EVERY or not sys.stderr.isatty():
        return None

    def watch(done: int) -> None:
        if done % TELL_EVERY == 0:
            say(f"replayed {done:,} of {total:,} requests")

    return watch
