"""A virtual fleet from plain settings: the one place where its parts are put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine_probe.engine.config import EngineConfig
from engine_probe.engine.engine import Engine
from engine_probe.engine.fleet.feed_listener import FeedListener
from engine_probe.engine.fleet.kv_moves import HandoverSettings, Tier, TierSettings
from engine_probe.engine.fleet.load_board import LoadBoard
from engine_probe.engine.fleet.moving_fleets import SplitFleet, TieredFleet
from engine_probe.engine.fleet.policies import make_policy
from engine_probe.engine.fleet.prefix_bits import PrefixBits
from engine_probe.engine.fleet.prefix_index import EventFeed
from engine_probe.engine.fleet.router import USES_INDEX, Router
from engine_probe.engine.fleet.shared_sink import SharedSink
from engine_probe.engine.fleet.virtual_fleet import FLUSH_STEPS, FrontEnd, Patience, VirtualFleet
from engine_probe.engine.host_costs import HostCosts
from engine_probe.engine.kv_identity import KvIdentity
from engine_probe.engine.kv_manager import KvListener
from engine_probe.engine.name_book import NameBook
from engine_probe.engine.roofline.executor import RooflineExecutor
from engine_probe.engine.roofline.extras import ExtendedExecutor, Extras
from engine_probe.engine.roofline.hardware import Hardware
from engine_probe.engine.roofline.model_shape import ModelShape
from engine_probe.engine.virtual_clock import EPOCH_NS, VirtualClock
from engine_probe.errors import UsageError
from engine_probe.recording.recorder import Recorder
from engine_probe.sending.sink import Sink


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """How calls are spread. index_delay_s, index_loss_ratio: of the block events that its index is fed with."""

    policy: str = "round_robin"
    ties: str = "random"
    min_match_ratio: float = 0.0
    load_weight: float = 1.0
    load_signal: str = "outstanding"
    load_refresh_s: float = 0.0
    load_is_dead: bool = False
    index_delay_s: float = 0.01
    index_loss_ratio: float = 0.0
    decision_s: float = 50e-6


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """A fleet of equal workers.

    num_blocks   of each worker; None: what the hardware's memory holds
    tier         each worker keeps what its pool gives up in a second tier; handover: some prefill, the others decode
    extras       what each worker does beside the plain step: speculation, adapters, shapes
    """

    shape: ModelShape
    hardware: Hardware
    num_workers: int = 1
    tp: int = 1
    num_blocks: int | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)
    router: RouterSettings = field(default_factory=RouterSettings)
    patience: Patience | None = None
    in_flight: int | None = None
    equal_steps: bool = True
    seed: int = 0
    tier: TierSettings | None = None
    handover: HandoverSettings | None = None
    extras: Extras | None = None

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise UsageError(f"a fleet of {self.num_workers} workers serves nobody; give 1 or more")
        if self.tier is not None and self.handover is not None:
            raise UsageError("a fleet has a second tier, or hands over between workers; both at once is not modelled")
        if self.handover is not None and self.handover.prefill_workers >= self.num_workers:
            raise UsageError(
                f"{self.handover.prefill_workers} of {self.num_workers} workers prefill, and nobody is left to decode"
            )

    @property
    def num_routed(self) -> int:
        """Workers that calls are sent to: the first so many."""
        return self.num_workers if self.handover is None else self.handover.prefill_workers


def build_fleet(
    settings: FleetSettings,
    sink: Sink,
    *,
    run_id: str | None = None,
    costs: Callable[[VirtualClock], HostCosts] | None = None,
    front_end: FrontEnd | None = None,
    engine_class: type[Engine] = Engine,
    start_utc_ns: int = EPOCH_NS,
    on_progress: Callable[[int], None] | None = None,
) -> VirtualFleet:
    """The fleet, ready to run; its rows go to `sink`, which is closed with the last of its recorders.

    engine_class   a worker that behaves otherwise (one that leaks blocks, in the lab)
    """
    ends: list[SharedSink] = []
    names = [f"w{index}" for index in range(settings.num_workers)]
    chosen = settings.router
    feed = EventFeed(
        PrefixBits(settings.num_routed),
        delay_s=chosen.index_delay_s,
        loss_ratio=chosen.index_loss_ratio,
        seed=settings.seed,
    )
    # A feed that nobody reads would keep every event of the run.
    is_fed = chosen.policy in USES_INDEX
    tiers = [] if settings.tier is None else [Tier(settings.tier) for _ in names]
    routed, book = settings.num_routed, NameBook()
    engines = [
        _engine(
            settings,
            name,
            SharedSink(sink, ends),
            run_id,
            tiers[index : index + 1],
            book,
            FeedListener(feed, index) if is_fed and index < routed else None,
            costs,
            engine_class,
            start_utc_ns,
        )
        for index, name in enumerate(names)
    ]
    recorder = _recorder(SharedSink(sink, ends), None, run_id, VirtualClock(start_utc_ns))
    policy = make_policy(
        chosen.policy,
        seed=settings.seed,
        ties=chosen.ties,
        min_match_ratio=chosen.min_match_ratio,
        load_weight=chosen.load_weight,
    )
    board = LoadBoard(
        engines[:routed], signal=chosen.load_signal, refresh_s=chosen.load_refresh_s, is_dead=chosen.load_is_dead
    )
    router = Router(
        policy,
        names[:routed],
        board,
        feed,
        recorder,
        block_size=settings.engine.block_size,
        decision_s=chosen.decision_s,
    )
    others: dict[str, Any] = {
        "front_end": front_end,
        "patience": settings.patience,
        "in_flight": settings.in_flight,
        "equal_steps": settings.equal_steps,
        "on_progress": on_progress,
    }
    if settings.handover is not None:
        return SplitFleet(engines, router, settings.handover, seed=settings.seed, **others)
    if tiers:
        return TieredFleet(engines, router, tiers, feed if is_fed else None, **others)
    return VirtualFleet(engines, router, **others)


def recorders(fleet: VirtualFleet) -> Sequence[Recorder]:
    """Those of the engines and the router's; close them when the rows are wanted."""
    return [*(engine.flight.recorder for engine in fleet.engines), fleet.router.recorder]


