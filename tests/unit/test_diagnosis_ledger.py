"""The ledger on windows small enough to work by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diagnosis.facts import BlockTotals, Gaps, LineageFacts, MarkFact, WorkerFacts
from diagnosis.ledger.ledger import Ledger, write
from diagnosis.ledger.spent import Context, own_work
from diagnosis.ledger.values import metric_values
from tests.factories import facts, request_facts, work_model

SEATS_2 = WorkerFacts("w0", block_size=16, num_blocks=20, flags={"max_num_seqs": "2"})
SEATS_8 = WorkerFacts("w0", block_size=16, num_blocks=20, flags={"max_num_seqs": "8"})
SHORTAGE = {"preemptions_total": 1.0}


def context(**changes: Any) -> Context:
    plain: dict[str, Any] = {
        "model": work_model(),
        "most_running": 8,
        "long_tokens": 1e9,
        "reuse_ratio": None,
        "caching_off": False,
        "usual_prefill_s": 0.0,
        "suspect": True,
    }
    return Context(**(plain | changes))


def row(ledger: Ledger, name: str) -> list[float]:
    return [round(float(x), 9) for x in ledger.column(name)]


def test_phases_of_a_request_alone_are_its_own() -> None:
    """10 ms before the engine, no wait, 90 ms prefill: front end and own prefill, nothing else."""
    requests = request_facts([0.0], queue=[0.0], prefill=[0.09], frontend_s=[0.01])
    requests.first_token_s[0] = 0.1
    ledger = write(facts(requests), "ttft", context())
    assert ledger.values.tolist() == pytest.approx([0.1])
    assert row(ledger, "front_end") == [0.01]
    assert row(ledger, "own_prefill") == [0.09]


def test_waiting_with_free_seats_and_a_full_pool_is_put_down_to_blocks() -> None:
    """One request of 20 blocks runs in a pool of 20; the second waits 1 s while 7 of 8 seats are free."""
    requests = request_facts(
        [0.0, 0.2],
        queue=[0.0, 1.0],
        prefill=[0.1, 0.1],
        decode=[1.1, 0.5],
        prompt_tokens=[320, 320],
        output_tokens=[8, 8],
    )
    ledger = write(facts(requests, workers=[SEATS_8], samples=SHORTAGE), "ttft", context())
    assert row(ledger, "admission_blocked_on_blocks") == [0.0, 1.0]
    assert row(ledger, "queue_load") == [0.0, 0.0]


def test_the_same_wait_with_all_seats_taken_is_ordinary_queueing() -> None:
    """Two seats, told and both taken until the third starts: it waits for one, and blocks are not what binds."""
    requests = request_facts(
        [0.0, 0.0, 0.2],
        queue=[0.0, 0.0, 1.0],
        prefill=[0.1, 0.1, 0.1],
        decode=[1.1, 1.1, 0.5],
        prompt_tokens=[320, 320, 320],
        output_tokens=[8, 8, 8],
    )
    ledger = write(facts(requests, workers=[SEATS_2], samples=SHORTAGE), "ttft", context())
    assert row(ledger, "admission_blocked_on_blocks") == [0.0, 0.0, 0.0]
    assert row(ledger, "queue_seats") == [0.0, 0.0, 1.0]


def test_a_wait_without_any_trace_of_shortage_is_not_put_down_to_blocks() -> None:
    """Free seats, a full pool, but 0 preemptions were counted and 0 blocks evicted: the cause stays ordinary."""
    requests = request_facts(
        [0.0, 0.2],
        queue=[0.0, 1.0],
        prefill=[0.1, 0.1],
        decode=[1.1, 0.5],
        prompt_tokens=[320, 320],
        output_tokens=[8, 8],
    )
    for seen in ({"samples": {"preemptions_total": 0.0}}, {"blocks": BlockTotals(20, 0, 0, 0)}):
        ledger = write(facts(requests, workers=[SEATS_8], **seen), "ttft", context())
        assert row(ledger, "admission_blocked_on_blocks") == [0.0, 0.0]
        assert row(ledger, "queue_load") == [0.0, 1.0]


def test_bookkeeping_that_requests_tell_is_passed_on_without_steps() -> None:
    """0.4 of the first one's 0.5 s went into it, and the second waited through 0.4 s of those: four fifths of its wait are the same."""
    requests = request_facts([0.0, 0.1], queue=[0.0, 0.4], prefill=[0.5, 0.1], alloc_s=[0.4, 0.0])
    requests = replace(requests, numbers={**requests.numbers, "prefill_s": np.array([0.1, 0.1])})
    known = facts(requests, workers=[SEATS_8], samples={"preemptions_total": 0.0})
    ledger = write(known, "ttft", context())
    assert row(ledger, "eviction_overhead") == [0.4, 0.32]
    assert row(ledger, "queue_load") == [0.0, 0.08]
    assert row(ledger, "own_prefill") == [0.1, 0.1]


