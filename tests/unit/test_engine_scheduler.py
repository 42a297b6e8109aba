"""What the scheduler puts into a step, whom it lets wait and why. Steps take 10 ms on a virtual clock."""

from __future__ import annotations

from typing import Any

import pytest

from engine_probe.engine.config import EngineConfig
from engine_probe.engine.sampling_params import SamplingParams
from engine_probe.engine.scheduler import SchedulerConfig
from engine_probe.engine.sequence import Sequence, State
from engine_probe.engine.waiting_queue import WaitingQueue
from engine_probe.errors import PromptRefused, UsageError
from tests.engine_bench import STEP_S, EngineBench

MS = 10**6


def steps(bench: EngineBench) -> list[dict[str, Any]]:
    """Step rows with waits in one word."""
    rows = bench.rows("step")
    for row in rows:
        row["held_up_by"] = next((name for name, count in row["waiting_on"].items() if count), None)
    return rows


def ttft_ms(bench: EngineBench) -> dict[str, float]:
    return {name: (row["first_token_ns"] - row["arrival_ns"]) / MS for name, row in bench.requests().items()}


def test_prompt_longer_than_the_budget_comes_in_chunks() -> None:
    """25 tokens, 10 a step: chunks of 10, 10 and 5, the first token at 30 ms."""
    bench = EngineBench(scheduler={"max_num_batched_tokens": 10, "max_num_seqs": 4})
    bench.request("a", 25, max_tokens=2)
    bench.run()
    assert [row["prefill_tokens"] for row in steps(bench)] == [10, 10, 5, 0]
    assert ttft_ms(bench) == {"a": 30.0}
    assert bench.requests()["a"]["prefill_chunks"] == 3


def test_decodes_go_on_beside_a_long_prompt() -> None:
    """Chunking: a request that decodes gets a token every step while 40 tokens of another come in, 9 a step beside it."""
    bench = EngineBench(scheduler={"max_num_batched_tokens": 10, "max_num_seqs": 4})
    bench.request("short", 4, max_tokens=7)
    bench.engine.step()
    bench.request("long", 40, max_tokens=1)
    bench.run()
    assert [(row["prefill_tokens"], row["decode_tokens"]) for row in steps(bench)] == [
        (4, 0),
        (9, 1),
        (9, 1),
        (9, 1),
        (9, 1),
        (4, 1),
        (0, 1),
    ]


def test_without_chunking_a_prompt_comes_whole() -> None:
    """A prompt above the budget is computed in one step, alone; the next one waits for the budget."""
    bench = EngineBench(scheduler={"max_num_batched_tokens": 10, "max_num_seqs": 4, "chunked_prefill": False})
    bench.request("a", 25, max_tokens=1)
    bench.request("b", 5, max_tokens=1)
    bench.run()
    assert [row["prefill_tokens"] for row in steps(bench)] == [25, 5]
    assert [row["held_up_by"] for row in steps(bench)] == ["budget", None]


def test_chunks_may_be_smaller_than_the_budget() -> None:
    """max_chunk_tokens bounds one prompt's share; the rest of the budget goes to the next."""
    bench = EngineBench(scheduler={"max_num_batched_tokens": 10, "max_num_seqs": 4, "max_chunk_tokens": 4})
    bench.request("a", 8, max_tokens=1)
    bench.request("b", 8, max_tokens=1)
    bench.run()
    assert [row["prefill_tokens"] for row in steps(bench)] == [8, 8]


def test_full_seats_are_the_reason_told() -> None:
    """One seat: the second request waits 30 ms for seats, and its row says so."""
    bench = EngineBench(scheduler={"max_num_seqs": 1, "max_num_batched_tokens": 100})
    bench.request("a", 4, max_tokens=3)
    bench.request("b", 4, max_tokens=1)
    bench.run()
    assert [row["held_up_by"] for row in steps(bench)] == ["seats", "seats", "seats", None]
    assert dict(bench.requests()["b"]["labels"]) == {"waited_on_seats_s": "0.030000"}
    assert bench.requests()["b"]["queue_s"] == pytest.approx(3 * STEP_S)


