"""A first token that never came: bounds, ranges, and where the seconds stand in the ledger, worked by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.facts import Facts, WorkerFacts
from diagnosis.judge import judge
from diagnosis.ledger.ledger import write
from diagnosis.ledger.spent import Context
from diagnosis.ledger.values import judged_values, metric_values
from diagnosis.statistics.censored import Range, Waits, at_least_s, counted, stand_in, waits
from diagnosis.statistics.quantiles import nearest_rank
from diagnosis.windows import Chosen
from store.interface import Window
from tests.factories import facts, request_facts, work_model

NEVER = np.nan
CHOSEN = Chosen(Window(run_id="a"), Window(run_id="b"), "baseline", "suspect", "both windows were given")


def gave_up(known: Facts, rows: list[int], after_s: float, *, scheduled: bool = False) -> Facts:
    """The requests in `rows` ended `after_s` after their arrival without a first token."""
    r = known.requests
    changed = {
        name: getattr(r, name).copy()
        for name in ("first_token_s", "last_token_s", "engine_first_s", "engine_last_s", "scheduled_s", "end_s")
    }
    for name, column in changed.items():
        if name != "end_s" and not (scheduled and name == "scheduled_s"):
            column[rows] = NEVER
    changed["end_s"][rows] = r.arrival_s[rows] + after_s
    finished = r.finished.copy()
    finished[rows] = False
    numbers = {name: column.copy() for name, column in r.numbers.items()}
    for name in ("queue_s", "prefill_s", "decode_s", "output_tokens"):
        if name in numbers and not (scheduled and name == "queue_s"):
            numbers[name][rows] = NEVER
    return replace(known, requests=replace(r, finished=finished, numbers=numbers, **changed))


def context() -> Context:
    return Context(work_model(), 8, 1e9, None, False, 0.0, True)


def test_an_unfinished_request_waited_at_least_until_its_end() -> None:
    """It gave up after 30 s; a finished one whose first token nobody saw is unobserved, not censored."""
    known = gave_up(facts(request_facts([0.0, 5.0, 9.0])), [1], 30.0)
    known.requests.first_token_s[2] = NEVER
    assert at_least_s(known).tolist() == pytest.approx([NEVER, 30.0, NEVER], nan_ok=True)


def test_without_an_end_nothing_is_known() -> None:
    """No first token and no end: not even a bound."""
    known = gave_up(facts(request_facts([0.0, 5.0])), [1], np.nan)
    assert np.isnan(at_least_s(known)).all()


def test_the_quantile_is_a_range() -> None:
    """98 requests at 1 s and two that gave up after 5 s and 9 s. P99 is the 99th of 100: at least 5 s, with no upper limit.
    P98 is 1 s whatever became of them; the median too."""
    found = Waits(np.ones(98), np.array([5.0, 9.0]))
    assert found.range("0.99") == Range(5.0, None)
    assert found.range("0.99").open
    assert found.range("0.98") == Range(1.0, 1.0)


def test_one_of_a_hundred_bounds_p99_from_both_sides() -> None:
    """Values 1 to 99 s and one that was cancelled after 0.5 s. Sorted with it at 0.5 the 99th is 98; with it above all it is 99."""
    found = Waits(np.arange(1.0, 100.0), np.array([0.5]))
    assert found.range("0.99") == Range(98.0, 99.0)


def test_the_range_is_said() -> None:
    """In words, with the share and how long they waited."""
    found = Waits(np.ones(98), np.array([5.0, 9.0]))
    assert found.statement("suspect", "TTFT", "0.99") == (
        "suspect: 2 of 100 requests (2.0 %) ended without a first token, after 7.00 s in the median; P99 TTFT is 5.00 s or more"
    )
    between = Waits(np.arange(1.0, 100.0), np.array([0.5])).statement("suspect", "TTFT", "0.99")
    assert between is not None
    assert between.endswith("P99 TTFT lies between 98.00 s and 99.00 s")
    same = found.statement("suspect", "TTFT", "0.5")
    assert same is not None
    assert same.endswith("P50 TTFT is 1.00 s all the same")
    assert Waits(np.ones(3), np.empty(0)).statement("suspect", "TTFT", "0.99") is None


def test_only_waits_that_tell_something_count() -> None:
    """The median of what was seen is 2 s: a refusal after 0.1 s says nothing about the tail, giving up after 2 s does."""
    values, at_least = np.array([1.0, 2.0, 3.0, NEVER, NEVER]), np.array([NEVER, NEVER, NEVER, 0.1, 2.0])
    assert counted(values, at_least).tolist() == [False, False, False, False, True]


def test_where_nobody_got_a_first_token_all_waits_count() -> None:
    """There is no median to compare with."""
    values, at_least = np.full(2, NEVER), np.array([0.0, 4.0])
    assert counted(values, at_least).tolist() == [True, True]


def test_tpot_has_no_range() -> None:
    """TPOT has no meaning without a first token."""
    known = gave_up(facts(request_facts([0.0, 5.0], decode=[1.0, 1.0], output_tokens=[11, 11])), [1], 30.0)
    values = metric_values(known, "tpot")
    assert values.tolist() == pytest.approx([0.1, NEVER], nan_ok=True)
    assert len(waits(known, "tpot", values).at_least) == 0
    assert judged_values(known, "tpot").tolist() == pytest.approx([0.1, NEVER], nan_ok=True)


def test_e2e_is_bounded_like_ttft() -> None:
    """E2E has not ended either: at least 30 s."""
    known = gave_up(facts(request_facts([0.0, 5.0], decode=[1.0, 1.0], output_tokens=[11, 11])), [1], 30.0)
    assert judged_values(known, "e2e").tolist() == pytest.approx([1.1, 30.0])
    ledger = write(known, "e2e", context())
    assert ledger.censored.tolist() == [False, True]
    assert ledger.parts.sum(axis=1).tolist() == pytest.approx([1.1, 30.0])


def test_given_up_in_the_queue_is_waiting() -> None:
    """A pool of 20 blocks is held by one request for 1.2 s; who waited for it and gave up after 1 s waited for blocks."""
    requests = request_facts(
        [0.0, 0.2],
        queue=[0.0, 0.0],
        prefill=[0.1, 0.1],
        decode=[1.1, 0.5],
        prompt_tokens=[320, 320],
        output_tokens=[8, 8],
    )
    known = facts(
        requests,
        workers=[WorkerFacts("w0", block_size=16, num_blocks=20, flags={"max_num_seqs": "8"})],
        samples={"preemptions_total": 1.0},
    )
    ledger = write(gave_up(known, [1], 1.0), "ttft", context())
    assert ledger.values.tolist() == pytest.approx([0.1, 1.0])
    assert ledger.column("admission_blocked_on_blocks").tolist() == pytest.approx([0.0, 1.0])


def test_given_up_during_its_prefill_is_prefill() -> None:
    """Scheduled after 0.3 s, gone after 2 s: 0.3 s of queue and 1.7 s of its own prefill."""
    requests = request_facts([0.0, 10.0], queue=[0.0, 0.3], prefill=[0.1, 0.1])
    ledger = write(gave_up(facts(requests), [1], 2.0, scheduled=True), "ttft", context())
    assert ledger.column("own_prefill").tolist() == pytest.approx([0.1, 1.7])
    assert ledger.parts.sum(axis=1).tolist() == pytest.approx([0.1, 2.0])


def test_given_up_without_an_engine_row_is_unobserved() -> None:
    """Only the client saw it: where it waited is unknown, and not guessed."""
    ledger = write(gave_up(facts(request_facts([0.0, 10.0])), [1], 2.0), "ttft", context())
    assert ledger.column("ttft_unobserved").tolist() == pytest.approx([0.1, 2.0])


def test_stand_ins_keep_the_windows_own_lengths() -> None:
    """Two unknown answers get the 1st and the 3rd quarter of the known ones; a known one and an unobserved one stay."""
    values = np.array([10.0, 20.0, 30.0, 40.0, NEVER, NEVER, NEVER])
    filled = stand_in(values, np.array([False] * 4 + [True, True, False]))
    assert sorted(filled[4:6]) == [20.0, 40.0]
    assert filled[:4].tolist() == [10.0, 20.0, 30.0, 40.0]
    assert np.isnan(filled[6])
    assert np.isnan(stand_in(np.array([NEVER]), np.array([True]))).all()


def _window(count: int, never: int, after_s: float) -> Facts:
    """`count` requests with TTFTs around 0.1 s, 10 s apart; every so many gave up, `never` of them in all."""
    ttft = 0.1 * (1 + 0.02 * np.sin(np.arange(count) * 2.3))
    known = facts(
        request_facts(
            np.arange(count) * 10.0,
            queue=[0.0] * count,
            prefill=ttft,
            decode=[1.0] * count,
            output_tokens=[9.0] * count,
        )
    )
    rows = list(range(3, count, count // never))[:never] if never else []
    return gave_up(known, rows, after_s) if rows else known


def test_timeouts_are_the_incident_not_left_out() -> None:
    """60 requests, then 60 of which 12 gave up after 30 s: the mean rose by 12/60 * 29.9 s = 5.98 s, and P99 is 30 s or more."""
    base, suspect = replace(_window(60, 0, 0.0), name="baseline"), replace(_window(60, 12, 30.0), name="suspect")
    verdict = judge(base, suspect, CHOSEN, "ttft", "0.99")
    assert verdict.delta.mean_s == pytest.approx(5.98, abs=0.01)
    assert verdict.delta.suspect_p99_range == (30.0, None)
    assert verdict.delta.base_p99_range is None
    assert "30.00 s or more" in verdict.verdict
    assert any("12 of 60 requests (20 %) ended without a first token" in note for note in verdict.notes)
    document = verdict.to_dict()["delta"]
    assert document["suspect"]["p99_range_s"] == [30.0, None]
    assert document["baseline"]["p99_range_s"] is None


def test_refusals_do_not_make_latency_better() -> None:
    """12 of 60 were refused at once: what was served did not change, and whether P99 did cannot be told."""
    base, suspect = replace(_window(60, 0, 0.0), name="baseline"), replace(_window(60, 12, 0.001), name="suspect")
    for pair in ((base, suspect), (suspect, base)):
        verdict = judge(*pair, CHOSEN, "ttft", "0.99")
        assert verdict.status == "not_distinguishable"
        assert "cannot be compared" in verdict.verdict
        assert verdict.causes == []


def test_a_few_refusals_do_not_stop_a_verdict() -> None:
    """One of 60 at P50: the median is known, and it did not change."""
    base, suspect = replace(_window(60, 0, 0.0), name="baseline"), replace(_window(60, 1, 0.001), name="suspect")
    verdict = judge(base, suspect, CHOSEN, "ttft", "0.5")
    assert verdict.status == "no_change"


latencies = st.lists(st.floats(0.0, 100.0), max_size=30)


@given(latencies, latencies, latencies, st.sampled_from(["0.5", "0.95", "0.99"]))
def test_whatever_became_of_the_waits_the_quantile_is_in_range(
    seen: list[float], at_least: list[float], more: list[float], q: str
) -> None:
    """Let every open wait have ended some time after its bound: the true quantile lies in the range."""
    if not seen and not at_least:
        return
    extra = (more + [0.0] * len(at_least))[: len(at_least)]
    truth = nearest_rank(np.array(seen + [low + plus for low, plus in zip(at_least, extra, strict=True)]), q)
    found = Waits(np.array(seen), np.array(at_least)).range(q)
    assert found.low_s <= truth
    assert found.high_s is None or truth <= found.high_s