def test_a_wait_whose_reason_nobody_could_have_seen_is_unobserved() -> None:
    """The same wait where spans are all there is: neither preemptions nor evictions could be seen. With all seats taken it is load."""
    waits = {"queue": [0.0, 1.0], "prefill": [0.1, 0.1], "decode": [1.1, 0.5]}
    requests = request_facts([0.0, 0.2], **waits, prompt_tokens=[320, 320], output_tokens=[8, 8])
    ledger = write(facts(requests), "ttft", context())
    assert row(ledger, "queue_unobserved") == [0.0, 1.0]
    assert row(ledger, "queue_load") == row(ledger, "admission_blocked_on_blocks") == [0.0, 0.0]
    full = write(facts(requests), "ttft", context(most_running=1))
    assert row(full, "queue_load") == [0.0, 1.0]


def test_a_wait_that_was_not_observed_is_not_guessed() -> None:
    """Only TTFT is known: one row, and it says so."""
    ledger = write(facts(request_facts([0.0, 1.0])), "ttft", context())
    assert ledger.names == ("ttft_unobserved",)
    assert ledger.unobserved_share() == 1.0


def test_evicted_tokens_become_seconds_by_the_measured_rate() -> None:
    """300 of 400 computed tokens had been evicted; at 0.2 ms a token that is 60 ms of a 100 ms prefill."""
    requests = request_facts([0.0], queue=[0.0], prefill=[0.1], prompt_tokens=[400], computed_tokens=[400])
    lineage = LineageFacts(np.array([300.0]), np.array([100.0]), np.array([0.0]), 18, 1.0, ())
    known = facts(requests, lineage=lineage, blocks=BlockTotals(25, 18, 18, 0))
    ledger = write(known, "ttft", context(model=work_model(prefill_s_per_token=0.0002)))
    assert row(ledger, "premature_eviction") == [0.06]
    assert row(ledger, "own_prefill") == [0.04]


def test_waiting_behind_a_prefill_of_evicted_blocks_is_passed_on_to_eviction() -> None:
    """The first request's 100 ms prefill is all evicted tokens (1 ms each); the second waits 80 ms of it."""
    requests = request_facts(
        [0.0, 0.02], queue=[0.0, 0.08], prefill=[0.1, 0.05], prompt_tokens=[100, 0], computed_tokens=[100, 0]
    )
    lineage = LineageFacts(np.array([100.0, 0.0]), np.zeros(2), np.zeros(2), 6, 1.0, ())
    known = facts(requests, lineage=lineage, blocks=BlockTotals(6, 6, 6, 0))
    ledger = write(known, "ttft", context(model=work_model(prefill_s_per_token=0.001)))
    assert row(ledger, "premature_eviction") == [0.1, 0.08]
    assert row(ledger, "own_prefill") == [0.0, 0.05]


def test_slow_steps_take_their_share_of_all_engine_time() -> None:
    """Steps took twice as long: half of a 200 ms wait and half of a 100 ms prefill are put down to them."""
    requests = request_facts([0.0, 0.0], queue=[0.0, 0.2], prefill=[0.1, 0.1])
    slow = context(model=work_model(slow_factor=2.0))
    assert row(write(facts(requests), "ttft", slow), "slow_steps") == [0.05, 0.15]
    fast = context(model=work_model(slow_factor=2.0), suspect=False)
    assert row(write(facts(requests), "ttft", fast), "slow_steps") == [0.0, 0.0]


def test_caching_off_costs_what_the_other_window_found_cached() -> None:
    """The other window reused 75 %: 300 of 400 tokens at 0.2 ms are 60 ms."""
    requests = request_facts([0.0], queue=[0.0], prefill=[0.1], prompt_tokens=[400], computed_tokens=[400])
    off = context(model=work_model(prefill_s_per_token=0.0002), reuse_ratio=0.75, caching_off=True)
    assert row(write(facts(requests), "ttft", off), "prefix_caching_off") == [0.06]


def test_a_long_prompt_is_its_own_work_and_the_others_loss() -> None:
    """A 1,000-token prompt (1 ms a token) prefills for 1 s; who waits 0.5 s of it lost that to the long prompt."""
    requests = request_facts(
        [0.0, 0.5], queue=[0.0, 0.5], prefill=[1.0, 0.05], prompt_tokens=[1000, 10], computed_tokens=[1000, 0]
    )
    long = context(model=work_model(prefill_s_per_token=0.001), long_tokens=1000)
    ledger = write(facts(requests), "ttft", long)
    assert row(ledger, "long_prefill_interference") == [0.0, 0.5]
    assert row(ledger, "own_prefill") == [1.0, 0.05]


