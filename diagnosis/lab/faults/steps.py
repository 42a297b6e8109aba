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
from engine_probe.engine.roofline.extras import Adapters, ExtendedExecutor, Extras, Shapes, Speculation
from engine_probe.engine.traffic.synthetic import Lengths, Traffic

NOT_THE_POOL = ("admission_blocked_on_blocks", "preemption_recompute", "premature_eviction", "prefix_caching_off")
LONG_RATE = 0.25
SWAP_S = 0.04
CLASS_TOKENS = 64


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


def _shapes(scene: Scene, severity: float) -> Scene:
    """Steps come in classes of shapes, all of which were compiled in the warm-up or before, for nothing."""
    return with_fleet(scene, extras=Extras(shapes=Shapes(CLASS_TOKENS)))


def _compiles(scene: Scene, severity: float) -> Scene:
    """What was compiled is lost: the first step of each shape takes the time to compile it."""

    def forget(fleet: VirtualFleet, at_ns: int) -> None:
        for engine in fleet.engines:
            assert isinstance(engine.executor, ExtendedExecutor)
            engine.executor.extras = Extras(shapes=Shapes(CLASS_TOKENS, severity))
            engine.executor.forget_shapes()

    return with_hook(scene, 0.0, forget)


def _adapted(scene: Scene, severity: float) -> Scene:
    """Calls ask for twelve adapters, and each worker has a slot for each."""
    return with_fleet(with_traffic(scene, adapters=12), extras=Extras(adapters=Adapters(slots=12, swap_s=SWAP_S)))


def _few_slots(scene: Scene, severity: float) -> Scene:
    return with_fleet(scene, extras=Extras(adapters=Adapters(slots=int(severity), swap_s=SWAP_S)))


def _speculating(scene: Scene, severity: float) -> Scene:
    """Long answers, most of whose drafts are accepted."""
    long = at_rate(with_traffic(scene, output_tokens=Lengths(64, 192)), 24.0)
    return with_fleet(long, extras=Extras(speculation=Speculation(acceptance=0.8)))


def _refused(scene: Scene, severity: float) -> Scene:
    return with_fleet(scene, extras=Extras(speculation=Speculation(acceptance=severity)))


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
        "What was compiled is lost: the first step of each shape stands still until it is compiled again",
        Severity(0.05, 0.1, 0.2, "seconds to compile a shape"),
        Expected(("recompile",), (), ("load_step", "length_shift", "mix_shift", *NOT_THE_POOL)),
        _compiles,
        _shapes,
    ),
    Fault(
        "adapter_swap",
        "steps",
        "More LoRA adapters are asked for than a worker has slots: they are swapped in again and again",
        Severity(8, 6, 4, "adapter slots of each worker, 12 before"),
        Expected(("adapter_swap",), (), ("load_step", "length_shift", "mix_shift", "slow_steps", *NOT_THE_POOL)),
        _few_slots,
        _adapted,
    ),
    Fault(
        "speculation_collapse",
        "steps",
        "Drafts are hardly accepted any more: each step gives one token where it gave three (TPOT)",
        Severity(0.6, 0.4, 0.2, "share of the drafts that is accepted, 0.8 before"),
        Expected(("speculation_collapse",), (), ("load_step", "length_shift", "mix_shift", *NOT_THE_POOL)),
        _refused,
        _speculating,
        metric="tpot",
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
