"""What a virtual fleet tells its router, and what it does not keep."""

from __future__ import annotations

import pytest

from engine_probe.engine.fleet.build import FleetSettings, RouterSettings, build_fleet, recorders
from engine_probe.engine.fleet.policies import POLICIES
from engine_probe.engine.roofline.hardware import find_hardware
from engine_probe.engine.roofline.model_shape import find_shape
from engine_probe.engine.traffic.call import Call, made_up_blocks
from engine_probe.engine.traffic.synthetic import Lengths, Traffic
from engine_probe.sending.sink import MemorySink

TRAFFIC = Traffic(
    num_requests=40, rate=20.0, groups=3, shared_tokens=256, own_tokens=Lengths(16, 64), output_tokens=Lengths(2, 8)
)


@pytest.mark.parametrize("policy", POLICIES)
def test_block_events_reach_the_router_that_reads_them_and_pile_up_for_nobody(policy: str) -> None:
    """Affinity believes what the caches hold, block for block; for the other policies nothing is kept. Every call is served."""
    settings = FleetSettings(
        find_shape("smollm2-135m"),
        find_hardware("a100"),
        num_workers=2,
        num_blocks=400,
        router=RouterSettings(policy=policy, index_delay_s=0.0),
    )
    fleet = build_fleet(settings, MemorySink())
    tally = fleet.run(TRAFFIC.calls())
    fleet.check_integrity()
    assert (tally.finished, tally.rejected, tally.stuck) == (40, 0, 0)
    feed = fleet.router.feed
    if policy not in ("prefix_affinity", "affinity_with_load"):
        assert feed.num_pending == feed.index.num_blocks(0) == feed.index.num_blocks(1) == 0
    else:
        feed.advance(1 << 62)
        held = [int(engine.holds_names().sum()) for engine in fleet.engines]  # nothing is under way
        assert [feed.index.num_blocks(worker) for worker in range(2)] == held
        assert feed.index.num_orphans == 0
    for recorder in recorders(fleet):
        recorder.close()


def test_every_decision_is_a_row_however_long_the_run() -> None:
    """Ten virtual days between two calls: rows of the router are judged by its own time, and none is refused as of the future."""
    day_ns, sink = 86_400 * 10**9, MemorySink()
    calls = [Call(f"c{number}", number * 10 * day_ns, 32, 2, made_up_blocks(1, 2)) for number in range(3)]
    fleet = build_fleet(
        FleetSettings(find_shape("smollm2-135m"), find_hardware("a100"), num_workers=2, num_blocks=400), sink
    )
    fleet.run(calls)
    for recorder in recorders(fleet):
        recorder.close()
    assert [sink.table(kind).num_rows for kind in ("route", "request")] == [3, 3]
