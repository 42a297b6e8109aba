"""`kvscope capacity`: hit rate against the number of KV blocks, replayed from a trace or from stored requests.

With `--routing` the same replay over several workers behind a router (`collector/routing.py`).
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collector.terminal.output import DEFAULT_STORE, JsonOption, StoreOption, emit, emit_json
from engine_probe.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from diagnosis.capacity.caching_pays import CachingPays
    from diagnosis.capacity.curve import CapacityPoint
    from diagnosis.capacity.traces import CacheLoad

BAR_WIDTH = 24
STEPS = (1, 2, 5)

TraceOption = Annotated[
    Path | None,
    typer.Option(help="Mooncake trace, recording, NDJSON or Parquet events.", show_default="the store"),
]
BlocksOption = Annotated[
    str | None,
    typer.Option(help="Sizes in blocks, with commas: 1000,3000,inf.", show_default="a series"),
]
RoutingOption = Annotated[
    str | None,
    typer.Option(
        help="Share requests out over --workers caches: round_robin, random, least_loaded, power_of_two, "
        "prefix_affinity, affinity_with_load or sticky.",
        show_default="replay each worker as it was",
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(help="With --routing: how many workers, each with --blocks of its own.", show_default=False),
]


def register(app: typer.Typer) -> None:
    """Add the verb `capacity`."""
    app.command("capacity")(capacity)


def capacity(
    trace: TraceOption = None,
    policy: Annotated[str, typer.Option(help="Eviction policy: lru, lfu or fifo.")] = "lru",
    blocks: BlocksOption = None,
    store: StoreOption = DEFAULT_STORE,
    run: Annotated[str | None, typer.Option(help="Run in the store.", show_default="live requests")] = None,
    facts: Annotated[bool, typer.Option("--facts", help="With --json: an object with facts and knee.")] = False,
    routing: RoutingOption = None,
    workers: WorkersOption = None,
    seed: Annotated[int, typer.Option(help="With --routing: of random choices.")] = 0,
    json: JsonOption = False,
) -> None:
    """How the prefix-cache hit rate depends on the number of KV blocks.

    Replays the prompt blocks that requests asked for. --json answers a list of {blocks, hit_rate, ...}; blocks null is
    a cache without an end. With several workers each has its own cache of that size.

    With --routing the requests are shared out anew: --workers 10 --blocks 5859 --routing affinity_with_load. --json then
    answers {hit_rate, max_over_mean_load, ...}; load is the uncached blocks of a worker, summed over the trace.
    """
    from collector.routing import document, routed
    from collector.routing import render as render_routing
    from diagnosis.capacity.curve import POLICIES
    from diagnosis.capacity.traces import cache_loads, curve_over

    if policy not in POLICIES:
        raise UsageError(f"--policy '{policy}' is not known; known: {', '.join(POLICIES)}")
    if trace is not None and run is not None:
        raise UsageError("give either --trace FILE or --run NAME of the store, not both")
    chosen = None if blocks is None else _sizes(blocks)
    _check_routing(routing, workers, policy, facts=facts)
    requests, facts_of_workers = _from_store(store, run) if trace is None else _from_file(trace)
    if routing is not None and workers is not None:
        replay, block_tokens = routed(requests, facts_of_workers, routing, workers, chosen, seed)
        if json:
            emit_json(document(replay, seed))
        else:
            emit(render_routing(replay, block_tokens))
        return
    loads = cache_loads(requests, facts_of_workers)
    points = curve_over(loads, policy, chosen or default_sizes(loads))
    if not json:
        emit(render(loads, policy, points))
    elif facts:
        found = caching_worth(loads)
        emit_json(
            {
                "points": [_row(p, policy) for p in points],
                "knee": knee(loads),
                "facts": _facts(loads),
                "caching": None if found is None else asdict(found),
            }
        )
    else:
        emit_json([_row(p, policy) for p in points])


def default_sizes(loads: list[CacheLoad]) -> list[int | None]:
    """1, 2, 5, 10, ... up to where nothing is evicted; the knee; what the workers have, and more of it; no end."""
    from diagnosis.capacity.traces import common

    largest = max(load.trace.num_unique for load in loads)
    first = max(largest // 500, 1)
    series = {step * 10**power for power in range(12) for step in STEPS}
    sizes = {size for size in series if first <= size < largest}
    at_knee, own = knee(loads)["blocks"], common([load.num_blocks for load in loads])
    if at_knee:
        sizes.add(at_knee)
    if own:
        sizes |= {own} | {size for size in (own * 5 // 4, own * 3 // 2, own * 2, own * 4) if size <= largest}
    return [*sorted(sizes), None]


def knee(loads: list[CacheLoad]) -> dict[str, Any]:
    """Fewest blocks with which LRU reaches KNEE_SHARE of the ceiling; with several workers, what the neediest needs."""
    from diagnosis.capacity.curve import KNEE_SHARE, smallest_size_for

    needs = [smallest_size_for(load.trace, KNEE_SHARE, counted=load.counted) for load in loads]
    return {"blocks": max((need for need in needs if need is not None), default=None), "share_of_ceiling": KNEE_SHARE}


def caching_worth(loads: list[CacheLoad]) -> CachingPays | None:
    """What a cache of the size that the workers have would be worth; where that is not known, one without an end."""
    from diagnosis.capacity.caching_pays import caching_pays
    from diagnosis.capacity.traces import common

    return caching_pays(loads, common([load.num_blocks for load in loads]))


def render(loads: list[CacheLoad], policy: str, points: list[CapacityPoint]) -> str:
    """The curve as text: one sentence, a table, the facts of each cache's load, what the replay leaves out."""
    from diagnosis.capacity.curve import KNEE_SHARE
    from diagnosis.capacity.traces import common, curve_over
    from diagnosis.telling.wording import wrapped

    at_knee, own = knee(loads)["blocks"], common([load.num_blocks for load in loads])
    block_tokens = common([load.block_tokens for load in loads])
    ceiling = curve_over(loads, "lru", [None])[0].hit_rate or 0.0
    lines = ["No block is ever asked for twice: a prefix cache of any size hits nothing here."]
    if at_knee is not None:
        size = f"{at_knee:,} blocks" + (f" ({at_knee * block_tokens:,} tokens)" if block_tokens else "")
        reach = f"LRU reaches {KNEE_SHARE:.0%} of that with {size}."
        lines = [f"At most {ceiling:.1%} of the blocks asked for could be hits; {reach}"]
    each = f", each of {len(loads)} workers has its own cache" if len(loads) > 1 else ""
    lines += ["", f"Hit rate by size ({policy.upper()}, blocks of contiguous prefixes / blocks requested{each})", ""]
    lines.append(f"  {'blocks':>10}  {'tokens':>13}  {'hit rate':>8}  of ceiling")
    notes = {at_knee: "  <- knee", own: "  <- what the engine has"}
    for point in points:
        share = (point.hit_rate or 0.0) / ceiling if ceiling else 0.0
        size = "no end" if point.blocks is None else f"{point.blocks:,}"
        tokens = f"{point.blocks * block_tokens:,}" if point.blocks and block_tokens else "-"
        bar = ("#" * round(share * BAR_WIDTH)).ljust(BAR_WIDTH)
        note = notes.get(point.blocks, "") if point.blocks else ""
        lines.append(f"  {size:>10}  {tokens:>13}  {point.hit_rate or 0:8.2%}  {share:6.1%}  {bar}{note}".rstrip())
    for facts in _facts(loads):
        lines += ["", *_facts_text(facts)]
    caching = caching_worth(loads)
    if caching is not None and caching.token_s is not None:
        lines += ["", *wrapped(caching.sentence, 118).split("\n")]
    num_warm_up = sum(int((~load.counted).sum()) for load in loads)
    if num_warm_up:
        lines.append(f"  {num_warm_up} warm-up requests fill the cache and are not counted in the rates.")
    lines += [
        "",
        "Only prompts are replayed. Generated tokens and running requests need blocks as well.",
    ]
    return "\n".join(lines)


