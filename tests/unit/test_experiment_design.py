"""Arms, repeats, order, and which pairs are read."""

from __future__ import annotations

import pytest

from diagnosis.experiments.design import Arm, contrasts, factorial, schedule
from engine_probe.errors import UsageError

ARMS = [Arm("B"), Arm("D")]


def test_factorial_is_the_owners_four_arms() -> None:
    """A off/cold, B off/warm, C on/cold, D on/warm."""
    arms = factorial({"cache": "off"}, {"cache": "on"})
    assert [(arm.name, arm.settings["cache"], arm.is_warm) for arm in arms] == [
        ("A", "off", False),
        ("B", "off", True),
        ("C", "on", False),
        ("D", "on", True),
    ]


def test_every_arm_runs_once_in_every_round() -> None:
    """Four arms, five repeats: each stretch of four holds all four, with the repeat's number."""
    trials = schedule(factorial({}, {}), 5, seed=3)
    assert len(trials) == 20
    for repeat in range(5):
        part = trials[4 * repeat : 4 * repeat + 4]
        assert sorted(trial.arm.name for trial in part) == ["A", "B", "C", "D"]
        assert {trial.repeat for trial in part} == {repeat + 1}
    assert [trial.turn for trial in trials] == list(range(20))


def test_order_is_the_seeds() -> None:
    """The same seed gives the same order, another one another, and no order is that of the names in every round."""
    order = [[trial.run_id for trial in schedule(factorial({}, {}), 5, seed)] for seed in (1, 1, 2)]
    assert order[0] == order[1]
    assert order[0] != order[2]
    named = [f"{arm}/{repeat}" for repeat in range(1, 6) for arm in "ABCD"]
    assert order[0] != named


def test_runs_are_named_by_arm_and_repeat() -> None:
    """`D/2` is the second run of D."""
    assert "D/2" in [trial.run_id for trial in schedule(ARMS, 3, 0)]


def test_pairs_of_the_factorial_and_of_ones_own_arms() -> None:
    """B to D first; with arms of one's own everything against the first."""
    assert contrasts(factorial({}, {})) == [("B", "D"), ("A", "C"), ("C", "D"), ("A", "B")]
    assert contrasts([Arm("control"), Arm("x"), Arm("y")]) == [("control", "x"), ("control", "y")]


@pytest.mark.parametrize(
    ("arms", "repeats", "words"),
    [
        ([], 3, "there is none"),
        ([Arm("B")], 3, "there is B"),
        ([Arm("B"), Arm("b")], 3, "one name"),
        (ARMS, 2, "3 or more"),
        (ARMS, 0, "3 or more"),
    ],
)
def test_what_cannot_be_compared_is_refused(arms: list[Arm], repeats: int, words: str) -> None:
    """Fewer than two arms or three repeats, or two arms that are one folder."""
    with pytest.raises(UsageError, match=words):
        schedule(arms, repeats, 0)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "a:b", "x\n"])
def test_an_arms_name_is_a_folder_and_a_run(name: str) -> None:
    """What would lead elsewhere, or break `--baseline`, is refused."""
    with pytest.raises(UsageError, match="cannot be a folder"):
        Arm(name)
