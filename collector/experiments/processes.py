"""Runs on the embedded engine in real time: each worker a process that computes, one fleet an arm, started once.

Between two runs caches are emptied and the rows get the new run's name. A cold arm is emptied again when counting begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from collector.experiments.judging import common_facts
from collector.experiments.runner import Folder, Ran
from collector.experiments.workload import BLOCK_SIZE, Asked, Workload, asked
from diagnosis.experiments.design import Arm, Trial
from engine_probe.engine.config import EngineConfig
from engine_probe.engine.fleet.policies import make_policy
from engine_probe.engine.fleet.process_fleet import ProcessFleet
from engine_probe.engine.fleet.process_worker import WorkerPlan
from engine_probe.engine.scheduler import SchedulerConfig
from engine_probe.engine.traffic.call import Call
from engine_probe.engine.traffic.tokens import with_tokens
from engine_probe.errors import EngineError, UsageError
from engine_probe.schema import arrow_schema

if TYPE_CHECKING:
    from engine_probe.engine.executor import Executor

READ_BACK = ("request", "step", "worker")
SETTINGS = ("cache", "routing")
FIRST_TOKEN_ID = 3
"""Below are the ids that models keep for themselves."""


@dataclass(frozen=True, slots=True)
class SeededModel:
    """A Llama with random weights: what it says is noise, what it costs is real. Fields of its config.json."""

    hidden_size: int = 32
    num_hidden_layers: int = 1
    num_attention_heads: int = 2
    num_key_value_heads: int = 1
    vocab_size: int = 512
    max_position_embeddings: int = 16384
    seed: int = 0

    def config(self) -> dict[str, Any]:
        """As config.json has it."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "intermediate_size": 2 * self.hidden_size,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
        }