@pytest.mark.parametrize(("hits", "lost"), [(800.0, 0.0), (400.0, 400.0)])
def test_longer_prompts_that_find_as_much_lost_no_reuse(hits: float, lost: float) -> None:
    """The others found 80 of 100 tokens each. Ten prompts, one of 500 tokens, are 1,400; at that rate 280 would be left to compute.

    Where they found 800 together, as many each as the others, the 600 that are left to compute are 320 beyond it, but nothing was lost.
    Where they found 400, 1,000 are left, 720 beyond it, and 400 fewer were found: lost are 400.
    """
    prompt = [100.0] * 9 + [500.0]
    left = (sum(prompt) - hits) / sum(prompt)
    requests = request_facts(
        np.arange(10.0),
        queue=[0.0] * 10,
        prefill=[0.1] * 9 + [0.5],
        prompt_tokens=prompt,
        computed_tokens=[left * tokens for tokens in prompt],
    )
    samples = {"prefix_queries_tokens_total": 1400.0, "prefix_hits_tokens_total": hits}
    told = own_work(facts(requests, samples=samples), context(reuse_ratio=0.8, found_each=80.0)).tokens["reuse_lost"]
    assert told.sum() == pytest.approx(lost)


def test_cold_start_counts_only_what_stands_out() -> None:
    """20 requests after a start miss everything, 20 later ones find 80 %: 80 tokens of 100 each are the cold cache's."""
    arrival = [*np.linspace(0, 30, 20), *np.linspace(100, 130, 20)]
    cached = [0.0] * 20 + [80.0] * 20
    requests = request_facts(
        arrival,
        queue=[0.0] * 40,
        prefill=[0.1] * 40,
        prompt_tokens=[100.0] * 40,
        cached_tokens=cached,
        computed_tokens=[100.0 - c for c in cached],
    )
    up = MarkFact("worker_up", 0.0, "w0", "started", {})
    tokens = own_work(facts(requests, marks=[up]), context()).tokens
    assert tokens["cold_start"].tolist() == pytest.approx([80.0] * 20 + [0.0] * 20)
    assert own_work(facts(requests), context()).tokens["cold_start"].sum() == 0.0


def test_a_reset_now_and_then_leaves_a_rest_to_compare_with() -> None:
    """Caches are lost at 0 s and 40 s: of each 40 s the first 20 are cold. 10 of 20 miss there, 2 of 20 later: 40 % of the tokens, not 50 %."""
    arrival, cached = [], []
    for start in (0.0, 40.0):
        arrival += [*np.linspace(start + 0.5, start + 19.5, 20), *np.linspace(start + 20.5, start + 39.5, 20)]
        cached += [0.0, 100.0] * 10 + [0.0] * 2 + [100.0] * 18
    requests = request_facts(
        arrival,
        queue=[0.0] * 80,
        prefill=[0.1] * 80,
        prompt_tokens=[100.0] * 80,
        cached_tokens=cached,
        computed_tokens=[100.0 - c for c in cached],
    )
    resets = [MarkFact("cache_reset", at, "w0", "lost", {}) for at in (0.0, 40.0)]
    told = replace(facts(requests, marks=resets), start_s=0.0, end_s=80.0)
    tokens = own_work(told, context()).tokens["cold_start"]
    cold = np.tile(np.repeat([True, False], 20), 2)
    assert tokens[~cold].sum() == 0.0
    assert tokens[cold].sum() == pytest.approx(40 * 100 * 0.4)


def test_stall_after_preemption_is_set_apart_from_decoding() -> None:
    """Nine gaps of 10 ms and one of 510 ms: 500 ms are the preemption's, 100 ms decoding."""
    at = np.cumsum([0.01] * 5 + [0.51] + [0.01] * 4) + 0.1
    gap = np.array([0.01] * 5 + [0.51] + [0.01] * 4)
    gaps = Gaps(np.zeros(10, dtype=np.int64), at, gap, np.ones(10))
    requests = request_facts([0.0], queue=[0.0], prefill=[0.1], decode=[0.6], output_tokens=[11], gaps=gaps)
    ledger = write(facts(requests, samples=SHORTAGE), "e2e", context())
    assert row(ledger, "preemption_recompute") == [0.5]
    assert row(ledger, "own_decode") == [0.1]
    calm = write(facts(requests), "e2e", context())
    assert row(calm, "decode_stall") == [0.5], "without a preemption the stall has no known cause"


def test_tpot_rows_are_seconds_a_token() -> None:
    """600 ms over 10 gaps: 60 ms a token, split like the decode itself."""
    requests = request_facts([0.0], queue=[0.0], prefill=[0.1], decode=[0.6], output_tokens=[11])
    ledger = write(facts(requests), "tpot", context())
    assert ledger.values.tolist() == pytest.approx([0.06])
    assert ledger.parts.sum() == pytest.approx(0.06)


def test_one_token_has_no_tpot() -> None:
    """TPOT needs two tokens: null, not zero."""
    requests = request_facts([0.0, 0.0], queue=[0.0, 0.0], prefill=[0.1, 0.1], decode=[0.0, 0.2], output_tokens=[1, 3])
    values = metric_values(facts(requests), "tpot")
    assert np.isnan(values[0])
    assert values[1] == pytest.approx(0.1)
    assert write(facts(requests), "tpot", context()).rows.tolist() == [1]
