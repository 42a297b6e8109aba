"""Runs on the embedded engine in virtual time, over the cores. Deterministic: the same plan, the same rows.

Repeats of an arm follow each other on the UTC axis, so that an arm's folder can be imported as one run.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa

from collector.experiments.arm_settings import VirtualArm, virtual_arm, with_load
from collector.experiments.judging import common_facts
from collector.experiments.runner import Folder, Ran, counting_begins
from collector.experiments.workload import NS, Asked, Workload, asked, expected_s
from diagnosis.experiments.design import Arm, Trial
from engine_probe.engine.engine import Engine
from engine_probe.engine.fleet.build import build_fleet, recorders
from engine_probe.engine.fleet.virtual_fleet import VirtualFleet
from engine_probe.engine.traffic.call import Call
from engine_probe.engine.virtual_clock import EPOCH_NS, VirtualClock
from engine_probe.engine.virtual_costs import VirtualCosts, charged_hardware
from engine_probe.errors import EngineError
from engine_probe.sending.sink import FileSink, MemorySink, Sink

WORTH_A_POOL = 6
"""Processes take a second to start: fewer runs are made one after the other."""
REST_S = 60.0
"""Between two repeats on the UTC axis: the answers of the last calls."""
READ_BACK = ("request", "step", "worker")


@dataclass(frozen=True, slots=True)
class VirtualTrial:
    """One run. folder: where its rows go as Parquet, None: nowhere; keep_blocks: with the life of every block."""

    trial: Trial
    arm: VirtualArm
    workload: Workload
    slot_s: float
    folder: Path | None
    keep_blocks: bool = True


@dataclass(frozen=True, slots=True)
class VirtualRunner:
    """jobs: processes, None: as many as cores where it is worth it; keep_blocks: the files tell the life of every block."""

    jobs: int | None = None
    keep_blocks: bool = True

    def check(self, arms: Sequence[Arm]) -> None:
        """Every arm's settings are those of a fleet."""
        for arm in arms:
            virtual_arm(arm.settings, f"arm {arm.name}")

    def run(
        self, trials: Sequence[Trial], workload: Workload, folder: Folder, tell: Callable[[int], None]
    ) -> list[Ran]:
        """Every run, in the given order."""
        slot_s = expected_s(workload, max(trial.repeat for trial in trials)) + REST_S
        fleets = {t.arm.name: virtual_arm(t.arm.settings, f"arm {t.arm.name}") for t in trials}
        plans = [VirtualTrial(t, fleets[t.arm.name], workload, slot_s, folder(t), self.keep_blocks) for t in trials]
        jobs = self.jobs or (min(os.cpu_count() or 1, len(plans)) if len(plans) >= WORTH_A_POOL else 1)
        ran = []
        for done in _each(plans, jobs):
            ran.append(done)
            tell(len(ran))
        return ran

    def facts(self, arms: Sequence[Arm], workload: Workload) -> dict[str, Any]:
        """Of the fleets, and of what they are asked."""
        told = {arm.name: _facts(virtual_arm(arm.settings, f"arm {arm.name}")) for arm in arms}
        return {**common_facts(told), **workload.facts()}

    def notes(self, workload: Workload, ran: Sequence[Ran]) -> list[str]:
        notes = ["virtual time: the same plan and seed give the same numbers, to the nanosecond"]
        if workload.num_warmup:
            notes.append(
                f"each run begins with {workload.num_warmup} warm-up calls"
                + ("" if workload.in_flight else f", {workload.warmup_gap_s:g} s apart")
                + "; a cold arm's caches are emptied when counting begins"
            )
        rejected = sum(run.facts["rejected"] for run in ran)
        if rejected:
            notes.append(f"{rejected:,} calls were refused: their prompts can never run there")
        return notes


