"""Arms of an experiment with repeats: the repeat is what is independent, so whole repeats are resampled, not stretches of requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from diagnosis.telling.verdict import Verdict
from store.interface import Store
from tests.diagnosed import as_run, few_replicates, judged, shifted, stored
from tests.simulate import Rows, Setup, simulate

SETUP = Setup(num_requests=120, output_tokens=(8, 16))


def arm(name: str, *, labelled: bool, repeats: int = 3, **changes: Any) -> list[Rows]:
    """Several runs of one arm behind each other under one name, each with other calls; the third meets a machine that is half as fast."""
    parts = []
    for repeat in range(1, repeats + 1):
        rows = simulate(SETUP, name, seed=repeat, slow=2.0 if repeat == 3 else 1.0, **changes)
        label = {"repeat": str(repeat)} if labelled else {}
        rows = {kind: [{**row} for row in part] for kind, part in rows.items()}
        for row in rows["request"]:
            row["request_id"] = f"{repeat}-{row['request_id']}"
            row["labels"] = label
        parts.append(as_run(shifted(rows, 1000.0 * repeat), name))
    return parts


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    parts = arm("a", labelled=True) + arm("plain-a", labelled=False) + arm("once", labelled=True, repeats=1)
    parts += arm("b", labelled=True, caching=False) + arm("plain-b", labelled=False, caching=False)
    opened = stored(tmp_path_factory.mktemp("repeats") / "store.duckdb", parts)
    with few_replicates():
        yield opened
    opened.close()


def width(verdict: Verdict) -> float:
    bounds = verdict.delta.mean_interval_95
    assert bounds is not None
    return bounds[1] - bounds[0]


def test_whole_repeats_are_resampled(store: Store) -> None:
    """What differs from repeat to repeat is in the interval, which three repeats make far wider than 360 requests; it is said."""
    by_repeat, by_block = judged(store, "a", "b"), judged(store, "plain-a", "plain-b")
    assert by_repeat.delta.mean_s == pytest.approx(by_block.delta.mean_s)
    assert width(by_repeat) > 2 * width(by_block)
    said = "whole repeats are resampled, for requests of one share its queues: 3 of the baseline and 3 of the suspect window"
    assert said in by_repeat.notes
    assert not [note for note in by_block.notes if "repeats" in note]


def test_one_repeat_alone_is_a_window_like_any_other(store: Store) -> None:
    """Its spread from repeat to repeat cannot be known; that of the other arm is still looked at."""
    verdict = judged(store, "once", "b")
    assert [note for note in verdict.notes if "repeats" in note] == [
        "whole repeats are resampled, for requests of one share its queues: 3 of the suspect window"
    ]
