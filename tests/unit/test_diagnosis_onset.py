"""What began: seconds that many requests of one window met and the other shows next to nothing of; ordinary work never begins."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diagnosis.cause import Case
from diagnosis.claims.onset import began, more_than_ever, waited_here_alone
from diagnosis.ledger.ledger import Ledger
from tests.verdicts import case


def with_seconds(row: str, before: list[float], now: list[float]) -> Case:
    """A case of which 100 requests a window have these seconds in this row, the others none."""

    def ledger(told: list[float]) -> Ledger:
        column = np.array(told + [0.0] * (100 - len(told)))
        return Ledger(
            "ttft", (row,), column[:, None], np.zeros(100), column, np.arange(100), np.zeros(100, dtype=np.bool_)
        )

    return replace(case(n=100), base_ledger=ledger(before), suspect_ledger=ledger(now))


@pytest.mark.parametrize(
    ("before", "now", "answer"),
    [
        ([], [0.5] * 20, True),
        ([], [0.5] * 19, False),
        ([0.5], [0.5] * 20, True),
        ([0.5] * 2, [0.5] * 20, False),
        ([], [0.0005] * 50, False),
    ],
)
def test_it_began_where_many_met_it_and_the_baseline_has_a_trace_at_most(
    before: list[float], now: list[float], answer: bool
) -> None:
    """20 requests or more with 1 ms each; 1 of 20 as much before is a trace, 1 of 10 is not."""
    row = "admission_blocked_on_blocks"
    assert began(with_seconds(row, before, now), [row]) is answer


@pytest.mark.parametrize(("before", "many", "answer"), [(0.3, 20, True), (0.3, 19, False), (0.5, 20, False)])
def test_more_than_ever_is_more_than_any_had(before: float, many: int, answer: bool) -> None:
    """20 requests or more with 0.5 s each, where nobody had as much."""
    assert more_than_ever(with_seconds("decode_bandwidth", [before], [0.5] * many), "decode_bandwidth") is answer


@pytest.mark.parametrize(("before", "answer"), [([], True), ([0.5] * 2, False), ([0.0005] * 50, True)])
def test_who_waited_here_alone(before: list[float], answer: bool) -> None:
    """20 requests waited, next to none before; half a millisecond is no wait."""
    assert waited_here_alone(with_seconds("queue_seats", before, [0.5] * 20), "queue_seats") is answer


def test_ordinary_work_does_not_begin() -> None:
    """A queue behind ordinary work is a busier moment, whatever the baseline had."""
    assert not began(with_seconds("queue_load", [], [0.5] * 50), ["queue_load"])
