"""A fleet in real time: worker processes that compute, behind one router."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from collector.experiments.processes import ProcessRunner, SeededModel, make_executor
from collector.experiments.workload import Workload, asked
from diagnosis.experiments.design import Arm, Trial
from engine_probe.engine.config import EngineConfig
from engine_probe.engine.executor import Executor
from engine_probe.engine.fleet.policies import make_policy
from engine_probe.engine.fleet.process_fleet import ProcessFleet
from engine_probe.engine.fleet.process_worker import WorkerPlan
from engine_probe.engine.scheduler import SchedulerConfig
from engine_probe.engine.traffic.call import Call
from engine_probe.engine.traffic.synthetic import Lengths, Traffic
from engine_probe.errors import EngineError, ModelUnreadable, UsageError

RUNNER = ProcessRunner(SeededModel(vocab_size=64), workers=2, blocks=64, seats=4, budget=256)
WORKLOAD = Workload(
    Traffic(
        rate=200.0, groups=1, shared_tokens=64, shared_ratio=1.0, own_tokens=Lengths(8, 8), output_tokens=Lengths(4, 4)
    ),
    num_requests=12,
    num_warmup=2,
    warmup_gap_s=0.2,
)
ON = Arm("on", {"cache": "on", "routing": "prefix_affinity"})


def rows(folder: Path, kind: str) -> list[dict[str, object]]:
    parts = sorted(folder.glob(f"*/kind={kind}/*.parquet"))
    return pa.concat_tables([pq.read_table(part, partitioning=None) for part in parts]).to_pylist()


def test_calls_are_routed_computed_and_recorded(tmp_path: Path) -> None:
    """Two runs of one arm: every call has one engine row and one route row, each run its own name; prefixes are found."""
    trials = [Trial(ON, 1, 0), Trial(ON, 2, 1)]
    ran = RUNNER.run(trials, WORKLOAD, lambda trial: tmp_path / trial.run_id, lambda _: None)
    assert [run.run_id for run in ran] == ["on/1", "on/2"]
    for run in ran:
        requests = run.tables["request"].to_pylist()
        assert len(requests) == 14
        assert {row["run_id"] for row in requests} == {run.run_id}
        assert {row["state"] for row in requests} == {"finished"}
        assert {row["output_tokens"] for row in requests} == {4}
        assert [row["cached_tokens"] for row in sorted(requests, key=lambda row: row["arrival_ns"])][-1] == 64
        assert {row["worker"] for row in run.tables["worker"].to_pylist()} == {"w0", "w1"}
        routes = rows(tmp_path / run.run_id, "route")
        assert sorted(row["request_id"] for row in routes) == sorted(row["request_id"] for row in requests)
        # What the router believes comes of the workers' own events, and has the names that calls have.
        matches = [row["candidates"][0]["matched_tokens"] for row in sorted(routes, key=lambda row: row["at_ns"])]
        assert (matches[0], matches[-1]) == (0, 64)
        # Pure affinity, ties to the first: whoever is first asked keeps all of them.
        assert {row["chosen"] for row in routes} == {row["worker"] for row in requests} == {"w0"}
    assert ran[1].tables["request"].to_pylist()[0]["cached_tokens"] == 0, "the cache was not emptied between runs"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"cache": "warm"}, "cache=warm"),
        ({"blocks": "7"}, "not in blocks"),
        ({"routing": "best"}, "known: round_robin"),
    ],
)
def test_arm_that_cannot_be_run_is_named_before_anything_starts(settings: dict[str, str], says: str) -> None:
    """What worker processes cannot differ in is misuse."""
    with pytest.raises(UsageError, match=says):
        RUNNER.check([Arm("x", settings)])


def no_model() -> Executor:
    raise ModelUnreadable("there is no model here")


def test_worker_that_cannot_start_says_why() -> None:
    """Its own sentence comes out, and no process is left."""
    with pytest.raises(EngineError, match="w0 failed to start: there is no model here"):
        ProcessFleet([WorkerPlan(EngineConfig(), no_model)], make_policy("round_robin"))
    with pytest.raises(EngineError, match="w0 failed to start: ValueError: 3 is no shape"):
        ProcessFleet([WorkerPlan(EngineConfig(), no_shape)], make_policy("round_robin"))
    assert not active_children()


def no_shape() -> Executor:
    raise ValueError("3 is no shape")


def third_step_fails() -> Executor:
    executor = make_executor(RUNNER)
    step, count = executor.execute, iter(range(10))

    def execute(*given: Any) -> Any:
        if next(count) == 2:
            raise RuntimeError("the device is gone")
        return step(*given)

    executor.execute = execute  # type: ignore[method-assign]
    return executor


def test_a_step_that_raises_in_a_worker_comes_out_as_what_it_was(tmp_path: Path) -> None:
    """Not as an exit code: the error's own text, the worker, how many requests were open; its rows are written."""
    with ProcessFleet([WorkerPlan(EngineConfig(worker="w0"), third_step_fails)], make_policy("round_robin")) as fleet:
        fleet.begin_run("r", tmp_path)
        with pytest.raises(EngineError, match="w0 failed with 1 requests open: RuntimeError: the device is gone"):
            fleet.run([call("a", 9, output_tokens=8)])
    assert not active_children()
    assert len(rows(tmp_path, "step")) == 2


