"""The recorder, driven as an engine's loop drives it, on a clock that the test turns."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from engine_probe.clock import Clock
from engine_probe.errors import ProbeError
from engine_probe.recording.recorder import NO_SLOT, Recorder
from engine_probe.recording.request_log import MAX_CHANGES
from engine_probe.sampling import Sampling
from engine_probe.sending.sink import MemorySink

WALL = 1_764_000_000 * 10**9
MS = 10**6


class Bench:
    """A recorder without a thread, its sink, and a clock in milliseconds from 0."""

    def __init__(self, **options: Any) -> None:
        self.now = 0
        self.wall = WALL
        self.sink = options.pop("sink", None) or MemorySink()
        self.clock = Clock(lambda: self.now, lambda: self.wall + self.now)
        self.recorder = Recorder(self.sink, worker="w0", clock=self.clock, flush_s=0, **options)

    def wait(self, ms: float) -> None:
        self.now += int(ms * MS)

    def step(self, ms: float, **numbers: Any) -> None:
        """One iteration of this length."""
        self.recorder.begin_step()
        self.wait(ms)
        self.recorder.end_step(**numbers)

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """What the sink has of a kind after a flush, nulls left out, instants in ms from 0."""
        self.recorder.flush()
        return [self.shown(row) for row in self.sink.table(kind).to_pylist()]

    def shown(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.ms(name, value) for name, value in row.items() if value is not None}

    def ms(self, name: str, value: Any) -> Any:
        if name == "spans":
            return [
                (s["phase"], self.ms("_ns", s["start_ns"]), self.ms("_ns", s["end_ns"]), s["tokens"]) for s in value
            ]
        if name == "token_ns":
            return [self.ms("_ns", item) for item in value]
        return (value - WALL) / MS if name.endswith("_ns") else value


def one_request(bench: Bench) -> None:
    """Waits 5 ms; prompt in two chunks of 10 ms; two tokens; preempted for 7 ms; recomputed in 20 ms; one last token."""
    recorder = bench.recorder
    slot = recorder.arrive("a", prompt_tokens=100, tenant="t")
    bench.wait(5)
    recorder.prefill(slot, 60)
    bench.step(10, alloc_s=0.001, sample_s=0.002)
    recorder.prefill(slot, 40, emits=1)
    bench.step(10, alloc_s=0.001, sample_s=0.002)
    recorder.decode(slot)
    bench.step(10)
    bench.step(10)
    recorder.preempt(slot)
    bench.step(7)
    recorder.prefill(slot, 103, emits=1, recomputed=103)
    bench.step(20)
    recorder.decode(slot)
    recorder.begin_step()
    bench.wait(5)
    recorder.finish(slot, finish_reason="stop")
    recorder.end_step()


def test_a_request_is_unfolded_from_its_runs_of_steps() -> None:
    """Instants, tokens and counts of the request above, worked by hand from the steps' ends 15 25 35 45 52 72 77."""
    bench = Bench(constants={"request": {"engine": "kvscope", "model": "tiny"}})
    one_request(bench)
    (row,) = bench.rows("request")
    assert (row["request_id"], row["vantage"], row["state"]) == ("a", "engine", "finished")
    assert (row["worker"], row["engine"], row["model"], row["tenant"]) == ("w0", "kvscope", "tiny", "t")
    instants = {name: row[name] for name in ("arrival_ns", "first_scheduled_ns", "first_token_ns", "last_token_ns")}
    assert instants == {"arrival_ns": 0, "first_scheduled_ns": 5, "first_token_ns": 25, "last_token_ns": 77}
    assert (row["end_ns"], row["at_ns"]) == (77, 77)
    assert row["token_ns"] == [25, 35, 45, 72, 77]
    assert row["token_counts"] == [1, 1, 1, 1, 1]
    assert (row["output_tokens"], row["prefill_chunks"], row["num_preemptions"]) == (5, 3, 1)
    assert (row["recomputed_tokens"], row["finish_reason"], row["prompt_tokens"]) == (103, "stop", 100)


