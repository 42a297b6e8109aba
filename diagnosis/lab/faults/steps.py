"""What fills the steps: long prompts of others, the chunk budget, seats, fuller batches, slower machines, no cache."""

from __future__ import annotations

from dataclasses import replace

from diagnosis.lab.fault import Expected, Fault, Severity
from diagnosis.lab.faults.routing import slow_down
from diagnosis.lab.scene import (
    Scene,
    at_rate,
    with_engine,
    with_fleet,
    with_hook,
    with_router,
    with_scheduler,
    with_traffic,
)
from engine_probe.engine.fleet.virtual_fleet import VirtualFleet
from engine_probe.engine.traffic.synthetic import Lengths, Traffic
from engine_probe.engine.virtual_clock import VirtualClock

NOT_THE_POOL = ("admission_blocked_on_blocks", "preemption_recompute", "premature_eviction", "prefix_caching_off")
LONG_RATE = 0.25


def _long_prompts(scene: Scene, severity: float) -> Scene:
    main = scene.traffic
    tokens = int(severity)
    documents = Traffic(
        num_requests=max(1, int(LONG_RATE * main.num_requests / main.rate)),
        rate=LONG_RATE,
        groups=1,
        shared_tokens=0,
        shared_ratio=0.0,
        own_tokens=Lengths(tokens, tokens),
        output_tokens=Lengths(16, 32),
        tenants=(("documents", 1.0),),
        prefix="d",
        seed=main.seed + 11,
    )
    return replace(scene, extra=(*scene.extra, documents))


def _small_budget(scene: Scene, severity: float) -> Scene:
    return with_scheduler(scene, max_num_batched_tokens=int(severity))


def _few_seats(scene: Scene, severity: float) -> Scene:
    return with_scheduler(scene, max_num_seqs=int(severity))


def _narrow(scene: Scene, severity: float) -> Scene:
    """Long contexts that are all in the cache: bursts of calls decode, and there are seats for few of them."""
    long = with_traffic(
        scene,
        rate=14.0,
        num_requests=scene.traffic.num_requests,
        arrivals="bursty",
        burst_ratio=3.0,
        groups=4,
        shared_tokens=8192,
        shared_ratio=1.0,
        own_tokens=Lengths(32, 128),
        output_tokens=Lengths(96, 192),
    )
    return with_scheduler(with_fleet(long, num_blocks=12_000), max_num_seqs=6)


def _slow(scene: Scene, severity: float) -> Scene:
    def all_of_them(fleet: VirtualFleet, at_ns: int) -> None:
        for worker in range(len(fleet.engines)):
            slow_down(worker, severity, fleet, at_ns)

    return with_hook(scene, 0.0, all_of_them)


def _uncached(scene: Scene, severity: float) -> Scene:
    return with_engine(scene, prefix_caching=False)


def _freezes(scene: Scene, severity: float) -> Scene:
    """Every ten seconds another worker compiles for `severity` seconds, and does nothing else meanwhile."""
    for turn in range(int(scene.measured_s / 10)):

        def freeze(fleet: VirtualFleet, at_ns: int, worker: int = turn % scene.fleet.num_workers) -> None:
            clock = fleet.engines[worker].clock
            assert isinstance(clock, VirtualClock)
            clock.advance(severity)

        scene = with_hook(scene, 5.0 + 10.0 * turn, freeze)
    return scene


def _least_loaded(scene: Scene, severity: float) -> Scene:
    return at_rate(with_router(scene, policy="least_loaded"), severity)


FAULTS = (
    Fault(
        "long_prefill_interference",
        "steps",
        "Rare, very long prompts fill the steps of those who share a worker with them",
        Severity(6_000, 12_000, 20_000, "tokens of such a prompt"),
        Expected(("long_prefill_interference",), ("length_shift", "mix_shift"), (*NOT_THE_POOL, "slow_steps")),
        _long_prompts,
        subject=("tenant", "documents"),
    ),
    Fault(
        "chunk_budget",
        "steps",
        "The token budget of a step is so small that prompts take many steps",
        Severity(128, 96, 72, "tokens of a step's budget"),
        Expected(("chunk_budget",), (), ("load_step", "length_shift", "mix_shift", *NOT_THE_POOL)),
        _small_budget,
    ),
    Fault(
        "small_batch",
        "steps",
        "Few seats: requests queue while the batch is far from full",
        Severity(10, 9, 8, "seats of each worker"),
        Expected(("small_batch",), (), ("length_shift", "mix_shift", *NOT_THE_POOL, "slow_steps")),
        _few_seats,
    ),
    Fault(
        "decode_bandwidth",
        "steps",
        "More seats: fuller batches decode slower (TPOT)",
        Severity(12, 24, 64, "seats of each worker, 6 before"),
        Expected(("decode_bandwidth",), (), ("length_shift", "mix_shift", *NOT_THE_POOL, "slow_steps")),
        _few_seats,
        _narrow,
        metric="tpot",
    ),
    Fault(
        "slow_steps",
        "steps",
        "Every step of every worker takes longer",
        Severity(1.2, 1.5, 2.0, "times the step time"),
        Expected(("slow_steps",), (), ("load_step", "length_shift", "mix_shift", *NOT_THE_POOL)),
        _slow,
    ),
    Fault(
        "recompile",
        "steps",
        "Every ten seconds a worker stands still to compile",
        Severity(1.0, 2.0, 4.0, "seconds each time"),
        Expected(("recompile",), (), ("load_step", "length_shift", "mix_shift", *NOT_THE_POOL)),
        _freezes,
    ),
    Fault(
        "prefix_caching_off",
        "steps",
        "The engines are started without prefix caching",
        Severity(24, 32, 40, "requests a second in both runs"),
        Expected(
            ("prefix_caching_off",), (), ("load_step", "length_shift", "mix_shift", "slow_steps", "premature_eviction")
        ),
        _uncached,
        _least_loaded,
    ),
)
