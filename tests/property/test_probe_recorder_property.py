"""Whatever an engine does, the recorder's sums hold: rows, tokens, phases; and sampling decides alike everywhere."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_probe.clock import Clock
from engine_probe.events import PHASES
from engine_probe.recording.phases import Span, disjoint, phases_to_first_token, seconds_by_phase
from engine_probe.recording.recorder import NO_SLOT, Recorder
from engine_probe.sampling import Sampling
from engine_probe.sending.sink import MemorySink
from engine_probe.wire.validate import validate

WALL = 1_764_000_000 * 10**9
FEW = settings(max_examples=60, deadline=None)

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["arrive", "prefill", "last", "decode", "stall", "finish", "abort", "step", "span", "flush", "hit"]
        ),
        st.integers(0, 5),
        st.integers(0, 40),
    ),
    max_size=120,
)


class Engine:
    """Drives a recorder with nonsense orders of calls, and counts what it did."""

    def __init__(self, **options: Any) -> None:
        self.now = 0
        self.sink = MemorySink()
        self.recorder = Recorder(
            self.sink, clock=Clock(lambda: self.now, lambda: WALL + self.now), flush_s=0, **options
        )
        self.slots: list[int] = []
        self.counts = {"request": 0, "step": 0, "block": 0}
        self.num_open = 0

    def do(self, action: str, which: int, amount: int) -> None:
        recorder, slot = self.recorder, self.slots[which % len(self.slots)] if self.slots else NO_SLOT
        if action == "arrive":
            slot = recorder.arrive(f"r{self.counts['request']}")
            self.counts["request"] += 1
            self.slots += [slot] if slot != NO_SLOT else []
        elif action == "prefill":
            recorder.prefill(slot, amount)
        elif action == "last":
            recorder.prefill(slot, amount, emits=1)
        elif action == "decode":
            recorder.decode(slot, amount % 4)
        elif action == "stall":
            recorder.preempt(slot)
        elif action in ("finish", "abort") and self.slots:
            self.slots.remove(slot)
            recorder.finish(slot, "finished" if action == "finish" else "aborted")
        elif action == "step":
            recorder.begin_step()
            ends = [self.now + amount * 1000 * (step + 1) for step in range(1 + which % 3)]
            self.now = ends[-1]
            run = (ends, [0.0] * len(ends)) if len(ends) > 1 else None
            recorder.end_step(alloc_s=amount / 3e6, sample_s=amount / 4e6, run=run)
            self.counts["step"] += len(ends)
        elif action == "span":
            recorder.span(slot, PHASES[amount % 10], max(self.now - which * 700, 0), self.now + amount)
        elif action == "hit":
            recorder.block_events("hit", list(range(amount)))
            self.counts["block"] += amount
        elif action == "flush":
            recorder.flush()


@FEW
@given(actions=ACTIONS, small=st.booleans())
def test_rows_out_and_rows_lost_are_rows_in(actions: list[tuple[str, int, int]], small: bool) -> None:
    """For requests, steps and block events: what the sink has, what was lost and what is open make up what was told."""
    room = {"steps": 3, "blocks": 50, "ended": 2, "max_open": 4} if small else {}
    engine = Engine(**room)
    for action in actions:
        engine.do(*action)
    engine.recorder.close()
    out = engine.sink.num_rows
    lost = engine.recorder.lost
    still_open = {"request": len(engine.slots)}
    for kind, told in engine.counts.items():
        assert out.get(kind, 0) + lost.get(kind, 0) + still_open.get(kind, 0) == told, kind
    assert bool(lost) == ("mark" in out), "a loss is told"


@FEW
@given(actions=ACTIONS)
def test_every_row_is_valid_and_its_sums_hold(actions: list[tuple[str, int, int]]) -> None:
    """Tokens are counted once, instants ascend, phases to the first token sum to its latency, spans tile without overlap."""
    engine = Engine()
    for action in actions:
        engine.do(*action)
    for slot in engine.slots:
        engine.recorder.finish(slot)
    engine.recorder.close()
    table = engine.sink.table("request")
    validate("request", table, WALL + engine.now)
    assert engine.recorder.lost == {}
    for row in table.to_pylist():
        spans = [(s["phase"], s["start_ns"], s["end_ns"]) for s in row["spans"] or ()]
        assert all(a[2] <= b[1] for a, b in pairwise(spans))
        if row["token_counts"] is not None:
            assert sum(row["token_counts"]) == row["output_tokens"]
        first = row["first_token_ns"]
        until = row["end_ns"] if first is None else first
        known = [row[f"{phase}_s"] or 0.0 for phase in PHASES[: PHASES.index("decode")]]
        stalled_before = sum(
            min(end, until) - start for phase, start, end in spans if phase == "stalled" and start < until
        )
        decoded_before = sum(
            min(end, until) - start for phase, start, end in spans if phase == "decode" and start < until
        )
        total = sum(known) + (stalled_before + decoded_before) / 1e9 + row["unexplained_s"]
        assert abs(total - (until - row["arrival_ns"]) / 1e9) < 1e-9


SPANS = st.lists(
    st.builds(Span, st.sampled_from(PHASES), st.integers(0, 1000), st.integers(0, 1000), st.none() | st.integers(0, 9)),
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(spans=SPANS, bounds=st.tuples(st.integers(0, 1000), st.integers(0, 1000)))
def test_disjoint_spans_tile_the_interval_and_the_earlier_phase_wins(
    spans: list[Span], bounds: tuple[int, int]
) -> None:
    """Every nanosecond belongs to one piece, and that is the first phase in order that covers it, else `unexplained`."""
    start, end = min(bounds), max(bounds)
    pieces = disjoint(spans, start, end)
    assert [piece.start_ns for piece in pieces] == ([start] + [piece.end_ns for piece in pieces[:-1]] if pieces else [])
    assert not pieces or pieces[-1].end_ns == end
    for piece in pieces:
        for at in {piece.start_ns, piece.end_ns - 1}:
            covering = [PHASES.index(span.phase) for span in spans if span.start_ns <= at < span.end_ns]
            assert piece.phase == (PHASES[min(covering)] if covering else "unexplained")
    whole = [span for span in spans if span.start_ns < span.end_ns]
    told = sum(piece.tokens or 0 for piece in pieces)
    assert told <= sum(span.tokens or 0 for span in whole)


@settings(max_examples=200, deadline=None)
@given(
    spans=SPANS.map(
        lambda spans: [s._replace(start_ns=s.start_ns * 10**15, end_ns=s.end_ns * 10**15 + 7) for s in spans]
    ),
    first=st.integers(0, 10**18),
)
def test_phases_sum_to_the_time_to_first_token(spans: list[Span], first: int) -> None:
    """To within 1e-9 s, for instants of any size."""
    phases = phases_to_first_token(spans, 5, 5 + first)
    assert abs(sum(phases.values()) - first / 1e9) <= 1e-9 * max(1.0, first / 1e15)
    assert all(value >= 0 for value in phases.values())


def test_seconds_are_summed_over_the_spans_of_a_phase() -> None:
    """Two chunks of 2 s and 3 s make 5 s of prefill."""
    spans = [Span("prefill", 0, 2 * 10**9), Span("queue", 2 * 10**9, 3 * 10**9), Span("prefill", 3 * 10**9, 6 * 10**9)]
    assert seconds_by_phase(spans) == {"prefill": 5.0, "queue": 1.0}


@settings(max_examples=100, deadline=None)
@given(
    ids=st.lists(st.text(max_size=20), max_size=20),
    rates=st.tuples(st.floats(0.001, 1.0), st.floats(0.001, 1.0)),
    by=st.sampled_from(["request", "prefix"]),
)
def test_a_higher_rate_keeps_all_that_a_lower_one_keeps(ids: list[str], rates: tuple[float, float], by: Any) -> None:
    """Two processes with different rates agree wherever the lower one keeps; the same rate decides the same."""
    low, high = Sampling(min(rates), by), Sampling(max(rates), by)
    for number, name in enumerate(ids):
        prefix = number % 3 or None
        assert low.keeps_request(name, prefix) == Sampling(min(rates), by).keeps_request(name, prefix)
        if low.keeps_request(name, prefix):
            assert high.keeps_request(name, prefix)
    hashes = np.arange(200, dtype=np.uint64) * np.uint64(0x5851F42D4C957F2D)
    assert (low.keeps_blocks(hashes) <= high.keeps_blocks(hashes)).all()


@settings(max_examples=60, deadline=None)
@given(prefix=st.integers(0, 2**64 - 1), ids=st.lists(st.text(max_size=8), min_size=2, max_size=6))
def test_requests_that_share_a_prefix_are_kept_or_left_out_together(prefix: int, ids: list[str]) -> None:
    """By prefix, the id does not matter."""
    sampling = Sampling(0.5, "prefix")
    assert len({sampling.keeps_request(name, prefix) for name in ids}) == 1


def test_about_the_stated_share_is_kept() -> None:
    """Ten thousand ids and blocks at 20 %: between 18 and 22 %, even for block hashes that count up."""
    sampling = Sampling(0.2)
    kept = sum(sampling.keeps_request(f"cmpl-{number}") for number in range(10_000))
    assert 1_800 < kept < 2_200
    for hashes in (np.arange(10_000, dtype=np.uint64), np.arange(10_000, dtype=np.uint64) << np.uint64(40)):
        assert 1_800 < sampling.keeps_blocks(hashes).sum() < 2_200