def test_phases_of_a_request_tile_its_life() -> None:
    """queue 5, alloc 2, prefill 16, sampling 2 make the 25 ms to the first token; then decode 25 and stalled 27."""
    bench = Bench()
    one_request(bench)
    (row,) = bench.rows("request")
    phases = {name: round(1000 * value, 6) for name, value in row.items() if name.endswith("_s")}
    assert phases == {
        "queue_s": 5,
        "alloc_s": 2,
        "prefill_s": 16,
        "first_sample_s": 2,
        "decode_s": 25,
        "stalled_s": 27,
        "tail_s": 0,
        "unexplained_s": 0,
    }
    assert row["spans"] == [
        ("queue", 0, 5, None),
        ("alloc", 5, 6, None),
        ("prefill", 6, 15, 60),
        ("alloc", 15, 16, None),
        ("prefill", 16, 23, 40),
        ("first_sample", 23, 25, None),
        ("decode", 25, 45, 2),
        ("stalled", 45, 52, None),
        ("stalled", 52, 72, 103),
        ("decode", 72, 77, 1),
    ]


def test_what_the_engine_measured_itself_comes_first_and_the_residue_is_unexplained() -> None:
    """frontend 0-2, tokenize 1-3, a lookup 6-8 inside the queue; queued from 4: the ms 3-4 is unexplained."""
    bench = Bench()
    recorder = bench.recorder
    slot = recorder.arrive("a", queued_ns=4 * MS)
    recorder.span(slot, "frontend", 0, 2 * MS)
    recorder.span(slot, "tokenize", 1 * MS, 3 * MS)
    recorder.span(slot, "cache_lookup", 9 * MS, 11 * MS)
    bench.wait(10)
    recorder.prefill(slot, 5, emits=1)
    bench.step(10)
    bench.wait(1)
    recorder.finish(slot)
    (row,) = bench.rows("request")
    phases = {name: round(1000 * value, 6) for name, value in row.items() if name.endswith("_s") and value}
    assert phases == {
        "frontend_s": 2,
        "tokenize_s": 1,
        "queue_s": 6,
        "cache_lookup_s": 1,
        "prefill_s": 9,
        "unexplained_s": 1,
        "tail_s": 1,
    }
    assert row["first_token_ns"] - row["arrival_ns"] == 20


def test_a_chunk_that_is_not_followed_at_once_is_a_stall() -> None:
    """Step 0 computes a chunk, step 1 has no budget for the request, step 2 computes the rest."""
    bench = Bench()
    slot = bench.recorder.arrive("a")
    bench.recorder.prefill(slot, 8)
    bench.step(10)
    bench.step(10)
    bench.recorder.prefill(slot, 8, emits=1)
    bench.step(10)
    bench.recorder.finish(slot)
    (row,) = bench.rows("request")
    assert row["spans"] == [("prefill", 0, 10, 8), ("stalled", 10, 20, None), ("prefill", 20, 30, 8)]


def test_several_tokens_a_step_are_one_instant_with_a_count() -> None:
    """Speculation gives 3, then 1 token a step; a step that gives none has no instant."""
    bench = Bench()
    slot = bench.recorder.arrive("a")
    bench.recorder.prefill(slot, 4, emits=1)
    bench.step(10)
    bench.recorder.decode(slot, 3)
    bench.step(10)
    bench.step(10)
    bench.recorder.decode(slot, 0)
    bench.step(10)
    bench.recorder.decode(slot, 1)
    bench.step(10)
    bench.recorder.finish(slot)
    (row,) = bench.rows("request")
    assert (row["token_ns"], row["token_counts"], row["output_tokens"]) == ([10, 20, 30, 50], [1, 3, 3, 1], 8)


