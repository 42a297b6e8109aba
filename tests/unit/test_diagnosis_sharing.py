"""How far prompts begin alike, and what that was worth to the cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from diagnosis.facts import Facts, SharingFacts
from diagnosis.ledger.sharing import no_longer_shared, sharing
from tests.factories import facts, request_facts


def blocks(*lists: list[int] | None) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(lists, pa.list_(pa.uint64()))])


def test_a_prompt_shares_up_to_the_first_block_that_nobody_else_names() -> None:
    """Blocks of 16: two begin with 1, 2; one of them goes on with 3, which a third names behind another beginning."""
    found = sharing(blocks([1, 2, 3], [1, 2, 4], [9, 3], None, []), 16)
    assert found is not None
    assert found.rows.tolist() == [0, 1, 2, 4]
    assert found.tokens.tolist() == [48.0, 32.0, 0.0, 0.0]


def test_of_fewer_requests_fewer_share() -> None:
    """The first three in turn begin with 1, 2 and 1; the fourth with 2, and with 5 behind it as the second did."""
    found = sharing(blocks([1, 3], [2, 5], [1, 4], [2, 5]), 16)
    assert found is not None
    assert found.among(4).tolist() == found.tokens.tolist() == [16.0, 32.0, 16.0, 32.0]
    assert found.among(3).tolist() == [16.0, 0.0, 16.0]
    assert found.among(2).tolist() == [0.0, 0.0]


def test_a_window_with_fewer_requests_is_held_against_as_many() -> None:
    """Fifty agents ask in turn, 200 times and 60 times: most of the latter are the first of their agent, and no prompt changed."""
    windows = []
    for num, found in ((200, 32.0), (60, 0.0)):
        shared = sharing(blocks(*([100 * (i % 50), 100 * (i % 50) + 1, 50_000 + i] for i in range(num))), 16)
        requests = request_facts(np.arange(num) * 2.0, prompt_tokens=[48.0] * num, cached_tokens=[found] * num)
        windows.append(replace(facts(requests), sharing=shared))
    assert windows[0].sharing is not None
    assert float(windows[0].sharing.tokens.mean()) == 32.0  # 60 of them: 10 agents ask twice, 20 of 60 requests share
    assert not no_longer_shared(windows[1], windows[0]).any()


def test_prompts_without_blocks_tell_nothing() -> None:
    """None of them named, and no rows at all."""
    assert sharing(blocks(None, None), 16) is None
    assert sharing(pa.chunked_array([], pa.list_(pa.uint64())), 16) is None


def window(shared: np.ndarray, cached: np.ndarray, tenant: list[str] | None = None) -> Facts:
    n = len(shared)
    requests = request_facts(np.arange(n) * 2.0, prompt_tokens=[200.0] * n, cached_tokens=list(cached))
    if tenant is not None:
        requests = replace(requests, tenant=np.array(tenant, dtype=object))
    return replace(facts(requests), sharing=SharingFacts(np.arange(n), shared))


FULL = np.full(60, 100.0)


def test_what_is_no_longer_shared_is_lost_as_far_as_it_was_found() -> None:
    """100 tokens were shared and 80 of them found; now 0 and 0: 80 a request."""
    lost = no_longer_shared(window(0 * FULL, 0 * FULL), window(FULL, 0.8 * FULL))
    assert lost.tolist() == [80.0] * 60


@pytest.mark.parametrize(("num", "told"), [(49, False), (50, True)])
def test_of_few_prompts_it_is_chance_which_text_is_asked_for_twice(num: int, told: bool) -> None:
    """Two tenants that share nothing any more: together they have to be fifty."""
    names = ["a", "b"] * 30
    lost = no_longer_shared(
        window(0 * FULL[:num], 0 * FULL[:num], names[:num]), window(FULL[:num], FULL[:num], names[:num])
    )
    assert lost.any() == told


def test_what_nobody_found_nobody_lost() -> None:
    """Nothing was cached before either."""
    assert not no_longer_shared(window(0 * FULL, 0 * FULL), window(FULL, 0 * FULL)).any()


def test_as_alike_as_before_is_not_the_prompts() -> None:
    """Prompts share what they shared, and nothing is found: somebody else's fault."""
    assert not no_longer_shared(window(FULL, 0 * FULL), window(FULL, FULL)).any()


def test_more_of_those_who_never_shared_are_no_change_of_prompts() -> None:
    """Tenant b shares nothing in either window and comes more often: within each tenant all is as before."""
    few, many = ["a"] * 54 + ["b"] * 6, ["a"] * 24 + ["b"] * 36
    pair = [np.array([100.0 if name == "a" else 0.0 for name in names]) for names in (few, many)]
    assert not no_longer_shared(window(pair[1], pair[1], many), window(pair[0], pair[0], few)).any()


def test_shorter_prompts_have_less_to_share() -> None:
    """Histories of 100 tokens where they had 200: half as much is shared, as much of a prompt as before."""
    there = window(2 * FULL, 2 * FULL)
    short = window(FULL, 0.2 * FULL)
    half = replace(short.requests, numbers={**short.requests.numbers, "prompt_tokens": FULL})
    assert no_longer_shared(short, there).tolist() == [100.0] * 60
    assert not no_longer_shared(replace(short, requests=half), there).any()
