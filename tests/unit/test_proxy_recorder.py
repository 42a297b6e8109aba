"""Rows that were measured elsewhere go through the recorder: shifted to UTC, sampled rows marked, losses told."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from engine_probe.clock import Clock
from engine_probe.recording.recorder import Recorder
from engine_probe.recording.request_rows import RequestRow
from engine_probe.sampling import Sampling
from engine_probe.sending.sink import MemorySink

UTC = 1_764_000_000 * 10**9


def recorder(sink: MemorySink, **options: object) -> Recorder:
    clock = Clock(lambda: 100, lambda: UTC + 100)
    constants = {"request": {"vantage": "client"}}
    return Recorder(sink, flush_s=0, clock=clock, constants=constants, **options)  # type: ignore[arg-type]


def row(number: int = 0) -> RequestRow:
    columns: dict[str, Any] = {
        "request_id": f"r{number}",
        "state": "finished",
        "arrival_ns": 10,
        "first_token_ns": 20,
        "end_ns": 30,
    }
    return RequestRow(columns, np.array([20, 25]), np.array([1, 2]))


def test_a_measured_row_is_written_with_its_instants_in_utc() -> None:
    """Scalars and lists alike; the constants of the kind stand where the row says nothing."""
    sink = MemorySink()
    recording = recorder(sink, sampling=Sampling(0.5))
    recording.add(row())
    recording.close()
    (written,) = sink.table("request").to_pylist()
    assert (written["arrival_ns"], written["at_ns"], written["token_ns"]) == (UTC + 10, UTC + 30, [UTC + 20, UTC + 25])
    assert (written["token_counts"], written["vantage"], written["sample_rate"]) == ([1, 2], "client", 0.5)


@pytest.mark.parametrize("threads", [1, 4])
def test_rows_beyond_what_may_wait_are_counted_and_told(threads: int) -> None:
    """Whichever threads they come from."""
    sink = MemorySink()
    recording = recorder(sink, ended=8)

    def add() -> None:
        for number in range(20):
            recording.add(row(number))

    adders = [threading.Thread(target=add) for _ in range(threads)]
    for adder in adders:
        adder.start()
    for adder in adders:
        adder.join()
    recording.close()
    written = sink.table("request").num_rows
    assert written >= 8
    assert written + recording.lost["request"] == 20 * threads
    (mark,) = sink.table("mark").to_pylist(maps_as_pydicts="strict")
    assert (mark["mark"], mark["attrs"]["dropped_request"]) == ("gap", str(20 * threads - written))


def test_a_row_that_breaks_the_contract_does_not_cost_the_others() -> None:
    """It is taken out, counted and told."""
    sink = MemorySink()
    recording = recorder(sink)
    bad = row(1)
    bad.columns["prompt_tokens"] = -5
    recording.add(bad)
    recording.add(row(2))
    recording.close()
    assert sink.table("request").column("request_id").to_pylist() == ["r2"]
    assert recording.lost == {"request": 1}