def _check_routing(routing: str | None, workers: int | None, policy: str, *, facts: bool) -> None:
    """UsageError before anything is read, where the options of a routing replay do not go together."""
    from engine_probe.engine.fleet.policies import POLICIES

    if routing is None:
        if workers is not None:
            raise UsageError("--workers shares requests out, which --routing NAME says how to do: give both or neither")
        return
    if routing not in POLICIES:
        raise UsageError(f"--routing '{routing}' is not known; known: {', '.join(POLICIES)}", routing=routing)
    if workers is None:
        raise UsageError("--routing shares requests out over workers: give --workers N, and --blocks N of each")
    if workers < 1:
        raise UsageError(f"--workers is {workers}; expected 1 or more")
    if policy != "lru":
        raise UsageError(f"--routing replays LRU caches; leave --policy {policy} out")
    if facts:
        raise UsageError(
            "--facts describes the trace of a curve; --routing answers one point, so leave one of them out"
        )


def _from_file(path: Path) -> tuple[pa.Table, pa.Table]:
    import pyarrow as pa

    from diagnosis.capacity.traces import REQUEST_COLUMNS, SESSION, TIMES, WORKER_COLUMNS
    from engine_probe.readers.detect import open_source
    from engine_probe.readers.source import Notes, ReadOptions
    from engine_probe.schema import arrow_schema

    source = open_source(path)
    requests, workers = [], [arrow_schema("worker").empty_table().select(WORKER_COLUMNS)]
    for tables in source.chunks(ReadOptions(), Notes()):
        if "request" in tables:
            requests.append(tables["request"].select([*REQUEST_COLUMNS, SESSION, *TIMES]))
        if "worker" in tables:
            workers.append(tables["worker"].select(WORKER_COLUMNS))
    if not requests:
        raise UsageError(f"{path} ({source.format}) holds no requests, and capacity is about their prompt blocks")
    return pa.concat_tables(requests), pa.concat_tables(workers)


