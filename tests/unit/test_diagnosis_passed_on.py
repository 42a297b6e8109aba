"""Queueing follows from whoever fills the steps: rows go whole to one cause, in the change's direction, and to nobody where two are equal."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from diagnosis.attribution.passed_on import follows
from diagnosis.attribution.shapley import Row


def rows(**seconds: float) -> list[Row]:
    """Rows whose mean and quantile moved by as much."""
    return [Row(name, value, value, value, None, None) for name, value in seconds.items()]


def followed(
    owned: dict[str, float], told: Sequence[Row], taken: Sequence[str] = (), *, same_kind: bool = True, **beside: bool
) -> tuple[str, list[str]] | None:
    """Of causes that own the row of their own name."""
    rows_of = {name: [name] for name in owned}
    return follows(owned, rows_of, {*owned, *taken}, told, by_mean=True, same_kind=same_kind, **beside)


def test_what_queues_behind_more_work_follows_from_it() -> None:
    """The probe took 8 ms of a request; waiting and shared steps grew by 9 ms: all of it is the probe's, what shrank is not."""
    told = rows(probe_overhead=0.008, queue_load=0.004, shared_prefill=0.005, decode_bandwidth=-0.001, front_end=0.002)
    assert followed({"probe_overhead": 0.008}, told) == ("probe_overhead", ["queue_load", "shared_prefill"])


def test_a_row_that_somebody_claims_does_not_follow() -> None:
    """A load step owns the queue: nothing is left to follow."""
    told = rows(slow_steps=0.01, queue_load=0.02)
    assert followed({"slow_steps": 0.01}, told, taken=["queue_load"]) is None


@pytest.mark.parametrize(("third", "leader"), [(0.0, "slow_steps"), (0.004, None)])
def test_it_follows_from_one_that_leads(third: float, leader: str | None) -> None:
    """10 ms beside 9 ms is 53 % of what fills the steps; with 4 ms more of a third it is 43 %: then nobody gets it."""
    told = rows(slow_steps=0.010, premature_eviction=0.009, cold_start=third, queue_load=0.02)
    found = followed({"slow_steps": 0.010, "premature_eviction": 0.009, "cold_start": third}, told)
    assert found == (None if leader is None else (leader, ["queue_load"]))


def test_what_fills_no_step_keeps_nobody_waiting() -> None:
    """Time before the engine delays its own request and no other."""
    assert followed({"front_end": 0.1}, rows(front_end=0.1, queue_load=0.02)) is None


def test_longer_prompts_do_not_follow_where_requests_are_of_another_kind() -> None:
    """At another mix the own prefill and decode are the mix's matter; the queue still follows."""
    told = rows(mix_shift=0.01, queue_load=0.02, own_prefill=0.01, own_decode=0.02)
    assert followed({"mix_shift": 0.01}, told, same_kind=False) == ("mix_shift", ["queue_load"])


@pytest.mark.parametrize(("own", "rows_that_follow"), [(0.05, None), (0.03, ["queue_load"])])
def test_what_waits_does_not_follow_from_lengths_where_own_work_grew_far_more(
    own: float, rows_that_follow: list[str] | None
) -> None:
    """Longer prompts own 10 ms; prompts of equal length took 50 ms longer (or 30): five sixths are somebody's whom nobody names."""
    told = rows(length_shift=0.01, queue_load=0.02, own_prefill=own)
    found = followed({"length_shift": 0.01}, told, same_kind=False)
    assert found == (None if rows_that_follow is None else ("length_shift", rows_that_follow))


@pytest.mark.parametrize(("own", "rows_that_follow"), [(0.004, ["own_decode"]), (0.006, None)])
def test_decoding_that_got_longer_does_not_follow_from_fuller_batches(
    own: float, rows_that_follow: list[str] | None
) -> None:
    """Fuller batches own 5 ms. 4 ms more of own decoding may be the fit's error; 6 ms are the larger half: slower decoding fills batches."""
    found = followed({"decode_bandwidth": 0.005}, rows(decode_bandwidth=0.005, own_decode=own))
    assert found == (None if rows_that_follow is None else ("decode_bandwidth", rows_that_follow))