def test_missing_blocks_are_the_reason_told() -> None:
    """Six blocks of 4: a prompt of 16 holds four; one of 12 needs three and waits for blocks until the first is done."""
    bench = EngineBench(num_blocks=6, prefix_caching=False)
    bench.request("a", 14, max_tokens=2)
    bench.request("b", 12, max_tokens=1)
    bench.run()
    assert [row["held_up_by"] for row in steps(bench)] == ["blocks", "blocks", None]
    assert dict(bench.requests()["b"]["labels"]) == {"waited_on_blocks_s": "0.020000"}


def test_youngest_gives_way_and_the_row_says_for_whom() -> None:
    """Both hold two of five blocks; at the third each, the younger gives its blocks back and is computed again."""
    bench = EngineBench(num_blocks=5, prefix_caching=False, scheduler={"watermark_ratio": 0.0})
    bench.request("old", 7, max_tokens=6)
    bench.request("young", 7, max_tokens=6)
    bench.run()
    rows = bench.requests()
    assert (rows["old"]["num_preemptions"], rows["young"]["num_preemptions"]) == (0, 1)
    assert dict(rows["young"]["labels"])["preempted_for"] == "young"
    # Eight tokens were computed (7 and the first output's); the ninth found no block.
    assert rows["young"]["recomputed_tokens"] == 8
    assert sum(row["num_preempted"] for row in steps(bench)) == 1
    assert rows["young"]["output_tokens"] == 6


def test_swap_brings_kv_back_instead_of_computing_it_again() -> None:
    """The same squeeze with host blocks: nothing is recomputed, two blocks go out and come in."""
    bench = EngineBench(
        num_blocks=5,
        prefix_caching=False,
        swap_blocks=4,
        scheduler={"watermark_ratio": 0.0, "preemption": "swap"},
    )
    bench.request("old", 7, max_tokens=6)
    bench.request("young", 7, max_tokens=6)
    bench.run()
    rows = bench.requests()
    assert (rows["young"]["num_preemptions"], rows["young"]["recomputed_tokens"]) == (1, 0)
    assert [len(plan.swap_out) for plan in bench.executor.plans if plan.swap_out] == [2]
    assert [len(plan.swap_in) for plan in bench.executor.plans if plan.swap_in] == [2]


def test_own_blocks_found_again_are_self_hits() -> None:
    """A preempted request finds its own prompt in the cache: counted as self hit, never as prefix hit."""
    bench = EngineBench(num_blocks=5, scheduler={"watermark_ratio": 0.0})
    bench.request("old", 7, max_tokens=6)
    bench.request("young", [1, 2, 3, 4, 5, 6, 7], max_tokens=6)
    bench.run()
    row = bench.requests()["young"]
    assert (row["num_preemptions"], row["cached_tokens"], row["self_hit_tokens"]) == (1, 0, 4)
    assert row["recomputed_tokens"] == 4
    hits = {row["name"]: row["value"] for row in bench.rows("sample")}
    assert hits["prefix_hits_tokens_total"] == 0


def test_policies_choose_who_is_next() -> None:
    """One seat, three waiting: by arrival, by length, by priority."""
    orders = {}
    for policy in ("fcfs", "shortest", "priority"):
        bench = EngineBench(scheduler={"max_num_seqs": 1, "max_num_batched_tokens": 100, "policy": policy})
        bench.request("running", 4, max_tokens=2)
        bench.engine.step()
        bench.request("long", 30, max_tokens=1)
        bench.request("short", 4, max_tokens=1)
        bench.request("urgent", 20, max_tokens=1, priority=5)
        bench.run()
        rows = bench.requests()
        orders[policy] = sorted(("long", "short", "urgent"), key=lambda name: rows[name]["first_scheduled_ns"])
    assert orders == {
        "fcfs": ["long", "short", "urgent"],
        "shortest": ["short", "urgent", "long"],
        "priority": ["urgent", "long", "short"],
    }