@pytest.mark.parametrize("state", ["failed", "aborted"])
def test_a_request_that_is_aborted_in_a_step_gets_no_token_of_it(state: str) -> None:
    """Only a finished request has the tokens of the step under way."""
    bench = Bench()
    slot = bench.recorder.arrive("a")
    bench.recorder.prefill(slot, 4, emits=1)
    bench.step(10)
    bench.recorder.decode(slot)
    bench.step(10)
    bench.recorder.begin_step()
    bench.wait(3)
    bench.recorder.finish(slot, state)
    bench.recorder.end_step()
    (row,) = bench.rows("request")
    assert (row["state"], row["token_ns"], row["last_token_ns"], row["end_ns"]) == (state, [10, 20], 20, 23)
    assert round(row["tail_s"] * 1000, 6) == 3


def test_a_request_that_never_ran_has_a_queue_and_nothing_else() -> None:
    """Aborted after 8 ms of waiting: no first token, no first schedule, the wait is the queue's."""
    bench = Bench()
    slot = bench.recorder.arrive("a")
    bench.wait(8)
    bench.recorder.finish(slot, "aborted")
    (row,) = bench.rows("request")
    assert "first_token_ns" not in row
    assert "first_scheduled_ns" not in row
    assert row["token_ns"] == []
    assert (row["queue_s"], row["unexplained_s"], row["end_ns"]) == (0.008, 0.0, 8)


def test_an_ended_request_waits_for_the_end_of_its_step() -> None:
    """A flush in the middle of a step keeps the request back: its last token has no instant yet."""
    bench = Bench()
    slot = bench.recorder.arrive("a")
    bench.recorder.prefill(slot, 4, emits=1)
    bench.recorder.begin_step()
    bench.wait(3)
    bench.recorder.finish(slot)
    assert bench.rows("request") == []
    bench.wait(4)
    bench.recorder.end_step()
    (row,) = bench.rows("request")
    assert row["token_ns"] == [7]


def test_the_last_flush_brings_out_what_still_waits() -> None:
    """The engine died in the middle of a step: the row comes, its unknown instant does not."""
    bench = Bench()
    slot = bench.recorder.arrive("a")
    bench.recorder.prefill(slot, 4, emits=1)
    bench.recorder.begin_step()
    bench.recorder.finish(slot)
    bench.recorder.close()
    (row,) = [bench.shown(row) for row in bench.sink.table("request").to_pylist()]
    assert "token_ns" not in row
    assert bench.sink.closed


def test_a_request_over_many_flushes_keeps_all_its_instants() -> None:
    """Ten thousand steps with a flush every thousand: the open request needs them all, and has them."""
    bench = Bench()
    slot = bench.recorder.arrive("a")
    bench.recorder.prefill(slot, 4, emits=1)
    bench.step(1)
    bench.recorder.decode(slot)
    for step in range(10_000):
        bench.step(1)
        if step % 1000 == 0:
            bench.recorder.flush()
    bench.recorder.finish(slot)
    (row,) = bench.rows("request")
    assert row["token_ns"] == [float(ms) for ms in range(1, 10_002)]
    assert len(bench.rows("step")) == 10_001


def test_steps_that_nobody_needs_are_forgotten() -> None:
    """With no request open the memory of step times does not grow."""
    bench = Bench()
    for _ in range(20):
        for _ in range(1000):
            bench.step(1)
        bench.recorder.flush()
    times = bench.recorder._flusher._times
    assert times.stop == 20_000
    assert times.stop - times.base <= 5_096


def test_step_rows_hold_what_was_given_and_null_for_the_rest() -> None:
    """Numbers, the struct of waits, constants; a NaN or None is unknown, a zero is zero."""
    bench = Bench(constants={"step": {"policy": "fcfs", "attention_backend": None}}, run_id="run-1")
    bench.wait(2)
    numbers: dict[str, Any] = {"gpu_util": None, "blocks_used": 0, "waiting_on_blocks": 2, "oldest_wait_s": 0.5}
    bench.step(10, num_running=3, schedule_s=0.001, forward_s=float("nan"), **numbers)
    (row,) = bench.rows("step")
    probe_s = row.pop("probe_s")
    assert 0 < probe_s < 1
    waits = {"blocks": 2, "budget": None, "seats": None, "dependency": None, "unknown": None}
    assert row == {
        "worker": "w0",
        "run_id": "run-1",
        "at_ns": 12,
        "step": 0,
        "duration_s": 0.01,
        "schedule_s": 0.001,
        "num_running": 3,
        "blocks_used": 0,
        "waiting_on": waits,
        "oldest_wait_s": 0.5,
        "policy": "fcfs",
    }