@dataclass(frozen=True, slots=True)
class ProcessRunner:
    """workers, blocks of each, seats of each (the admission limit); device: of all of them."""

    model: SeededModel = field(default_factory=SeededModel)
    workers: int = 2
    blocks: int = 4000
    seats: int = 2
    budget: int = 2048
    device: str = "auto"

    def check(self, arms: Sequence[Arm]) -> None:
        """Arms differ in `cache` (on, off) and `routing`."""
        for arm in arms:
            self._engine(arm)
            make_policy(arm.settings.get("routing", "round_robin"))

    def run(
        self, trials: Sequence[Trial], workload: Workload, folder: Folder, tell: Callable[[int], None]
    ) -> list[Ran]:
        """Every run, in the given order, all on one machine and one after the other."""
        ran = []
        with ExitStack() as stack:
            fleets: dict[str, ProcessFleet] = {}
            for trial in trials:
                if trial.arm.name not in fleets:
                    fleets[trial.arm.name] = stack.enter_context(self.fleet(trial.arm))
            for trial in trials:
                with TemporaryDirectory(prefix="kvscope-run-") as temporary:
                    place = folder(trial) or Path(temporary)
                    ran.append(self._run_one(trial, workload, fleets[trial.arm.name], place))
                tell(len(ran))
        return ran

    def facts(self, arms: Sequence[Arm], workload: Workload) -> dict[str, Any]:
        """Of the fleets, and of what they are asked."""
        return {**common_facts({arm.name: self._facts(arm) for arm in arms}), **workload.facts()}

    def notes(self, workload: Workload, ran: Sequence[Ran]) -> list[str]:
        return [
            "real time: every worker is a process that computes on this machine; another run gives other numbers",
            f"each run begins with {workload.num_warmup} warm-up calls, {workload.warmup_gap_s:g} s apart",
        ]

    def fleet(self, arm: Arm) -> ProcessFleet:
        """The arm's workers, started and waiting."""
        config = self._engine(arm)
        plans = [
            WorkerPlan(replace(config, worker=f"w{index}"), partial(make_executor, self))
            for index in range(self.workers)
        ]
        return ProcessFleet(plans, make_policy(arm.settings.get("routing", "round_robin"), ties="lowest"))

    def calls(self, work: Asked, arm: Arm) -> list[Call]:
        """The calls with token ids, made up before the clock runs."""
        config = self._engine(arm)
        root = config.identity.root(config.salt)
        return [
            with_tokens(call, BLOCK_SIZE, self.model.vocab_size, root=root, salt=config.salt, first_id=FIRST_TOKEN_ID)
            for call in work.calls
        ]

    def _run_one(self, trial: Trial, workload: Workload, fleet: ProcessFleet, place: Path) -> Ran:
        if workload.in_flight is not None:
            raise UsageError("worker processes are asked in an open loop: give a rate, not --concurrency")
        work = asked(workload, trial.repeat, is_warm=trial.arm.is_warm)
        calls = self.calls(work, trial.arm)
        fleet.clear()
        fleet.begin_run(trial.run_id, place)
        tally = fleet.run(calls if trial.arm.is_warm else _clearing(calls, work.num_warmup, fleet))
        fleet.begin_run(None, None)
        if tally.stuck or tally.rejected:
            raise EngineError(f"{trial.run_id}: {tally.stuck + tally.rejected} requests could not be served")
        tables = {kind: _read(place, kind) for kind in READ_BACK}
        return Ran(trial.run_id, tables, {"seconds": tally.virtual_s, "output_tokens": tally.output_tokens})

    def _engine(self, arm: Arm) -> EngineConfig:
        unknown = sorted(set(arm.settings) - set(SETTINGS))
        cache = arm.settings.get("cache", "on")
        if unknown or cache not in ("on", "off"):
            raise UsageError(
                f"arm {arm.name}: worker processes differ in {' and '.join(SETTINGS)} (cache=on|off), not in "
                f"{', '.join(unknown) or f'cache={cache}'}"
            )
        return EngineConfig(
            block_size=BLOCK_SIZE,
            prefix_caching=cache == "on",
            scheduler=SchedulerConfig(max_num_seqs=self.seats, max_num_batched_tokens=self.budget),
        )

    def _facts(self, arm: Arm) -> dict[str, Any]:
        model = self.model
        return {
            "engine": f"kvscope {version('kvscope')}, computing",
            "model": f"Llama of {model.num_hidden_layers} layer(s) of {model.hidden_size}",
            "weights": f"random, seed {model.seed}",
            "tokenizer": "none: prompts are token ids",
            "template": "none",
            "hardware": self.device,
            "workers": self.workers,
            "blocks_per_worker": self.blocks,
            "routing": arm.settings.get("routing", "round_robin"),
            "engine_flags": self._engine(arm).flags(),
            "sampling": "greedy",
            "stop": "each call's own length",
        }


def make_executor(runner: ProcessRunner) -> Executor:
    """Called in the worker's own process."""
    from engine_probe.engine.torch_executor.executor import TorchExecutor, TorchOptions
    from engine_probe.engine.torch_executor.model_config import read_config

    options = TorchOptions(device=runner.device, dtype="float32", num_blocks=runner.blocks, warm_up_tokens=256)
    return TorchExecutor.seeded(read_config(runner.model.config()), runner.model.seed, options)


def serving_s(runner: ProcessRunner, arms: Mapping[str, Arm], workload: Workload, calls: int = 6) -> dict[str, float]:
    """Seconds that one call takes when nothing else is there, by arm: the median of some, after a first one."""
    import statistics

    found = {}
    for name, arm in arms.items():
        with runner.fleet(arm) as fleet:
            took = []
            for call in runner.calls(asked(replace(workload, num_requests=calls, num_warmup=1), 1, is_warm=True), arm):
                began = time.monotonic()
                fleet.run([replace(call, at_ns=0)])
                took.append(time.monotonic() - began)
            found[name] = statistics.median(took[1:])
    return found


def _clearing(calls: Sequence[Call], num_warmup: int, fleet: ProcessFleet) -> Iterator[Call]:
    for number, call in enumerate(calls):
        if number == num_warmup:
            fleet.clear()
        yield call


def _read(place: Path, kind: str) -> pa.Table:
    parts = sorted(place.glob(f"*/kind={kind}/*.parquet"))
    if not parts:
        return arrow_schema(kind).empty_table()
    return pa.concat_tables([pq.read_table(part, partitioning=None) for part in parts])
