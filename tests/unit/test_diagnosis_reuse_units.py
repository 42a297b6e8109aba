"""Units that grew, and misses on a grid of lengths: found where they are, and nothing made up where they are not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diagnosis.facts import Facts, WorkerFacts
from diagnosis.ledger.reuse_units import below_unit, found_tokens, grid_of, larger_unit, log_chance
from diagnosis.loading.lineage import gone_untold, too_short
from tests.factories import facts, request_facts


def window(prompt: np.ndarray, cached: np.ndarray | None, *, block: int = 16, hits: float | None = None) -> Facts:
    n = len(prompt)
    columns = {"prompt_tokens": prompt} | ({} if cached is None else {"cached_tokens": cached})
    requests = request_facts(np.arange(n) * 2.0, queue=[0.0] * n, prefill=[0.1] * n, **columns)
    samples = {} if hits is None else {"prefix_hits_tokens_total": hits}
    return facts(requests, workers=[WorkerFacts("w0", block_size=block)], samples=samples)


PROMPT = np.full(40, 500.0)


def test_a_unit_that_grew_beyond_what_was_found_takes_all_of_it() -> None:
    """240 of 500 tokens were found at blocks of 16, none at 784: each request computes the mean of 240 more."""
    before, after = window(PROMPT, np.full(40, 240.0)), window(PROMPT, np.zeros(40), block=784)
    assert larger_unit(after, before) == (784, 16)
    assert below_unit(after, before).tolist() == [240.0] * 40
    assert below_unit(before, after).tolist() == [0.0] * 40


def test_counters_stand_in_for_requests_that_do_not_tell() -> None:
    """9,600 tokens hit over 40 requests are 240 each."""
    before, after = window(PROMPT, None, hits=9600.0), window(PROMPT, None, block=784, hits=0.0)
    assert found_tokens(before) == (240.0, 240.0)
    assert larger_unit(after, before) == (784, 16)


@pytest.mark.parametrize(
    ("cached", "block", "why"),
    [
        (0.0, 16, "the unit is as before"),
        (0.0, 128, "what was found is longer than the unit"),
        (128.0, 784, "something is found"),
    ],
)
def test_no_unit_is_blamed_where(cached: float, block: int, why: str) -> None:
    """The unit must have grown, beyond what was found, and nothing be found any more."""
    before = window(PROMPT, np.full(40, 240.0))
    assert larger_unit(window(PROMPT, np.full(40, cached), block=block), before) is None, why


def test_nothing_was_found_before_either() -> None:
    """Nothing is lost where nothing was had; where nobody tells, nothing is said."""
    none = window(PROMPT, np.zeros(40))
    assert larger_unit(window(PROMPT, np.zeros(40), block=784), none) is None
    assert found_tokens(window(PROMPT, None)) is None
    assert larger_unit(window(PROMPT, None, block=784), window(PROMPT, None)) is None


def turns(period: int, margin: int, seed: int = 1, n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Prompts that grow turn by turn, and what was found: nothing where the length before modulo the period is below the margin."""
    rng = np.random.default_rng(seed)
    lengths = 20_000.0 + np.cumsum(rng.integers(300, 900, n + 1))
    before, prompt = lengths[:-1], lengths[1:]
    return prompt, np.where(before % period < margin, 0.0, before)


def test_a_grid_is_found_with_its_period_and_its_arc() -> None:
    """448 of 2,048 tokens are the margin: the arc begins near 0 and is no wider."""
    prompt, cached = turns(2048, 448)
    grid = grid_of(window(prompt, cached, block=448))
    assert grid is not None
    assert (grid.period, grid.by) == (2048, "before")
    assert grid.low < 200
    assert grid.width <= 448
    # the first turn has none before it
    assert grid.misses[1:].tolist() == (cached[1:] == 0).tolist()
    lost = below_unit(window(prompt, cached, block=448), window(prompt, cached, block=448))
    assert (lost[grid.misses] > 0.9 * prompt[grid.misses]).all()
    assert not lost[~grid.misses].any()


@pytest.mark.parametrize("seed", range(20))
def test_misses_by_lot_have_no_grid(seed: int) -> None:
    """Of 60 turns 13 miss at random: no period of all that are tried parts them from the hits."""
    prompt, _ = turns(2048, 448, seed)
    cached = prompt.copy()
    cached[np.random.default_rng(seed).choice(60, 13, replace=False)] = 0.0
    assert grid_of(window(prompt, cached, block=448)) is None


def test_long_prompts_that_miss_are_no_grid() -> None:
    """Misses at one length and hits at others: lengths span no period."""
    prompt = np.where(np.arange(80) % 4 == 0, 6000.0, 400.0 + np.arange(80))
    cached = np.where(np.arange(80) % 4 == 0, 0.0, 384.0)
    assert grid_of(window(prompt, cached)) is None


def test_sessions_are_told_apart() -> None:
    """Two conversations in turns: the length before is that of the same conversation."""
    one, two = turns(2048, 448, 1), turns(2048, 448, 2)
    prompt, cached = (np.stack([a, b], axis=1).ravel() for a, b in zip(one, two, strict=True))
    known = window(prompt, cached, block=448)
    session = np.array(["a", "b"] * 60, dtype=object)
    grid = grid_of(replace(known, requests=replace(known.requests, session=session)))
    assert grid is not None
    assert grid.period == 2048


def test_the_chance_of_an_arc() -> None:
    """Of 4 on a circle 2 lie side by side in 4 of 6 choices."""
    assert np.exp(log_chance(4, 2)) == pytest.approx(4 / 6)


@pytest.mark.parametrize(
    ("given", "short"),
    [
        ([0.0, 0.0, 0.0, 0.0], [False, True, False, False]),
        ([0.0, 0.0, 0.0, 4096.0], [False, True, False, False]),
        ([0.0, 0.0, 0.0, 512.0], [False, False, False, False]),
    ],
)
def test_what_was_evicted_and_is_too_short_would_not_have_been_given_back_either(
    given: list[float], short: list[bool]
) -> None:
    """1,024 tokens were there and not used: as many that were evicted cost nothing, 2,048 do; where some request was given 512, nothing is known."""
    requests = request_facts([0.0, 1.0, 2.0, 3.0], cached_tokens=given)
    lost, unused = np.array([1024.0, 1024.0, 2048.0, 0.0]), np.array([1024.0, 0.0, 0.0, 0.0])
    assert (too_short(requests, lost, unused) & (unused == 0.0)).tolist() == short


@pytest.mark.parametrize(
    ("given", "gone"),
    [
        ([], []),
        ([784.0] * 20, [784.0]),
        ([784.0] * 10 + [512.0] * 10, [784.0, 512.0]),
        ([784.0] * 19 + [128.0], [784.0]),
        ([784.0] * 18 + [128.0] * 2, [784.0, 512.0, 240.0]),
    ],
)
def test_what_others_were_given_as_short_was_gone(given: list[float], gone: list[float]) -> None:
    """784, 512 and 240 tokens were there by their events and not given: no unit is in the way of what others were given. Of 20 hits one,
    the shortest, tells nothing."""
    asked = [0.0] * 3 + given
    requests = request_facts(np.arange(float(len(asked))), cached_tokens=asked)
    unused = np.zeros(len(asked))
    unused[:3] = [784.0, 512.0, 240.0]
    untold = gone_untold(requests, unused)
    assert untold[untold > 0].tolist() == gone
