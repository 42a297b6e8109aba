"""Hardware that is slower by design: no hotspot where the router knows it, a straggler where it does not, or where the pace changed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diagnosis.hotspots.by_design import slower_by_design
from diagnosis.hotspots.judge import find
from diagnosis.hotspots.observed import Observed
from diagnosis.hotspots.regret import bear, regret_of
from tests.simulated_routing import LENGTHS, POLICIES, Fleet, Pick, least, simulate

PROMPT_S = 0.8 * 4 * 10 / 200
"""0.16 s of computing a prompt, where four workers are busy for 0.8 of the time with 200 prompts in 10 s."""


def knows_speed(number: int, busy: np.ndarray, has: np.ndarray, random: np.random.Generator) -> int:
    """Where the prompt is done first: w3 takes twice as long."""
    return least(busy + PROMPT_S * np.array([1.0, 1.0, 1.0, 2.0]), random)


def _fleet(pick: Pick) -> Observed:
    """w3 takes twice as long all the time; in each step one answer is decoded too, which loses by that."""
    seen = simulate(Fleet(4, pick, LENGTHS["equal"], 6, 200, use=0.8, noise=0.02, slow=((3, 2.0),)))
    assert seen.steps is not None
    return replace(seen, steps=replace(seen.steps, decode_tokens=np.ones(len(seen.steps.at_s))))


def test_slower_worker_is_no_hotspot_where_the_router_knows_it() -> None:
    """It gets about half of what the others get, and nothing waits for it longer than elsewhere: a note, and nothing else."""
    found = find(_fleet(knows_speed))
    assert found.status == "none"
    [note] = [line for line in found.cannot_tell if "by design" in line]
    assert note.startswith("w3 takes 2.0")


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded"])
def test_slower_worker_is_a_straggler_where_the_router_does_not_know_it(policy: str) -> None:
    """Given as much as the others, or less only when its queue is longer already."""
    found = find(_fleet(POLICIES[policy]))
    assert ("straggler", "w3") in [(spot.kind, spot.subject["id"]) for spot in found.hotspots]
    assert not any("by design" in line for line in found.cannot_tell)


def test_worker_whose_pace_changed_is_not_slower_by_design() -> None:
    """Twice as long in six intervals is by design; 1.0 times as long in one of them lies nearer to the others, below the root of 2."""
    seen = _fleet(knows_speed)
    regret = regret_of(seen)
    slowness, slow = np.ones((6, 4)), np.zeros((6, 4), dtype=bool)
    slowness[:, 3], slow[:, 3] = 2.0, True
    told = slower_by_design(seen, regret, bear(seen, regret), slowness, slow)
    assert np.isnan(told[:3]).all()
    assert told[3] == pytest.approx(2.0)
    slowness[0, 3], slow[0, 3] = 1.0, False
    assert np.isnan(slower_by_design(seen, regret, bear(seen, regret), slowness, slow)).all()
