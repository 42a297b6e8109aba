"""Before and behind the engine: too few threads that parse, and a buffer that holds the head of every answer back."""

from __future__ import annotations

from dataclasses import replace

from diagnosis.lab.fault import Expected, Fault, Severity
from diagnosis.lab.scene import ClientView, Scene

NOT_THE_ENGINE = (
    "load_step",
    "length_shift",
    "mix_shift",
    "slow_steps",
    "admission_blocked_on_blocks",
    "preemption_recompute",
    "premature_eviction",
)


def _seen_by_clients(scene: Scene, severity: float) -> Scene:
    return replace(scene, clients=ClientView())


def _slow_threads(scene: Scene, severity: float) -> Scene:
    """One thread, busy for this share of the time at the mean length."""
    tokens = scene.traffic.shared_tokens + 350
    return replace(
        scene,
        front_end=replace(scene.front_end, threads=1, token_s=severity / scene.traffic.rate / tokens, fixed_s=0.0005),
    )


def _buffer(scene: Scene, severity: float) -> Scene:
    assert scene.clients is not None
    return replace(scene, clients=replace(scene.clients, first_token_s=severity))


FAULTS = (
    Fault(
        "front_end",
        "front end",
        "One thread parses and tokenizes for all, and is nearly always busy",
        Severity(0.8, 0.9, 0.95, "share of the time that it is busy"),
        Expected(("front_end",), (), NOT_THE_ENGINE),
        _slow_threads,
        _seen_by_clients,
    ),
    Fault(
        "fixed_offset",
        "front end",
        "A buffer between engine and callers holds the head of every answer back for a fixed time",
        Severity(0.05, 0.1, 0.3, "seconds"),
        Expected(("fixed_offset",), ("front_end",), NOT_THE_ENGINE),
        _buffer,
        _seen_by_clients,
    ),
)
