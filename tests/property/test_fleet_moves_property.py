"""Fleets whose KV moves, under any pressure: every call ends, every block is given back, nothing is awaited for ever."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_probe.engine.config import EngineConfig
from engine_probe.engine.fleet.build import FleetSettings, RouterSettings, build_fleet
from engine_probe.engine.fleet.kv_moves import HandoverSettings, TierSettings
from engine_probe.engine.fleet.virtual_fleet import Patience
from engine_probe.engine.roofline.hardware import find_hardware
from engine_probe.engine.roofline.model_shape import find_shape
from engine_probe.engine.scheduler import SchedulerConfig
from engine_probe.engine.traffic.synthetic import Lengths, Traffic
from engine_probe.sending.sink import MemorySink

TIERS = st.builds(
    TierSettings,
    num_blocks=st.integers(1, 400),
    latency_s=st.floats(0, 0.05),
    bytes_per_s=st.floats(1e7, 1e11),
    min_blocks=st.integers(1, 8),
)
HANDOVERS = st.builds(
    HandoverSettings,
    prefill_workers=st.integers(1, 2),
    decode_blocks=st.one_of(st.none(), st.integers(40, 200)),
    orchestration_s=st.floats(0, 0.1),
    bytes_per_s=st.floats(1e8, 1e11),
    failure_ratio=st.floats(0, 1),
    timeout_s=st.floats(0, 0.5),
)
MOVES = st.one_of(st.tuples(TIERS, st.none()), st.tuples(st.none(), HANDOVERS))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    moves=MOVES,
    num_blocks=st.integers(60, 300),
    seats=st.integers(1, 16),
    patience=st.one_of(st.none(), st.builds(Patience, st.floats(0.01, 0.5), st.integers(0, 3))),
    policy=st.sampled_from(["affinity_with_load", "round_robin", "prefix_affinity"]),
    cancelled=st.sets(st.integers(0, 39), max_size=8),
    seed=st.integers(0, 1000),
)
def test_every_call_ends_and_every_block_is_given_back(
    moves: tuple[TierSettings | None, HandoverSettings | None],
    num_blocks: int,
    seats: int,
    patience: Patience | None,
    policy: str,
    cancelled: set[int],
    seed: int,
) -> None:
    """Whatever links, pools, seats, breakage, patience and callers that go away."""
    tier, handover = moves
    fleet = build_fleet(
        FleetSettings(
            find_shape("llama-3-8b"),
            find_hardware("a100"),
            num_workers=3,
            num_blocks=num_blocks,
            engine=EngineConfig(scheduler=SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=512)),
            router=RouterSettings(policy=policy),
            patience=patience,
            seed=seed,
            tier=tier,
            handover=handover,
        ),
        MemorySink(),
    )
    calls = list(
        Traffic(
            num_requests=40,
            rate=30,
            groups=4,
            shared_tokens=256,
            own_tokens=Lengths(1, 700),
            output_tokens=Lengths(1, 24),
            seed=seed,
        ).calls()
    )
    for number in cancelled:
        name = calls[number].request_id
        fleet.at(calls[number].at_ns + 100_000_000, lambda at_ns, name=name: fleet.cancel(name, at_ns))
    tally = fleet.run(calls)
    fleet.check_integrity()
    for engine in fleet.engines:
        assert engine.kv.pool.num_referenced == 0
        assert not engine.has_work
        assert engine.num_awaited == 0
    assert tally.stuck == 0
    assert tally.finished + tally.aborted - tally.retries + tally.rejected == 40
