"""How much load each worker was offered, and how many workers there were."""

from __future__ import annotations

import pytest

from diagnosis.claims.offered_load import num_workers, offered_load
from diagnosis.facts import Facts
from tests.factories import facts, request_facts


def served(names: tuple[str | None, ...], workers: list[int]) -> Facts:
    """A request a tenth of a second, by these workers in turn."""
    n = len(workers)
    return facts(request_facts([0.1 * i for i in range(n)], worker=workers, worker_names=names))


@pytest.mark.parametrize(
    ("names", "workers", "expected"),
    [
        (("w0", "w1"), [0, 1] * 10, (2, 2)),
        (("w0", "w1", None), [0, 1] * 9 + [0, 2], (2, 2)),  # the engine's row of one request was lost
        (("w0", None), [1] * 19 + [0], (1, 1)),
        ((None,), [0] * 20, (1, 1)),
    ],
)
def test_requests_that_name_no_worker_are_no_worker(
    names: tuple[str | None, ...], workers: list[int], expected: tuple[int, int]
) -> None:
    """A few of them change nothing; where most name none, neither window is divided by workers, and the load is what it was."""
    whole = served(("w0", "w1"), [0, 1] * 10)
    assert num_workers(whole, served(names, workers)) == expected
    assert num_workers(served(names, workers), whole) == expected[::-1]
    assert offered_load(whole, served(names, workers)).factor == pytest.approx(1.0)
