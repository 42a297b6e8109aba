"""KV that moves between tiers and workers: links, tiers, whole fleets that lose nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine_probe.engine.block_pool import Evicted
from engine_probe.engine.fleet.build import FleetSettings, build_fleet, recorders
from engine_probe.engine.fleet.kv_moves import HandoverSettings, Link, Tier, TierSettings
from engine_probe.engine.fleet.virtual_fleet import Patience
from engine_probe.engine.name_book import Names
from engine_probe.engine.roofline.hardware import find_hardware
from engine_probe.engine.roofline.model_shape import find_shape
from engine_probe.engine.traffic.synthetic import Lengths, Traffic
from engine_probe.errors import UsageError
from engine_probe.sending.sink import MemorySink

TRAFFIC = Traffic(
    num_requests=150, rate=20, groups=12, shared_tokens=512, own_tokens=Lengths(32, 256), output_tokens=Lengths(1, 32)
)


def fleet(**changes: Any) -> FleetSettings:
    return replace(
        FleetSettings(find_shape("llama-3-8b"), find_hardware("a100"), num_workers=3, num_blocks=500), **changes
    )


def given_up(*hashes: int) -> tuple[Names, Evicted]:
    zeros = np.zeros(len(hashes))
    return np.array(hashes, dtype=np.uint64), Evicted("capacity", np.arange(len(hashes)), zeros, zeros, zeros)


def test_a_link_carries_one_load_after_the_other() -> None:
    """100 bytes/s: 50 bytes take half a second; a second load of 100 that could go at 0.2 s goes at 0.5 and ends at 1.5."""
    link = Link(100.0)
    assert link.carry(50, 0) == (0, 500_000_000)
    assert link.carry(100, 200_000_000) == (500_000_000, 1_500_000_000)
    assert link.carry(0, 2_000_000_000) == (2_000_000_000, 2_000_000_000)


def test_a_tier_keeps_what_was_given_up_last_and_matches_in_a_row() -> None:
    """Three of four fit, the first is forgotten; a gap ends a match; a reset forgets all."""
    tier = Tier(TierSettings(num_blocks=3))
    tier.evicted(*given_up(1, 2, 3, 4), "r", 0)
    assert len(tier) == 3
    assert tier.match([2, 3, 4], 0) == 3
    assert tier.match([9, 2, 3, 8, 4], 1) == 2
    assert tier.match([1, 2], 0) == 0
    tier.cleared(0)
    assert tier.match([2], 0) == 0


def test_a_tier_tells_what_it_takes_in_and_gives_up() -> None:
    """Offloaded blocks less those that it gave up are what its size holds; counters end at the bytes of both directions."""
    sink = MemorySink()
    built = build_fleet(fleet(num_workers=1, num_blocks=200, tier=TierSettings(num_blocks=150)), sink)
    built.run(TRAFFIC.calls())
    for recorder in recorders(built):
        recorder.close()
    told = [(row["change"], row["block_hash"]) for row in sink.table("block").to_pylist() if row["tier"] == "host"]
    taken, given = ([block for change, block in told if change == which] for which in ("offloaded", "evicted"))
    assert len(taken) - len(given) == 150
    assert set(given) <= set(taken)
    loaded = sum(change == "loaded" for change, _ in told)
    moved = sum(row["num_bytes"] for row in sink.table("transfer").to_pylist())
    samples = {row["name"]: row["value"] for row in sink.table("sample").to_pylist()}
    assert loaded > 0
    assert 0 < samples["tier_read_bytes_total"] <= moved
    assert 0 < samples["tier_written_bytes_total"] <= len(taken) * moved / loaded


@pytest.mark.parametrize(
    "changes",
    [
        {"tier": TierSettings(bytes_per_s=2e9)},
        {"handover": HandoverSettings(prefill_workers=1, failure_ratio=0.2)},
        {"handover": HandoverSettings(prefill_workers=2, decode_blocks=120)},
        {"tier": TierSettings(bytes_per_s=1e8), "patience": Patience(0.05, max_retries=2)},
        {"handover": HandoverSettings(prefill_workers=1, bytes_per_s=1e9), "patience": Patience(0.05, max_retries=2)},
    ],
    ids=["tier", "breaking", "little-room", "impatient-tier", "impatient-handover"],
)
def test_a_fleet_whose_kv_moves_answers_everybody_and_leaks_no_block(changes: dict[str, Any]) -> None:
    """Every call ends, blocks add up, nothing is awaited for ever; the same run again gives the same rows."""
    tables = []
    for _ in range(2):
        sink = MemorySink()
        built = build_fleet(fleet(**changes), sink)
        tally = built.run(TRAFFIC.calls())
        built.check_integrity()
        assert all(engine.num_awaited == 0 and not engine.has_work for engine in built.engines)
        if "patience" not in changes:
            assert (tally.finished, tally.aborted, tally.stuck) == (150, 0, 0)
        tables.append(sink.table("transfer"))
    assert tables[0].num_rows > 0
    assert tables[0].equals(tables[1])


def test_a_call_too_long_for_a_decode_worker_is_refused_and_nobody_else_waits_for_it() -> None:
    """Prompts of up to 768 tokens, 30 blocks of 16: those above 479 are rejected by the decode worker, the others finish."""
    built = build_fleet(fleet(handover=HandoverSettings(prefill_workers=2, decode_blocks=30)), MemorySink())
    tally = built.run(TRAFFIC.calls())
    built.check_integrity()
    assert tally.rejected > 0
    assert tally.finished + tally.rejected == 150


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (TierSettings, {"num_blocks": 0}),
        (TierSettings, {"bytes_per_s": 0.0}),
        (TierSettings, {"latency_s": float("nan")}),
        (HandoverSettings, {"prefill_workers": 0}),
        (HandoverSettings, {"failure_ratio": 1.5}),
        (HandoverSettings, {"retry_s": 0.0}),
        (HandoverSettings, {"orchestration_s": -1.0}),
    ],
)
def test_settings_that_move_nothing_are_refused(kind: type, wrong: dict[str, float]) -> None:
    """No blocks, no bytes a second, nobody who prefills, time that runs backwards."""
    with pytest.raises(UsageError):
        kind(**wrong)


def test_a_fleet_needs_somebody_who_decodes_and_one_way_of_moving() -> None:
    """As many that prefill as there are workers, or tier and hand-over at once."""
    with pytest.raises(UsageError, match="nobody is left to decode"):
        fleet(handover=HandoverSettings(prefill_workers=3))
    with pytest.raises(UsageError, match="both at once"):
        fleet(tier=TierSettings(), handover=HandoverSettings())


@pytest.mark.parametrize(
    ("gone_s", "worker", "phases"),
    [
        (0.001, "w0", {"frontend_s": 0.001}),
        (0.5, "w1", {"handover_s": None}),
        (1.4, "w1", {"handover_s": 1.0, "kv_transfer_s": None}),
    ],
    ids=["in the front end", "before it may go", "on the wire"],
)
def test_a_caller_that_goes_away_before_a_worker_has_it_is_gone(
    gone_s: float, worker: str, phases: dict[str, float | None]
) -> None:
    """A front end of 2 ms, a prefill of some 50, a hand-over of 1 s, then 64 MiB at 100 MB/s: at each of three instants it ends
    there, in a row that says how far it came; nothing is decoded, and no block stays."""
    settings = fleet(num_workers=2, handover=HandoverSettings(1, orchestration_s=1.0, bytes_per_s=1e8))
    sink = MemorySink()
    built = build_fleet(settings, sink)
    (call,) = Traffic(
        num_requests=1, own_tokens=Lengths(513, 513), shared_ratio=0.0, output_tokens=Lengths(9, 9)
    ).calls()
    built.cancel_at(call.request_id, call.at_ns + round(gone_s * 1e9))
    tally = built.run([call])
    for recorder in recorders(built):
        recorder.close()
    rows = sink.table("request").to_pylist()
    row = next(row for row in rows if row["state"] == "aborted")
    assert (row["worker"], row["finish_reason"], row["first_token_ns"]) == (worker, "client_gone", None)
    began_ns = rows[0]["end_ns"] if worker == "w1" else row["arrival_ns"]
    assert row["end_ns"] - rows[0]["arrival_ns"] == round(gone_s * 1e9)
    told = {name: row[name] for name in phases}
    left_s = (row["end_ns"] - began_ns) / 1e9 - sum(s for s in phases.values() if s is not None)
    assert told == pytest.approx({name: left_s if s is None else s for name, s in phases.items()}, abs=1e-9)
    assert (tally.aborted, tally.finished, tally.output_tokens) == (1, 0, 1 if worker == "w1" else 0)
    assert not [step for step in sink.table("step").to_pylist() if step["worker"] == "w1" and step["decode_tokens"]]
    built.check_integrity()
    assert [engine.kv.pool.num_referenced for engine in built.engines] == [0, 0]
    assert [engine.num_awaited for engine in built.engines] == [0, 0]