def test_nobody_starves_under_shortest_first() -> None:
    """Short requests keep coming; the long one still runs once it has waited 100 ms."""
    bench = EngineBench(
        scheduler={"max_num_seqs": 1, "max_num_batched_tokens": 100, "policy": "shortest", "max_wait_s": 0.1}
    )
    bench.request("first", 4, max_tokens=1)
    bench.request("long", 40, max_tokens=1)
    for number in range(60):
        bench.request(f"short{number}", 4, max_tokens=1)
        bench.engine.step()
    waited_s = bench.requests()["long"]["queue_s"]
    assert 0.1 < waited_s <= 0.1 + 2 * STEP_S


def waiting(name: str, number: int, since_ns: int) -> Sequence:
    made = Sequence(name, 4 + number, SamplingParams(max_tokens=1), since_ns, number=number)
    made.waits_since_ns = since_ns
    return made


def test_who_takes_over_a_prompt_waits_since_it_came() -> None:
    """A sibling that comes into the queue late, because it waited for another, is the oldest there, and overdue first."""
    queue = WaitingQueue("shortest", max_wait_ns=100)
    queue.push(waiting("short", 0, since_ns=50))
    queue.push(heir := waiting("heir", 1, since_ns=0))
    assert queue.oldest() is heir
    assert queue.next(100) is not heir
    assert queue.next(101) is heir


def test_requests_that_gave_up_are_not_kept_in_the_queue() -> None:
    """One waits on while 10,000 behind it come and are aborted: the queue does not grow with them."""
    queue = WaitingQueue("priority")
    queue.push(first := waiting("first", 0, since_ns=0))
    for number in range(1, 10_000):
        queue.push(gone := waiting(f"r{number}", number, since_ns=number))
        gone.state = State.ENDED
        queue.left(State.WAITING)
    assert len(queue._heap) < 100
    assert list(queue) == [first]


def test_last_prompt_token_alone_is_prefill_and_no_decode() -> None:
    """Nine tokens in chunks of 4: 4, 4 and 1 are prefill; until the first token nothing was decoded."""
    bench = EngineBench(scheduler={"max_chunk_tokens": 4})
    bench.request("a", 9, max_tokens=2)
    bench.run()
    assert [(row["prefill_tokens"], row["decode_tokens"]) for row in steps(bench)] == [(4, 0), (4, 0), (1, 0), (0, 1)]
    row = bench.requests()["a"]
    assert (row["prefill_chunks"], row["computed_tokens"]) == (3, 9)
    assert (row["prefill_s"], row["decode_s"]) == (pytest.approx(3 * STEP_S), pytest.approx(STEP_S))


def test_wait_that_ended_in_vain_has_its_reason() -> None:
    """Aborted after 20 ms in the queue: the row says what it waited for."""
    bench = EngineBench(scheduler={"max_num_seqs": 1})
    bench.request("runs", 4, max_tokens=9)
    bench.request("gone", 4)
    bench.engine.step()
    bench.engine.step()
    bench.engine.abort("gone")
    row = bench.requests()["gone"]
    assert dict(row["labels"]) == {"waited_on_seats_s": "0.020000"}
    assert row["queue_s"] == pytest.approx(0.02)


def test_preemption_without_a_step_is_told_with_the_next() -> None:
    """Blocks are held for KV on its way: the one that runs gives way, nothing is computed; the next step's row counts it."""
    bench = EngineBench(num_blocks=3, scheduler={"watermark_ratio": 0.0}, prefix_caching=False)
    bench.request("a", 4, max_tokens=4)
    bench.engine.step()
    held = bench.engine.kv.reserve(2, "other", bench.clock.now)
    assert bench.engine.step() is None
    bench.engine.kv.pool.release(held, bench.clock.now)
    bench.run()
    row = bench.requests()["a"]
    assert (row["num_preemptions"], row["recomputed_tokens"], row["output_tokens"]) == (1, 4, 4)
    assert [row["num_preempted"] for row in steps(bench)] == [0, 1, 0, 0]


