"""Whoever gives up, and when: the seconds of a request still sum to what it waited."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis.facts import Facts, WorkerFacts
from diagnosis.ledger.ledger import write
from diagnosis.ledger.spent import Context
from diagnosis.statistics.censored import at_least_s
from tests.factories import facts, request_facts, work_model

seconds = st.floats(0.0, 5.0, allow_nan=False)


@st.composite
def windows(draw: st.DrawFn) -> Facts:
    """Requests of two workers, of which some never got a first token: not scheduled, scheduled, or unknown to the engine."""
    n = draw(st.integers(1, 20))

    def column(strategy: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(strategy, min_size=n, max_size=n))

    requests = request_facts(
        sorted(column(st.floats(0.0, 20.0))),
        queue=column(seconds),
        prefill=column(seconds),
        decode=column(seconds),
        worker=draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)),
        worker_names=("w0", "w1"),
        prompt_tokens=column(st.integers(0, 4000)),
        computed_tokens=column(st.integers(0, 4000)),
        output_tokens=column(st.integers(1, 500)),
    )
    fate = np.array(
        draw(st.lists(st.sampled_from(["served", "queued", "scheduled", "unknown"]), min_size=n, max_size=n))
    )
    gone = fate != "served"
    instants = {name: getattr(requests, name).copy() for name in INSTANTS}
    for name in INSTANTS:
        kept = (fate == "scheduled") if name == "scheduled_s" else np.zeros(n, dtype=bool)
        kept |= (fate != "unknown") & (name == "engine_arrival_s")
        instants[name][gone & ~kept] = np.nan
    numbers = {name: values.copy() for name, values in requests.numbers.items()}
    for name in ("queue_s", "prefill_s", "decode_s"):
        numbers[name][gone & ~((fate == "scheduled") & (name == "queue_s"))] = np.nan
    end = np.where(gone, requests.arrival_s + np.array(column(seconds)), requests.end_s)
    broken = replace(requests, numbers=numbers, finished=~gone, end_s=end, **instants)
    workers = [WorkerFacts(w, block_size=16, num_blocks=draw(st.integers(1, 500))) for w in ("w0", "w1")]
    return facts(broken, workers=workers, samples={"preemptions_total": draw(st.sampled_from([0.0, 3.0]))})


INSTANTS = ("first_token_s", "last_token_s", "engine_first_s", "engine_last_s", "scheduled_s", "engine_arrival_s")


@settings(max_examples=100)
@given(windows(), st.sampled_from(["ttft", "e2e"]), st.sampled_from([None, 0.5, 3.0]))
def test_rows_sum_to_what_was_waited(window: Facts, metric: str, slow: float | None) -> None:
    """Within 1e-9, no row below zero, and the value of a request without a first token is its bound."""
    context = Context(work_model(prefill_s_per_token=1e-3, slow_factor=slow), 8, 1e9, None, False, 0.0, True)
    ledger = write(window, metric, context)
    assert np.allclose(ledger.parts.sum(axis=1), ledger.values, atol=1e-9, rtol=0)
    assert (ledger.parts >= -1e-9).all()
    bounds = at_least_s(window)[ledger.rows]
    assert np.allclose(ledger.values[ledger.censored], bounds[ledger.censored])
    assert (ledger.censored == np.isfinite(bounds)).all()