def test_worker_that_dies_ends_the_run_with_its_exit_code() -> None:
    """Killed in mid-run: the fleet says which worker, and how many requests were open."""
    plans = [WorkerPlan(EngineConfig(worker="w0"), partial(make_executor, RUNNER))]
    with ProcessFleet(plans, make_policy("round_robin")) as fleet:
        calls = RUNNER.calls(asked(WORKLOAD, 1, is_warm=True), ON)
        (child,) = [process for process in active_children() if process.name == "kvscope-w0"]
        child.kill()
        child.join()
        with pytest.raises(EngineError, match="w0"):
            fleet.run(calls)


def call(name: str, num_tokens: int, output_tokens: int = 3) -> Call:
    return Call(name, 0, num_tokens, output_tokens, token_ids=[1] * num_tokens)


def test_every_call_ends_once_whatever_becomes_of_it(tmp_path: Path) -> None:
    """Longer than the pool, even far longer than a pipe holds: refused; out of time: aborted; the others finish."""
    config = EngineConfig(worker="w0", timeout_s=30.0, scheduler=SchedulerConfig(max_num_seqs=1))
    with ProcessFleet([WorkerPlan(config, partial(make_executor, RUNNER))], make_policy("least_loaded")) as fleet:
        fleet.begin_run("r", tmp_path)
        calls = [call("a", 9), call("longer", 2000), call("far-longer", 500_000), call("b", 9), call("empty", 0)]
        tally = fleet.run(calls)
        assert (tally.finished, tally.rejected, tally.aborted, tally.output_tokens) == (2, 3, 0, 6)
        late = replace(call("late", 9), at_ns=-31 * 10**9)  # it came 31 s ago
        tally = fleet.run([late, call("c", 9)])
        assert (tally.finished, tally.rejected, tally.aborted, tally.stuck) == (1, 0, 1, 0)
        assert fleet.router.board.read(0)[0] == [0.0]
        fleet.begin_run(None, None)
    states = {row["request_id"]: row["state"] for row in rows(tmp_path, "request")}
    assert states == {
        "a": "finished",
        "b": "finished",
        "c": "finished",
        "late": "aborted",
        **dict.fromkeys(("longer", "far-longer", "empty"), "rejected"),
    }


def test_leaving_a_fleet_whose_worker_is_gone_is_quiet() -> None:
    """Its processes end, and nothing is raised on the way out."""
    with ProcessFleet([WorkerPlan(EngineConfig(), partial(make_executor, RUNNER))], make_policy("random")):
        (child,) = [process for process in active_children() if process.name == "kvscope-w0"]
        child.kill()
    child.join(5)
    assert not child.is_alive()
