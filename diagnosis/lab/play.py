"""Plays a scene: a fleet in virtual time serves its calls, and what it told comes back as tables.

Invariant: the same scene gives the same rows, byte for byte: time is virtual, costs are told and not measured, and what is
drawn is drawn by seed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

from diagnosis.lab.clients import client_rows
from diagnosis.lab.lately import Lately
from diagnosis.lab.scene import IDLE_S, Scene
from engine_probe.engine.fleet.build import build_fleet, recorders
from engine_probe.engine.fleet.front_ends import ThreadPoolFrontEnd
from engine_probe.engine.fleet.virtual_fleet import Tally, VirtualFleet
from engine_probe.engine.virtual_clock import EPOCH_NS
from engine_probe.engine.virtual_costs import VirtualCosts, charged_hardware
from engine_probe.events import KINDS
from engine_probe.sending.sink import MemorySink

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Played:
    """What a run told. start_ns, end_ns: UTC instants between which the judged calls came."""

    tables: dict[str, pa.Table]
    tally: Tally
    start_ns: int
    end_ns: int


KEPT = 6
"""Runs that a process remembers: the healthy fleet of a seed, and what is played between two faults that begin from it."""
_lately: Lately[tuple[Scene, str], Played] = Lately(KEPT)


def play_once(scene: Scene, run_id: str) -> Played:
    """As `play`; what this process played lately is not played again, so the faults of a seed share their baseline."""
    return _lately.of((scene, run_id), lambda: play(scene, run_id))


def forget() -> None:
    """Every run is played again."""
    _lately.clear()


def play(scene: Scene, run_id: str) -> Played:
    """Run the scene to its last answer; rows carry `run_id`."""
    sink = MemorySink()
    seeds = count(scene.fleet.seed * 1000)
    front = scene.front_end
    fleet = build_fleet(
        replace(scene.fleet, hardware=charged_hardware(scene.fleet.hardware, scene.costs)),
        sink,
        run_id=run_id,
        costs=lambda clock: VirtualCosts(clock, scene.costs, next(seeds)),
        front_end=ThreadPoolFrontEnd(front.threads, fixed_s=front.fixed_s, token_s=front.token_s),
        engine_class=scene.engine_class,
    )
    for after_s, hook in scene.hooks:
        _at(fleet, round((IDLE_S + scene.warmup_s + after_s) * 1e9), hook)
    calls = list(scene.calls())
    if scene.cancels:
        for call in calls[scene.cancels - 1 :: scene.cancels]:
            fleet.cancel_at(call.request_id, call.at_ns + round(scene.cancel_s * 1e9))
    tally = fleet.run(calls)
    for recorder in recorders(fleet):
        recorder.close()
    tables = {kind: sink.table(kind) for kind in KINDS if kind in sink.num_rows}
    if scene.clients is not None:
        tables["request"] = client_rows(tables["request"], scene.clients, run_id)
    for edit in scene.edits:
        tables = edit(tables)
    start_ns = EPOCH_NS + round((IDLE_S + scene.warmup_s) * 1e9)
    return Played(tables, tally, start_ns, EPOCH_NS + max(call.at_ns for call in calls) + 1)


def _at(fleet: VirtualFleet, at_ns: int, hook: object) -> None:
    assert callable(hook)
    fleet.at(at_ns, lambda now_ns: hook(fleet, now_ns))