def test_a_run_of_steps_is_unfolded() -> None:
    """One call for four steps of a virtual-time engine: four rows, four tokens; who waits had waited less in the earlier ones,
    and of its two sequences' blocks more was unfilled."""
    bench = Bench()
    slot = bench.recorder.arrive("a")
    bench.recorder.prefill(slot, 4, emits=1)
    bench.step(10)
    bench.recorder.decode(slot)
    bench.recorder.begin_step()
    run = ([14 * MS, 19 * MS, 25 * MS, 32 * MS], [0.001, 0.002, 0.003, 0.004])
    bench.wait(22)
    told = {"num_running": 1, "batch_size": 2, "wasted_slots": 5, "oldest_wait_s": 0.020, "probe_s": 2e-6}
    assert bench.recorder.end_step(**told, run=run) == 1
    bench.recorder.finish(slot)
    (row,) = bench.rows("request")
    assert row["token_ns"] == [10, 14, 19, 25, 32]
    names = ("step", "at_ns", "duration_s", "forward_s", "oldest_wait_s", "probe_s", "wasted_slots")
    assert [tuple(step.get(name) for name in names) for step in bench.rows("step")[1:]] == [
        (1, 14, 0.004, 0.001, 0.002, 2e-6, 11),
        (2, 19, 0.005, 0.002, 0.007, 2e-6, 9),
        (3, 25, 0.006, 0.003, 0.013, 2e-6, 7),
        (4, 32, 0.007, 0.004, 0.020, 2e-6, 5),
    ]


def test_a_run_that_finds_no_room_is_lost_whole() -> None:
    """A ring of one row: the second run is counted step by step, and the third has its own instants again."""
    bench = Bench(steps=1)

    def run(*ends: int) -> None:
        bench.recorder.begin_step(bench.now)
        bench.now = ends[-1] * MS
        bench.recorder.end_step(run=([end * MS for end in ends], [0.0] * len(ends)))

    run(1, 3)
    run(4, 5)
    bench.recorder.flush()
    run(7, 9)
    assert [(step["at_ns"], step["duration_s"]) for step in bench.rows("step")] == [
        (1, 0.001), (3, 0.002), (7, 0.002), (9, 0.002),
    ]  # fmt: skip
    assert bench.recorder.lost == {"step": 2}


def test_very_long_runs_are_unfolded_in_portions() -> None:
    """Forty runs of 4,096 steps are 160,000 steps: all rows come out."""
    bench = Bench()
    for number in range(40):
        ends = [number * 4096 + step + 1 for step in range(4096)]
        bench.recorder.begin_step(number * 4096)
        bench.recorder.end_step(at_ns=ends[-1], run=(ends, [0.0] * 4096))
    bench.recorder.flush()
    assert bench.sink.table("step").column("step").to_pylist() == list(range(40 * 4096))


def test_block_events_come_out_one_a_row() -> None:
    """Lists, arrays and shared values; a parent of 0 and a NaN are null; a request's slot gives its id."""
    bench = Bench()
    slot = bench.recorder.arrive("r1")
    bench.recorder.block_events("stored", [1, 2], slot=slot, parent_hash=[0, 1], num_tokens=16)
    bench.wait(1)
    evicted = np.array([2**64 - 1], dtype=np.uint64)
    bench.recorder.block_events("evicted", evicted, reason="capacity", idle_s=[float("nan")], age_s=[2.5])
    evicted[0] = 7  # the engine uses its array again
    bench.recorder.block_events("cleared", [])
    bench.recorder.block_events("hit", [9, 10], num_tokens=[16, None], parent_hash=[None, 9], tier=None)
    rows = [{name: row[name] for name in row if name not in ("worker", "at_ns")} for row in bench.rows("block")]
    assert rows == [
        {"change": "stored", "block_hash": 1, "num_tokens": 16, "tier": "device", "request_id": "r1"},
        {"change": "stored", "block_hash": 2, "parent_hash": 1, "num_tokens": 16, "tier": "device", "request_id": "r1"},
        {"change": "evicted", "block_hash": 2**64 - 1, "tier": "device", "reason": "capacity", "age_s": 2.5},
        {"change": "hit", "block_hash": 9, "num_tokens": 16},
        {"change": "hit", "block_hash": 10, "parent_hash": 9},
    ]
    assert [row["at_ns"] for row in bench.rows("block")] == [0, 0, 1, 1, 1]


