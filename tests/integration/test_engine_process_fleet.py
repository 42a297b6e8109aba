"""A fleet in real time: worker processes that compute, behind one router."""

from __future__ import annotations

from functools import partial
from multiprocessing import active_children
from pathlib import Path

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
    with pytest.raises(EngineError, match="w0 cannot start: there is no model here"):
        ProcessFleet([WorkerPlan(EngineConfig(), no_model)], make_policy("round_robin"))


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
