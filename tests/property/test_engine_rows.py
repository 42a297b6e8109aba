"""What a fleet in virtual time writes down, held against the contract's promises, whatever its settings are.

Small pools, impatient clients, swaps, chunks of one token, tiers and hand-overs: every call ends once and has its rows, and
what requests, steps and blocks tell of one run is one story.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_probe.engine.config import EngineConfig
from engine_probe.engine.fleet.build import FleetSettings, RouterSettings, build_fleet, recorders
from engine_probe.engine.fleet.kv_moves import HandoverSettings, TierSettings
from engine_probe.engine.fleet.policies import POLICIES
from engine_probe.engine.fleet.virtual_fleet import Patience, Tally, VirtualFleet
from engine_probe.engine.host_costs import HostCosts
from engine_probe.engine.roofline.executor import RooflineExecutor
from engine_probe.engine.roofline.hardware import HARDWARE
from engine_probe.engine.roofline.model_shape import find_shape
from engine_probe.engine.scheduler import SchedulerConfig
from engine_probe.engine.traffic.call import Call
from engine_probe.engine.traffic.synthetic import ARRIVALS, Lengths, Traffic
from engine_probe.engine.virtual_clock import VirtualClock
from engine_probe.engine.virtual_costs import CostSettings, VirtualCosts
from engine_probe.events import PHASES
from engine_probe.sending.sink import MemorySink

SHAPE, H100 = find_shape("llama-3-8b"), HARDWARE["h100"]
COSTS = CostSettings(lookup_s=0.0005, scan_block_s=1e-7, lock_busy_ratio=0.2, lock_hold_s=0.001)
Row = dict[str, Any]


@dataclass
class Run:
    """A run that is over, and its rows by kind."""

    settings: FleetSettings
    fleet: VirtualFleet
    calls: dict[str, Call]
    tally: Tally
    requests: list[Row]
    steps: dict[str, list[Row]]
    blocks: dict[str, list[Row]]
    routes: list[Row]
    totals: dict[tuple[str, str], float]


def play(chosen: FleetSettings, traffic: Traffic, costs: Callable[[VirtualClock], HostCosts] | None = None) -> Run:
    """Serve the traffic to the last call; blocks add up at the end and nothing is held."""
    draw, sink = random.Random(chosen.seed), MemorySink()
    fleet = build_fleet(chosen, sink, run_id="r", costs=costs)
    calls = [replace(call, priority=draw.choice([0, 0, 1, 5])) for call in traffic.calls()]
    tally = fleet.run(calls)
    fleet.check_integrity()
    for engine in fleet.engines:
        assert (engine.kv.pool.num_referenced, engine.num_awaited) == (0, 0)
        assert engine.host.num_free == engine.host.num_blocks
    for recorder in recorders(fleet):
        recorder.close()
    by_worker: dict[str, defaultdict[str, list[Row]]] = {kind: defaultdict(list) for kind in ("step", "block")}
    for kind, found in by_worker.items():
        for row in sink.table(kind).to_pylist():
            found[row["worker"]].append(row)
    assert not [row for row in sink.table("mark").to_pylist() if row["mark"] == "gap"]
    return Run(
        chosen,
        fleet,
        {call.request_id: call for call in calls},
        tally,
        sink.table("request").to_pylist(),
        by_worker["step"],
        by_worker["block"],
        sink.table("route").to_pylist(),
        {(row["worker"], row["name"]): row["value"] for row in sink.table("sample").to_pylist()},
    )


@st.composite
def fleets(draw: st.DrawFn) -> tuple[FleetSettings, Traffic]:
    """Settings of a small fleet, and what it is asked."""

    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    size, blocks, seats = one(1, 4, 16), one(2, 5, 12, 40, 200), one(1, 2, 4, 16)
    preemption = one("recompute", "swap")
    scheduler = SchedulerConfig(
        max_num_seqs=seats,
        max_num_batched_tokens=max(seats, one(1, 8, 64, 512)),
        max_chunk_tokens=one(None, 1, 7, 32),
        chunked_prefill=one(True, True, False),
        policy=one("fcfs", "shortest", "priority"),
        preemption=preemption,
        watermark_ratio=one(0.0, 0.01, 0.2),
        max_wait_s=one(0.05, 1.0, 30.0),
    )
    engine = EngineConfig(
        block_size=size,
        prefix_caching=one(True, True, False),
        eviction=one("lru", "lfu", "fifo", "length"),
        ttl_s=one(None, None, 0.05, 0.5),
        min_reuse_tokens=one(0, 8),
        swap_blocks=one(0, 1, 3, 20) if preemption == "swap" else 0,
        timeout_s=one(None, None, 0.3),
        scheduler=scheduler,
    )
    workers, kind = one(1, 2, 3), one("plain", "plain", "tier", "handover")
    tier = TierSettings(num_blocks=one(3, 100), min_blocks=one(1, 4), latency_s=one(0.0, 0.05))
    handover = HandoverSettings(prefill_workers=1, failure_ratio=one(0.0, 0.4), timeout_s=0.1)
    made = FleetSettings(
        SHAPE,
        H100,
        num_workers=workers,
        num_blocks=blocks,
        engine=engine,
        router=RouterSettings(
            policy=one(*POLICIES), load_signal=one("outstanding", "polled"), index_loss_ratio=one(0.0, 0.3)
        ),
        patience=one(None, None, Patience(0.02, 2, 0.05), Patience(0.2, 0)),
        in_flight=one(None, None, 1, 5),
        equal_steps=one(True, False),
        seed=draw(st.integers(0, 99)),
        tier=tier if kind == "tier" else None,
        handover=handover if kind == "handover" and workers > 1 else None,
    )
    own, output = sorted(draw(st.lists(st.integers(1, min(200, blocks * size)), min_size=2, max_size=2))), one(1, 9, 60)
    traffic = Traffic(
        num_requests=one(3, 12, 40),
        rate=one(2.0, 20.0, 200.0),
        arrivals=one(*ARRIVALS),
        groups=one(1, 3),
        shared_tokens=one(0, size * 2, min(100, blocks * size // 2)),
        own_tokens=Lengths(own[0], own[1]),
        output_tokens=Lengths(1, output),
        block_size=size,
        seed=draw(st.integers(0, 999)),
    )
    return made, traffic


@settings(max_examples=60, deadline=None)
@given(asked=fleets(), is_costly=st.booleans())
def test_a_run_tells_one_story(asked: tuple[FleetSettings, Traffic], is_costly: bool) -> None:
    """Calls, requests, steps and blocks of one run agree."""
    run = play(*asked, (lambda clock: VirtualCosts(clock, COSTS, 1)) if is_costly else None)
    calls_end_once(run)
    for row in run.requests:
        if row["state"] != "rejected":
            phases_tile_the_wait(row)
            waits_have_reasons(row, run)
        if row["state"] == "finished":
            tokens_add_up(row, run)
    for worker, steps in run.steps.items():
        steps_follow_each_other(steps, run)
        mine = [row for row in run.requests if row["worker"] == worker]
        for of_steps, of_requests in (
            ("num_preempted", "num_preemptions"),
            ("recomputed_tokens", "recomputed_tokens"),
        ):
            assert sum(row[of_steps] for row in steps) == total(mine, of_requests), of_steps
    for worker in {row["worker"] for row in run.requests}:
        counters_agree(worker, run)
        blocks_are_where_they_are_said_to_be(worker, run)


def total(rows: list[Row], column: str) -> int:
    return sum(row[column] or 0 for row in rows)


def calls_end_once(run: Run) -> None:
    """Each try of each call ends in one way and has one route; where one worker serves it, one row."""
    tally, tries = run.tally, len(run.calls) + run.tally.retries
    assert tally.stuck == 0
    assert tally.finished + tally.aborted + tally.rejected == tries
    assert len(run.routes) == tries
    assert len({(row["request_id"], row["attempt"]) for row in run.requests}) == tries
    assert len({(row["request_id"], row["attempt"], row["worker"]) for row in run.requests}) == len(run.requests)
    if run.settings.handover is None:
        states = Counter(row["state"] for row in run.requests)
        assert states == +Counter(finished=tally.finished, aborted=tally.aborted, rejected=tally.rejected)
        assert total(run.requests, "output_tokens") == tally.output_tokens


def phases_tile_the_wait(row: Row) -> None:
    """Up to the first token spans are disjoint and sum, with what is unexplained, to t1 - t0; nothing was decoded by then."""
    begin_ns, first_ns = row["arrival_ns"], row["first_token_ns"]
    if first_ns is None:
        return
    before = sorted((span["start_ns"], span["end_ns"]) for span in row["spans"] if span["start_ns"] < first_ns)
    assert all(end <= start for (_, end), (start, _) in pairwise(before))
    assert before[0][0] >= begin_ns
    assert before[-1][1] <= first_ns
    told_s = sum(end - start for start, end in before) / 1e9
    assert told_s + row["unexplained_s"] == pytest.approx((first_ns - begin_ns) / 1e9, abs=1e-8)
    assert not [span for span in row["spans"] if span["phase"] == "decode" and span["start_ns"] < first_ns]
    whole_s = sum(row[f"{phase}_s"] or 0.0 for phase in PHASES)
    assert whole_s <= (row["end_ns"] - begin_ns) / 1e9 + 1e-8


def waits_have_reasons(row: Row, run: Run) -> None:
    """Seconds by reason sum to the wait, but for the step that was under way when it came, and that in which it gave up."""
    waited_s = sum(float(value) for name, value in row["labels"] or () if name.startswith("waited_on_"))
    queue_s = row["queue_s"] or 0.0
    longest_s = max((step["duration_s"] for step in run.steps.get(row["worker"], [])), default=0.0)
    assert waited_s <= queue_s + 1e-5
    assert queue_s - waited_s <= 2 * longest_s + 0.01


def tokens_add_up(row: Row, run: Run) -> None:
    """Prompt = cached + computed, by tier; as many tokens as were asked for, or as the context holds."""
    cached = row["cached_tokens"] or 0
    assert cached + row["computed_tokens"] == row["prompt_tokens"]
    assert (row["cached_tokens"] is None) <= (not run.settings.engine.prefix_caching)
    assert cached == sum(row[f"cached_tokens_{tier}"] or 0 for tier in ("device", "host", "remote"))
    assert row["output_tokens"] == sum(row["token_counts"]) == len(row["token_ns"])
    if not row["num_preemptions"]:
        assert not row["recomputed_tokens"]
        assert not row["self_hit_tokens"]
    if run.settings.handover is None:
        room = run.fleet.engines[0].max_context - row["prompt_tokens"]
        assert row["output_tokens"] == min(run.calls[row["request_id"]].output_tokens, room)
        if not run.settings.engine.prefix_caching:
            return
        assert len(row["prompt_blocks"]) == row["prompt_tokens"] // run.settings.engine.block_size


def steps_follow_each_other(steps: list[Row], run: Run) -> None:
    """Numbers without a gap, no overlap, nothing above the budget or the pool, and nobody waits for two things."""
    scheduler = run.settings.engine.scheduler
    for earlier, later in pairwise(steps):
        assert later["step"] == earlier["step"] + 1
        assert later["at_ns"] - round(later["duration_s"] * 1e9) >= earlier["at_ns"] - 1
    for row in steps:
        waiting = row["num_waiting_prefill"] + row["num_waiting_decode"]
        assert sum(count or 0 for count in row["waiting_on"].values()) <= waiting
        assert row["blocks_used"] + row["blocks_cached"] <= row["blocks_total"]
        assert row["recomputed_tokens"] <= row["prefill_tokens"]
        assert 0 <= row["alloc_s"] <= row["schedule_s"] + 1e-9
        assert 0 <= row["wasted_slots"] < run.settings.engine.block_size * max(1, row["num_running"])
        assert row["num_running"] <= scheduler.max_num_seqs
        if scheduler.chunked_prefill:
            assert row["prefill_tokens"] + row["decode_tokens"] <= scheduler.max_num_batched_tokens


def counters_agree(worker: str, run: Run) -> None:
    """The counters of a metrics page are sums over the rows."""
    mine = [row for row in run.requests if row["worker"] == worker]
    for name, column in (
        ("prefix_hits_tokens_total", "cached_tokens"),
        ("preemptions_total", "num_preemptions"),
        ("output_tokens_total", "output_tokens"),
    ):
        assert run.totals[worker, name] == total(mine, column), name
    assert run.totals[worker, "requests_finished_total"] == sum(row["state"] == "finished" for row in mine)


def blocks_are_where_they_are_said_to_be(worker: str, run: Run) -> None:
    """What is hit or evicted was there, its parent is the block before it, ages are true, an eviction names whom it was for."""
    requests = {row["request_id"]: row for row in run.requests}
    resident: dict[int, int] = {}
    in_tier: set[int] = set()
    found: Counter[str] = Counter()
    last_ns = num_evicted = num_late = 0
    steps = run.steps.get(worker, [])
    for row in run.blocks.get(worker, []):
        name, at_ns = row["block_hash"], row["at_ns"]
        assert at_ns >= last_ns
        last_ns = at_ns
        if row["tier"] == "host" and row["change"] in ("offloaded", "evicted"):
            assert (name in in_tier) == (row["change"] == "evicted")
            in_tier ^= {name}
        elif row["change"] == "stored":
            blocks = list(run.calls[row["request_id"]].blocks)
            index = blocks.index(name)
            assert row["parent_hash"] == (blocks[index - 1] if index else None)
            assert name not in resident
            resident[name] = at_ns
        elif row["change"] == "loaded":
            resident.setdefault(name, at_ns)
        elif row["change"] == "hit":
            assert name in resident
            assert 0 <= row["idle_s"] <= (at_ns - resident[name]) / 1e9 + 1e-8
            found[row["request_id"], row["reason"]] += row["num_tokens"]  # type: ignore[index]
        else:
            assert row["change"] == "evicted"
            assert row["age_s"] == pytest.approx((at_ns - resident.pop(name)) / 1e9, abs=1e-8)
            assert row["age_s"] >= row["idle_s"] >= 0
            assert row["reason"] in ("capacity", "ttl")
            assert row["reason"] == "ttl" or row["request_id"] in requests
            num_evicted += 1
            num_late += not steps or at_ns >= steps[-1]["at_ns"]  # no step came after it that could tell
    assert num_evicted - num_late <= sum(row["blocks_evicted"] for row in steps) <= num_evicted
    mine = [row for row in run.requests if row["worker"] == worker]
    assert sum(tokens for (_, reason), tokens in found.items() if reason is None) == total(mine, "cached_tokens")
    assert sum(tokens for (_, reason), tokens in found.items() if reason == "self") == total(mine, "self_hit_tokens")


@settings(max_examples=15, deadline=None)
@given(asked=fleets(), policy=st.sampled_from(["prefix_affinity", "affinity_with_load"]))
def test_a_fresh_index_tells_the_router_the_truth(asked: tuple[FleetSettings, Traffic], policy: str) -> None:
    """Without delay or loss the candidates' matches are what each worker held at that instant, by its block rows."""
    chosen, traffic = asked
    router = RouterSettings(policy=policy, index_delay_s=0.0)
    run = play(replace(chosen, num_workers=3, router=router, tier=None, handover=None), traffic)
    changes = {worker: deque(rows) for worker, rows in run.blocks.items()}
    held: dict[str, set[int]] = {f"w{index}": set() for index in range(3)}
    for route in sorted(run.routes, key=lambda row: row["at_ns"]):
        for worker, told in changes.items():
            # At the same instant what was stored is known, and a step that evicts has not begun.
            while told and told[0]["at_ns"] < route["at_ns"] + (told[0]["change"] == "stored"):
                row = told.popleft()
                if row["change"] == "stored":
                    held[worker].add(row["block_hash"])
                elif row["change"] == "evicted":
                    held[worker].discard(row["block_hash"])
        blocks = run.calls[route["request_id"]].blocks
        for candidate in route["candidates"]:
            there = held[candidate["worker"]]
            leading = next((index for index, name in enumerate(blocks) if name not in there), len(blocks))
            assert candidate["matched_tokens"] == leading * chosen.engine.block_size


