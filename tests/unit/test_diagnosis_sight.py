"""Both windows are read at what both of them saw, and the traffic's share of a change is set apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diagnosis.facts import BlockTotals, Facts, Gaps, LineageFacts, WorkerFacts
from diagnosis.judge import judge
from diagnosis.loading.sight import equal_sight
from diagnosis.windows import Chosen
from store.interface import Window
from tests.cause_scenarios import longer_prompts
from tests.factories import facts, request_facts

CHOSEN = Chosen(Window(run_id="a"), Window(run_id="b"), "baseline", "suspect", "both windows were given")
N = 40
JITTER = 1 + 0.02 * np.sin(np.arange(N) * 2.3)


def seen(name: str, *, phases: bool = True, decode: bool = True, blocks: bool = True) -> Facts:
    """A window with what is asked for; TTFT is 0.3 s, of which 0.2 s are queue where phases are known."""
    requests = request_facts(
        np.arange(N) * 5.0,
        queue=[0.2] * N if phases else None,
        prefill=0.1 * JITTER if phases else 0.3 * JITTER,
        decode=[0.9] * N if decode else None,
        prompt_tokens=[100.0] * N,
    )
    gaps = Gaps(np.arange(N), np.arange(N) * 5.0 + 1.0, np.full(N, 0.1), np.ones(N)) if decode else None
    lineage = LineageFacts(np.full(N, 16.0), np.zeros(N), np.zeros(N), N, 1.0, ()) if blocks else None
    return facts(
        replace(requests, gaps=gaps),
        name=name,
        lineage=lineage,
        blocks=BlockTotals(9, 9, None, 0) if blocks else None,
    )


def test_equal_windows_stay_as_they_are() -> None:
    """Nothing is hidden where both saw the same."""
    for kept in (True, False):
        base, suspect = (seen(name, phases=kept, decode=kept, blocks=kept) for name in ("baseline", "suspect"))
        assert equal_sight(base, suspect) == (base, suspect, [])


@pytest.mark.parametrize("richer", [0, 1])
def test_what_only_one_window_saw_is_left_aside_in_both(richer: int) -> None:
    """Phases, decode times and block events, in either order; each is said."""
    pair = [seen("baseline", phases=False, decode=False, blocks=False), seen("suspect")]
    if richer == 0:
        pair = [replace(pair[1], name="baseline"), replace(pair[0], name="suspect")]
    base, suspect, notes = equal_sight(*pair)
    for window in (base, suspect):
        assert not window.requests.has("queue_s", 0.01)
        assert np.isnan(window.requests.scheduled_s).all()
        assert window.requests.gaps is None
        assert not window.requests.has("decode_s", 0.01)
        assert (window.blocks, window.lineage) == (None, None)
        assert not window.visible & {"request.queue_s", "request.token_ns", "block.evicted"}
    name = ("baseline", "suspect")[richer]
    assert len(notes) == 3
    assert all(f"in the window {name} only" in note for note in notes)


def test_no_block_events_with_caching_off_are_the_whole_truth() -> None:
    """With caching off nothing is stored and nothing evicted: the other window's events stay."""
    off = replace(seen("suspect", blocks=False), workers=[WorkerFacts("w0", prefix_caching=False)])
    base, _, notes = equal_sight(seen("baseline"), off)
    assert base.blocks is not None
    assert notes == []


def test_a_window_that_saw_more_shows_no_change() -> None:
    """The same latencies, with phases in one window only: no seconds come into being in a queue nobody saw before."""
    base, suspect = seen("baseline", phases=False, decode=False, blocks=False), seen("suspect")
    verdict = judge(base, suspect, CHOSEN, "ttft", "0.99")
    assert verdict.status == "no_change", verdict.verdict
    assert {row.cause for row in verdict.attribution} <= {"ttft_unobserved", "dependence", "other"}
    assert any("queue and prefill were seen in the window suspect only" in note for note in verdict.notes)


def test_the_traffic_s_row_and_the_rest_sum_to_the_raw_change() -> None:
    """Prompts of 100 and 400 tokens at 1 ms a token, 20 % and then 80 % long: mean 160 -> 340 ms. At a common mix nothing
    changed, so the row of the traffic is all of it."""
    base, suspect, metric = longer_prompts()
    verdict = judge(base, suspect, CHOSEN, metric, "0.99")
    shift = next(row for row in verdict.attribution if row.cause == "length_shift")
    assert verdict.delta.mean_s == pytest.approx(0.18, abs=0.003)
    assert shift.mean_s == pytest.approx(0.18, abs=0.005)
    for column in ("mean_s", "p99_s", "judged_s"):
        told = sum(getattr(row, column) for row in verdict.attribution)
        assert told == pytest.approx(getattr(verdict.delta, column), abs=1e-9)
    assert verdict.unexplained["mean_s"] == pytest.approx(0.0, abs=0.005)
    assert "because the traffic changed" in verdict.verdict
