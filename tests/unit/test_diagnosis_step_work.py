"""Steps that tell their token counts say what a wait was spent on; small windows worked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis.facts import BlockTotals, Facts, LineageFacts, StepFacts
from diagnosis.ledger.ledger import Ledger, write
from diagnosis.ledger.spent import Context
from diagnosis.ledger.step_work import others_by_steps, spread, step_work
from tests.factories import facts, request_facts, work_model

MS_A_TOKEN = 0.001


def steps(duration: list[float], worker: str = "w0", **numbers: list[float]) -> StepFacts:
    """Steps one after the other from 0 on."""
    n = len(duration)
    columns = {name: np.asarray(values, dtype=float) for name, values in numbers.items()}
    return StepFacts(np.zeros(n, dtype=np.int64), (worker,), np.cumsum(duration), np.asarray(duration), columns)


def ledger(known: Facts, metric: str = "ttft") -> Ledger:
    """With one seat: who waits, waits for that."""
    model = work_model(prefill_s_per_token=MS_A_TOKEN)
    return write(known, metric, Context(model, 1, 1e9, None, False, 0.0, True))


def row(found: Ledger, name: str) -> list[float]:
    return [round(float(x), 9) for x in found.column(name)]


def test_a_wait_through_a_step_that_computed_again_is_preemption() -> None:
    """The second waits from 1 s to 2 s: that step computed 750 tokens again at 1 ms each, and decoded for the rest."""
    requests = request_facts(
        [0.0, 1.0], queue=[0.0, 1.0], prefill=[0.1, 0.1], decode=[2.9, 0.9], computed_tokens=[100, 100]
    )
    told = steps([1.0, 1.0, 1.0], prefill_tokens=[100, 750, 100], recomputed_tokens=[0, 750, 0])
    found = ledger(facts(requests, steps=told, samples={"preemptions_total": 1.0}))
    assert row(found, "preemption_recompute") == [0.0, 0.75]
    assert row(found, "queue_load") == [0.0, 0.25]
    blind = ledger(facts(requests, samples={"preemptions_total": 1.0}))
    assert row(blind, "preemption_recompute") == [0.0, 0.0], "the requests' own phases do not show it"


def test_first_time_prefill_is_told_apart_by_the_requests_that_computed_it() -> None:
    """The first computes 600 tokens from 0 s to 2 s, half of them evicted: 200 in the first step, 400 in the second, in which the
    second request waits all of 1 s. That step spent 0.4 s on prefill, so 0.2 s are the eviction's."""
    requests = request_facts([0.0, 1.0], queue=[0.0, 1.0], prefill=[2.0, 0.1], computed_tokens=[600, 0])
    lineage = LineageFacts(np.array([300.0, 0.0]), np.array([300.0, 0.0]), np.zeros(2), 18, 1.0, ())
    told = steps([1.0, 1.0, 0.1], prefill_tokens=[200, 400, 0])
    known = facts(requests, steps=told, lineage=lineage, blocks=BlockTotals(37, 18, 18, 0))
    assert row(ledger(known), "premature_eviction")[1] == 0.2
    by_requests = facts(requests, lineage=lineage, blocks=BlockTotals(37, 18, 18, 0))
    assert row(ledger(by_requests), "premature_eviction")[1] == 0.15, "spread evenly over the prefill without steps"


def test_a_decode_shared_with_recomputing_of_others_pays_for_it() -> None:
    """1 s of decoding, in which one step of 0.5 s computed 400 tokens again for somebody else; own recomputing is its own stall."""
    requests = request_facts([0.0], queue=[0.0], prefill=[0.5], decode=[1.0], output_tokens=[11], computed_tokens=[0])
    told = steps([0.5, 0.5, 0.5], prefill_tokens=[0, 400, 0], recomputed_tokens=[0, 400, 0])
    seen = {"steps": told, "samples": {"preemptions_total": 1.0}}
    assert row(ledger(facts(requests, **seen), "e2e"), "preemption_recompute") == [0.4]
    own = request_facts(
        [0.0],
        queue=[0.0],
        prefill=[0.5],
        decode=[1.0],
        output_tokens=[11],
        computed_tokens=[0],
        recomputed_tokens=[400],
    )
    assert row(ledger(facts(own, **seen), "e2e"), "preemption_recompute") == [0.0]


def test_prompts_booked_when_they_are_finished_are_put_back_in_time() -> None:
    """1,500 tokens in a step of 0.6 s at 1 ms each: 0.6 s of them there, 0.6 s in the step before, 0.3 s in the one before that."""
    told = facts(request_facts([0.0]), steps=steps([0.6, 0.6, 0.6], prefill_tokens=[0, 0, 1500]))
    work = step_work(told, "w0", MS_A_TOKEN)
    assert work is not None
    assert work.first.tolist() == pytest.approx([0.5, 1.0, 1.0])


