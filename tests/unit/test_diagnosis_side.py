"""The rule of thumb: TTFT alone is the prefill side, TPOT alone the decode side, both the batch; queues for the two stand apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diagnosis.facts import Facts, StepFacts
from diagnosis.judge import judge
from diagnosis.telling.side import opening, side_of
from diagnosis.telling.text import render
from diagnosis.windows import Chosen
from store.interface import Window
from tests import cause_scenarios as room
from tests import moves_scenarios as moves
from tests.factories import facts
from tests.verdicts import case, judged

CHOSEN = Chosen(Window(run_id="a"), Window(run_id="b"), "baseline", "suspect", "both windows were given")


pytestmark = pytest.mark.usefixtures("few_replicates")


def document(made: room.Pair) -> dict[str, Any]:
    base, suspect, metric = made
    return judge(base, suspect, CHOSEN, metric, "0.99").to_dict()


def before_the_engine() -> room.Pair:
    """Each request spends 0.3 s in the front end that it did not before; all that follows is 0.3 s later."""
    late = room.plain(frontend_s=0.3)
    for instants in (late.first_token_s, late.last_token_s):
        instants += 0.3
    return room.pair(facts(room.plain(frontend_s=0.0)), facts(replace(late, end_s=late.last_token_s)))


def exchanged(made: Callable[[], room.Pair]) -> room.Pair:
    """The suspect window first: what rose falls."""
    base, suspect, metric = made()
    return room.pair(suspect, base, metric)


@pytest.mark.parametrize(
    ("made", "side", "begins"),
    [
        (room.evicted, "prefill", "Prefill side: TTFT rose (+100 ms) and TPOT is as before"),
        (room.blocked, "prefill", "Prefill side: TTFT rose (+500 ms)"),
        (before_the_engine, "before_engine", "Before the engine: TTFT rose (+300 ms) and TPOT is as before"),
        (room.fuller, "decode", "Decode side: TTFT is as before and TPOT rose (+3.0 ms)"),
        (room.slower, "batch", "Batch, both sides: TTFT rose (+60.0 ms) and TPOT rose (+60.0 ms)"),
        (room.as_fast, "neither", "Neither side: TTFT is as before and TPOT is as before"),
        (room.bare_pair, "unknown", "Side unknown: TPOT cannot be judged here"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_side_is_what_moved(made: Callable[[], room.Pair], side: str, begins: str) -> None:
    """By the scenarios of causes that are known to sit there; the verdict's first line begins with it."""
    found = document(made())
    assert found["side"]["side"] == side
    assert found["side"]["statement"].startswith(begins)
    assert begins in " ".join(render(found).split())
    is_told = found["status"] == "explained" and side not in ("neither", "unknown")
    assert found["verdict"].startswith(f"{begins.partition(':')[0]}: ") == is_told


@pytest.mark.parametrize(("found", "told"), [({"changed": True}, True), ({"changed_mean": True}, True), ({}, False)])
def test_what_is_not_established_is_on_no_side(found: dict[str, bool], told: bool) -> None:
    """TTFT doubled in one burst and TPOT rose beyond noise: the decode side it is not, for nobody knows of TTFT."""
    made = case({"block_leak": (0.1, 0.2)}, base_s=0.1)
    effects = [{"metric": "tpot_mean_s", "baseline": 0.01, "suspect": 0.02, "changed": True}]
    side = side_of(made, judged(**({"changed": False, "changed_mean": False} | found)), effects)
    assert side.side == ("batch" if told else "unknown")
    decode = replace(side, side="decode")
    assert opening(decode, "explained", established=told) == ("Decode side: " if told else "")


def test_what_got_better_is_on_a_side_too() -> None:
    """The same pair the other way round: TTFT fell, by as much."""
    found = document(exchanged(room.evicted))["side"]
    assert found["side"] == "prefill"
    assert found["statement"].startswith("Prefill side: TTFT fell (-100 ms)")
    assert found["ttft_s"] == pytest.approx(-0.1, abs=0.01)


def test_moving_against_each_other_is_a_trade() -> None:
    """Prefill 0.1 -> 0.3 s, and 100 ms a token -> 60 ms."""
    before, after = (facts(room.plain(prefill, decode=9 * gap)) for prefill, gap in ((0.1, 0.1), (0.3, 0.06)))
    assert document(room.pair(before, after))["side"]["side"] == "trade"


def test_the_parts_of_ttft_sum_to_it() -> None:
    """0.5 s more of waiting in the queue, nothing before the engine, nothing in prefill."""
    found = document(room.blocked())["side"]
    places = ("before_engine", "behind_engine", "either_way", "prefill_queue", "prefill")
    parts = [found[f"{place}_s"] for place in places]
    assert parts == pytest.approx([0.0, 0.0, 0.0, 0.5, 0.0], abs=0.01)
    assert sum(parts) == pytest.approx(found["ttft_s"], abs=1e-9)


def with_steps(known: Facts, prefill: float, decode: float) -> Facts:
    """One long step with so many waiting, and a short one with none: 9 s and 1 s."""
    steps = StepFacts(
        np.zeros(2, dtype=np.int64),
        ("w0",),
        np.array([9.0, 10.0]),
        np.array([9.0, 1.0]),
        {"num_waiting_prefill": np.array([prefill, 0.0]), "num_waiting_decode": np.array([decode, 0.0])},
    )
    return replace(known, steps=steps)


def test_the_two_queues_are_two_numbers() -> None:
    """9 of 10 s with 10 waiting for prefill are 9 on average; those for decode stand beside them, each with what it was before."""
    base, suspect, metric = room.evicted()
    found = document((with_steps(base, 0.0, 1.0), with_steps(suspect, 10.0, 2.0), metric))["side"]
    assert found["prefill_queue"] == pytest.approx([0.0, 9.0])
    assert found["decode_queue"] == pytest.approx([0.9, 1.8])
    assert (
        "waiting a worker: 9 for prefill (0 in the baseline) and 1.8 for decode (0.9 in the baseline)"
        in found["statement"]
    )
    assert document(room.evicted())["side"]["decode_queue"] == [None, None]


def test_who_waits_at_a_worker_that_decodes_waits_for_decode() -> None:
    """In a split fleet w0 prefills and w9 decodes; its steps call what waits there a prompt as well: 2 wait at w0, 5 at w9."""
    made = moves.longer("transfer_wire")
    split = []
    for known in made()[:2]:
        waiting = {"num_waiting_prefill": np.array([2.0, 5.0]), "num_waiting_decode": np.array([0.0, np.nan])}
        steps = StepFacts(np.array([0, 1]), ("w0", "w9"), np.array([1.0, 1.0]), np.array([0.1, 0.1]), waiting)
        split.append(replace(known, steps=steps))
    found = document((split[0], split[1], "tpot"))["side"]
    assert "2 for prefill (2 in the baseline) and 5 for decode (5 in the baseline)" in str(found)
