"""What every arm is asked: the same calls, warm-up first, and what could be reused of each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from collector.experiments.workload import NS, Workload, asked
from engine_probe.engine.traffic.synthetic import Lengths, Traffic
from engine_probe.errors import UsageError

SHARED = Workload(
    Traffic(
        rate=5.0, groups=1, shared_tokens=160, shared_ratio=1.0, own_tokens=Lengths(32, 32), output_tokens=Lengths(4, 4)
    ),
    num_requests=6,
    num_warmup=3,
)


def _reusable(workload: Workload, *, is_warm: bool) -> list[int]:
    return [int(call.labels["reusable_tokens"]) for call in asked(workload, 1, is_warm=is_warm).calls]


def test_arms_are_asked_the_same_and_repeats_others() -> None:
    """Cold and warm differ in labels alone; repeat 2 has other prompts under other ids."""
    warm, cold = asked(SHARED, 1, is_warm=True), asked(SHARED, 1, is_warm=False)
    assert [(c.request_id, c.at_ns, c.blocks) for c in warm.calls] == [
        (c.request_id, c.at_ns, c.blocks) for c in cold.calls
    ]
    other = asked(SHARED, 2, is_warm=True)
    assert {c.request_id for c in other.calls}.isdisjoint(c.request_id for c in warm.calls)
    assert not set(other.calls[0].blocks) & set(warm.calls[0].blocks)


def test_warm_up_comes_first_one_second_apart_and_is_labelled() -> None:
    """0, 1, 2 s; counting begins at 3 s."""
    work = asked(SHARED, 1, is_warm=True)
    assert [call.at_ns for call in work.calls[:3]] == [0, NS, 2 * NS]
    assert [call.labels.get("phase") for call in work.calls] == ["warmup"] * 3 + [None] * 6
    assert work.counted_ns == work.calls[3].at_ns == 3 * NS
    assert [call.at_ns for call in work.calls] == sorted(call.at_ns for call in work.calls)


def test_what_could_be_reused_is_what_was_sent_before() -> None:
    """10 shared blocks of 16: the first call finds nothing, all later ones 160 tokens; a cold start forgets the warm-up."""
    assert _reusable(SHARED, is_warm=True) == [0] + [160] * 8
    assert _reusable(SHARED, is_warm=False) == [0, 160, 160, 0] + [160] * 5


def test_a_trace_is_cut_into_one_part_a_repeat(tmp_path: Path) -> None:
    """Repeat 2 begins where repeat 1 ended; a trace that is too short is refused with the number."""
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 100 * n, "input_length": 512, "output_length": 3, "hash_ids": [n]} for n in range(10)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    workload = Workload(trace=trace, num_requests=4, num_warmup=1)
    first, second = (asked(workload, repeat, is_warm=True) for repeat in (1, 2))
    assert len(first.calls) == len(second.calls) == 5
    assert not {b for call in first.calls for b in call.blocks} & {b for call in second.calls for b in call.blocks}
    with pytest.raises(UsageError, match="within repeat 3: each repeat takes 5 calls"):
        asked(workload, 3, is_warm=True)


def test_facts_name_what_is_held_fixed() -> None:
    """Lengths, share, popularity, arrivals, loop, seed."""
    facts = SHARED.facts()
    assert facts["shared_ratio"] == 1.0
    assert facts["loop"] == "open"
    assert replace(SHARED, in_flight=4).facts()["loop"] == "closed, 4 in flight"
    assert {"rate", "arrivals", "groups", "skew", "own_tokens", "output_tokens", "seed"} <= set(facts)


@pytest.mark.parametrize("wrong", [{"num_requests": 0}, {"num_warmup": -1}, {"warmup_gap_s": 0.0}, {"in_flight": 0}])
def test_numbers_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    """Each says what was expected."""
    with pytest.raises(UsageError, match="expected"):
        replace(SHARED, **wrong)
