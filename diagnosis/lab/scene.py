"""A scene: everything that one virtual run is made of, as plain values; a fault is a function from one scene to another.

The base scene is a healthy fleet: four A100s with an 8B model, prompts of about 1,400 tokens of which half is found in the
cache, a router that weighs prefix against load, at about two thirds of what it can serve. Nothing but a fault makes it ill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import merge
from typing import TYPE_CHECKING

from engine_probe.engine.config import EngineConfig
from engine_probe.engine.engine import Engine
from engine_probe.engine.fleet.build import FleetSettings, RouterSettings
from engine_probe.engine.fleet.virtual_fleet import VirtualFleet
from engine_probe.engine.roofline.hardware import find_hardware
from engine_probe.engine.roofline.model_shape import find_shape
from engine_probe.engine.scheduler import SchedulerConfig
from engine_probe.engine.traffic.call import Call
from engine_probe.engine.traffic.synthetic import Lengths, Traffic
from engine_probe.engine.virtual_costs import CostSettings

if TYPE_CHECKING:
    import pyarrow as pa

Tables = Mapping[str, "pa.Table"]
Hook = Callable[[VirtualFleet, int], None]
"""Something that happens to the fleet at an instant (ns of the run's own clock)."""
Edit = Callable[[dict[str, "pa.Table"]], dict[str, "pa.Table"]]
"""What a broken reporter makes of the rows: the run itself is as it was."""

RATE = 40.0
NUM_REQUESTS = 2000
WARMUP_S = 8.0
"""Calls of the first seconds fill the caches; they are labelled as warm-up and judged by nobody."""
IDLE_S = 100.0
"""The fleet is started so long before its first call: a start is not what these runs are about."""


@dataclass(frozen=True, slots=True)
class FrontEndSettings:
    """A pool of threads before the router: `front_ends.ThreadPoolFrontEnd`."""

    threads: int = 16
    fixed_s: float = 0.002
    token_s: float = 0.5e-6


@dataclass(frozen=True, slots=True)
class ClientView:
    """What the callers' side saw, as rows of its own: each token `network_s` after the engine sent it.

    first_token_s   more that the first token takes (something between buffers the head of each answer)
    """

    network_s: float = 0.001
    first_token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Scene:
    """One run.

    hooks     (seconds after the warm-up, what happens then)
    edits     applied to the rows in this order
    clients   None: the engines' rows alone
    cancels   every so many-th caller goes away `cancel_s` after it asked (0: nobody)
    """

    fleet: FleetSettings
    traffic: Traffic
    extra: tuple[Traffic, ...] = ()
    costs: CostSettings = field(default_factory=CostSettings)
    front_end: FrontEndSettings = field(default_factory=FrontEndSettings)
    engine_class: type[Engine] = Engine
    hooks: tuple[tuple[float, Hook], ...] = ()
    edits: tuple[Edit, ...] = ()
    clients: ClientView | None = None
    cancels: int = 0
    cancel_s: float = 0.4
    warmup_s: float = WARMUP_S

    @property
    def measured_s(self) -> float:
        """Seconds in which calls come that are judged."""
        return self.traffic.num_requests / self.traffic.rate - self.warmup_s

    def calls(self) -> Iterator[Call]:
        """All calls in order of arrival on the run's clock, those of the warm-up labelled."""
        idle_ns, until_ns = round(IDLE_S * 1e9), round(self.warmup_s * 1e9)
        for call in merge(self.traffic.calls(), *(more.calls() for more in self.extra), key=_arrival):
            labels = {"phase": "warmup"} if call.at_ns < until_ns else call.labels
            yield replace(call, at_ns=call.at_ns + idle_ns, labels=labels)


def base_scene(num_requests: int = NUM_REQUESTS, seed: int = 1) -> Scene:
    """The healthy fleet, with `num_requests` calls to be judged."""
    return Scene(
        FleetSettings(
            find_shape("llama-3-8b"),
            find_hardware("a100"),
            num_workers=4,
            num_blocks=8000,
            engine=EngineConfig(scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048)),
            router=RouterSettings(policy="affinity_with_load"),
            seed=seed,
        ),
        Traffic(
            num_requests=num_requests + round(RATE * WARMUP_S),
            rate=RATE,
            groups=24,
            skew=0.8,
            shared_tokens=1024,
            shared_ratio=0.75,
            own_tokens=Lengths(64, 1024),
            output_tokens=Lengths(16, 128),
            tenants=(("search", 0.5), ("chat", 0.35), ("agents", 0.15)),
            seed=seed,
        ),
    )


def with_engine(scene: Scene, **changes: object) -> Scene:
    """The scene whose engines differ in these settings."""
    return replace(scene, fleet=replace(scene.fleet, engine=replace(scene.fleet.engine, **changes)))  # type: ignore[arg-type]  # fields by name


def with_scheduler(scene: Scene, **changes: object) -> Scene:
    """The scene whose schedulers differ in these settings."""
    return with_engine(scene, scheduler=replace(scene.fleet.engine.scheduler, **changes))  # type: ignore[arg-type]  # fields by name


def with_router(scene: Scene, **changes: object) -> Scene:
    """The scene whose router differs in these settings."""
    return replace(scene, fleet=replace(scene.fleet, router=replace(scene.fleet.router, **changes)))  # type: ignore[arg-type]  # fields by name


def with_fleet(scene: Scene, **changes: object) -> Scene:
    """The scene whose fleet differs in these settings."""
    return replace(scene, fleet=replace(scene.fleet, **changes))  # type: ignore[arg-type]  # fields by name


def with_traffic(scene: Scene, **changes: object) -> Scene:
    """The scene whose main traffic differs in these settings."""
    return replace(scene, traffic=replace(scene.traffic, **changes))  # type: ignore[arg-type]  # fields by name


def at_rate(scene: Scene, rate: float) -> Scene:
    """The scene whose main traffic comes at this rate, as many calls of it judged as before; other traffic lasts as long."""
    main = scene.traffic
    judged = main.num_requests - round(main.rate * scene.warmup_s)
    changed = replace(main, rate=rate, num_requests=judged + round(rate * scene.warmup_s))
    seconds = changed.num_requests / rate
    extra = tuple(replace(more, num_requests=max(1, round(more.rate * seconds))) for more in scene.extra)
    return replace(scene, traffic=changed, extra=extra)


def with_costs(scene: Scene, **changes: float) -> Scene:
    """The scene whose engines' bookkeeping costs something else."""
    return replace(scene, costs=replace(scene.costs, **changes))


def with_hook(scene: Scene, after_s: float, hook: Hook) -> Scene:
    """The scene in which this happens so many seconds after the warm-up."""
    return replace(scene, hooks=(*scene.hooks, (after_s, hook)))


def with_edit(scene: Scene, edit: Edit) -> Scene:
    """The scene whose rows are told this way."""
    return replace(scene, edits=(*scene.edits, edit))


def reseeded(scene: Scene, seed: int) -> Scene:
    """The same scene by another draw of everything that is drawn."""
    return replace(
        scene,
        fleet=replace(scene.fleet, seed=seed),
        traffic=replace(scene.traffic, seed=seed),
        extra=tuple(replace(more, seed=seed + index + 1) for index, more in enumerate(scene.extra)),
    )


def _arrival(call: Call) -> int:
    return call.at_ns
