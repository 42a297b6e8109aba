"""The two ways in which `kvscope engine run` serves calls: virtual time in this process, or processes that compute."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_probe.engine.config import EngineConfig
    from engine_probe.engine.executor import Executor
    from engine_probe.engine.fleet.run_summary import Served
    from engine_probe.engine.fleet.virtual_fleet import Tally
    from engine_probe.engine.traffic.call import Call

SEEDED = "seeded"
COMPUTED_BLOCKS = 2048
FIRST_TOKEN_ID = 3
"""Below are the ids that models keep for themselves."""
MOST_WORKERS, MOST_PROCESSES = 4096, 64
"""Of a fleet in virtual time, and of one that computes: far beyond what a machine gets through."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be served, by how many workers with which settings; out: folder of the rows, None: nowhere.

    index_delay_s, index_loss_ratio   of the block events that the router's index hears of; None: the fleet's own
    """

    calls: Sequence[Call]
    config: EngineConfig
    workers: int
    policy: str
    blocks: int | None
    in_flight: int | None
    seed: int
    out: Path | None
    run_id: str | None
    on_progress: Callable[[int], None]
    index_delay_s: float | None = None
    index_loss_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of it. real_s: seconds it took here; facts: num_blocks, block_size, model, is_virtual, rows, ..."""

    served: Served
    tally: Tally
    real_s: float
    facts: Mapping[str, Any]


def virtual_run(asked: Asked, model: str, hardware: str, tp: int) -> Ran:
    """In virtual time, on named hardware."""
    from engine_probe.engine.fleet.build import FleetSettings, RouterSettings, build_fleet, recorders
    from engine_probe.engine.fleet.run_summary import SummarySink
    from engine_probe.engine.roofline.hardware import find_hardware
    from engine_probe.engine.roofline.model_shape import find_shape
    from engine_probe.sending.sink import FileSink

    _check_workers(asked.workers, MOST_WORKERS, "each has a pool and a cache of its own to simulate")
    router = RouterSettings(policy=asked.policy)
    if asked.index_delay_s is not None:
        router = replace(router, index_delay_s=asked.index_delay_s)
    if asked.index_loss_ratio is not None:
        router = replace(router, index_loss_ratio=asked.index_loss_ratio)
    settings = FleetSettings(
        find_shape(model),
        find_hardware(hardware),
        num_workers=asked.workers,
        tp=tp,
        num_blocks=asked.blocks,
        engine=asked.config,
        router=router,
        in_flight=asked.in_flight,
        seed=asked.seed,
    )
    sink = SummarySink(None if asked.out is None else FileSink(asked.out))
    fleet = build_fleet(settings, sink, run_id=asked.run_id, on_progress=asked.on_progress)
    began = time.perf_counter()
    tally = fleet.run(asked.calls)
    for recorder in recorders(fleet):
        recorder.close()
    facts = {
        "num_blocks": fleet.engines[0].kv.pool.num_blocks,
        "block_size": asked.config.block_size,
        "model": settings.shape.name,
        "hardware": settings.hardware.name,
        "is_virtual": True,
        "rows": sink.num_rows,
    }
    return Ran(sink.served(), tally, time.perf_counter() - began, facts)


def compute_run(asked: Asked, model: str | None) -> Ran:
    """With real tokens, each worker a process on this machine. model: a folder; None: a tiny seeded one."""
    import pyarrow.parquet as pq

    from engine_probe.engine.fleet.policies import make_policy
    from engine_probe.engine.fleet.process_fleet import ProcessFleet
    from engine_probe.engine.fleet.process_worker import WorkerPlan
    from engine_probe.engine.fleet.run_summary import SummarySink
    from engine_probe.engine.traffic.tokens import with_tokens
    from engine_probe.errors import UsageError

    if importlib.util.find_spec("torch") is None:
        raise UsageError("--compute needs torch, which is not installed: pip install '.[service,engine]'")
    _check_workers(asked.workers, MOST_PROCESSES, "each is a process of its own, with torch in it")
    config, blocks = asked.config, COMPUTED_BLOCKS if asked.blocks is None else asked.blocks
    if blocks < 1:
        raise UsageError(f"an engine of {blocks} KV blocks can hold no token")
    vocab_size = _vocab_size(model)
    root = config.identity.root(config.salt)
    calls = [
        with_tokens(call, config.block_size, vocab_size, root=root, salt=config.salt, first_id=FIRST_TOKEN_ID)
        for call in asked.calls
    ]
    make = partial(make_executor, model, config.block_size, blocks, asked.seed)
    plans = [WorkerPlan(replace(config, worker=f"w{index}"), make) for index in range(asked.workers)]
    with ExitStack() as stack:
        out = asked.out or Path(stack.enter_context(TemporaryDirectory(prefix="kvscope-run-")))
        fleet = stack.enter_context(
            ProcessFleet(plans, make_policy(asked.policy, seed=asked.seed), on_progress=asked.on_progress)
        )
        fleet.begin_run(asked.run_id, out)
        began = time.perf_counter()
        tally = fleet.run(calls)
        real_s = time.perf_counter() - began
        fleet.begin_run(None, None)
        sink = SummarySink()
        for part in sorted(out.glob("*/kind=*/*.parquet")):
            sink.write({part.parent.name.removeprefix("kind="): pq.read_table(part, partitioning=None)})
    facts = {
        "num_blocks": blocks,
        "block_size": config.block_size,
        "model": model or SEEDED,
        "hardware": "this machine",
        "is_virtual": False,
        "rows": sink.num_rows,
    }
    return Ran(sink.served(), tally, real_s, facts)


def make_executor(model: str | None, block_size: int, blocks: int, seed: int) -> Executor:
    """Called in the worker's own process."""
    from engine_probe.engine.server.model import TINY
    from engine_probe.engine.torch_executor.executor import TorchExecutor, TorchOptions

    options = TorchOptions(block_size=block_size, num_blocks=blocks, seed=seed, warm_up_tokens=64)
    if model is not None:
        return TorchExecutor.from_folder(Path(model), options)
    return TorchExecutor.seeded(TINY, 0, options)


def _vocab_size(model: str | None) -> int:
    from engine_probe.engine.server.model import TINY
    from engine_probe.engine.torch_executor.checkpoint import read_folder_config

    return TINY.vocab_size if model is None else read_folder_config(Path(model)).vocab_size


def _check_workers(workers: int, most: int, why: str) -> None:
    """Raises UsageError for a fleet of none, or of more than this machine gets through."""
    from engine_probe.errors import UsageError

    if workers < 1:
        raise UsageError(f"a fleet of {workers} workers serves nobody; give 1 or more")
    if workers > most:
        raise UsageError(f"--workers is {workers:,}; give up to {most:,}: {why}")
