"""Contradictions: the same counters with opposite truths, clocks bounded by causality, tokens that cannot be, and what rests on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diagnosis.checks import between, clocks, counters, delivery, integrity, reuse
from diagnosis.checks.check import NUMBERS_OF_REUSE, Check
from diagnosis.facts import Facts, Gaps, StepFacts, WorkerFacts
from diagnosis.judge import judge
from diagnosis.quality import check, penalty
from diagnosis.telling.verdict import Verdict
from diagnosis.windows import Chosen
from store.interface import Window
from tests import cause_scenarios as room
from tests.factories import facts, request_facts
from tests.telemetry_scenarios import HITS, QUERIES, far_away, lying

CHOSEN = Chosen(Window(run_id="a"), Window(run_id="b"), "baseline", "suspect", "both windows were given")
N = 100


pytestmark = pytest.mark.usefixtures("few_replicates")


def judged(made: room.Pair) -> Verdict:
    base, suspect, metric = made
    return judge(base, suspect, CHOSEN, metric, "0.99")


def plain(prefill: float = 0.1, samples: Any = None, steps: StepFacts | None = None, **numbers: Any) -> Facts:
    """100 requests 1 s apart: no queue, `prefill` s, ten tokens 0.1 s apart."""
    known: dict[str, Any] = {"prompt_tokens": 100.0, "output_tokens": 10.0} | numbers
    requests = request_facts(
        [float(k) for k in range(N)],
        queue=[0.0] * N,
        prefill=[prefill] * N,
        decode=[0.9] * N,
        **dict[str, Any]({name: [value] * N for name, value in known.items()}),
    )
    return facts(requests, name="suspect", samples=samples, steps=steps)


def steps(worker: str = "w0", num: int = 60, **numbers: Any) -> StepFacts:
    columns = {name: np.broadcast_to(np.asarray(value, dtype=float), num) for name, value in numbers.items()}
    return StepFacts(
        np.zeros(num, dtype=np.int64), (worker,), np.arange(num, dtype=np.float64), np.full(num, 0.5), columns
    )


# What never came to be computed, and in which unit a counter counts


def _given_up(known: Facts, share: int) -> Facts:
    """Of every `share` requests one ended without a first token."""
    r = known.requests
    gone = np.arange(N) % share == 0
    first = np.where(gone, np.nan, r.first_token_s)
    return replace(known, requests=replace(r, finished=~gone, first_token_s=first, engine_first_s=first))


def spoken(made: Check | None) -> Check:
    """The check, which has to say something: silence fails here."""
    if made is None:
        pytest.fail("the check says nothing")
    return made


@pytest.mark.parametrize(("computed", "status"), [(7_500, "ok"), (1_500, "contradiction")])
def test_prompts_that_were_never_computed_are_not_reused(computed: int, status: str) -> None:
    """25 of 100 prompts of 100 tokens were turned away: 7,500 to compute. All computed: nothing reused; 1,500: 6,000 were."""
    samples = {QUERIES: 7_500.0, HITS: 0.0}
    known = _given_up(plain(samples=samples, steps=steps(prefill_tokens=computed / 60)), 4)
    made = spoken(reuse.hit_counter(known))
    assert made.status == status


def test_steps_that_are_missing_computed_as_much_as_the_others() -> None:
    """48 of 60 steps are there, with 8,000 of 10,000 tokens: nothing was reused, and no counter lies."""
    kept = np.delete(np.arange(61.0), np.arange(5, 60, 5)[:12])
    there = steps(num=len(kept), step=kept, prefill_tokens=10_000 / 61)
    made = spoken(reuse.hit_counter(plain(samples={QUERIES: 10_000.0, HITS: 0.0}, steps=there)))
    assert made.status == "ok"


@pytest.mark.parametrize("tells", ["requests", "steps"])
def test_counter_of_blocks_is_named_so(tells: str) -> None:
    """6,400 tokens were reused, blocks have 16: a counter at 400 counts blocks; one at 3,000 is only off."""
    for hits, in_blocks in ((400.0, True), (3_000.0, False)):
        samples = {QUERIES: 10_000.0, HITS: hits}
        if tells == "requests":
            known = plain(samples=samples, cached_tokens=64.0)
        else:
            known = plain(samples=samples, steps=steps(prefill_tokens=3_600 / 60))
        known = replace(known, workers=[WorkerFacts("w0", block_size=16)])
        made = spoken(reuse.cached_tokens(known) if tells == "requests" else reuse.hit_counter(known))
        assert ("blocks of 16 tokens" in made.statement, made.contradicts) == (in_blocks, in_blocks)


def test_requests_that_say_nothing_was_found_are_held_against_the_steps() -> None:
    """The steps computed 4,000 of 10,000 prompt tokens. A counter that tells is held against both elsewhere."""
    few = steps(prefill_tokens=4_000 / 60)
    made = spoken(reuse.unsaid_reuse(plain(steps=few, cached_tokens=0.0)))
    assert made.contradicts
    assert made.touches == NUMBERS_OF_REUSE["requests"]
    both = spoken(reuse.unsaid_reuse(plain(samples={QUERIES: 10_000.0, HITS: 0.0}, steps=few, cached_tokens=0.0)))
    assert both.touches == NUMBERS_OF_REUSE["requests"] | NUMBERS_OF_REUSE["counter"]
    assert reuse.unsaid_reuse(plain(samples={QUERIES: 10_000.0, HITS: 6_000.0}, steps=few, cached_tokens=0.0)) is None
    assert reuse.unsaid_reuse(plain(steps=steps(prefill_tokens=10_000 / 60), cached_tokens=0.0)) is None
    assert reuse.unsaid_reuse(plain(steps=few, cached_tokens=60.0)) is None


# The same counters, opposite truths: hits 0, queries 10,000


ZERO = {QUERIES: 10_000.0, HITS: 0.0, "prompt_tokens_total": 10_000.0}


@pytest.mark.parametrize(
    ("told", "status"),
    [
        ({"cached_tokens": 0.0}, "ok"),
        ({"cached_tokens": 60.0}, "contradiction"),
        ({"steps": steps(prefill_tokens=10_000 / 60)}, "ok"),
        ({"steps": steps(prefill_tokens=4_000 / 60)}, "contradiction"),
        ({"samples": {"prompt_tokens_computed_total": 10_000.0}}, "ok"),
        ({"samples": {"prompt_tokens_computed_total": 4_000.0}}, "contradiction"),
        ({"samples": {"prompt_tokens_cached_total": 0.0}}, "ok"),
        ({"samples": {"prompt_tokens_cached_total": 6_000.0}}, "contradiction"),
    ],
)
def test_identical_counters_and_opposite_truth(told: dict[str, Any], status: str) -> None:
    """0 of 10,000 looked-up tokens were hits. Requests, steps or other counters bear that out, or say that 6,000 were reused."""
    known = plain(**{**told, "samples": ZERO | told.get("samples", {})})
    made = [c for c in check(known) if c.check in ("cached_tokens", "hit_counter")]
    assert [c.status for c in made] == [status]
    if status == "contradiction":
        assert "not telling the truth" in made[0].statement


@pytest.mark.parametrize(("prefill", "status"), [(0.22, "ok"), (0.1, "contradiction")])
def test_times_tell_where_nobody_else_does(prefill: float, status: str) -> None:
    """Half of the tokens were hits before, none are now by the counter. Prefill twice as long bears it out; as before belies it."""
    before = replace(plain(0.1, {QUERIES: 10_000.0, HITS: 5_000.0}), name="baseline")
    now = plain(prefill, {QUERIES: 10_000.0, HITS: 0.0})
    made = spoken(between.hits_against_times(now, before))
    assert made.status == status
    assert between.hits_against_times(before, now) is None, "a counter that moves is not asked"


@pytest.mark.parametrize(("prefill", "status"), [(0.09, "ok"), (0.04, "contradiction")])
def test_a_counter_that_never_moved(prefill: float, status: str) -> None:
    """Caching was off (nothing looked up) and is on: the counter says 0 hits. Prefill that fell to 0.4 of what it was belies it."""
    before = replace(plain(0.1, {QUERIES: 0.0, HITS: 0.0}), name="baseline")
    made = spoken(between.hits_against_times(plain(prefill, {QUERIES: 10_000.0, HITS: 0.0}), before))
    assert made.status == status


def test_another_machine_makes_times_no_witness() -> None:
    """Where decoding got twice as fast too, shorter prefill says nothing of a cache."""
    before = replace(plain(0.1), name="baseline")
    now = plain(0.04, {QUERIES: 10_000.0, HITS: 0.0})
    fast = replace(now.requests, last_token_s=now.requests.first_token_s + 0.4)
    assert between.hits_against_times(replace(now, requests=fast), before) is None


def test_the_third_witness_says_who_lies() -> None:
    """Requests 6,000, counter 0, steps 6,000: the counter. Requests 0, counter 6,000, steps 0: the counter too; steps 6,000: the requests."""

    def said(cached: float, hits: float, computed: float) -> Check:
        known = plain(samples=ZERO | {HITS: hits}, steps=steps(prefill_tokens=computed / 60), cached_tokens=cached)
        made = spoken(reuse.cached_tokens(known))
        assert made.contradicts
        return made

    counter, requests = NUMBERS_OF_REUSE["counter"], NUMBERS_OF_REUSE["requests"]
    assert (said(60.0, 0.0, 4_000.0).touches, said(0.0, 6_000.0, 10_000.0).touches) == (counter, counter)
    assert said(0.0, 6_000.0, 4_000.0).touches == requests
    undecided = plain(samples={QUERIES: 10_000.0, HITS: 0.0}, cached_tokens=60.0)
    made = spoken(reuse.cached_tokens(undecided))
    assert made.touches == counter | requests
    assert "one of the two" in made.statement


# Clocks


def seen_by_callers(ahead: dict[str, float], n: int = 200, way_in: float = 0.002, way_out: float = 0.001) -> Facts:
    """Requests in turns at workers whose clocks are ahead of the callers' by so much; the way there and back takes its time."""
    names = tuple(ahead)
    requests = request_facts(
        [k * 0.1 for k in range(n)],
        queue=[0.01] * n,
        prefill=[0.05] * n,
        decode=[0.2] * n,
        worker=[k % len(names) for k in range(n)],
        worker_names=names,
        vantage="client",
    )
    skew = np.array([ahead[name] for name in names])[requests.worker]
    there, back = requests.engine_arrival_s.copy(), requests.engine_first_s.copy()
    return facts(
        replace(
            requests,
            arrival_s=there - way_in,
            first_token_s=back + way_out,
            engine_arrival_s=there + skew,
            engine_first_s=back + skew,
        ),
        name="suspect",
    )