def test_overdue_request_is_not_thrown_out_by_urgent_ones() -> None:
    """A request of low priority that waited past the bound runs to its end although urgent ones need its blocks."""
    bench = EngineBench(
        num_blocks=6,
        prefix_caching=False,
        scheduler={"policy": "priority", "max_wait_s": 0.05, "watermark_ratio": 0.0, "max_num_seqs": 2},
    )
    bench.request("urgent0", 8, max_tokens=6, priority=9)
    bench.request("urgent1", 8, max_tokens=6, priority=9)
    bench.request("humble", 8, max_tokens=8)
    for number in range(2, 12):
        bench.request(f"urgent{number}", 8, max_tokens=6, priority=9)
    bench.run()
    row = bench.requests()["humble"]
    assert row["num_preemptions"] == 0
    assert row["queue_s"] < 0.25


def test_timeout_ends_a_request_wherever_it_is() -> None:
    """50 ms: the running one and the waiting one end as aborted, and hold nothing."""
    bench = EngineBench(timeout_s=0.05, scheduler={"max_num_seqs": 1, "max_num_batched_tokens": 100})
    bench.request("runs", 4, max_tokens=100)
    bench.request("waits", 4, max_tokens=1)
    bench.run()
    rows = bench.requests()
    assert {(row["state"], row["finish_reason"]) for row in rows.values()} == {("aborted", "timeout")}
    assert rows["runs"]["output_tokens"] == 5
    assert bench.engine.kv.pool.num_referenced == 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "says"),
    [
        (0, 1, "has no prompt token"),
        (64, 1, r"64 prompt tokens; this engine takes 63 .* \(KV blocks: 16 of 4 tokens"),
        (9, 0, "max_tokens is 0"),
    ],
)
def test_request_that_can_never_run_is_refused_with_the_numbers(prompt: int, max_tokens: int, says: str) -> None:
    """No tokens, longer than the pool, nothing to generate: refused, recorded, and no block is held."""
    bench = EngineBench(num_blocks=16)
    with pytest.raises(PromptRefused, match=says):
        bench.request("a", prompt, max_tokens)
    assert not bench.engine.has_work
    assert [row["state"] for row in bench.rows("request")] == (["rejected"] if max_tokens else [])
    bench.engine.check_integrity()


def test_an_id_under_way_is_refused_and_the_first_goes_on() -> None:
    """Two requests of one id at once cannot be told apart."""
    bench = EngineBench()
    bench.request("a", 5)
    with pytest.raises(PromptRefused, match="under way already"):
        bench.request("a", 5)
    assert [output.finish_reason for output in bench.run()][-1] == "length"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SchedulerConfig(max_num_seqs=0), "max_num_seqs is 0"),
        (lambda: SchedulerConfig(max_num_seqs=9, max_num_batched_tokens=8), "not every running sequence could decode"),
        (lambda: SchedulerConfig(max_chunk_tokens=0), "max_chunk_tokens is 0"),
        (lambda: SchedulerConfig(preemption="kill"), "known: recompute, swap"),
        (lambda: SchedulerConfig(watermark_ratio=1.0), "watermark_ratio is 1.0"),
        (lambda: EngineBench(scheduler={"policy": "lifo"}), "known: fcfs, shortest, priority"),
        (lambda: EngineConfig(block_size=0), "block_size is 0"),
        (lambda: EngineConfig(ttl_s=0), "ttl_s is 0"),
        (lambda: EngineConfig(timeout_s=-1), "timeout_s is -1"),
        (lambda: EngineConfig(salt=b"x" * 65), "at most 64"),
    ],
)
def test_setting_that_makes_no_sense_is_named(make: Any, says: str) -> None:
    """Each setting is checked where it enters."""
    with pytest.raises(UsageError, match=says):
        make()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
    ],
)
def test_sampling_out_of_range_is_refused(fields: dict[str, float], says: str) -> None:
    """Each parameter is named with its value."""
    with pytest.raises(PromptRefused, match=says):
        SamplingParams(**fields)  # type: ignore[arg-type]