@settings(max_examples=100, deadline=None)
@given(asked=fleets(), is_costly=st.sampled_from([None, COSTS, replace(COSTS, lock_busy_ratio=0.0)]))
def test_workers_that_sleep_leave_the_rows_of_workers_that_take_each_step(
    asked: tuple[FleetSettings, Traffic], is_costly: CostSettings | None
) -> None:
    """Every row of every kind, value for value, and what the run came to: nothing tells that steps were foreseen."""
    made, traffic = asked
    told = []
    for may_sleep in (True, False):
        draw, sink = random.Random(made.seed), MemorySink()
        costs = None if is_costly is None else (lambda clock: VirtualCosts(clock, is_costly, 1))
        fleet = build_fleet(replace(made, equal_steps=may_sleep), sink, run_id="r", costs=costs)
        calls = [replace(call, priority=draw.choice([0, 0, 1, 5])) for call in traffic.calls()]
        fleet.at(calls[len(calls) // 2].at_ns, lambda now_ns, fleet=fleet: slow_down(fleet))  # type: ignore[misc]
        fleet.cancel_at(calls[-1].request_id, calls[-1].at_ns + 30_000_000)
        tally = fleet.run(calls)
        fleet.check_integrity()
        for recorder in recorders(fleet):
            recorder.close()
        rows = {kind: by_worker(sink.table(kind).to_pylist()) for kind in sorted(sink.num_rows)}
        if is_costly is None:  # then the recorder measures itself
            rows["step"] = [{**row, "probe_s": None} for row in rows.get("step", ())]
        told.append((asdict(tally), rows))
    for kind in told[1][1]:
        assert told[0][1].get(kind) == told[1][1][kind], kind
    assert told[0] == told[1]


def slow_down(fleet: VirtualFleet) -> None:
    """A straggler from now on, and caches that are forgotten."""
    executor = fleet.engines[0].executor
    assert isinstance(executor, RooflineExecutor)
    executor.slow_factor = 1.7
    fleet.engines[-1].reset_prefix_cache()


def by_worker(rows: list[Row]) -> list[Row]:
    """In each one's own order: when whose rows were flushed is nobody's promise."""
    return sorted(rows, key=lambda row: str(row["worker"]))