@pytest.mark.parametrize("ahead_s", [0.1, 0.5, 2.0, -0.1, -0.5])
def test_one_worker_s_clock_is_told_apart(ahead_s: float) -> None:
    """One of four is off: it is named, with how far, between what arrivals and first tokens allow (1 ms back, 2 ms there)."""
    made = clocks.clocks(seen_by_callers({"w0": 0.0, "w1": 0.0, "w2": ahead_s, "w3": 0.0}))
    assert (made.status, made.subject) == ("contradiction", "w2")
    (skew,) = clocks.skews(seen_by_callers({"w0": 0.0, "w1": 0.0, "w2": ahead_s, "w3": 0.0}))
    assert (skew.low_s, skew.high_s) == pytest.approx((ahead_s - 0.001, ahead_s + 0.002))
    assert ("ahead" if ahead_s > 0 else "behind") in made.statement


def test_small_differences_are_warnings_and_smaller_ones_nothing() -> None:
    """30 ms cannot be the way and spoils little; 5 ms is within what clocks are allowed."""
    assert clocks.clocks(seen_by_callers({"w0": 0.0, "w1": 0.03})).status == "warning"
    assert clocks.clocks(seen_by_callers({"w0": 0.0, "w1": 0.005})).status == "ok"


def test_a_long_way_is_no_skew() -> None:
    """32 s in a front end before the engine sees a request: every clock agrees, and so it is said."""
    assert clocks.clocks(seen_by_callers({"w0": 0.0}, way_in=32.0)).status == "ok"
    assert "clock_skew" not in [cause.cause for cause in judged(far_away()).causes]


