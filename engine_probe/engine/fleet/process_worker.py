"""One worker of a torch fleet: a process with an engine, that reads what to do from a pipe and tells what it did.

To it: ("submit", Sequence), ("abort", request id, reason), ("clear",), ("run", run id, folder), ("stop",). From it: Ready,
then a Report after each step that brought something, and Ready again when a run's rows are written and the next may begin.
A worker that cannot start, or whose engine raises, says why (Failed), and ends. A thread takes orders out of the pipe, so that a long prompt never waits in it
for the end of a step, and keeps the fleet from sending others their calls.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from engine_probe.chain_hash import ROOT
from engine_probe.engine.block_pool import Evicted, Seconds
from engine_probe.engine.config import EngineConfig
from engine_probe.engine.engine import Engine, Output
from engine_probe.engine.executor import Executor
from engine_probe.engine.fleet.run_sink import RunSink, begin_run
from engine_probe.engine.name_book import Names
from engine_probe.engine.sequence import Sequence as EngineSequence
from engine_probe.errors import KvscopeError, PromptRefused
from engine_probe.recording.recorder import Recorder

log = logging.getLogger(__name__)
IDLE_S = 0.2

Orders = queue.SimpleQueue[tuple[Any, ...] | None]
"""Orders in the order in which they came; None: the fleet is gone."""
MakeExecutor = Callable[[], Executor]


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What a process needs to become a worker; it travels to it pickled. num_threads: of torch."""

    config: EngineConfig
    make_executor: MakeExecutor
    num_threads: int = 1


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker takes requests; num_blocks of its pool."""

    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker ends. error: what was raised, in a sentence."""

    error: str

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """Ours speak for themselves; others say what they are too."""
        return cls(error.message if isinstance(error, KvscopeError) else f"{type(error).__name__}: {error}")


@dataclass(slots=True)
class Report:
    """What happened since the last one.

    tokens     (request id, new tokens, finish reason or None)
    refused    (request id, why)
    stored     (at_ns, hashes, parents), evicted (at_ns, hashes), in order; only where somebody listens
    """

    num_running: int = 0
    num_waiting: int = 0
    tokens: list[tuple[str, int, str | None]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    blocks: list[tuple[str, int, list[int], list[int | None]]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.tokens or self.refused or self.blocks)


def serve(plan: WorkerPlan, pipe: Connection) -> None:
    """The process's main: serve until told to stop, or until the other end is gone."""
    os.environ["OMP_NUM_THREADS"] = str(plan.num_threads)
    sink, report = RunSink(), Report()
    try:
        engine = _start(plan, sink, report)
    except Exception as error:  # whoever waits for it must not be left with an exit code
        if not isinstance(error, KvscopeError):
            log.exception("worker did not start", extra={"worker": plan.config.worker})
        _tell(pipe, error)
        return
    pipe.send(Ready(engine.kv.pool.num_blocks))
    recorder = engine.flight.recorder
    orders: Orders = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, orders), name="kvscope-orders", daemon=True).start()
    try:
        outputs: Sequence[Output] | None = None
        while _obey(engine, orders, pipe, sink, report, IDLE_S if outputs is None else 0.0):
            outputs = engine.step() if engine.has_work else None
            for output in outputs or ():
                report.tokens.append((output.sequence.request_id, len(output.tokens), output.finish_reason))
            if not report.is_empty:
                report.num_running, report.num_waiting = engine.num_running, engine.num_waiting
                pipe.send(report)
                report.tokens, report.refused, report.blocks = [], [], []
    except (EOFError, BrokenPipeError, ConnectionResetError):
        log.warning("the fleet is gone, the worker ends", extra={"worker": plan.config.worker})
    except Exception as error:  # a step's, mostly: its requests are lost, and the fleet is told why
        log.exception("worker failed", extra={"worker": plan.config.worker})
        _tell(pipe, error)
    finally:
        with suppress(
            Exception
        ):  # after a failed step there may be nothing to end; what was recorded is written all the same
            engine.close()
            engine.flight.stopped(engine)
        recorder.close()


def _tell(pipe: Connection, error: Exception) -> None:
    with suppress(OSError):  # nobody is left to be told
        pipe.send(Failed.of(error))


def _start(plan: WorkerPlan, sink: RunSink, report: Report) -> Engine:
    from engine_probe.engine.torch_executor.device import use_threads

    use_threads(plan.num_threads)
    executor = plan.make_executor()
    recorder = Recorder(sink, worker=plan.config.worker, flush_s=0.5)
    recorder.constants["request"].update(engine="kvscope", model=executor.worker_facts.get("model"))
    attention = getattr(executor, "attention", None)
    recorder.constants["step"].update(
        policy=plan.config.scheduler.policy, attention_backend=None if attention is None else attention.name
    )
    return Engine(plan.config, executor, recorder, listeners=[_Teller(report)])


def _read(pipe: Connection, orders: Orders) -> None:
    """Take orders out of the pipe until the fleet is gone."""
    try:
        while True:
            orders.put(pipe.recv())
    except (EOFError, OSError):
        orders.put(None)


def _obey(engine: Engine, orders: Orders, pipe: Connection, sink: RunSink, report: Report, wait_s: float) -> bool:
    """Do what was ordered, waiting so long for it. False: stop. Raises EOFError where the fleet is gone."""
    while True:
        try:
            order = orders.get(wait_s > 0, wait_s or None)
        except queue.Empty:
            return True
        wait_s = 0.0
        if order is None:
            raise EOFError
        if order[0] == "stop":
            return False
        if order[0] == "submit":
            sequence: EngineSequence = order[1]
            try:
                engine.submit(sequence)
            except PromptRefused as refusal:
                report.refused.append((sequence.request_id, refusal.message))
        elif order[0] == "abort":
            engine.abort(order[1], order[2])
        elif order[0] == "clear":
            engine.reset_prefix_cache()
        elif order[0] == "run":
            begin_run(engine.flight.recorder, sink, order[1], order[2], lambda: engine.flight.announce(engine))
            pipe.send(Ready(engine.kv.pool.num_blocks))


class _Teller:
    """Block changes go into the report (KvListener)."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def stored(self, sequence: EngineSequence, hashes: Names, parents: Names, first: int, at_ns: int) -> None:
        above = [None if parent == ROOT else parent for parent in parents.tolist()]
        self._report.blocks.append(("stored", at_ns, hashes.tolist(), above))

    def hit(self, sequence: EngineSequence, hashes: Names, idle_s: Seconds, at_ns: int) -> None:
        """Nobody asks."""

    def evicted(self, hashes: Names, blocks: Evicted, cause: str | None, at_ns: int) -> None:
        self._report.blocks.append(("evicted", at_ns, hashes.tolist(), []))

    def cleared(self, at_ns: int) -> None:
        self._report.blocks.append(("cleared", at_ns, [], []))
