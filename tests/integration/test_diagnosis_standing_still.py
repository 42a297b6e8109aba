"""An engine whose process stands still now and then: named, where nothing tells why; and quiet where both windows have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnosis.telling.verdict import Verdict
from tests.diagnosed import judged, stored
from tests.simulate import Setup, simulate

PAUSES = (4.0, 0.35)
"""Every 4 s a step takes 350 ms more."""
SETUP = Setup(num_requests=700, rate=5.0)


pytestmark = pytest.mark.usefixtures("few_replicates")


def compared(
    folder: Path, base: tuple[float, float] | None, suspect: tuple[float, float] | None, metric: str
) -> Verdict:
    rows = [simulate(SETUP, "base", seed=1, pauses=base), simulate(SETUP, "suspect", seed=2, pauses=suspect)]
    with stored(folder / "store.duckdb", rows) as store:
        return judged(store, "base", "suspect", metric)


def test_who_waits_while_the_process_stands_still_waits_for_that(tmp_path: Path) -> None:
    """8 % of the arrivals (0.35 of every 4.35 s) wait 175 ms on average: 14 ms a request, and a little more for those that are served
    in such a step."""
    verdict = compared(tmp_path, None, PAUSES, "ttft")
    assert [cause.cause for cause in verdict.causes] == ["slow_steps"], verdict.verdict
    seconds = {row.cause: row.mean_s for row in verdict.attribution}
    assert 0.012 < seconds["slow_steps"] < 0.022
    assert abs(seconds.get("queue_load", 0.0)) < 0.003
    said = verdict.causes[0].evidence[0]["statement"]
    assert "the process stood still, and nothing tells why (0 in the baseline)" in said


def test_who_decodes_meanwhile_has_it_in_the_same_row(tmp_path: Path) -> None:
    """An answer of a second meets a pause in about one of four: no slower decoding, and no stall of unknown cause."""
    verdict = compared(tmp_path, None, PAUSES, "e2e")
    assert [cause.cause for cause in verdict.causes] == ["slow_steps"], verdict.verdict
    seconds = {row.cause: row.mean_s for row in verdict.attribution}
    assert abs(seconds.get("own_decode", 0.0)) + abs(seconds.get("decode_stall", 0.0)) < 0.1 * seconds["slow_steps"]


def test_pauses_of_both_windows_changed_nothing(tmp_path: Path) -> None:
    """As often and as long in both."""
    verdict = compared(tmp_path, PAUSES, PAUSES, "ttft")
    assert not verdict.causes, verdict.verdict


def test_where_they_end_so_does_what_they_cost(tmp_path: Path) -> None:
    """The sides are exchanged."""
    verdict = compared(tmp_path, PAUSES, None, "ttft")
    assert [(cause.cause, cause.ended) for cause in verdict.causes] == [("slow_steps", True)], verdict.verdict