def test_who_reshapes_the_steps_owns_what_got_shorter_too() -> None:
    """A smaller budget: 90 ms more waiting for it, 40 ms longer own prefills, 10 ms less waiting behind others: the sum of them is its doing."""
    told = rows(queue_budget=0.09, own_prefill=0.04, queue_load=-0.01, slow_steps=-0.02, front_end=0.001)
    found = follows(
        {"chunk_budget": 0.09}, {"chunk_budget": ["queue_budget"]}, {"queue_budget"}, told, by_mean=True, same_kind=True
    )
    assert found == ("chunk_budget", ["own_prefill", "queue_load", "slow_steps"])


@pytest.mark.parametrize(
    ("second", "same_kind", "mine"),
    [(0.0, True, ["queue_load", "ttft_unobserved"]), (0.0, False, ["queue_load"]), (0.4, True, [])],
)
def test_who_gives_up_owns_what_the_served_attempt_waits_less(second: float, same_kind: bool, mine: list[str]) -> None:
    """Attempts before cost 1 s and the one that is served waits 0.2 s less, in the queue or unseen; what grew unseen is nobody's.

    Unseen seconds hold own work too, so they follow among requests of one kind alone; beside a second cause with 29 % none does.
    """
    told = rows(client_retries=1.0, slow_steps=second, queue_load=-0.1, ttft_unobserved=-0.1)
    owned = {"client_retries": 1.0} | ({"slow_steps": second} if second else {})
    found = followed(owned, told, same_kind=same_kind)
    assert found == (("client_retries", mine) if mine else None)
    assert followed(owned, rows(client_retries=1.0, ttft_unobserved=0.1), same_kind=same_kind) is None


def test_what_is_over_takes_its_queue_along() -> None:
    """Latency fell by 10 ms when slow steps ended, and the queue by 20 ms; what rose meanwhile stays."""
    told = rows(slow_steps=-0.01, queue_load=-0.02, shared_prefill=0.001)
    assert followed({"slow_steps": -0.01}, told) == ("slow_steps", ["queue_load"])


@pytest.mark.parametrize("row", ["hotspot_affinity", "hotspot_stale_index", "decode_queue", "decode_bandwidth"])
def test_who_sends_requests_elsewhere_owns_what_got_shorter_there(row: str) -> None:
    """A hotspot costs 40 ms and 15 of shared steps; at the workers that were spared 5 ms of waiting are gone: 50 ms are its doing."""
    told = [*rows(shared_prefill=0.015, queue_load=-0.005), *rows(**{row: 0.04})]
    assert followed({row: 0.04}, told) == (row, ["shared_prefill", "queue_load"])


@pytest.mark.parametrize(("own", "mine"), [(0.03, ["queue_load"]), (0.05, None)])
def test_prompts_that_are_slower_everywhere_follow_from_no_router(own: float, mine: list[str] | None) -> None:
    """A hotspot has 40 ms; own prefill grew 30 ms at every worker and stays nobody's. At 50 ms it fills more of the steps than the hotspot."""
    told = rows(hotspot_dead_signal=0.04, own_prefill=own, queue_load=0.02)
    owned = {"hotspot_dead_signal": 0.04}
    assert followed(owned, told, slower_everywhere=True) == (mine and ("hotspot_dead_signal", mine))
    assert followed(owned, told) == ("hotspot_dead_signal", ["own_prefill", "queue_load"])


def test_a_slower_machine_takes_what_is_slower_everywhere_along() -> None:
    """Slower steps are slower everywhere: what is left of prefill is theirs."""
    told = rows(slow_steps=0.04, own_prefill=0.03)
    assert followed({"slow_steps": 0.04}, told, slower_everywhere=True) == ("slow_steps", ["own_prefill"])


@pytest.mark.parametrize("row", ["hotspot_straggler", "slow_steps", "probe_overhead"])
def test_nothing_follows_where_more_requests_came(row: str) -> None:
    """More requests share steps with more, whoever else is named."""
    told = rows(own_prefill=0.05, queue_load=0.02, **{row: 0.04})
    assert followed({row: 0.04}, told, more_came=True) is None


def test_own_work_follows_from_the_load_where_more_requests_came() -> None:
    """The queue is the load's by its claim, and so is what sharing steps costs each."""
    told = rows(queue_load=0.05, own_prefill=0.02)
    assert followed({"queue_load": 0.05}, told) is None, "a queue alone fills no step"
    told = rows(decode_bandwidth=0.05, own_prefill=0.02)
    assert followed({"decode_bandwidth": 0.05}, told, more_came=True) == ("decode_bandwidth", ["own_prefill"])
