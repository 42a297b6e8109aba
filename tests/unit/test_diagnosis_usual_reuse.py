"""What requests of one kind usually find, and who therefore computed for want of it."""

from __future__ import annotations

import numpy as np
import pytest

from diagnosis.claims.displaced import shares
from diagnosis.facts import Facts
from diagnosis.judge import found_each
from diagnosis.ledger.usual_reuse import found_by_counters, spread_over, usual_reuse
from tests.factories import facts, request_facts


def window(prompts: list[int], cached: list[int] | None) -> Facts:
    """Requests of one tenant, a second apart."""
    found = {} if cached is None else {"cached_tokens": cached}
    return facts(request_facts([float(i) for i in range(len(prompts))], prompt_tokens=prompts, **found))


def test_what_a_kind_lost_is_counted_against_the_other_window() -> None:
    """Ten prompts of 1,000 found 800 there; here two of ten find none: 2 x 800 missed and lost, and nobody else lost anything."""
    there = window([1000] * 10, [800] * 10)
    here = window([1000] * 10, [0, 0, *[800] * 8])
    told = usual_reuse(here, there)
    assert told is not None
    assert told.missed.tolist() == pytest.approx([800.0, 800.0, *[0.0] * 8])
    assert told.lost.tolist() == pytest.approx([800.0, 800.0, *[0.0] * 8])


def test_as_many_misses_there_are_nothing_lost() -> None:
    """Two of ten missed in both windows: they missed what their kind finds, and no more of it was lost than before."""
    there = window([1000] * 10, [0, 0, *[800] * 8])
    told = usual_reuse(there, there)
    assert told is not None
    assert told.missed.sum() == pytest.approx(1600.0)
    assert told.lost.tolist() == [0.0] * 10


def test_a_prompt_of_another_length_is_of_another_kind() -> None:
    """Twenty times as long as those that are found: nobody of its kind ever found anything, so it lost nothing."""
    there = window([1000] * 10, [800] * 10)
    here = window([*[1000] * 10, 20_000], [*[800] * 10, 0])
    told = usual_reuse(here, there)
    assert told is not None
    assert told.missed[10] == 0.0
    assert told.lost.sum() == 0.0


def test_nothing_is_usual_where_nobody_tells_what_was_found() -> None:
    """Without cached tokens of either window there is nothing to go by."""
    assert usual_reuse(window([1000] * 10, None), window([1000] * 10, [800] * 10)) is None


def test_tokens_go_first_to_who_missed_them() -> None:
    """300 of 400 missed: three quarters each. 600 of 400 missed: those, and the other 200 over the 800 that are left, a quarter of each."""
    left, missed = np.array([400.0, 400.0, 400.0]), np.array([300.0, 100.0, 0.0])
    assert spread_over(left, 300.0, missed).tolist() == pytest.approx([225.0, 75.0, 0.0])
    assert spread_over(left, 600.0, missed).tolist() == pytest.approx([325.0, 175.0, 100.0])


def test_tokens_go_to_all_alike_where_nobody_is_known_to_have_missed_them() -> None:
    """600 of 1,200: half of each."""
    assert spread_over(np.array([800.0, 400.0]), 600.0, None).tolist() == pytest.approx([400.0, 200.0])


def test_shares_leave_out_what_nobody_owns() -> None:
    """300 of tenant a, 100 of b; 600 of nobody count for neither."""
    owner = np.array(["a", "b", None], dtype=object)
    assert shares(np.array([300.0, 100.0, 600.0]), owner) == [("a", 0.75), ("b", 0.25)]


def counted(prompts: list[int], queries: float, hits: float) -> Facts:
    """Requests that do not tell what they found, beside the engine's counters."""
    samples = {"prefix_queries_tokens_total": queries, "prefix_hits_tokens_total": hits}
    requests = request_facts([float(i) for i in range(len(prompts))], prompt_tokens=prompts)
    return facts(requests, samples=samples)


def test_the_counter_tells_what_requests_found_where_they_do_not() -> None:
    """Ten prompts of 1,000, of which 8,000 tokens were found: 800 each."""
    found = counted([1000] * 10, 10_000.0, 8_000.0)
    assert found_by_counters(found) == 8_000.0
    assert found_each(found, found) == 800.0


@pytest.mark.parametrize(("queries", "hits"), [(12_000.0, 8_000.0), (12_100.0, None), (7_900.0, None)])
def test_a_counter_of_other_requests_tells_nothing(queries: float, hits: float | None) -> None:
    """Of 10,000 tokens of the prompts a fifth more may have been looked up; beyond that it counts requests that nobody recorded."""
    assert found_by_counters(counted([1000] * 10, queries, 8_000.0)) == hits