def test_rare_rows_take_their_request_from_the_slot() -> None:
    """Worker, transfer and route rows are told as they are."""
    bench = Bench()
    slot = bench.recorder.arrive("r1")
    bench.recorder.row("worker", role="mixed", flags={"max_num_seqs": "8"})
    bench.recorder.row("transfer", slot=slot, outcome="ok", num_bytes=7)
    bench.wait(3)
    bench.recorder.row("route", request_id="r2", candidates=[{"worker": "w0", "load": 0.5}])
    assert bench.rows("worker")[0]["flags"] == [("max_num_seqs", "8")]
    (transfer,) = bench.rows("transfer")
    assert (transfer["request_id"], transfer["num_bytes"], transfer["at_ns"]) == ("r1", 7, 0)
    (route,) = bench.rows("route")
    assert (route["candidates"][0]["load"], route["at_ns"]) == (0.5, 3)


def test_open_requests_can_be_seen() -> None:
    """One runs, one is stalled since 30 ms, one waits since 60 ms: counts, oldest wait, the longest waiting first."""
    bench = Bench()
    running, stalled = bench.recorder.arrive("running"), bench.recorder.arrive("stalled")
    for slot in (running, stalled):
        bench.recorder.prefill(slot, 4, emits=1)
    bench.step(10)
    bench.recorder.decode(running)
    bench.recorder.arrive("waiting")
    bench.step(30)
    bench.recorder.preempt(stalled)
    bench.step(30)
    view = bench.recorder.live()
    assert (view.num_queued, view.num_running, view.num_stalled, view.oldest_wait_s) == (1, 1, 1, 0.06)
    lines = [(line.request_id, line.state, line.wait_s, line.age_s) for line in view.requests]
    assert lines == [
        ("waiting", "queued", 0.06, 0.06),
        ("stalled", "stalled", 0.03, 0.07),
        ("running", "running", None, 0.07),
    ]
    assert view.at_ns == WALL + 70 * MS
    bench.recorder.finish(running)
    assert bench.recorder.live().num_running == 0


def gaps(bench: Bench) -> list[dict[str, str]]:
    """Attributes of the `gap` marks told so far, the times left out."""
    rows = [dict(row["attrs"]) for row in bench.rows("mark") if row["mark"] == "gap"]
    return [{name: row[name] for name in row if name not in ("from_ns", "to_ns")} for row in rows]


def test_full_buffers_lose_new_rows_and_tell_so() -> None:
    """Four steps fit, six come: two are lost; block calls of 5 into room for 8: the second is lost whole."""
    bench = Bench(steps=4, blocks=8, ended=1, rows=9, max_open=2)
    for _ in range(6):
        bench.step(1)
    for _ in range(2):
        bench.recorder.block_events("hit", [1, 2, 3, 4, 5])
    first, second, third = (bench.recorder.arrive(name) for name in "abc")
    assert third == NO_SLOT
    bench.recorder.finish(first)
    bench.recorder.finish(second)
    bench.recorder.finish(third)
    told = gaps(bench)
    assert told == [
        {
            "reason": "recorder_full",
            "dropped_rows": "9",
            "dropped_block": "5",
            "dropped_request": "2",
            "dropped_step": "2",
        }
    ]
    assert bench.recorder.lost == {"step": 2, "block": 5, "request": 2}
    assert len(bench.rows("step")) == 4
    assert len(bench.rows("block")) == 5
    assert gaps(bench) == told, "a loss is told once"