def _engine(
    settings: FleetSettings,
    name: str,
    sink: Sink,
    run_id: str | None,
    listeners: Sequence[KvListener],
    book: NameBook,
    feed: FeedListener | None,
    costs: Callable[[VirtualClock], HostCosts] | None,
    engine_class: type[Engine],
    start_utc_ns: int,
) -> Engine:
    clock = VirtualClock(start_utc_ns)
    num_blocks = settings.num_blocks
    if settings.handover is not None and _role(settings, name) == "decode":
        num_blocks = settings.handover.decode_blocks or num_blocks
    scheduler = settings.engine.scheduler
    executor = (RooflineExecutor if settings.extras is None else ExtendedExecutor)(
        settings.shape,
        settings.hardware,
        clock,
        tp=settings.tp,
        block_size=settings.engine.block_size,
        num_blocks=num_blocks,
        max_batch_tokens=scheduler.max_num_batched_tokens,
        max_seqs=scheduler.max_num_seqs,
    )
    if isinstance(executor, ExtendedExecutor) and settings.extras is not None:
        executor.extend(settings.extras, settings.seed * 1000 + int(name[1:]))
    shape = settings.shape
    identity = KvIdentity(shape.name, shape.dtype, shape.kv_dtype)
    config = replace(settings.engine, worker=name, identity=identity, role=_role(settings, name))
    recorder = _recorder(sink, name, run_id, clock)
    recorder.constants["request"].update(engine="kvscope", model=shape.name)
    recorder.constants["step"].update(policy=scheduler.policy)
    return engine_class(
        config, executor, recorder, costs=costs(clock) if costs else None, listeners=listeners, book=book, feed=feed
    )


def _role(settings: FleetSettings, worker: str) -> str:
    if settings.handover is None:
        return settings.engine.role
    return "prefill" if int(worker[1:]) < settings.num_routed else "decode"


def _recorder(sink: Sink, worker: str | None, run_id: str | None, clock: VirtualClock) -> Recorder:
    # Virtual time waits for the flush: what is held between two flushes never overflows, however fast it goes by.
    return Recorder(
        sink,
        worker=worker,
        run_id=run_id,
        clock=clock,
        flush_s=0,
        blocks=1 << 22,
        rows=1 << 20,
        ended=1 << 20,
        steps=2 * FLUSH_STEPS if worker else 1,
    )