def test_a_few_wrong_instants_decide_nothing() -> None:
    """Four of 200 first tokens are told an hour late by a worker: that is no skew of its clock."""
    known = seen_by_callers({"w0": 0.0})
    known.requests.engine_first_s[:4] += 3600.0
    assert clocks.clocks(known).status == "ok"


def test_workers_whose_way_from_the_router_differs_are_a_warning() -> None:
    """Without callers: requests reach w2 half a second later after routing than the others: its clock, or its way."""
    made = clocks.clocks(replace(plain(), routed_s={"w0": 0.001, "w1": 0.002, "w2": 0.5}))
    assert (made.status, made.subject) == ("warning", "w2")
    assert clocks.clocks(replace(plain(), routed_s={"w0": 0.001, "w1": 0.002})).status == "ok"


def test_a_clock_that_was_set_shows_in_durations() -> None:
    """Two of 100 requests decode 3.9 s by their instants and 0.9 s by their own stop watch; stalls that are told explain it."""
    known = plain(stalled_s=0.0)
    known.requests.engine_last_s[:2] += 3.0
    made = spoken(clocks.durations(known))
    assert made.contradicts
    paused = plain(stalled_s=3.0)
    paused.requests.engine_last_s[:2] += 3.0
    assert clocks.durations(paused) is None