def test_rare_rows_are_refused_by_drop_order() -> None:
    """Room for 9: samples are refused when it is more than half full, marks nearly to the end."""
    bench = Bench(rows=9)
    for _ in range(9):
        bench.recorder.row("sample", name="x", value=1.0)
    for _ in range(9):
        bench.recorder.row("mark", mark="deployed")
    bench.recorder.flush()
    assert bench.sink.num_rows["sample"] == 5
    assert bench.sink.num_rows["mark"] == 3 + 1, "three, and the gap's own"
    assert bench.recorder.lost == {"sample": 4, "mark": 6}


def test_lost_steps_make_instants_unknown_and_not_wrong() -> None:
    """The ring was full while the request decoded: the instants between are unknown, the ends are known."""
    bench = Bench(steps=2)
    slot = bench.recorder.arrive("a", prompt_tokens=3)
    bench.recorder.prefill(slot, 3, emits=1)
    bench.step(10)
    bench.recorder.decode(slot)
    for _ in range(3):
        bench.step(10)
    bench.recorder.flush()
    bench.step(10)
    bench.recorder.finish(slot, finish_reason="stop")
    (row,) = bench.rows("request")
    assert "token_ns" not in row
    assert (row["first_token_ns"], row["last_token_ns"], row["output_tokens"]) == (10, 50, 5)
    assert (row["decode_s"], row["finish_reason"]) == (0.04, "stop"), "both its ends are known"


