"""A fleet in real time: each worker a process of its own, calls sent when they are due, routes written down.

Calls keep their instants whatever the fleet does (an open loop: a slow answer never delays the next question), and the
clock is the machine's monotonic one, which its processes share.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from engine_probe.engine.fleet.load_board import LoadBoard
from engine_probe.engine.fleet.policies import Policy
from engine_probe.engine.fleet.prefix_index import EventFeed, PrefixIndex
from engine_probe.engine.fleet.process_worker import Failed, Ready, Report, WorkerPlan, serve
from engine_probe.engine.fleet.router import USES_INDEX, Router
from engine_probe.engine.fleet.run_sink import RunSink, begin_run
from engine_probe.engine.fleet.virtual_fleet import Tally
from engine_probe.engine.sampling_params import SamplingParams
from engine_probe.engine.sequence import Sequence as EngineSequence
from engine_probe.engine.traffic.call import Call
from engine_probe.errors import EngineError, UsageError
from engine_probe.recording.recorder import Recorder

START_S = 120.0
STOP_S = 10.0


class _Worker:
    """This side of one worker process."""

    def __init__(self, plan: WorkerPlan, context: Any) -> None:
        self.name = plan.config.worker
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(plan, theirs), name=f"kvscope-{self.name}", daemon=True)
        self.process.start()
        theirs.close()
        self.num_running = self.num_waiting = 0

    def send(self, *order: object) -> None:
        try:
            self.pipe.send(order)
        except OSError as error:
            raise self.gone("") from error

    def gone(self, when: str) -> EngineError:
        """It ended by itself: with its own words where it left some, else with its exit code."""
        with suppress(EOFError, OSError):
            while self.pipe.poll():
                if isinstance(said := self.pipe.recv(), Failed):
                    return self.failed(said, when)
        self.process.join(1)
        return EngineError(f"worker {self.name} died{when} (exit {self.process.exitcode})", worker=self.name)

    def failed(self, said: Failed, when: str) -> EngineError:
        """What it said when it ended."""
        return EngineError(f"worker {self.name} failed{when}: {said.error}", worker=self.name)


class ProcessFleet:
    """Worker processes behind one router. A context manager: leaving it stops them.

    Rows go nowhere until `begin_run` says where.
    """

    def __init__(
        self,
        plans: Sequence[WorkerPlan],
        policy: Policy,
        *,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        if not plans:
            raise UsageError("a fleet has at least one worker")
        context = multiprocessing.get_context("spawn")
        self.tally = Tally()
        self._sink = RunSink()
        self._on_progress = on_progress
        self._workers = [_Worker(plan, context) for plan in plans]
        self._by_pipe: dict[Connection, int] = {worker.pipe: i for i, worker in enumerate(self._workers)}
        self._worker_of: dict[str, int] = {}
        self._feed = EventFeed(PrefixIndex(len(plans)))
        self._feeds_index = policy.name in USES_INDEX
        config = plans[0].config
        self._root = config.identity.root(config.salt)
        """Calls' blocks are named from here on (`traffic/tokens.py`), and so must the workers name theirs."""
        self.router = Router(
            policy,
            [worker.name for worker in self._workers],
            LoadBoard(self._workers),
            self._feed,
            Recorder(self._sink, flush_s=0.5),
            block_size=plans[0].config.block_size,
        )
        self.num_blocks = self._wait_until_ready(" to start")

    def __enter__(self) -> ProcessFleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def clear(self) -> None:
        """Forget every prefix, in every worker."""
        for worker in self._workers:
            worker.send("clear")

    def begin_run(self, run_id: str | None, folder: Path | None) -> None:
        """Rows of what comes now bear this run's name and go into `folder` as Parquet (None: nowhere).

        Those of the run before are written when this returns.
        """
        for worker in self._workers:
            worker.send("run", run_id, None if folder is None else folder / worker.name)
        begin_run(self.router.recorder, self._sink, run_id, None if folder is None else folder / "router")
        self._wait_until_ready()

    def run(self, calls: Iterable[Call], drain_s: float = 600.0) -> Tally:
        """Send the calls when they are due (at_ns from now on), wait for the last answer; what it came to.

        Raises EngineError where a worker died.
        """
        self.tally = Tally()
        started_ns = time.monotonic_ns()
        for call in calls:
            due_ns = started_ns + call.at_ns
            while (left_s := (due_ns - time.monotonic_ns()) / 1e9) > 0:
                self._listen(left_s)
            self._listen(0)
            self._send(call, due_ns)
        deadline = time.monotonic() + drain_s
        while self._worker_of and time.monotonic() < deadline:
            self._listen(0.5)
        for request_id, worker in list(self._worker_of.items()):
            self._workers[worker].send("abort", request_id, "stuck")
            self.tally.stuck += 1
            self._end(request_id)
        self.tally.virtual_s = (time.monotonic_ns() - started_ns) / 1e9
        return self.tally

    def close(self) -> None:
        """Stop the workers; what they recorded is written."""
        for worker in self._workers:
            with suppress(EngineError):  # it is gone already
                worker.send("stop")
        for worker in self._workers:
            worker.process.join(STOP_S)
            if worker.process.is_alive():
                worker.process.kill()
            worker.pipe.close()
        self.router.recorder.close()

    def _send(self, call: Call, due_ns: int) -> None:
        index = self.router.route(call, due_ns)
        columns = {
            "workload": call.workload,
            "session_id": call.session_id,
            "turn": call.turn,
            "prefix_hash": call.prefix_hash,
            "route_id": call.request_id,
            "labels": dict(call.labels),
        }
        sequence = EngineSequence(
            call.request_id,
            call.prompt_tokens,
            SamplingParams(max_tokens=call.output_tokens, ignore_eos=True),
            due_ns,
            token_ids=list(call.token_ids),
            root=self._root,
            priority=call.priority,
            tenant=call.tenant,
            columns={name: value for name, value in columns.items() if value is not None},
        )
        self._worker_of[call.request_id] = index
        self._workers[index].send("submit", sequence)
        if self._on_progress is not None:
            self._on_progress(1)

    def _listen(self, timeout_s: float) -> None:
        for pipe in wait(list(self._by_pipe), timeout_s):
            index = self._by_pipe[pipe]  # type: ignore[index]  # `wait` gives back what it was given
            worker, when = self._workers[index], f" with {len(self._worker_of)} requests open"
            try:
                report: Report | Failed = worker.pipe.recv()
            except (EOFError, OSError) as error:
                raise worker.gone(when) from error
            if isinstance(report, Failed):
                raise worker.failed(report, when)
            self._take_in(index, report)

    def _take_in(self, index: int, report: Report) -> None:
        worker = self._workers[index]
        worker.num_running, worker.num_waiting = report.num_running, report.num_waiting
        for request_id, num_tokens, reason in report.tokens:
            if request_id not in self._worker_of:
                continue  # it was given up, and ended before it heard so
            self.tally.output_tokens += num_tokens
            if reason is not None:
                self.tally.aborted += reason == "timeout"
                self.tally.finished += reason != "timeout"
                self._end(request_id)
        for request_id, _ in report.refused:
            self.tally.rejected += request_id in self._worker_of
            self._end(request_id)
        if not self._feeds_index:
            return
        for change, at_ns, hashes, parents in report.blocks:
            if change == "stored":
                self._feed.stored(at_ns, index, hashes, parents)
            elif change == "evicted":
                self._feed.removed(at_ns, index, hashes)
            else:
                self._feed.cleared(at_ns, index)

    def _end(self, request_id: str) -> None:
        worker = self._worker_of.pop(request_id, None)
        if worker is not None:
            self.router.board.ended(worker)

    def _wait_until_ready(self, when: str = "") -> int:
        """Blocks of a worker, once all of them are ready. Raises EngineError, and ends them all, where one is not."""
        num_blocks = 0
        try:
            for index, worker in enumerate(self._workers):
                if not worker.pipe.poll(START_S):
                    raise EngineError(f"worker {worker.name} was not ready within {START_S:.0f} s", worker=worker.name)
                try:
                    while isinstance(said := worker.pipe.recv(), Report):
                        self._take_in(index, said)
                except (EOFError, OSError) as error:
                    raise worker.gone(when) from error
                if isinstance(said, Failed):
                    raise worker.failed(said, when)
                ready: Ready = said
                num_blocks = ready.num_blocks
        except EngineError:
            self._kill()
            raise
        return num_blocks

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.process.join(STOP_S)
            worker.pipe.close()
