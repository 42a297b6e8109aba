"""An experiment or a sweep on the embedded engine: arms, runs, and what was held fixed, told by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from collector.experiments.arm_settings import VirtualArm, virtual_arm
from collector.experiments.judging import arm_summary, common_facts, judged
from collector.experiments.virtual import VirtualTrial, run_all
from collector.experiments.workload import Workload, expected_s
from diagnosis.experiments.design import Arm, schedule
from diagnosis.experiments.document import sweep_document
from diagnosis.experiments.knee import Level, find_knee, next_level
from engine_probe.errors import UsageError
from store.metrics import Slo

REST_S = 60.0
"""Between two repeats on the UTC axis: the answers of the last calls."""
MOST_LEVELS = 24


@dataclass(frozen=True, slots=True)
class VirtualPlan:
    """name, arms, and how often each; out: folder of the Parquet, None: nothing is kept."""

    name: str
    arms: Sequence[Arm]
    workload: Workload
    repeats: int
    seed: int
    slo: Slo
    out: Path | None
    keep_blocks: bool = True
    jobs: int | None = None


def run_virtual(plan: VirtualPlan, tell: Callable[[int, int], None]) -> dict[str, Any]:
    """Run and judge it. tell: (runs done, runs in all). Raises UsageError before anything runs where the plan makes no sense."""
    fleets = {arm.name: virtual_arm(arm.settings, f"arm {arm.name}") for arm in plan.arms}
    trials = schedule(plan.arms, plan.repeats, plan.seed)
    slot_s = expected_s(plan.workload, plan.repeats) + REST_S
    runs = [
        VirtualTrial(
            trial,
            fleets[trial.arm.name],
            plan.workload,
            slot_s,
            None if plan.out is None else plan.out / trial.run_id,
            plan.keep_blocks,
        )
        for trial in trials
    ]
    ran = run_all(runs, plan.jobs, lambda done: tell(done, len(runs)))
    return judged(
        plan.name, fixed_facts(plan.workload, fleets), plan.arms, trials, ran, plan.slo, _notes(plan.workload)
    )


def sweep_virtual(
    plan: VirtualPlan, loads: Sequence[float] | None, start: float, *, by_rate: bool, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Raise the load of the plan's one arm to the knee and past it. loads: exactly these; None: from `start`, doubling, then narrowing.

    by_rate   loads are requests/s, else requests in flight
    """
    arm = plan.arms[0]
    fleet = virtual_arm(arm.settings, f"arm {arm.name}")
    unit = "requests/s" if by_rate else "in flight"
    levels: list[Level] = []
    waiting = list(loads or [start])
    while waiting and len(levels) < MOST_LEVELS:
        load = waiting.pop(0)
        levels.append(Level(load, _level(plan, arm, fleet, load, by_rate=by_rate)))
        tell(f"{load:g} {unit}: P99 TTFT {levels[-1].p99.value or float('nan'):.3f} s")
        if loads is None:
            found = next_level(levels, plan.slo.ttft_s, whole=not by_rate)
            waiting = [] if found is None else [found]
    knee = find_knee(levels, plan.slo.ttft_s, unit)
    return sweep_document(
        plan.name, fixed_facts(plan.workload, {arm.name: fleet}), unit, levels, knee, _notes(plan.workload)
    )


def fixed_facts(workload: Workload, fleets: Mapping[str, VirtualArm]) -> dict[str, Any]:
    """What every arm has in common, by name; what differs says so arm by arm."""
    return {**common_facts({name: _facts(fleet) for name, fleet in fleets.items()}), **workload.facts()}


def with_load(workload: Workload, load: float, *, by_rate: bool) -> Workload:
    """The same calls at another load."""
    if by_rate and workload.trace is not None:
        raise UsageError("a trace has its own arrivals; sweep --concurrency, or give no --trace")
    if by_rate:
        return replace(workload, traffic=replace(workload.traffic, rate=load), in_flight=None)
    return replace(workload, in_flight=int(load))


def _level(plan: VirtualPlan, arm: Arm, fleet: VirtualArm, load: float, *, by_rate: bool) -> Any:
    workload = with_load(plan.workload, load, by_rate=by_rate)
    trials = [trial for trial in schedule([arm, Arm("unused")], plan.repeats, plan.seed) if trial.arm == arm]
    slot_s = expected_s(workload, plan.repeats) + REST_S
    folder = None if plan.out is None else plan.out / f"load-{load:g}"
    runs = [
        VirtualTrial(t, fleet, workload, slot_s, None if folder is None else folder / str(t.repeat), plan.keep_blocks)
        for t in trials
    ]
    return arm_summary(arm, trials, run_all(runs, plan.jobs, lambda _: None), plan.slo)


def _facts(arm: VirtualArm) -> dict[str, Any]:
    fleet, engine = arm.fleet, arm.fleet.engine
    shape = fleet.shape
    return {
        "engine": f"kvscope {version('kvscope')}, virtual time",
        "model": shape.name,
        "weights": f"{shape.dtype}, none computed: time follows from lengths",
        "kv_dtype": shape.kv_dtype,
        "tokenizer": None,
        "template": None,
        "hardware": fleet.hardware.name,
        "tp": fleet.tp,
        "workers": fleet.num_workers,
        "blocks_per_worker": fleet.num_blocks or "what the memory holds",
        "routing": asdict(fleet.router),
        "engine_flags": engine.flags(),
        "bookkeeping": asdict(arm.costs),
        "sampling": "none: tokens are counted",
        "stop": "each call's own length",
    }


def _notes(workload: Workload) -> list[str]:
    notes = ["virtual time: the same plan and seed give the same numbers, to the nanosecond"]
    if workload.num_warmup:
        notes.append(
            f"each run begins with {workload.num_warmup} warm-up calls, {workload.warmup_gap_s:g} s apart; a cold arm's caches "
            "are emptied when counting begins"
        )
    return notes
