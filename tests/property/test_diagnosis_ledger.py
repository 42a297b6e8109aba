"""Whatever the phases, whoever waits for whom: the rows of a request sum to its latency."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis.facts import BlockTotals, HandoverFacts, LineageFacts, RoutingFacts, WorkerFacts
from diagnosis.ledger.drift import Spell
from diagnosis.ledger.ledger import write
from diagnosis.ledger.rows import HANDOVER, HOTSPOTS
from diagnosis.ledger.spent import Context
from tests.factories import facts, request_facts, work_model

seconds = st.floats(0.0, 5.0, allow_nan=False)
tokens = st.integers(0, 4000)


def hotspots(n: int, lost: list[float], held: list[float], slow: list[float]) -> RoutingFacts:
    """What requests lost to hotspots of every kind at once."""
    of_worker = {name: np.array(lost) for name in HOTSPOTS}
    of_index = dict.fromkeys(("hotspot_stale_index", "hotspot_unreachable_threshold"), np.array(held, dtype=float))
    amiss = {name: np.arange(n) % 2 == 0 for name in of_index}
    return RoutingFacts((), of_worker, of_index, amiss, np.array(slow), n, 2, 1, True, frozenset())


def handover(n: int, spent: list[float], before_first: bool) -> HandoverFacts:
    """A hand-over of every request, on each of its parts as long."""
    every, unknown = np.ones(n, dtype=bool), np.full(n, np.nan)
    return HandoverFacts(
        parts={name: np.array(spent) for name in HANDOVER},
        moved=every,
        worker_names=("d0",),
        worker=np.zeros(n, dtype=np.int64),
        first_s=unknown,
        last_s=unknown,
        output_tokens=unknown,
        again={},
        before_first=every if before_first else ~every,
        num_bytes=unknown,
        wire_s=unknown,
        wait_s=unknown,
        link_s=unknown,
        broke=~every,
        of=np.arange(n),
        sees_room=False,
    )


@st.composite
def windows(draw: st.DrawFn) -> tuple[object, Context]:
    n = draw(st.integers(1, 25))

    def column(strategy: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(strategy, min_size=n, max_size=n))

    prompt, computed = column(tokens), column(tokens)
    requests = request_facts(
        sorted(column(st.floats(0.0, 20.0))),
        queue=column(seconds),
        prefill=column(seconds),
        decode=column(seconds),
        worker=draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)),
        worker_names=("w0", "w1"),
        prompt_tokens=prompt,
        computed_tokens=computed,
        output_tokens=column(st.integers(2, 500)),
        frontend_s=column(seconds),
    )
    lineage = LineageFacts(np.array(column(tokens), dtype=float), np.zeros(n), np.zeros(n), n, None, ())
    known = facts(
        requests,
        workers=[
            WorkerFacts(w, block_size=16, num_blocks=draw(st.integers(1, 500)), flags={"max_num_seqs": "4"})
            for w in ("w0", "w1")
        ],
        samples={"preemptions_total": draw(st.sampled_from([0.0, 3.0]))},
        lineage=draw(st.sampled_from([None, lineage])),
        blocks=BlockTotals(5, 5, draw(st.integers(0, 5)), 0),
    )
    known = replace(
        known,
        routing=draw(
            st.sampled_from([None, hotspots(n, column(seconds), column(tokens), column(st.floats(0.0, 0.9)))])
        ),
        handover=draw(st.sampled_from([None, handover(n, column(seconds), draw(st.booleans()))])),
    )
    model = work_model(
        prefill_s_per_token=draw(st.sampled_from([None, 1e-5, 1e-2])),
        decode_s_per_seq=draw(st.sampled_from([None, 1e-4, 1.0])),
        slow_factor=draw(st.sampled_from([None, 0.5, 1.0, 3.0])),
        spell=draw(st.sampled_from([None, Spell(1.0, 5.0, 2.0, 0.1)])),
    )
    context = Context(
        model,
        most_running=draw(st.integers(1, 8)),
        long_tokens=draw(st.sampled_from([100.0, 1e9])),
        reuse_ratio=draw(st.sampled_from([None, 0.0, 0.7])),
        caching_off=draw(st.booleans()),
        usual_prefill_s=draw(seconds),
        suspect=draw(st.booleans()),
    )
    return known, context


@settings(max_examples=150, deadline=None)
@given(windows(), st.sampled_from(["ttft", "tpot", "e2e"]))
def test_rows_sum_to_the_metric_and_no_row_is_negative(window: tuple[object, Context], metric: str) -> None:
    """Every second is given away once: sums within 1e-9, nothing below zero but float dust."""
    known, context = window
    ledger = write(known, metric, context)  # type: ignore[arg-type]
    assert np.allclose(ledger.parts.sum(axis=1), ledger.values, atol=1e-9, rtol=0)
    assert (ledger.parts >= -1e-9).all()
