"""An experiment or a sweep from its plan to its document, whoever runs the runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from collector.experiments.judging import arm_summary, judged
from collector.experiments.runner import Ran, Runner
from collector.experiments.workload import Workload
from diagnosis.experiments.design import Arm, Trial, schedule
from diagnosis.experiments.document import sweep_document
from diagnosis.experiments.knee import Level, find_knee, next_level
from engine_probe.errors import UsageError
from store.metrics import Slo

MOST_LEVELS = 24
LEVELS = "loads"
"""Folder of a sweep's levels."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Arms, what they are asked and how often; out: folder of the Parquet, None: nothing is kept."""

    name: str
    arms: Sequence[Arm]
    workload: Workload
    repeats: int
    seed: int
    slo: Slo
    out: Path | None


def run_experiment(plan: Plan, runner: Runner, tell: Callable[[str], None]) -> dict[str, Any]:
    """Run and judge it. Raises UsageError before anything runs where the plan makes no sense."""
    trials = schedule(plan.arms, plan.repeats, plan.seed)

    def folder(trial: Trial) -> Path | None:
        return None if plan.out is None else plan.out / trial.run_id

    def done(count: int) -> None:
        tell(f"run {count} of {len(trials)}: {trials[count - 1].run_id}")

    ran = runner.run(trials, plan.workload, folder, done)
    fixed, notes = runner.facts(plan.arms, plan.workload), runner.notes(plan.workload, ran)
    return judged(plan.name, fixed, plan.arms, trials, ran, plan.slo, notes)


def run_sweep(
    plan: Plan,
    runner: Runner,
    loads: Sequence[float] | None,
    start: float,
    slo_s: float | None,
    *,
    by_rate: bool,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Raise the load of the plan's one arm to the knee and past it.

    loads     exactly these; None: from `start` on, doubling until P99 breaks, then narrowing down
    slo_s     limit of P99 TTFT, None: twice that of the lowest load
    by_rate   loads are requests/s, else requests in flight
    """
    arm, unit = plan.arms[0], "requests/s" if by_rate else "in flight"
    levels: list[Level] = []
    everything: list[Ran] = []
    waiting, workload = list(loads or [start]), plan.workload
    while waiting and len(levels) < MOST_LEVELS:
        load = waiting.pop(0)
        workload = with_load(plan.workload, load, by_rate=by_rate)
        trials = [Trial(arm, repeat, repeat - 1) for repeat in range(1, plan.repeats + 1)]
        ran = runner.run(trials, workload, _folders(plan.out, load), lambda _: None)
        everything += ran
        levels.append(Level(load, arm_summary(arm, trials, ran, plan.slo)))
        p99 = levels[-1].p99.value
        tell(f"{load:g} {unit}: P99 TTFT {'unknown' if p99 is None else f'{p99 * 1e3:,.0f} ms'}")
        if loads is None:
            found = next_level(levels, slo_s, whole=not by_rate)
            waiting = [] if found is None else [found]
    knee = find_knee(levels, slo_s, unit)
    fixed = {k: v for k, v in runner.facts([arm], plan.workload).items() if k not in ("rate", "loop")}
    return sweep_document(plan.name, fixed, unit, levels, knee, runner.notes(workload, everything))


def with_load(workload: Workload, load: float, *, by_rate: bool) -> Workload:
    """The same calls at another load. Raises UsageError for a rate of a trace, which has its own."""
    if by_rate and workload.trace is not None:
        raise UsageError("a trace has its own arrivals; sweep --concurrency, or give no --trace")
    if by_rate:
        return replace(workload, traffic=replace(workload.traffic, rate=load), in_flight=None)
    return replace(workload, in_flight=int(load))


def _folders(out: Path | None, load: float) -> Callable[[Trial], Path | None]:
    return lambda trial: None if out is None else out / LEVELS / f"{load:g}" / str(trial.repeat)