@pytest.mark.parametrize(("wrong", "status"), [(0, None), (1, "warning"), (2, "contradiction")])
def test_tokens_that_come_before_those_in_front_of_them(wrong: int, status: str | None) -> None:
    """Reordered tokens of one stream: one in a hundred requests is an accident, more is a contradiction."""
    gaps = Gaps(np.arange(N), np.arange(N, dtype=np.float64), np.full(N, 0.1), np.ones(N), wrong)
    known = plain()
    made = clocks.token_times(replace(known, requests=replace(known.requests, gaps=gaps)))
    assert (made and made.status) == status


# Tokens, counters and gauges


@pytest.mark.parametrize(
    ("numbers", "status"),
    [
        ({"cached_tokens": 60.0, "computed_tokens": 40.0}, None),
        ({"cached_tokens": 120.0}, "contradiction"),
        ({"cached_tokens": 60.0, "computed_tokens": 100.0}, "contradiction"),
        ({"cached_tokens": 60.0, "computed_tokens": 100.0, "recomputed_tokens": 60.0}, None),
    ],
)
def test_cached_and_computed_are_parts_of_the_prompt(numbers: dict[str, Any], status: str | None) -> None:
    """Of a prompt of 100; what was computed twice after a preemption counts once."""
    made = reuse.token_sums(plain(**numbers))
    assert (made and made.status) == status


@pytest.mark.parametrize(
    ("mine", "theirs", "status"),
    [(10.0, 10.0, None), (8.0, 10.0, "warning"), (12.0, 10.0, "contradiction")],
)
def test_tokens_of_the_caller_and_of_the_engine(mine: float, theirs: float, status: str | None) -> None:
    """Fewer may be chunks; more than the engine made cannot be."""
    made = reuse.client_tokens(plain(output_tokens=mine, engine_output_tokens=theirs))
    assert (made and made.status) == status
    cached = spoken(reuse.client_tokens(plain(cached_tokens=0.0, engine_cached_tokens=60.0)))
    assert cached.contradicts


def test_more_hits_than_lookups_cannot_be() -> None:
    """12,000 found of 10,000 looked up."""
    made = spoken(reuse.lookups(plain(samples={QUERIES: 10_000.0, HITS: 12_000.0})))
    assert made.contradicts
    assert reuse.lookups(plain(samples={QUERIES: 10_000.0, HITS: 9_000.0})) is None


def test_a_cache_that_is_said_to_be_off_and_found_something() -> None:
    """The worker's flag against 6,000 cached tokens."""
    known = plain(cached_tokens=60.0)
    off = replace(known, workers=[WorkerFacts("w0", prefix_caching=False)])
    made = spoken(reuse.caching_flag(off))
    assert made.contradicts
    assert reuse.caching_flag(replace(known, workers=[WorkerFacts("w0", prefix_caching=True)])) is None


def test_gauges_and_counters_that_are_dead() -> None:
    """A gauge of usage at 0 beside steps that use 30 %; none running beside 9 at once; a counter that stands still over the window."""
    used = steps(blocks_used=30.0, blocks_total=100.0)
    usage = {"kv_usage_ratio:min": 0.0, "kv_usage_ratio:max": 0.0, "kv_usage_ratio:n": 60.0}
    made = spoken(counters.usage_range(plain(samples=usage, steps=used)))
    assert made.contradicts
    busy = replace(plain(), requests=replace(plain().requests, end_s=np.arange(N, dtype=np.float64) + 10.0))
    running = {"requests_running:max": 0.0, "requests_running:n": 60.0}
    assert spoken(counters.running(replace(busy, samples=running))).contradicts
    assert counters.running(replace(busy, samples={**running, "requests_running:n": 2.0})) is None, (
        "two scrapes miss much"
    )
    still = {"requests_finished_total": 0.0, "requests_finished_total:span_s": 90.0}
    assert spoken(counters.still_counters(plain(samples=still))).contradicts
    assert counters.still_counters(plain(samples={**still, "requests_finished_total:span_s": 5.0})) is None, (
        "read too shortly"
    )


def test_negative_and_impossible_numbers() -> None:
    """-1 requests wait; a step uses 120 of 100 blocks."""
    made = spoken(counters.negative(plain(samples={"requests_waiting:min": -1.0})))
    assert made.contradicts
    assert spoken(counters.blocks_in_use(plain(steps=steps(blocks_used=120.0, blocks_total=100.0)))).contradicts
    assert counters.blocks_in_use(plain(steps=steps(blocks_used=80.0, blocks_total=100.0))) is None