def test_answers_to_one_prompt_share_its_blocks_until_they_write() -> None:
    """Three answers to 10 tokens, blocks of 4: 9 tokens are computed once; two of three copy the block they part in."""
    bench = EngineBench(num_blocks=16, block_size=4)
    bench.siblings(["a", "b", "c"], list(range(10)), max_tokens=2)
    bench.engine.step()
    bench.engine.check_integrity()
    assert bench.engine.kv.pool.num_referenced == 3
    bench.run()
    assert [len(plan.copies) for plan in bench.executor.plans] == [0, 2, 0]
    assert [(row["prefill_tokens"], row["decode_tokens"]) for row in steps(bench)] == [(9, 0), (3, 0), (0, 3)]
    rows = bench.requests()
    assert [rows[name]["cached_tokens"] for name in "abc"] == [0, 9, 9]
    assert {row["output_tokens"] for row in rows.values()} == {2}
    assert [rows[name]["computed_tokens"] for name in "abc"] == [10, 1, 1]
    assert [rows[name]["prefill_s"] for name in "abc"] == [pytest.approx(2 * STEP_S), *[pytest.approx(STEP_S)] * 2]
    assert [rows[name]["decode_s"] for name in "abc"] == [pytest.approx(STEP_S)] * 3


def test_answers_wait_for_their_prompt_as_a_dependency() -> None:
    """While the prompt comes in two chunks, its two siblings are told as waiting for a dependency."""
    bench = EngineBench(scheduler={"max_num_batched_tokens": 6, "max_num_seqs": 4})
    bench.siblings(["a", "b", "c"], list(range(10)), max_tokens=1)
    bench.run()
    assert [row["waiting_on"]["dependency"] for row in steps(bench)] == [2, 0, 0]
    rows = bench.requests()
    assert [dict(rows[name].get("labels", {})) for name in "abc"] == [
        {},
        *({"waited_on_dependency_s": "0.020000"},) * 2,
    ]
    assert rows["b"]["queue_s"] == pytest.approx(0.02)


@pytest.mark.parametrize("gone", ["a", "b"])
def test_answers_go_on_when_one_of_them_is_aborted(gone: str) -> None:
    """Aborted while the prompt comes in: the others take it over, or go on, and hold the right blocks."""
    bench = EngineBench(scheduler={"max_num_batched_tokens": 6, "max_num_seqs": 4})
    bench.siblings(["a", "b", "c"], list(range(10)), max_tokens=2)
    bench.engine.step()
    assert bench.engine.abort(gone)
    bench.run()
    rows = bench.requests()
    assert {name: row["state"] for name, row in rows.items()} == {
        name: "aborted" if name == gone else "finished" for name in "abc"
    }
    assert bench.engine.kv.pool.num_referenced == 0


def test_more_answers_than_seats_are_refused() -> None:
    """They part at once, so each needs its seat."""
    bench = EngineBench(scheduler={"max_num_seqs": 2, "max_num_batched_tokens": 100})
    with pytest.raises(PromptRefused, match="3 answers to request a need as many seats; this engine has 2"):
        bench.siblings(["a", "b", "c"], [1, 2, 3])
    assert not bench.engine.has_work


@pytest.mark.parametrize("prompt", [[1], [1, 2, 3]])
def test_answers_are_taken_all_or_none(prompt: list[int]) -> None:
    """One of them has an id that is under way, or two have the same: none is taken, whether they share a prompt or not."""
    bench = EngineBench()
    bench.request("b", 5)
    for names, says in ((["a", "b"], "b is under way already"), (["c", "c"], "two answers to request c have one id")):
        with pytest.raises(PromptRefused, match=says):
            bench.siblings(names, prompt)
    assert bench.engine.request_ids == ["b"]
    bench.engine.check_integrity()