def test_tokens_booked_when_they_are_admitted_again_are_put_later() -> None:
    """1,500 tokens to compute again, told by the first step, keep the next ones busy; first-time prompts get what room is left."""
    counts = {"prefill_tokens": [1500, 0, 300], "recomputed_tokens": [1500, 0, 0]}
    work = step_work(facts(request_facts([0.0]), steps=steps([0.6, 0.6, 0.6], **counts)), "w0", MS_A_TOKEN)
    assert work is not None
    assert work.again.tolist() == pytest.approx([1.0, 1.0, 0.5])
    assert work.first.tolist() == pytest.approx([0.0, 0.0, 0.5])


def test_idle_time_is_no_room() -> None:
    """The engine slept between two steps: what the second had no time for is not put before the sleep."""
    told = StepFacts(
        np.zeros(2, dtype=np.int64),
        ("w0",),
        np.array([1.0, 9.0]),
        np.array([1.0, 0.5]),
        {"prefill_tokens": np.array([0.0, 900.0])},
    )
    work = step_work(facts(request_facts([0.0]), steps=told), "w0", MS_A_TOKEN)
    assert work is not None
    assert work.first.tolist() == pytest.approx([0.0, 1.0])


def test_others_are_counted_in_the_steps_that_decoded() -> None:
    """Between 1 s and 4 s three steps end, with 3, 0 and 5 sequences: 2 and 4 others, 3 in the mean; the idle one counts nothing."""
    told = steps([1.0, 1.0, 1.0, 1.0, 1.0], decode_tokens=[9, 3, 0, 5, 9])
    assert others_by_steps(told, "w0", np.array([1.0]), np.array([4.0])).tolist() == [3.0]
    assert np.isnan(others_by_steps(told, "w0", np.array([9.0]), np.array([9.5]))).all(), "no step in it"
    assert np.isnan(others_by_steps(told, "w1", np.array([1.0]), np.array([4.0]))).all()
    assert np.isnan(others_by_steps(None, "w0", np.array([1.0]), np.array([4.0]))).all()


def test_what_happens_during_a_stall_is_not_counted_again() -> None:
    """Half of 2 s of decoding was a stall; of the steps' 400 tokens computed again for others half fell into it: 0.2 s beside the stall."""
    told = steps([0.5, 1.0, 1.0], prefill_tokens=[0, 200, 200], recomputed_tokens=[0, 200, 200])
    requests = request_facts(
        [0.0], queue=[0.0], prefill=[0.5], decode=[2.0], output_tokens=[11], computed_tokens=[0], stalled_s=[1.0]
    )
    found = ledger(facts(requests, steps=told, samples={"preemptions_total": 1.0}), "e2e")
    assert row(found, "preemption_recompute") == [1.2]


@pytest.mark.parametrize(
    ("told", "worker", "token_s"),
    [
        (None, "w0", 0.001),
        (steps([1.0], prefill_tokens=[5]), "w0", None),
        (steps([1.0], prefill_tokens=[5]), "w1", 0.001),
        (steps([1.0], decode_tokens=[5]), "w0", 0.001),
        (steps([np.nan], prefill_tokens=[5]), "w0", 0.001),
    ],
)
def test_steps_that_cannot_tell_are_left_aside(told: StepFacts | None, worker: str, token_s: float | None) -> None:
    """No steps, no cost of a token, another worker's steps, no token counts, no durations."""
    assert step_work(facts(request_facts([0.0]), steps=told), worker, token_s) is None


_SIZES = st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 2)), min_size=1, max_size=30)


@settings(max_examples=100, deadline=None)
@given(_SIZES, st.randoms())
def test_no_step_spends_more_than_its_time_and_nothing_is_made(sizes: list[tuple[float, float]], random: Any) -> None:
    """Whatever is booked where: at most the room, at most what there was, all of it where the room behind it is enough."""
    seconds, room = np.array([a for a, _ in sizes]), np.array([b for _, b in sizes])
    joined = np.array([random.random() < 0.8 for _ in sizes[1:]], dtype=np.int64)
    found = spread(seconds, room, joined)
    assert (found <= room + 1e-12).all()
    assert found.sum() <= seconds.sum() + 1e-9
    assert spread(seconds, np.full(len(room), 1e9), joined).tolist() == seconds.tolist()


def test_whoever_is_in_a_step_that_loads_or_behind_it_waits_for_the_load() -> None:
    """The last step, from 2.1 s on, loads for 50 ms and computes 50 tokens of each of two for 100. The first has its own load once, the second
    shares it, and of the 90 ms that the third waits from 2.16 s on a third is the load's."""
    told = steps(
        [0.01, 0.06] * 30 + [0.15],
        kv_load_s=[0.0, 0.05] * 30 + [0.05],
        prefill_tokens=[0.0] * 60 + [100.0],
        decode_tokens=[1.0, 1.0, 2.0, 2.0] * 15 + [0.0],
    )
    requests = request_facts(
        [2.1, 2.1, 2.16],
        queue=[0.0, 0.0, 0.09],
        prefill=[0.15, 0.15, 0.1],
        kv_load_s=[0.05, 0.0, 0.0],
        computed_tokens=[50.0, 50.0, 50.0],
        prompt_tokens=[50.0, 50.0, 50.0],
    )
    requests.numbers["prefill_s"][0] = 0.1  # the load is a phase of its own
    found = ledger(facts(requests, steps=told))
    assert row(found, "tier_load") == [0.05, 0.05, 0.03]