@pytest.mark.parametrize(("lost", "status"), [(0, "ok"), (1, "warning"), (10, "contradiction")])
def test_steps_that_are_missing_leave_holes(lost: int, status: str) -> None:
    """Their numbers run on: 60 steps of which so many of 60 are not there. A restart, which counts from 0, is no hole."""
    numbers = np.arange(60 + lost, dtype=float)
    kept = np.delete(numbers, np.arange(20, 20 + lost))
    kept[40:] = np.arange(20)
    made = spoken(delivery.holes(plain(steps=steps(num=60, step=kept))))
    assert made.status == status


def test_half_rows_of_lost_batches_are_no_contradiction() -> None:
    """One step in 60 is missing, so three requests in a hundred may be halves; without holes three are a contradiction."""
    known = plain(output_tokens=10.0, engine_output_tokens=10.0)
    known.requests.get("output_tokens")[:3] = 20.0
    assert spoken(reuse.client_tokens(known)).contradicts
    holes = steps(num=60, step=np.delete(np.arange(61.0), 30))
    assert reuse.client_tokens(replace(known, steps=holes)) is None


@pytest.mark.parametrize(
    ("made", "status"),
    [
        ({}, None),
        ({"mask": (50, 0)}, "ok"),
        ({"mask": (200, 1)}, "warning"),
        ({"sample_boundary": (3, 3)}, "contradiction"),
    ],
)
def test_wrong_or_reordered_tokens(made: dict[str, tuple[int, int]], status: str | None) -> None:
    """Failed checks of batches and streams; who reports only what failed is held against its requests."""
    found = integrity.integrity(replace(plain(), integrity=made))
    assert (found and found.status) == status


# What rests on a contradiction


def test_confidence_falls_where_a_cause_rests_on_it() -> None:
    """0.7 of a cause that needs the counter, nothing of one that does not; one that can be judged otherwise keeps its own."""
    lies = Check("hit_counter", "contradiction", "", "telemetry", frozenset({"sample.prefix_hits_tokens_total"}))
    assert penalty([lies], ("sample.prefix_hits_tokens_total",)) == 0.7
    assert penalty([lies], ("request.cached_tokens|sample.prefix_hits_tokens_total",)) == 1.0
    assert penalty([lies], ("step",)) == 1.0
    assert penalty([lies]) == 0.7
    everything = Check("gaps", "warning", "")
    assert penalty([everything, lies], ("step",)) == 0.95


def test_beside_a_cause_of_the_engine_a_lying_counter_stands_in_the_quality_alone() -> None:
    """Blocks ran short, and the hit counter lies: nothing of the one rests on the other, and it keeps its confidence."""
    base, suspect, metric = room.blocked()
    lie = {QUERIES: 10_000.0, HITS: 0.0, **suspect.samples}
    requests = replace(suspect.requests, numbers={**suspect.requests.numbers, "cached_tokens": np.full(room.N, 100.0)})
    verdict = judged((base, replace(suspect, samples=lie, requests=requests), metric))
    assert verdict.causes[0].cause == "admission_blocked_on_blocks"
    assert "telemetry_contradiction" not in [cause.cause for cause in verdict.causes]
    assert any(row["status"] == "contradiction" for row in verdict.quality)
    because = next(row["because"] for row in verdict.excluded if row["cause"] == "telemetry_contradiction")
    assert "does not rest on it" in because
    assert verdict.causes[0].confidence == judged(room.blocked()).causes[0].confidence


def test_beside_a_cause_that_rests_on_it_the_contradiction_is_named_after_it() -> None:
    """Caching is off by the flag and the requests, and the flag is contradicted by the counter: both are named, the engine's first."""
    base, suspect, metric = room.caching_off()
    verdict = judged((base, replace(suspect, samples={QUERIES: 9_600.0, HITS: 6_000.0}), metric))
    assert [cause.cause for cause in verdict.causes] == ["prefix_caching_off", "telemetry_contradiction"]
    assert verdict.causes[0].certainty == pytest.approx(0.7), "that of a cause whose numbers are contradicted"


def test_a_baseline_that_lies_is_told_too() -> None:
    """The same contradiction in the window before."""
    base, suspect, metric = lying()
    verdict = judged(room.pair(suspect, base, metric))
    assert [cause.cause for cause in verdict.causes] == ["telemetry_contradiction"]
    assert "baseline: cached tokens by request" in verdict.verdict