def _each(trials: Sequence[VirtualTrial], jobs: int) -> Iterator[Ran]:
    if jobs == 1:
        yield from map(run_one, trials)
        return
    with ProcessPoolExecutor(max_workers=jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(run_one, trials)


def run_one(plan: VirtualTrial) -> Ran:
    """Serve the calls of one run. Raises EngineError where requests were stuck: no arm is judged by half a run."""
    trial = plan.trial
    work = asked(plan.workload, trial.repeat, is_warm=trial.arm.is_warm)
    arm = with_load(plan.arm, in_flight=plan.workload.in_flight, seed=plan.workload.seed * 1000 + trial.repeat)
    memory = MemorySink()
    sink = _Both(memory, None if plan.folder is None else FileSink(plan.folder), plan.keep_blocks)
    settings, costs = arm.fleet, arm.costs
    if costs.probe_s:
        settings = replace(settings, hardware=charged_hardware(settings.hardware, costs))
    fleet = build_fleet(
        settings,
        sink,
        run_id=trial.run_id,
        costs=lambda clock: VirtualCosts(clock, costs, seed=settings.seed),
        start_utc_ns=EPOCH_NS + round((trial.repeat - 1) * plan.slot_s * NS),
    )
    is_cold, is_open = not trial.arm.is_warm, plan.workload.in_flight is None
    if is_cold and is_open and work.num_warmup:
        fleet.at(max(work.counted_ns - 1, 0), lambda at_ns: _reset(fleet.engines, at_ns))
    calls: Iterator[Call] = iter(work.calls)
    if is_open:
        fleet.router.recorder.row("mark", work.counted_ns, **counting_begins(trial))
    else:
        calls = _closed(work, trial, fleet)
    tally = fleet.run(calls)
    for recorder in recorders(fleet):
        recorder.close()
    if tally.stuck:
        raise EngineError(
            f"{trial.run_id}: {tally.stuck} requests could never run (a prompt needs more blocks than there are); give more "
            "blocks or shorter prompts",
            run_id=trial.run_id,
        )
    tables = {kind: memory.table(kind) for kind in READ_BACK}
    if not tally.finished:
        told = [error for error in tables["request"]["error"].to_pylist() if error]
        raise EngineError(
            f"{trial.run_id}: no request was served; {told[0] if told else 'all were given up'}", run_id=trial.run_id
        )
    facts = {"virtual_s": tally.virtual_s, "rejected": tally.rejected, "output_tokens": tally.output_tokens}
    return Ran(trial.run_id, tables, facts)


def _reset(engines: Sequence[Engine], at_ns: int | None) -> None:
    for engine in engines:
        if at_ns is not None and isinstance(engine.clock, VirtualClock):
            engine.clock.advance_to(at_ns)  # an idle engine's clock stands where its work ended
        engine.reset_prefix_cache()


def _closed(work: Asked, trial: Trial, fleet: VirtualFleet) -> Iterator[Call]:
    """The calls of a closed loop, which has no instant at which counting begins: it is when the first that counts is asked for."""
    for number, call in enumerate(work.calls):
        if number == work.num_warmup:
            if not trial.arm.is_warm and work.num_warmup:
                _reset(fleet.engines, None)
            now = max(engine.clock.monotonic_ns() for engine in fleet.engines)
            fleet.router.recorder.row("mark", now, **counting_begins(trial))
        yield call


class _Both(Sink):
    """What is judged stays in memory, and everything goes into the files."""

    def __init__(self, memory: MemorySink, files: FileSink | None, keep_blocks: bool) -> None:
        self._memory, self._files, self._keep_blocks = memory, files, keep_blocks

    def write(self, tables: Mapping[str, pa.Table]) -> None:
        self._memory.write({kind: table for kind, table in tables.items() if kind in READ_BACK})
        if self._files is not None:
            self._files.write({kind: t for kind, t in tables.items() if self._keep_blocks or kind != "block"})

    def close(self) -> None:
        if self._files is not None:
            self._files.close()


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
