"""KV that comes from elsewhere, too slowly or not at all: from a host tier, from a prefill worker, into too small a pool."""

from __future__ import annotations

from dataclasses import replace

from diagnosis.lab.fault import Expected, Fault, Severity
from diagnosis.lab.scene import ClientView, Scene, at_rate, with_fleet, with_scheduler, with_traffic
from engine_probe.engine.fleet.kv_moves import HandoverSettings, TierSettings
from engine_probe.engine.traffic.synthetic import Lengths

NEVER = ("load_step", "length_shift", "mix_shift", "slow_steps", "prefix_caching_off", "preemption_recompute")
GB = 1e9


def _tiered(scene: Scene, severity: float) -> Scene:
    """Device pools that hold some of the prefixes, and a host tier that holds them all and is fast.

    Pools of 1,000 blocks are at the edge: of one draw in forty the baseline's own queue for blocks grows until the end, and the fault relieves it.
    """
    many = with_traffic(scene, groups=48, skew=0.4, shared_ratio=0.9)
    return with_fleet(many, num_blocks=1200, tier=TierSettings())


def _slow_tier(scene: Scene, severity: float) -> Scene:
    assert scene.fleet.tier is not None
    return with_fleet(scene, tier=replace(scene.fleet.tier, bytes_per_s=severity * GB))


def _unread_tier(scene: Scene, severity: float) -> Scene:
    assert scene.fleet.tier is not None
    return with_fleet(scene, tier=replace(scene.fleet.tier, min_blocks=int(severity)))


def _small_tier(scene: Scene, severity: float) -> Scene:
    assert scene.fleet.tier is not None
    return with_fleet(scene, tier=replace(scene.fleet.tier, num_blocks=int(severity)))


def _split(scene: Scene, severity: float) -> Scene:
    """Two workers prefill, two decode; answers are short, so that a late hand-over shows in the time per token."""
    slower = at_rate(with_traffic(scene, output_tokens=Lengths(8, 48)), 22.0)
    return replace(with_fleet(slower, handover=HandoverSettings()), clients=ClientView())


def _changed(scene: Scene, **changes: float) -> Scene:
    assert scene.fleet.handover is not None  # narrows: `_split` has set it
    return with_fleet(scene, handover=replace(scene.fleet.handover, **changes))  # type: ignore[arg-type]  # fields by name, all of them numbers


def _slow_wire(scene: Scene, severity: float) -> Scene:
    return _changed(scene, bytes_per_s=severity * GB)


def _slow_orchestration(scene: Scene, severity: float) -> Scene:
    return _changed(scene, orchestration_s=severity)


def _broken(scene: Scene, severity: float) -> Scene:
    return _changed(scene, failure_ratio=severity)


def _split_at(scene: Scene, severity: float) -> Scene:
    """The same at another rate: what one worker can just do, or not."""
    return at_rate(_split(scene, severity), severity)


def _one_prefills(scene: Scene, severity: float) -> Scene:
    return _changed(scene, prefill_workers=1)


def _long_answers(scene: Scene, severity: float) -> Scene:
    """Long answers and few seats, so that the decode workers are what is short."""
    long = with_traffic(_split_at(scene, severity), output_tokens=Lengths(128, 256))
    return with_scheduler(long, max_num_seqs=16)


def _one_decodes(scene: Scene, severity: float) -> Scene:
    return _changed(scene, prefill_workers=3)


def _small_decoders(scene: Scene, severity: float) -> Scene:
    return _changed(scene, decode_blocks=int(severity))


FAULTS = (
    Fault(
        "tier_slower_than_recompute",
        "moves",
        "Loading evicted blocks from the host tier takes longer than computing them again",
        Severity(1.5, 0.9, 0.7, "GB/s of the tier"),
        Expected(("tier_slower_than_recompute",), (), NEVER),
        _slow_tier,
        _tiered,
    ),
    Fault(
        "tier_never_read",
        "moves",
        "The tier takes in what is evicted, and is asked for runs so long that it is never read",
        Severity(256, 1024, 4096, "blocks of the shortest load"),
        Expected(("tier_never_read",), ("premature_eviction",), NEVER),
        _unread_tier,
        _tiered,
    ),
    Fault(
        "tier_saves_nothing",
        "moves",
        "The tier is so small that blocks are gone from it before anybody asks for them",
        Severity(400, 100, 20, "blocks of the tier"),
        Expected(("tier_saves_nothing",), ("premature_eviction",), NEVER),
        _small_tier,
        _tiered,
    ),
    Fault(
        "prefill_backlog",
        "moves",
        "One worker prefills where two did: prompts queue there, and three decode workers have time",
        Severity(12, 14, 16, "requests a second in both runs"),
        Expected(
            ("prefill_backlog",), ("load_step",), ("length_shift", "mix_shift", "slow_steps", "prefix_caching_off")
        ),
        _one_prefills,
        _split_at,
    ),
    Fault(
        "decode_backlog",
        "moves",
        "One worker decodes where two did: finished prefills wait for a seat there",
        Severity(6.0, 6.5, 7.0, "requests a second in both runs"),
        Expected(
            ("decode_backlog",),
            ("decode_bandwidth",),
            ("length_shift", "mix_shift", "slow_steps", "prefix_caching_off"),
        ),
        _one_decodes,
        _long_answers,
        metric="tpot",
    ),
    Fault(
        "transfer_wire",
        "moves",
        "The link between prefill and decode workers is slow",
        Severity(4.0, 2.5, 2.0, "GB/s into a decode worker"),
        Expected(("transfer_wire",), (), NEVER),
        _slow_wire,
        _split,
        metric="tpot",
    ),
    Fault(
        "transfer_orchestration",
        "moves",
        "Between the end of a prefill and its hand-over passes time in which no byte moves",
        Severity(0.05, 0.1, 0.3, "seconds a hand-over"),
        Expected(("transfer_orchestration",), (), NEVER),
        _slow_orchestration,
        _split,
        metric="tpot",
    ),
    Fault(
        "transfer_failures",
        "moves",
        "Hand-overs break, and the decode worker computes the prompt again",
        Severity(0.03, 0.08, 0.2, "share of the hand-overs"),
        Expected(("transfer_failures",), (), ("load_step", "length_shift", "mix_shift", "slow_steps")),
        _broken,
        _split,
        metric="tpot",
    ),
    Fault(
        "decode_block_shortage",
        "moves",
        "The decode workers have too few blocks: finished prefills wait for room",
        Severity(550, 450, 430, "KV blocks of each decode worker"),
        Expected(("decode_block_shortage",), ("admission_blocked_on_blocks",), NEVER[:-1]),
        _small_decoders,
        _split,
        metric="tpot",
    ),
)
