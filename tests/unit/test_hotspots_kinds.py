"""Which reason is named: a key is none where everything goes to the worker, and a match is none where nothing follows it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diagnosis.hotspots.judge import find
from diagnosis.hotspots.kinds import name_load
from diagnosis.hotspots.observed import Observed
from diagnosis.hotspots.regret import regret_of
from tests.simulated_routing import LENGTHS, Fleet, Pick, simulate

NUM = 600
"""Decisions of a window: six intervals of a hundred."""


def _fleet(pick: Pick, workers: int = 4, use: float = 0.24) -> Observed:
    """By routes that tell no load, so that keys and matches alone can be the reason."""
    seen = simulate(Fleet(workers, pick, LENGTHS["equal"], use=use))
    unknown = np.full((NUM, workers), np.nan, dtype=np.float32)
    decisions = replace(seen.decisions, load=unknown, score=unknown, goes_by_load=np.zeros(NUM, dtype=bool))
    return replace(seen, policies=("mine",), decisions=decisions)


def _with(seen: Observed, prefix: np.ndarray | None = None, matched: np.ndarray | None = None) -> Observed:
    changes = {} if prefix is None else {"prefix": prefix.astype(np.int64)}
    if matched is not None:
        changes["matched"] = matched.astype(np.float32)
    names = () if prefix is None else tuple(f"p{code}" for code in range(int(prefix.max()) + 1))
    return replace(seen, prefixes=names, decisions=replace(seen.decisions, **changes))


def _all_first(number: int, busy: np.ndarray, has: np.ndarray, random: np.random.Generator) -> int:
    return 0


def _held(chosen: np.ndarray, prefix: np.ndarray, workers: int) -> np.ndarray:
    """[N, K] 400 tokens of a prefix where it was computed before: what an index that hears of everything believes."""
    held = np.zeros((int(prefix.max()) + 1, workers))
    matched = np.zeros((len(prefix), workers))
    for row, (key, worker) in enumerate(zip(prefix, chosen, strict=True)):
        matched[row] = held[key]
        held[key, worker] = 400.0
    return matched


def test_no_key_is_named_where_all_of_twenty_go_to_one_worker() -> None:
    """Each of 20 prefixes stays at w0, and so does everything: the router did not look at them."""
    spot = find(_with(_fleet(_all_first), np.arange(NUM) % 20)).hotspots[0]
    assert (spot.kind, spot.subject["id"], spot.advice.replicas) == (None, "w0", None)


def test_one_key_that_all_have_is_named() -> None:
    """A prefix that every prompt begins with, kept at w0: what would become of another cannot be told, so it stands."""
    spot = find(_with(_fleet(_all_first), np.zeros(NUM))).hotspots[0]
    assert spot.kind == "affinity"
    assert "prefix p0" in spot.statement


def test_key_that_stays_while_others_go_elsewhere_is_named() -> None:
    """Half of all have prefix p0 and go to w0; ten more prefixes are spread by turns."""
    prefix = np.where(np.arange(NUM) % 2 == 0, 0, 1 + np.arange(NUM) // 2 % 10)

    def pick(number: int, busy: np.ndarray, has: np.ndarray, random: np.random.Generator) -> int:
        return 0 if prefix[number] == 0 else 1 + number // 2 % 3

    spot = find(_with(_fleet(pick, use=0.4), prefix)).hotspots[0]
    assert spot.kind == "affinity"
    assert "prefix p0" in spot.statement


def test_match_is_no_reason_where_what_nobody_holds_goes_there_too() -> None:
    """w0 alone holds all it was ever sent, since it is sent everything: the first of each of 100 prefixes as well, which nobody held."""
    prefix = np.arange(NUM) * 7919 % 100
    seen = _fleet(_all_first)
    matched = _held(seen.decisions.chosen, prefix, 4)
    spot = find(_with(seen, None, matched)).hotspots[0]
    assert (spot.kind, spot.subject["id"]) == (None, "w0")


def test_match_is_the_reason_where_choices_follow_it() -> None:
    """Every second prompt is held by w0 alone and goes there; what nobody holds goes by turns."""
    matched = np.zeros((NUM, 4))
    matched[::2, 0] = 400.0

    def pick(number: int, busy: np.ndarray, has: np.ndarray, random: np.random.Generator) -> int:
        return 0 if number % 2 == 0 else number // 2 % 4

    spot = find(_with(_fleet(pick, use=0.4), None, matched)).hotspots[0]
    assert spot.kind == "affinity"
    assert "follows the longest match" in spot.statement


@pytest.mark.parametrize(("num_holders", "kind"), [(2, "affinity"), (4, "affinity"), (5, None)])
def test_match_that_few_of_many_hold_is_the_reason_too(num_holders: int, kind: str | None) -> None:
    """Every second prompt is held by some of eight and goes to w0 or w1, which hold it: a reason for up to four of eight, not for more than half.

    Shares are 5/16 for w0 and w1, and 1/16 for the others, so chance would send 10/16 to the two, 12/16 to four; all go there.
    """
    matched = np.zeros((NUM, 8))
    matched[::2, :num_holders] = 400.0

    def pick(number: int, busy: np.ndarray, has: np.ndarray, random: np.random.Generator) -> int:
        return number // 2 % 2 if number % 2 == 0 else number // 2 % 8

    seen = _with(_fleet(pick, 8, use=0.3), None, matched)
    named = name_load(seen, regret_of(seen), np.arange(NUM), 0)
    assert named.kind == kind
    spots = [spot for spot in find(seen).hotspots if spot.subject["kind"] == "worker"]
    assert {(spot.kind, spot.subject["id"]) for spot in spots} == {(kind, "w0"), (kind, "w1")}
    if kind:
        assert f"at {num_holders} workers only" in spots[0].statement
        assert spots[0].advice.replicas == num_holders + 1


@pytest.mark.parametrize("follows", [True, False])
def test_match_is_judged_within_the_two_that_were_drawn(follows: bool) -> None:
    """Half of all are forced to w0, which is in their list then; the rest is one of two drawn at random. Who gets most holds most.

    Of a list with w0 in it w0 gets nearly all, whether it holds the prompt or not: that is no match followed. Where it gets only what it
    holds, it is one.
    """
    random = np.random.default_rng(1)
    listed, matched = np.zeros((NUM, 8), dtype=bool), np.zeros((NUM, 8))
    rows, first = np.arange(NUM), np.arange(NUM) % 2 == 0
    other = random.integers(1, 8, NUM)
    chosen = np.where(first, 0, other)
    beside = np.where(follows & ~first, 0, np.where(first, other, other % 7 + 1))
    listed[rows, chosen] = listed[rows, beside] = True
    holds = follows | (random.random(NUM) < np.where(first, 0.8, 0.5))
    matched[rows, np.where(holds, chosen, beside)] = 400.0
    seen = _with(_fleet(lambda number, busy, has, random: int(chosen[number]), 8, use=0.2), None, matched)
    seen = replace(seen, decisions=replace(seen.decisions, listed=listed))
    assert name_load(seen, regret_of(seen), rows, 0).kind == ("affinity" if follows else None)


def test_straggler_is_told_the_weight_that_it_is_due() -> None:
    """A worker that takes twice as long as the others serves half of what they do."""
    slow = Fleet(4, lambda number, busy, has, random: number % 4, LENGTHS["equal"], 6, 200, use=0.3, slow=((2, 2.0),))
    [spot] = find(simulate(slow)).hotspots
    assert spot.kind == "straggler"
    assert "0.50 of the others' weight" in spot.advice.text


def test_cost_beyond_regret_is_no_share_of_it() -> None:
    """Every second belief in 400 tokens was wrong: what that took to compute is more than the regret of a fleet where nobody held them."""
    matched = np.zeros((NUM, 4))
    matched[::2] = 400.0
    seen = _with(_fleet(lambda number, busy, has, random: number % 4, use=0.1), None, matched)
    found = find(seen)
    [spot] = [spot for spot in found.hotspots if spot.kind == "stale_index"]
    assert spot.regret_s is not None
    total = found.regret["total_s"]
    assert (spot.regret_share is None) == (spot.regret_s > total)
    assert any("to compute what it believed to be there took" in fact.statement for fact in spot.evidence)


def test_clock_that_is_off_is_said_where_queues_are_compared() -> None:
    """w0's clock is a minute ahead: all that is sent there waits, and nothing of that lies at the instants of the decisions."""
    seen = _fleet(_all_first, use=0.26)
    ahead, steps = replace(seen.served, arrival_s=seen.served.arrival_s + 60.0), seen.steps
    assert steps is not None
    off = replace(seen, served=ahead, steps=replace(steps, at_s=steps.at_s + 60.0))
    said = "by its clock requests reach w0 60.00 s after they were routed"
    assert any(said in line for line in find(off).cannot_tell)
    assert not any("by its clock" in line for line in find(seen).cannot_tell)


@pytest.mark.parametrize("policy", ["least_loaded", "mine"])
def test_ties_of_the_least_load_that_go_to_the_first_are_named(policy: str) -> None:
    """Half the time nobody has anything and w0 is taken, half the time w0 is busy and w1 is, of three that are not: always the first.

    No score is told. Of a router that may go by something else its load is no score.
    """
    loads = np.zeros((NUM, 4))
    loads[1::2, 0] = 1.0
    seen = _fleet(lambda number, busy, has, random: number % 2, use=0.1)
    by_load = np.full(NUM, policy == "least_loaded")
    decisions = replace(seen.decisions, load=loads.astype(np.float32), goes_by_load=by_load)
    seen, rows = replace(seen, decisions=decisions, policies=(policy,)), np.arange(NUM)
    regret = regret_of(seen)
    kinds = [name_load(seen, regret, rows, worker).kind for worker in (0, 1)]
    assert kinds == (["tie_breaking"] * 2 if policy == "least_loaded" else [None, None])
