"""Which token comes next, and that chance belongs to the request alone."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from engine_probe.engine.sampling_params import SamplingParams
from engine_probe.engine.sequence import Sequence
from engine_probe.engine.torch_executor.sampling import choose, uniform
from engine_probe.errors import EngineError


def asking(number: int = 0, num_output: int = 0, **params: object) -> Sequence:
    """A sequence that wants its tokens chosen so."""
    made = Sequence("a", 1, SamplingParams(**params), 0, number=number)  # type: ignore[arg-type]
    made.num_output = num_output
    return made


def drawn(logits: list[float], count: int, **params: object) -> Counter[int]:
    """How often each token came out of that many draws."""
    rows = torch.tensor([logits] * count)
    return Counter(choose(rows, [asking(num_output=at, seed=1, **params) for at in range(count)], 0))


def test_greedy_takes_the_likeliest() -> None:
    """Temperature 0; of equals the first."""
    assert choose(torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 0.0]]), [asking(), asking()], 0) == [1, 0]


def test_draws_follow_the_probabilities() -> None:
    """Logits ln 1, ln 2, ln 5: shares 1/8, 2/8, 5/8 of 4,000 draws, within four standard errors."""
    found = drawn([0.0, math.log(2), math.log(5)], 4000, temperature=1.0)
    for token, share in enumerate((0.125, 0.25, 0.625)):
        assert found[token] / 4000 == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 4000))


def test_temperature_sharpens_and_flattens() -> None:
    """At 1/2 the shares of 1 and 3 become 1 and 9; at 2 they come closer."""
    cold = drawn([0.0, math.log(3)], 4000, temperature=0.5)
    assert cold[1] / 4000 == pytest.approx(0.9, abs=0.02)
    hot = drawn([0.0, math.log(9)], 4000, temperature=2.0)
    assert hot[1] / 4000 == pytest.approx(0.75, abs=0.03)


def test_top_p_keeps_the_likeliest_that_reach_it() -> None:
    """Shares 5/8, 2/8, 1/8: 0.8 keeps the two likeliest (7/8), 0.5 one; their shares keep their ratio."""
    logits = [0.0, math.log(5), math.log(2)]
    kept = drawn(logits, 4000, temperature=1.0, top_p=0.8)
    assert set(kept) == {1, 2}
    assert kept[1] / 4000 == pytest.approx(5 / 7, abs=0.03)
    assert set(drawn(logits, 200, temperature=1.0, top_p=0.5)) == {1}
    assert set(drawn(logits, 200, temperature=1.0, top_p=1e-9)) == {1}


def test_vanishing_temperature_is_greedy() -> None:
    """No overflow, no NaN: the likeliest token."""
    assert set(drawn([0.0, 1.0, 0.5], 50, temperature=1e-300)) == {1}
    assert set(drawn([1e30, -1e30, 0.0], 50, temperature=1.0)) == {0}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error(bad: float, temperature: float) -> None:
    """Damaged weights end in a clear word, not in a token; -inf beside a number is fine."""
    with pytest.raises(EngineError, match="request a are no numbers"):
        choose(torch.tensor([[0.0, bad]]), [asking(temperature=temperature)], 0)
    assert choose(torch.tensor([[0.0, -math.inf]]), [asking(temperature=temperature)], 0) == [0]


def test_rows_are_chosen_each_in_its_own_way() -> None:
    """Greedy and drawing neighbours in one batch; a row's token is the same as alone."""
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    wants = [asking(), asking(temperature=1.0, seed=3), asking(), *(asking(at, temperature=0.7) for at in range(3))]
    together = choose(logits, wants, 5)
    assert together == [choose(logits[at : at + 1], [want], 5)[0] for at, want in enumerate(wants)]


def test_chance_belongs_to_the_request() -> None:
    """The same seed and place give the same number; another place, seed or request another one."""
    assert uniform(asking(1, 4, seed=9), 0) == uniform(asking(2, 4, seed=9), 1)
    assert uniform(asking(1, 4), 0) == uniform(asking(1, 4), 0)
    others = [asking(1, 5, seed=9), asking(1, 4, seed=8), asking(1, 4), asking(2, 4)]
    numbers = [uniform(asking(1, 4, seed=9), 0), *(uniform(other, 0) for other in others), uniform(asking(1, 4), 1)]
    assert len(set(numbers)) == 6
    assert all(0 <= number < 1 for number in numbers)