def test_a_request_that_changes_too_often_loses_its_tokens_and_keeps_its_row() -> None:
    """More changes than are noted: where its tokens went is unknown."""
    bench = Bench()
    slot = bench.recorder.arrive("a")
    for turn in range(MAX_CHANGES // 3 + 1):
        bench.recorder.decode(slot, 1 + turn % 2)
        bench.step(1)
    bench.recorder.finish(slot)
    (row,) = bench.rows("request")
    assert "token_ns" not in row
    assert row["state"] == "finished"


def test_a_row_that_breaks_the_contract_costs_only_itself(caplog: pytest.LogCaptureFixture) -> None:
    """Three requests, one with a negative count: two rows come, the loss is told, the log says why once."""
    bench = Bench()
    for tokens in (1, -1, 2, -2):
        bench.recorder.finish(bench.recorder.arrive("r", prompt_tokens=tokens))
    with caplog.at_level(logging.WARNING):
        assert [row["prompt_tokens"] for row in bench.rows("request")] == [1, 2]
    assert bench.recorder.lost == {"request": 2}
    assert gaps(bench) == [{"reason": "recorder_invalid", "dropped_rows": "2", "dropped_request": "2"}]
    assert sum("prompt_tokens" in record.message for record in caplog.records) == 1


def test_an_empty_name_is_no_name() -> None:
    """A worker or a run named "" is unknown, and its rows are kept."""
    sink = MemorySink()
    recorder = Recorder(sink, worker="", run_id="", flush_s=0)
    recorder.finish(recorder.arrive("r"))
    recorder.close()
    [row] = sink.table("request").to_pylist()
    assert (row["worker"], row["run_id"]) == (None, None)


def test_a_value_of_the_wrong_type_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """A text where a number belongs costs the value, not the row; an unknown column costs nothing."""
    bench = Bench()
    bench.recorder.finish(bench.recorder.arrive("a", prompt_tokens="many", colour="red", turn=3))
    bench.recorder.finish(bench.recorder.arrive("b", prompt_tokens=5))
    with caplog.at_level(logging.WARNING):
        rows = bench.rows("request")
    assert [(row.get("prompt_tokens"), row.get("turn")) for row in rows] == [(None, 3), (5, None)]
    assert "did not fit" in caplog.text


def test_verbs_take_nonsense_without_raising() -> None:
    """The engine's loop is never stopped by its recorder."""
    bench = Bench()
    recorder = bench.recorder
    for slot in (NO_SLOT, 12345):
        recorder.prefill(slot, 1)
        recorder.decode(slot)
        recorder.preempt(slot)
        recorder.note(slot, a=1)
        recorder.span(slot, "queue", 0, 1)
        recorder.finish(slot)
    recorder.row("no such kind", x=1)
    recorder.end_step(num_running="many")  # type: ignore[arg-type]
    recorder.block_events("hit", [-1, "x"])
    recorder.block_events("hit", None)  # type: ignore[arg-type]
    recorder.block_events("hit", 7)  # type: ignore[arg-type]
    recorder.block_events("hit", [5])
    recorder.block_events("hit", [1, 2], idle_s=[0.5])
    recorder.span(recorder.arrive("a"), "no such phase", 0, 10**12)
    recorder.arrive("b")
    bench.wait(5)
    recorder.finish(0)
    recorder.finish(1)
    assert [row["request_id"] for row in bench.rows("request")] == ["b"]
    assert recorder.lost == {"unknown kind": 1, "step": 1, "block": 6, "request": 1}
    assert [row["block_hash"] for row in bench.rows("block")] == [5]


class Failing(MemorySink):
    """A sink that takes nothing until it is mended."""

    broken = True

    def write(self, tables: Mapping[str, pa.Table]) -> None:
        if self.broken:
            raise ProbeError("no")
        super().write(tables)


def test_a_sink_that_fails_costs_rows_that_are_counted_and_told_later() -> None:
    """Two flushes fail; the third tells the loss of both, once."""
    sink = Failing()
    bench = Bench(sink=sink)
    bench.step(1)
    bench.recorder.flush()
    bench.step(1)
    bench.recorder.flush()
    sink.broken = False
    bench.step(1)
    assert len(bench.rows("step")) == 1
    assert gaps(bench) == [{"reason": "sink_failed", "dropped_rows": "2", "dropped_step": "2"}]
    assert bench.recorder.lost == {"step": 2}


def test_a_move_of_the_clock_is_a_mark() -> None:
    """The wall clock is put forward by a second: the flush after a minute says so."""
    bench = Bench()
    bench.wait(60_000)
    bench.wall += 10**9
    bench.recorder.flush()
    (row,) = bench.sink.table("mark").to_pylist()
    assert (row["mark"], row["subject"], dict(row["attrs"])["offset_s"]) == ("clock", "w0", "1.000000000")
    assert row["at_ns"] == WALL + 61 * 10**9


def test_sampled_rows_say_their_rate_and_steps_are_all_kept() -> None:
    """At one in four, requests and their transfers are kept together, blocks by block, steps always."""
    bench = Bench(sampling=Sampling(0.25))
    for number in range(400):
        slot = bench.recorder.arrive(f"r{number}")
        bench.recorder.row("transfer", slot=slot, outcome="ok")
        bench.recorder.row("route", request_id=f"r{number}")
        bench.recorder.block_events("stored", [number * 7919 + 1])
        bench.recorder.finish(slot)
        bench.step(1)
    requests, transfers = bench.rows("request"), bench.rows("transfer")
    kept = [row["request_id"] for row in requests]
    assert 60 < len(kept) < 140
    assert [row["request_id"] for row in transfers] == kept == [row["request_id"] for row in bench.rows("route")]
    assert 60 < len(bench.rows("block")) < 140
    assert len(bench.rows("step")) == 400
    assert {row["sample_rate"] for row in requests + transfers + bench.rows("block")} == {0.25}
    assert "sample_rate" not in bench.rows("step")[0]
    assert bench.recorder.lost == {}


def test_the_thread_flushes_by_itself_and_close_brings_out_the_rest() -> None:
    """With a thread, rows appear without anybody asking; close stops it."""
    sink = MemorySink()
    recorder = Recorder(sink, worker="w0", flush_s=0.01)
    recorder.begin_step()
    recorder.end_step(num_running=1)
    for _ in range(1000):
        if sink.num_rows:
            break
        recorder._flusher._stop.wait(0.01)
    assert sink.table("step").num_rows == 1
    recorder.end_step(num_running=2)
    recorder.close()
    recorder.close()
    assert sink.table("step").column("num_running").to_pylist() == [1, 2]
    assert sink.closed
    assert not recorder._flusher._thread.is_alive()