def _from_store(url: str, run: str | None) -> tuple[pa.Table, pa.Table]:
    from diagnosis.capacity.traces import stored_requests
    from store.interface import Window
    from store.open import open_store

    store = open_store(url, read_only=True)
    try:
        known = ", ".join(store.runs()) or "none"
        if run is not None and run not in store.runs():
            raise UsageError(f"the store {url} has no run '{run}'; runs there: {known}", run=run)
        requests, workers = stored_requests(store, Window(run_id=run))
        if not requests.num_rows:
            where = f"run {run}" if run else "live data"
            raise UsageError(
                f"{where} in {url} has no request that names its prompt blocks (request.prompt_blocks), so nothing can be "
                f"replayed; runs there: {known}. Or give --trace FILE"
            )
        return requests, workers
    finally:
        store.close()


def _sizes(text: str) -> list[int | None]:
    sizes: list[int | None] = []
    for part in text.split(","):
        word = part.strip().replace("_", "").lower()
        if word in ("inf", "infinite"):
            sizes.append(None)
        elif word.isascii() and word.isdigit() and int(word) > 0:
            sizes.append(int(word))
        else:
            raise UsageError(f"--blocks takes whole numbers above 0, or inf, with commas between; '{part}' is neither")
    return sizes


def _row(point: CapacityPoint, policy: str) -> dict[str, Any]:
    return {
        "blocks": point.blocks,
        "hit_rate": point.hit_rate,
        "policy": policy,
        "hit_blocks": point.hit_blocks,
        "requested_blocks": point.requested_blocks,
    }


def _facts(loads: list[CacheLoad]) -> list[dict[str, Any]]:
    from diagnosis.capacity.curve import trace_facts

    return [
        {
            "worker": load.worker,
            "num_blocks": load.num_blocks,
            "block_tokens": load.block_tokens,
            **asdict(trace_facts(load.trace, load.arrival_s, load.input_tokens)),
        }
        for load in loads
    ]


def _facts_text(facts: dict[str, Any]) -> list[str]:
    def show(value: float | None, form: str) -> str:
        return "unknown" if value is None else format(value, form)

    gaps = "/".join(show(gap, ",.0f") for gap in facts["reuse_gap_s"].values())
    name = f"worker {facts['worker']}: " if facts["worker"] else ""
    return [
        f"{name}{facts['requests']:,} requests, mean input {show(facts['mean_input_tokens'], ',.0f')} tokens; "
        f"{facts['blocks']:,} blocks asked for, {facts['unique_blocks']:,} different, "
        f"{show(facts['used_once_share'], '.1%')} of these once only.",
        f"  Time between two uses of a block, p50/p80/p90/p99: {gaps} s. "
        f"The top tenth of the blocks is {show(facts['reuse_share_of_top_tenth'], '.0%')} of all reuse.",
    ]
