"""The engine's bookkeeping got dear: looking up, evicting, waiting for the cache's lock, recording."""

from __future__ import annotations

from diagnosis.lab.fault import Expected, Fault, Severity
from diagnosis.lab.scene import Scene, with_costs, with_fleet

NEVER = (
    "load_step",
    "length_shift",
    "mix_shift",
    "admission_blocked_on_blocks",
    "preemption_recompute",
    "prefix_caching_off",
)


def _lookup(scene: Scene, severity: float) -> Scene:
    return with_costs(scene, lookup_s=severity)


def _scan(scene: Scene, severity: float) -> Scene:
    return with_costs(scene, scan_block_s=severity * 1e-6)


def _evicting(scene: Scene, severity: float) -> Scene:
    """Pools that are full, so that every prompt evicts."""
    return with_fleet(scene, num_blocks=2500)


def _lock(scene: Scene, severity: float) -> Scene:
    return with_costs(scene, lock_busy_ratio=severity, lock_hold_s=0.05)


def _probe(scene: Scene, severity: float) -> Scene:
    return with_costs(scene, probe_s=severity)


FAULTS = (
    Fault(
        "lookup_overhead",
        "costs",
        "Every look-up in the prefix cache takes a fixed time",
        Severity(0.01, 0.03, 0.05, "seconds a look-up"),
        Expected(("lookup_overhead",), (), NEVER),
        _lookup,
    ),
    Fault(
        "eviction_overhead",
        "costs",
        "Each eviction scans all cached blocks for its victim",
        Severity(0.1, 0.3, 0.5, "microseconds a cached block"),
        Expected(("eviction_overhead",), (), NEVER),
        _scan,
        _evicting,
    ),
    Fault(
        "cache_lock_contention",
        "costs",
        "Others hold the cache's lock for 50 ms at a time",
        Severity(0.15, 0.3, 0.5, "share of the time"),
        Expected(("cache_lock_contention",), ("lookup_overhead",), NEVER),
        _lock,
    ),
    Fault(
        "probe_overhead",
        "costs",
        "The recorder takes its time in every step",
        Severity(0.002, 0.005, 0.010, "seconds a step"),
        Expected(("probe_overhead",), ("slow_steps",), NEVER),
        _probe,
    ),
)
