"""What the causes that are hotspots say: the judgement's own words and advice, the reason of a straggler, what follows from an index."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diagnosis.attribution import ranking
from diagnosis.cause import Case, Claim, Excluded, all_causes
from diagnosis.facts import WorkerFacts
from diagnosis.judge import judge
from diagnosis.telling.verdict import NamedCause, Verdict
from diagnosis.windows import Chosen
from store.interface import Window
from tests.cause_scenarios import Pair, pair, plain
from tests.routing_scenarios import ROUTING, routed, routing, slow_worker, spot, too_much

CHOSEN = Chosen(Window(run_id="a"), Window(run_id="b"), "baseline", "suspect", "both windows were given")


pytestmark = pytest.mark.usefixtures("few_replicates")


def judged(made: Pair) -> Verdict:
    return judge(*made[:2], CHOSEN, made[2], "0.99")


def statements(cause: NamedCause) -> list[str]:
    return [str(evidence["statement"]) for evidence in cause.evidence]


def test_a_straggler_is_told_with_what_was_measured_of_it() -> None:
    """The clock that fell is a reason; the CPU that did as much as elsewhere is none."""
    told = statements(judged(slow_worker()).causes[0])
    assert "meanwhile its clock at w0: 1,200,000,000 Hz (1,800,000,000 Hz at the others): a reason" in told
    assert "as at the others was its host's CPU use 12 % (11 %): not the reason" in told


def test_the_advice_with_its_break_even_comes_first() -> None:
    """What this window's own numbers say is told before the runbook."""
    remedy = judged(too_much("hotspot_affinity")()).causes[0].remedy
    assert remedy[0] == "router: Spill above 3 waiting."
    assert len(remedy) > 3


def test_subject_and_time_are_the_hotspot_s() -> None:
    """w0, from 10 s to 100 s."""
    cause = judged(too_much("hotspot_tie_breaking")()).causes[0]
    assert cause.subject == {"kind": "worker", "id": "w0"}
    assert cause.interval is not None
    assert cause.interval["end_ns"] - cause.interval["start_ns"] == 90 * 10**9


def test_a_hotspot_that_the_baseline_has_too_is_not_blamed() -> None:
    """The same seconds were lost there: the change is somebody else's, and the number says so."""
    found = routing([spot("hotspot_affinity", 12.0)], lost_s={"hotspot_affinity": 0.2})
    verdict = judged(pair(routed(plain(queue=0.2), found), routed(plain(0.4, queue=0.2), found)))
    assert verdict.delta.mean_s == pytest.approx(0.3, abs=0.01)
    assert "hotspot_affinity" not in {cause.cause for cause in verdict.causes}
    because = next(row["because"] for row in verdict.excluded if row["cause"] == "hotspot_affinity")
    assert "less than 10 %" in because


def test_one_worker_is_no_hotspot() -> None:
    """There is no other: excluded with that number, where nothing of routing was recorded."""
    base, suspect, metric = ROUTING["hotspot_straggler"].quiet()
    alone = [replace(facts, routing=None) for facts in (base, suspect)]
    verdict = judged((alone[0], alone[1], metric))
    because = next(row["because"] for row in verdict.excluded if row["cause"] == "hotspot_straggler")
    assert because == "1 worker served all 60 requests: there is no other"


@pytest.mark.parametrize(("gone", "is_told"), [(0.0, True), (30.0, False)], ids=["knows too little", "is late"])
def test_an_index_that_began_anew_is_told_by_what_it_does_not_know(gone: float, is_told: bool) -> None:
    """45 wrong beliefs: none of them in blocks that were gone, or 30. The second index is late, and did not begin anew."""
    base, suspect, metric = ROUTING["hotspot_stale_index"].fires()
    found = suspect.routing
    assert found is not None
    one = found.spots[0]
    facts = (one.evidence[0], replace(one.evidence[1], value=gone))
    suspect = replace(suspect, routing=replace(found, spots=(replace(one, evidence=facts),)))
    told = statements(judged((base, suspect, metric)).causes[0])
    assert any("700 of 1,000 blocks" in said for said in told) is is_told


@pytest.mark.parametrize(("blocks", "rows"), [(500, None), (250, ("hotspot_stale_index",))], ids=["as many", "half"])
def test_waiting_for_blocks_follows_from_an_index_only_where_the_pool_is_as_large(
    blocks: int, rows: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer blocks than before the shortage has a reason of its own, and the index claims its own row alone."""
    base, suspect, metric = ROUTING["hotspot_stale_index"].fires()
    pool = [WorkerFacts("w0", block_size=16, num_blocks=blocks)]
    answers: list[Claim | Excluded | None] = []
    cause = all_causes()["hotspot_stale_index"]

    def asked(case: Case) -> Claim | Excluded | None:
        answers.append(cause.judge(case))
        return answers[-1]

    monkeypatch.setattr(ranking, "all_causes", lambda: {cause.name: replace(cause, judge=asked)})
    judged((base, replace(suspect, workers=pool), metric))
    [answer] = answers
    assert isinstance(answer, Claim)
    assert answer.rows == rows


def test_spots_of_another_kind_are_said() -> None:
    """Who is not it says what was found in its place."""
    base, suspect, metric = ROUTING["hotspot_affinity"].quiet()
    other = replace(suspect, routing=routing([spot("hotspot_straggler", 1.0)], lost_s={"hotspot_straggler": 0.0}))
    because = next(
        row["because"] for row in judged((base, other, metric)).excluded if row["cause"] == "hotspot_affinity"
    )
    assert because.endswith("what was found is hotspot_straggler")
