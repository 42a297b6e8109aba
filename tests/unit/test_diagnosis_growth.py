"""How sure it is that arrivals grew: diagnosis/causes/load_step.py."""

from __future__ import annotations

import math

import numpy as np
import pytest

from diagnosis.causes.load_step import growth_z
from diagnosis.facts import Facts
from tests.factories import facts, request_facts


def arriving(at_s: np.ndarray) -> Facts:
    return facts(request_facts(at_s))


def evenly(num: int) -> np.ndarray:
    """So many in a hundred seconds."""
    return (np.arange(num) + 0.5) * 100.0 / num


def in_bursts(few: int, many: int) -> np.ndarray:
    """A hundred seconds, of every two stretches of five seconds so many in the one and so many in the other."""
    return np.concatenate([np.linspace(5 * i + 0.1, 5 * i + 4.9, many if i % 2 else few) for i in range(20)])


def test_of_even_arrivals_it_is_poissons() -> None:
    """1,000 and then 1,210: log(1.21) over sqrt(1/1000 + 1/1210), and ends of a window are half a gap inside."""
    z = growth_z(arriving(evenly(1000)), arriving(evenly(1210)))
    assert z == pytest.approx(math.log(1.21) / math.sqrt(1 / 1000 + 1 / 1210), rel=0.01)


def test_bursts_scatter_more() -> None:
    """10 and 90 by turns, then 30 and 92: mean 50 and 61, variance 20 * 40^2 / 19 and 20 * 31^2 / 19, so indices 33.7 and 16.6."""
    z = growth_z(arriving(in_bursts(10, 90)), arriving(in_bursts(30, 92)))
    assert z == pytest.approx(math.log(1.22) / math.sqrt(33.68 / 1000 + 16.58 / 1220), rel=0.01)


def test_few_arrivals_tell_no_bursts() -> None:
    """20 in 20 stretches, all of them in every other one: taken for Poisson's."""
    z = growth_z(arriving(in_bursts(0, 2)), arriving(evenly(40)))
    assert z == pytest.approx(math.log(2.0) / math.sqrt(1 / 20 + 1 / 40), rel=0.05)
