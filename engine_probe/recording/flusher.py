"""The thread beside the engine's: some times a second it makes tables of what was noted, and hands them to the sink.

It also looks after the clock's anchor, judges the rows before anybody else does (one bad row must not cost its batch), and
tells every loss with a `gap` mark. Invariant: a row drained is written, or counted in `lost`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from engine_probe.errors import InvalidRows
from engine_probe.recording.request_log import OpenRequest
from engine_probe.recording.step_times import StepTimes

if TYPE_CHECKING:
    import pyarrow as pa

    from engine_probe.recording.block_log import BlockEvents
    from engine_probe.recording.recorder import Recorder
    from engine_probe.recording.request_rows import RequestRow
    from engine_probe.recording.step_ring import Steps
    from engine_probe.sending.sink import Sink

log = logging.getLogger(__name__)

_FORGET_STEPS: Final = 4096
_BREATH: Final = 8
"""Requests turned into rows before the engine's thread may have the interpreter."""
_MAX_BAD_ROWS: Final = 20
"""Rows taken out of a table one by one; a table with more bad rows is dropped whole."""


class Flusher:
    """Makes and writes a recorder's rows. flush_s: seconds between flushes; 0 for no thread."""

    def __init__(self, recorder: Recorder, sink: Sink, flush_s: float) -> None:
        self._recorder = recorder
        self._sink = sink
        self._flush_s = flush_s
        self._times = StepTimes()
        self._pending: list[OpenRequest] = []
        self.lost: Counter[str] = Counter()
        self._untold: Counter[tuple[str, str]] = Counter()
        self._telling: Counter[tuple[str, str]] = Counter()
        self._seen: Counter[str] = Counter()
        self._since_ns = recorder.clock.now_ns()
        self._told: set[str] = set()
        self._working = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvscope-flush", daemon=True)
        if flush_s > 0:
            self._thread.start()

    def flush(self, *, is_last: bool = False) -> None:
        """One pass. Raises nothing that comes from rows or from the sink."""
        with self._working:
            tables = self._drain(is_last)
            self._write(tables)

    def close(self, timeout_s: float) -> None:
        """Stop the thread, flush a last time, close the sink."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._working.acquire(timeout=timeout_s):
            self._working.release()
            self.flush(is_last=True)
        else:
            log.warning("the sink does not come back, last rows are lost")
        self._sink.close()

    def _run(self) -> None:
        while not self._stop.wait(self._flush_s):
            try:
                self.flush()
            except Exception:
                self._tell("flush", "a flush failed, its rows are lost", log.exception)

    def _drain(self, is_last: bool) -> dict[str, pa.Table]:
        recorder = self._recorder
        move = recorder.clock.reanchor()
        # In this order: a request noted as open now, or drained here, keeps its steps' instants; steps come last, so
        # that they include those that an ended request's tokens belong to.
        floor = self._oldest_step_needed()
        self._pending += [recorder.ended.popleft() for _ in range(len(recorder.ended))]
        measured = [recorder.measured.popleft() for _ in range(len(recorder.measured))]
        rows = [recorder.rows.popleft() for _ in range(len(recorder.rows))]
        calls = recorder.blocks.drain()
        drained = recorder.ring.drain()
        tables: dict[str, list[pa.Table]] = {}
        for steps in drained:
            self._times.extend(steps)
            self._add(tables, "step", len(steps), partial(self._steps, steps))
        ready = [r for r in self._pending if is_last or not r.changes or r.stop_step <= self._times.stop]
        self._pending = [] if is_last else [r for r in self._pending if r.changes and r.stop_step > self._times.stop]
        if ready:
            self._add(tables, "request", len(ready), lambda: self._requests(ready))
        if measured:
            self._add(tables, "request", len(measured), lambda: self._measured(measured))
        if calls:
            self._add(tables, "block", sum(call.num_events for call in calls), lambda: self._blocks(calls))
        if move is not None:
            rows.append(("mark", {**move.to_mark(recorder.worker), "at_ns": move.at_ns - recorder.clock.offset_ns}))
        rows += [("mark", mark) for mark in self._gap_marks()]
        self._add_rows(tables, rows)
        if floor - self._times.base >= _FORGET_STEPS:
            self._times.forget_before(floor)
        import pyarrow as pa

        return {kind: pa.concat_tables(parts) for kind, parts in tables.items()}

    def _oldest_step_needed(self) -> int:
        needed = [request.first_step for request in (*self._pending, *self._recorder.open_requests)]
        needed += [request.first_step for request in list(self._recorder.ended)]
        return min([step for step in needed if step is not None], default=self._times.stop)

    def _add(self, tables: dict[str, list[pa.Table]], kind: str, num_rows: int, make: Callable[[], pa.Table]) -> None:
        """Make a table and judge it; a mistake costs this table and is counted."""
        try:
            table = self._judged(kind, make())
        except Exception as error:
            self._lose(kind, num_rows, "recorder_error")
            self._tell(f"{kind} {type(error).__name__}", f"rows of kind {kind} could not be made", log.exception)
            return
        if table.num_rows:
            tables.setdefault(kind, []).append(table)

    def _steps(self, steps: Steps) -> pa.Table:
        from engine_probe.recording.step_ring import steps_table

        return steps_table(steps, self._recorder.clock.offset_ns, self._recorder.constants["step"])

    def _requests(self, ended: Sequence[OpenRequest]) -> pa.Table:
        from engine_probe.recording.request_rows import request_row
        from engine_probe.recording.request_table import requests_table

        constants = {"vantage": "engine", **self._constants("request")}
        rows = []
        for number, request in enumerate(ended):
            try:
                rows.append(request_row(request, self._times))
            except Exception as error:
                self._lose("request", 1, "recorder_error")
                self._tell(f"request {type(error).__name__}", "a request could not be made a row", log.exception)
            if self._flush_s and number % _BREATH == 0:
                time.sleep(0)  # the engine's thread waits for the interpreter
        table, misfits = requests_table(rows, self._recorder.clock.offset_ns, constants)
        self._note_misfits("request", misfits)
        return table

    def _measured(self, rows: Sequence[RequestRow]) -> pa.Table:
        from engine_probe.recording.request_table import requests_table

        table, misfits = requests_table(rows, self._recorder.clock.offset_ns, self._constants("request"))
        self._note_misfits("request", misfits)
        return table

    def _blocks(self, calls: Sequence[BlockEvents]) -> pa.Table:
        from engine_probe.recording.block_log import blocks_table

        offset_ns, sampling = self._recorder.clock.offset_ns, self._recorder.sampling
        constants = self._constants("block")
        try:
            return blocks_table(calls, offset_ns, constants, sampling)[0]
        except (ValueError, TypeError, OverflowError):
            return blocks_table([call for call in calls if self._is_sound(call)], offset_ns, constants, sampling)[0]

    def _is_sound(self, call: BlockEvents) -> bool:
        """Whether one call's values fit the contract; if not, they are counted as lost."""
        from engine_probe.recording.block_log import blocks_table

        try:
            blocks_table([call], 0, {}, self._recorder.sampling)
        except (ValueError, TypeError, OverflowError) as error:
            self._lose("block", call.num_events, "recorder_invalid")
            self._tell("block", f"block events do not fit the contract: {error}", log.warning)
            return False
        return True

    def _add_rows(self, tables: dict[str, list[pa.Table]], rows: Sequence[tuple[str, dict[str, Any]]]) -> None:
        by_kind: dict[str, list[dict[str, Any]]] = {}
        for kind, columns in rows:
            by_kind.setdefault(kind, []).append(columns)
        for kind, found in by_kind.items():
            self._add(tables, kind, len(found), partial(self._rows, kind, found))

    def _rows(self, kind: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
        from engine_probe.recording.request_table import rows_table

        table, misfits = rows_table(kind, rows, self._recorder.clock.offset_ns, self._constants(kind))
        self._note_misfits(kind, misfits)
        return table

    def _constants(self, kind: str) -> dict[str, Any]:
        """Columns of every row of a kind; sampled kinds say their rate."""
        constants = self._recorder.constants[kind]
        if kind in ("request", "route", "transfer", "block"):
            return {"sample_rate": self._recorder.sampling.sample_rate, **constants}
        return constants

    def _judged(self, kind: str, table: pa.Table) -> pa.Table:
        """The table without the rows that break the contract."""
        import pyarrow as pa

        from engine_probe.wire.validate import validate

        now_ns = self._recorder.clock.now_ns()
        for _ in range(_MAX_BAD_ROWS):
            try:
                validate(kind, table, now_ns)
                return table
            except InvalidRows as error:
                self._lose(kind, 1, "recorder_invalid")
                self._tell(f"{kind} {error.column}", f"a row breaks the contract: {error.message}", log.warning)
                row = int(error.row or 0)
                table = pa.concat_tables([table.slice(0, row), table.slice(row + 1)])
        self._lose(kind, table.num_rows, "recorder_invalid")
        return table.slice(0, 0)

    def _write(self, tables: dict[str, pa.Table]) -> None:
        if not tables:
            return
        try:
            self._sink.write(tables)
        except Exception as error:
            # Whatever a sink raises, the engine goes on, and what was to be told now is told later.
            num_tales = len({reason for reason, _ in self._telling})
            for kind, table in tables.items():
                self._lose(kind, table.num_rows - (num_tales if kind == "mark" else 0), "sink_failed")
            self._untold.update(self._telling)
            self._tell("sink", f"the sink took no rows: {error}", log.warning)
        self._telling.clear()

    def _gap_marks(self) -> list[dict[str, Any]]:
        """One `mark` a reason for what was lost since the last pass."""
        recorder = self._recorder
        full = Counter({"step": recorder.ring.num_lost, "block": recorder.blocks.num_lost})
        totals = recorder.refused + full
        for kind, count in (totals - self._seen).items():
            self._untold["recorder_full", kind] += count
        self._seen = totals
        now_ns = recorder.clock.now_ns()
        marks = []
        self._telling, self._untold = self._untold, Counter()
        for reason in sorted({reason for reason, _ in self._telling}):
            rows = {kind: count for (why, kind), count in sorted(self._telling.items()) if why == reason}
            what = ", ".join(f"{count} {kind}" for kind, count in rows.items())
            attrs = {"reason": reason, "dropped_rows": str(sum(rows.values()))}
            attrs |= {f"dropped_{kind}": str(count) for kind, count in rows.items()}
            attrs |= {"from_ns": str(self._since_ns), "to_ns": str(now_ns)}
            text = f"The recorder lost {what} rows ({reason.replace('_', ' ')})."
            marks.append({"at_ns": now_ns - recorder.clock.offset_ns, "mark": "gap", "subject": recorder.worker})
            marks[-1] |= {"text": text, "attrs": attrs}
        self._since_ns = now_ns
        return marks

    def _lose(self, kind: str, num_rows: int, reason: str) -> None:
        if num_rows:
            self._untold[reason, kind] += num_rows
            self.lost[kind] += num_rows

    def _note_misfits(self, kind: str, misfits: int) -> None:
        if misfits:
            self._tell(
                f"misfit {kind}", f"values of kind {kind} did not fit their columns and were left out", log.warning
            )

    def _tell(self, what: str, message: str, say: Callable[..., None]) -> None:
        """Say it once."""
        if what not in self._told:
            self._told.add(what)
            say(message)
