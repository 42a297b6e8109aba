"""The router sends too much to one worker, or to the wrong one, for six reasons."""

from __future__ import annotations

from collections import Counter
from typing import cast

from diagnosis.lab.fault import SWITCH, Expected, Fault, Severity, Subject
from diagnosis.lab.scene import Scene, Tables, with_fleet, with_hook, with_router, with_traffic
from engine_probe.engine.fleet.virtual_fleet import VirtualFleet
from engine_probe.engine.roofline.executor import RooflineExecutor
from engine_probe.engine.traffic.synthetic import Lengths

STRAGGLER = "w1"
NOT_THE_LOAD = ("load_step", "length_shift", "mix_shift", "admission_blocked_on_blocks", "prefix_caching_off")
BEGINS_AT = 0.25


def busiest(tables: Tables) -> Subject:
    """The worker that most was sent to."""
    return ("worker", Counter(tables["route"]["chosen"].to_pylist()).most_common(1)[0][0])


def slow_down(worker: int, factor: float, fleet: VirtualFleet, at_ns: int) -> None:
    """From now on every step of this worker takes `factor` times as long."""
    cast(RooflineExecutor, fleet.engines[worker].executor).slow_factor = factor


def _skewed(scene: Scene, severity: float) -> Scene:
    """Half of the calls share one prefix, and what they add to it is long: one worker cannot serve them alone."""
    return with_traffic(
        scene,
        rate=28.0,
        groups=6,
        skew=1.6,
        shared_ratio=0.95,
        own_tokens=Lengths(256, 2048),
    )


def _one_large(scene: Scene, severity: float) -> Scene:
    """One tenant calls as often as this, three others share the rest."""
    others = tuple((name, (1 - severity) / 3) for name in ("chat", "agents", "batch"))
    return with_traffic(scene, tenants=(("search", severity), *others))


def _affinity(scene: Scene, severity: float) -> Scene:
    return with_router(scene, policy="sticky")


def _straggler(scene: Scene, severity: float) -> Scene:
    worker = int(STRAGGLER[1:])
    return with_hook(
        scene, BEGINS_AT * scene.measured_s, lambda fleet, at_ns: slow_down(worker, severity, fleet, at_ns)
    )


def _dead(scene: Scene, severity: float) -> Scene:
    return with_router(scene, load_is_dead=True)


def _by_match(scene: Scene, severity: float) -> Scene:
    """The index is so late that in the warm-up every worker computes the prefixes: all hold them, and all match alike."""
    known = with_router(scene, policy="prefix_affinity", min_match_ratio=0.3, index_delay_s=6.0)
    return with_traffic(known, shared_ratio=severity, groups=12)


def _lowest(scene: Scene, severity: float) -> Scene:
    return with_router(scene, ties="lowest")


def _scarce(scene: Scene, severity: float) -> Scene:
    """A worker's cache holds some of the prefixes, the fleet's together hold all: the index decides what is found."""
    return with_fleet(with_traffic(scene, groups=48, skew=0.4, shared_ratio=0.9), num_blocks=2000)


def _stale(scene: Scene, severity: float) -> Scene:
    return with_router(scene, index_delay_s=severity, index_loss_ratio=0.5)


def _pinning(scene: Scene, severity: float) -> Scene:
    return with_router(_scarce(scene, severity), policy="prefix_affinity", min_match_ratio=0.3)


def _unreachable(scene: Scene, severity: float) -> Scene:
    return with_router(scene, min_match_ratio=severity)


FAULTS = (
    Fault(
        "hotspot_affinity",
        "routing",
        "The router keeps each tenant on one worker, and one tenant is large",
        Severity(0.36, 0.4, 0.45, "share of the calls that are the large tenant's"),
        Expected(("hotspot_affinity",), (), (*NOT_THE_LOAD, "slow_steps")),
        _affinity,
        _one_large,
        subject=busiest,
    ),
    Fault(
        "hotspot_straggler",
        "routing",
        f"The steps of {STRAGGLER} take longer, and the router goes on sending",
        Severity(1.3, 2.0, 3.0, "times the step time"),
        Expected(("hotspot_straggler",), ("slow_steps",), NOT_THE_LOAD),
        _straggler,
        subject=("worker", STRAGGLER),
        begins_at=BEGINS_AT,
    ),
    Fault(
        "hotspot_dead_signal",
        "routing",
        "The router's load counter is never moved: every load reads 0",
        SWITCH,
        Expected(("hotspot_dead_signal",), ("hotspot_affinity",), (*NOT_THE_LOAD, "slow_steps")),
        _dead,
        _skewed,
        subject=busiest,
    ),
    Fault(
        "hotspot_tie_breaking",
        "routing",
        "Of workers that hold the same prefix the router always takes the first",
        Severity(0.6, 0.7, 0.8, "share of the calls that share a prefix"),
        Expected(("hotspot_tie_breaking",), (), (*NOT_THE_LOAD, "slow_steps")),
        _lowest,
        _by_match,
        subject=busiest,
    ),
    Fault(
        "hotspot_stale_index",
        "routing",
        "The router's prefix index hears of blocks late, and not of all",
        Severity(5.0, 20.0, 60.0, "seconds that block events are late"),
        Expected(("hotspot_stale_index",), ("premature_eviction",), (*NOT_THE_LOAD, "slow_steps")),
        _stale,
        _scarce,
    ),
    Fault(
        "hotspot_unreachable_threshold",
        "routing",
        "The match that the router asks for cannot be reached: it never goes by prefix",
        Severity(1.0, 1.1, 2.0, "share of the prompt that must match"),
        Expected(("hotspot_unreachable_threshold",), ("premature_eviction",), (*NOT_THE_LOAD, "slow_steps")),
        _unreachable,
        _pinning,
    ),
)
