"""More requests and longer ones at once: the waiting is split by the growth of work on the log scale, and no second is lost."""

from __future__ import annotations

from dataclasses import replace
from math import log

import numpy as np
import pytest

from diagnosis.attribution.shared_load import evidence, share_of_mix, with_traffic_apart
from diagnosis.facts import Facts
from diagnosis.statistics.comparability import Mix
from tests.factories import facts, request_facts, work_model
from tests.verdicts import attribution, case

N = 400
SHORT, LONG = 100.0, 200.0
MODEL = work_model(prefill_s_per_token=0.001)
ROWS = (np.arange(N), np.arange(N))


def window(long_ones: int, every_s: float) -> Facts:
    """400 requests, one each `every_s`, of which so many compute 200 tokens and the others 100."""
    tokens = np.where(np.arange(N) < long_ones, LONG, SHORT)
    arrivals = [i * every_s for i in range(N)]
    known = facts(request_facts(arrivals, prefill=[0.001] * N, queue=[0.0] * N, computed_tokens=tokens.tolist()))
    return replace(known, arrivals_s=N * every_s)


def mixed(before: int, now: int, *, shifted: bool = True) -> Mix:
    """Weights that give both windows the share of long ones that lies in the middle."""
    middle = (before + now) / 2 / N
    weights = []
    for long_ones in (before, now):
        share = long_ones / N
        is_long = np.arange(N) < long_ones
        weights.append(np.where(is_long, middle / share, (1 - middle) / (1 - share)))
    return Mix(weights[0], weights[1], shifted, [], (400.0, 400.0), [], 0.25, {"prompt_tokens": 0.25})


@pytest.mark.parametrize(
    ("now", "every_s", "share"),
    [
        (300, 0.5, log(175 / 150) / log(2 * 175 / 150)),
        (300, 1.0, 0.0),
        (100, 0.5, 0.0),
        (100, 2.0, log(125 / 150) / log(125 / 150 / 2)),
        (200, 0.5, 0.0),
    ],
)
def test_the_share_of_each_is_its_growth_of_work_on_the_log_scale(now: int, every_s: float, share: float) -> None:
    """Half of 400 were long, one a second: 175 tokens in place of 150 and twice as many; as many; shorter and more; both less; more alone."""
    windows = (window(200, 1.0), window(now, every_s))
    assert share_of_mix(windows, ROWS, mixed(200, now), MODEL) == pytest.approx(share)


def test_without_another_mix_or_a_known_cost_nothing_is_split() -> None:
    """What nothing was reweighted for is the load's; so is what cannot be weighed in seconds."""
    windows = (window(200, 1.0), window(300, 0.5))
    assert share_of_mix(windows, ROWS, mixed(200, 300, shifted=False), MODEL) == 0.0
    assert share_of_mix(windows, ROWS, mixed(200, 300), work_model()) == 0.0


def test_no_second_is_lost() -> None:
    """A quarter of what waits behind ordinary work goes to the traffic; rows of other work stay, replicates with them."""
    found = attribution({"queue_load": (0.04, 0.08), "shared_prefill": (0.02, 0.04), "slow_steps": (0.01, 0.01)})
    apart = with_traffic_apart(found, 0.25)
    assert [row.mean_s for row in apart.rows] == pytest.approx([0.03, 0.015, 0.01])
    assert apart.to_traffic == pytest.approx((0.015, 0.03, 0.03))
    assert apart.draws_mean[0].tolist() == pytest.approx([0.03, 0.015, 0.01])
    told = sum(row.quantile_s for row in apart.rows) + apart.dependence.quantile_s + apart.to_traffic[1]
    assert told == pytest.approx(apart.delta_quantile_s)
    assert with_traffic_apart(found, 0.0) is found


def test_the_part_that_waits_is_told() -> None:
    """15 ms of a request's waiting stand with the traffic: its evidence says so; where none does it says nothing."""
    made = case({"queue_load": (0.06, 0.1)})
    assert evidence(made) == []
    told = evidence(replace(made, attribution=with_traffic_apart(made.attribution, 0.25)))
    assert [fact.unit for fact in told] == ["s"]
    assert told[0].value == pytest.approx(0.015)
    assert "15.0 ms a request" in told[0].statement
