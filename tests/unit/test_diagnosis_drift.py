"""Slow steps in a part of a window: found with their part, not mistaken for drift, and not found where there is only drift."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from diagnosis.facts import F64, LineageFacts
from diagnosis.ledger.drift import SPANS, Drift, Spell, compare, drift, spell
from diagnosis.ledger.ledger import write
from diagnosis.ledger.spent import Context
from diagnosis.ledger.work_model import calibrate
from tests.diagnosed import few_replicates, judged, stored
from tests.factories import facts, request_facts, work_model
from tests.simulate import Rows, Setup, at_level, simulate
from tests.unit.test_diagnosis_work_model import stepped, streamed


def spans(*effect: float) -> Drift:
    """A window whose spans of 5 s have these effects, two each, and each a little off in turn."""
    both = np.repeat(np.asarray(effect), 2)
    wobble = 0.004 * np.where(np.arange(len(both)) % 2, 1.0, -1.0)
    return Drift(both + wobble, np.arange(len(both) + 1) * 5.0)


QUIET = spans(*[0.0] * 8)


def test_a_slow_half_is_a_spell() -> None:
    """The second half of the spans at 0.47 (1.6 times): from 40 s to 80 s 1.6, not 1.26 of the whole."""
    suspect = spans(0, 0, 0, 0, 0.47, 0.47, 0.47, 0.47)
    found, whole = spell(suspect, QUIET), compare(QUIET, suspect)
    assert found is not None
    assert whole is not None
    assert whole.value == pytest.approx(1.26, rel=0.01)
    assert found.factor == pytest.approx(1.6, rel=0.01)
    assert (found.start_s, found.end_s) == (40.0, 80.0)
    assert np.log(found.factor) > found.noise
    shares = found.shares(np.array([39.9, 40.0, 79.9, 80.0, np.nan]))
    assert shares.tolist() == pytest.approx([0.0, 0.375, 0.375, 0.0, 0.0], abs=0.01)


@pytest.mark.parametrize(
    "suspect",
    [
        spans(*[0.3] * 8),  # all of it
        spans(*[0.2] * 4, *[0.7] * 4),  # all of it, a part more
        spans(*[-0.3] * 4, *[0.0] * 4),  # faster in a part
        spans(0.1, -0.1, 0.2, -0.2, 0.1, -0.1, 0.2, -0.2),  # scatter
        Drift(QUIET.effect + 0.6 * (np.arange(16) == 7), QUIET.edges),  # one span
        spans(0, 0, 0, 0, 0.15, 0.15, 0.15, 0.15),  # too little
        spans(0, 0, 0),  # too few
    ],
)
def test_what_is_no_spell(suspect: Drift) -> None:
    """A slow whole, also where a part is slower still, a fast part, scatter, one bad span, a small rise, six spans."""
    assert spell(suspect, QUIET) is None


def test_quiet_windows_have_no_spell() -> None:
    """Of 2,000 pairs whose spans drift by 5 % at most two have one."""
    rng = np.random.default_rng(1)
    edges = np.arange(SPANS + 1) * 1.0
    quiet = [[Drift(rng.normal(0.0, 0.05, SPANS), edges) for _ in range(2)] for _ in range(2000)]
    assert sum(spell(*pair) is not None for pair in quiet) <= 2


def test_spans_hold_as_many_steps_each() -> None:
    """80 steps, the first half slower, unknown ones left out: sixteen spans of five."""
    relative = np.where(np.arange(80) < 40, 0.5, 0.0)
    relative[3] = np.nan
    found = drift(relative, np.arange(80.0), SPANS)
    assert found.effect.tolist() == [0.5] * 8 + [0.0] * 8
    assert len(found.edges) == SPANS + 1
    assert len(drift(np.array([np.nan]), np.array([1.0]))) == 0


def test_borders_may_fall_into_spans() -> None:
    """Slow from the end of one span (0.2) to the middle of another (0.3): the second is in it, neither moves its factor."""
    effect = np.array([0, 0, 0, 0.2, 0.5, 0.5, 0.5, 0.5, 0.3, 0, 0, 0, 0, 0, 0, 0]) + QUIET.effect
    found = spell(Drift(effect, QUIET.edges), QUIET)
    assert found is not None
    assert (found.start_s, found.end_s) == (20.0, 45.0)
    assert found.factor == pytest.approx(np.exp(0.5), rel=0.01)


def halves(n: int) -> F64:
    """1 in the first half, 1.6 in the second."""
    return np.where(np.arange(n) < n // 2, 1.0, 1.6)


def test_steps_that_got_slow_half_way_are_found_by_steps_and_by_gaps() -> None:
    """1.6 times from the middle on: the factor of the part, and which part; the window as a whole has none."""
    by_steps = calibrate(stepped(), stepped(halves(480)))
    assert by_steps.slow_factor == 1.0
    assert by_steps.spell is not None
    assert by_steps.spell.factor == pytest.approx(1.6, rel=0.02)
    by_gaps = calibrate(streamed(), streamed(0.1 * halves(60)))
    assert by_gaps.source == "token gaps"
    assert by_gaps.spell is not None
    assert by_gaps.spell.factor == pytest.approx(1.6, rel=0.02)
    assert by_gaps.spell.start_s == pytest.approx(300.0, abs=20.0)
    at = np.array([0.0, 500.0])
    assert by_gaps.spell_shares(at, suspect=True).tolist() == pytest.approx([0.0, 0.375], abs=0.01)
    assert by_gaps.spell_shares(at, suspect=False).tolist() == [0.0, 0.0]


def test_a_spell_is_of_the_worse_window() -> None:
    """The baseline was slow half way and is worse: its spell, also with the roles exchanged; not looked for where it is better."""
    model = calibrate(streamed(0.1 * halves(60)), streamed(), suspect_is_worse=False)
    assert model.spell is not None
    assert not model.spell_in_suspect
    assert model.spell_shares(np.array([500.0]), suspect=False).tolist() == pytest.approx([0.375], abs=0.01)
    assert model.exchanged().spell_in_suspect
    assert calibrate(streamed(0.1 * halves(60)), streamed()).spell is None


SLOW_FROM_300 = Spell(300.0, 600.0, 1.6, 0.1)


def test_only_requests_of_the_spell_pay_for_it() -> None:
    """Steps were 1.6 times as slow from 300 s on: 0.375 of a prefill of 160 ms there are slow steps, none before."""
    model = work_model(slow_factor=1.0, spell=SLOW_FROM_300)
    requests = request_facts([100.0, 400.0], queue=[0.0, 0.0], prefill=[0.1, 0.16])
    ledger = write(facts(requests), "ttft", Context(model, 8, 1e9, None, False, 0.0, True))
    assert ledger.column("slow_steps").tolist() == pytest.approx([0.0, 0.06], abs=0.001)
    assert ledger.column("own_prefill").tolist() == pytest.approx([0.1, 0.1], abs=0.001)


def test_what_lineage_claims_is_not_taken_by_a_spell() -> None:
    """60 of 100 ms compute evicted tokens again at 1 ms each: those 60 stay, and slow steps take 0.375 of the other 40."""
    requests = request_facts([400.0], queue=[0.0], prefill=[0.1], prompt_tokens=[100.0], computed_tokens=[100.0])
    lineage = LineageFacts(np.array([60.0]), np.array([40.0]), np.zeros(1), 4, None, ())
    known = facts(requests, lineage=lineage)
    told = {}
    for name, found in (("usual", None), ("slow", SLOW_FROM_300)):
        model = work_model(slow_factor=1.0, spell=found, prefill_s_per_token=0.001)
        told[name] = write(known, "ttft", Context(model, 8, 1e9, None, False, 0.0, True))
    for ledger in told.values():
        assert ledger.column("premature_eviction").tolist() == pytest.approx([0.06])
    assert told["usual"].column("slow_steps").tolist() == [0.0]
    assert told["slow"].column("slow_steps").tolist() == pytest.approx([0.015])


SETUP = Setup(num_requests=400)
FAULTS = {
    "base": {},
    "spell": {"slow": 1.8, "slow_span": (30.0, 60.0)},
    "squeeze": {"num_blocks": 300},
    "both": {"num_blocks": 300, "slow": 1.8, "slow_span": (30.0, 60.0)},
}


@pytest.fixture(scope="module")
def runs() -> dict[str, Rows]:
    return {name: simulate(SETUP, name, **fault) for name, fault in FAULTS.items()}


@pytest.mark.parametrize("level", ["plugin", "otlp", "client"])
def test_a_simulated_spell_is_named_with_its_time(runs: dict[str, Rows], level: str, tmp_path: Path) -> None:
    """Steps 1.8 times as long from 30 s to 60 s: `slow_steps` owns the change, then, and its end when the windows are exchanged."""
    with (
        stored(tmp_path / "s.duckdb", [at_level(runs[name], level) for name in ("base", "spell")]) as store,
        few_replicates(),
    ):
        there, back = judged(store, "base", "spell", "tpot"), judged(store, "spell", "base", "tpot")
    for verdict in (there, back):
        first = verdict.causes[0]
        assert first.cause == "slow_steps"
        assert first.interval is not None
    assert back.causes[0].ended
    row = next(r for r in there.attribution if r.cause == "slow_steps")
    assert row.mean_s > 0.5 * there.delta.mean_s


def test_a_spell_takes_nothing_from_eviction(runs: dict[str, Rows], tmp_path: Path) -> None:
    """The same shortage of blocks with and without a spell: both are named, and eviction owns no less beside it."""
    with stored(tmp_path / "s.duckdb", [runs[name] for name in ("base", "squeeze", "both")]) as store, few_replicates():
        alone, beside = judged(store, "base", "squeeze"), judged(store, "base", "both")
    owned = [
        next(r.mean_s for r in verdict.attribution if r.cause == "premature_eviction") for verdict in (alone, beside)
    ]
    assert {"slow_steps", "premature_eviction"} <= {cause.cause for cause in beside.causes}
    assert owned[1] >= owned[0] > 0
