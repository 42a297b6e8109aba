"""More work arrives: more requests, or the same requests again and again."""

from __future__ import annotations

from dataclasses import replace

from diagnosis.lab.fault import Expected, Fault, Severity
from diagnosis.lab.scene import ClientView, Scene, at_rate, with_engine, with_fleet, with_traffic
from engine_probe.engine.fleet.virtual_fleet import Patience

NEVER = ("length_shift", "mix_shift", "admission_blocked_on_blocks", "preemption_recompute", "prefix_caching_off")


def _more(scene: Scene, severity: float) -> Scene:
    return at_rate(scene, scene.traffic.rate * severity)


def _busy(scene: Scene, severity: float) -> Scene:
    """Bursts bring the wait near to what callers bear, and no cache keeps what was computed for who went away."""
    bursty = with_traffic(
        scene,
        rate=21.0,
        num_requests=scene.traffic.num_requests * 3 // 4,
        arrivals="bursty",
        burst_ratio=2.0,
        burst_s=3.0,
    )
    return replace(with_engine(bursty, prefix_caching=False), clients=ClientView())


def _impatient(scene: Scene, severity: float) -> Scene:
    return with_fleet(scene, patience=Patience(timeout_s=severity, max_retries=4, backoff_s=0.05))


FAULTS = (
    Fault(
        "load_step",
        "load",
        "More requests arrive a second, for as many workers",
        Severity(1.2, 1.4, 1.6, "times the arrival rate"),
        Expected(("load_step",), ("decode_bandwidth",), (*NEVER, "slow_steps", "premature_eviction")),
        _more,
    ),
    Fault(
        "client_retries",
        "load",
        "Callers give up early and ask again: work is thrown away and comes back",
        Severity(0.45, 0.35, 0.25, "seconds that a caller waits for its first token"),
        Expected(("client_retries",), ("load_step",), NEVER),
        _impatient,
        _busy,
    ),
)
