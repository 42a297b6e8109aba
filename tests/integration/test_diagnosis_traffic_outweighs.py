"""The raw numbers go one way because the traffic changed, and at a common mix of requests the other: each cause keeps its own direction."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnosis.telling.verdict import Verdict
from tests.diagnosed import judged, stored
from tests.integration.test_diagnosis_reports_of_engines import Columns, served
from tests.simulate import Rows

pytestmark = pytest.mark.usefixtures("few_replicates")


def slow(_: int, __: float) -> Columns:
    """Prompts of about 1,400 tokens, and 60 ms in every prefill that nobody tells of."""
    return {"hidden_s": 0.06}


def longer(i: int, _: float) -> Columns:
    """Every fifth prompt has 6,000 tokens, and no prefill loses any time."""
    return {"prompt_tokens": 6000} if i % 5 == 0 else {}


def by_tenant(i: int, at: float) -> Columns:
    return longer(i, at) | {"tenant": "batch" if i % 5 == 0 else "chat"}


def verdict_of(folder: Path, base: Rows, suspect: Rows) -> Verdict:
    with stored(folder / "s.duckdb", [base, suspect]) as store:
        return judged(store, "base", "suspect")


def test_longer_prompts_on_a_faster_engine_are_not_what_is_over(tmp_path: Path) -> None:
    """TTFT rises by longer prompts: they are of the suspect window and want a remedy, although equal prompts are faster."""
    verdict = verdict_of(tmp_path, served("base", 1, told=slow, rate=0.5), served("suspect", 2, told=longer, rate=0.5))
    assert verdict.status == "explained"
    assert "TTFT rose from" in verdict.verdict
    assert "because the traffic changed" in verdict.verdict
    assert "; at a common mix of requests " in verdict.verdict
    assert "the end of length_shift" not in verdict.verdict
    first = verdict.causes[0]
    assert (first.cause, first.ended) == ("length_shift", False)
    assert first.summary.startswith("The traffic changed")
    assert first.evidence[0]["statement"].startswith("mean prompt length in the suspect window: 2,3")
    assert not any(remedy.startswith("nothing") for remedy in first.remedy)
    assert all(cause.ended for cause in verdict.causes[1:])
    assert verdict.side is not None
    assert verdict.side["ttft_s"] > 0


def test_shorter_prompts_on_a_slower_engine_want_no_remedy(tmp_path: Path) -> None:
    """The same the other way round: TTFT fell by the traffic, nothing is to be done about that, and what rose at a common mix is of now."""
    verdict = verdict_of(tmp_path, served("base", 1, told=longer, rate=0.5), served("suspect", 2, told=slow, rate=0.5))
    assert "TTFT fell from" in verdict.verdict
    assert "because the traffic changed" in verdict.verdict
    first = next(cause for cause in verdict.causes if cause.cause == "length_shift")
    assert first.ended
    assert list(first.remedy) == ["nothing: these requests take less than the baseline's did"]
    assert not any(cause.ended for cause in verdict.causes if cause.cause != "length_shift")


def test_a_tenant_that_grew_is_told_of_the_window_that_has_it(tmp_path: Path) -> None:
    """As lengths: the tenant with long prompts stands in the suspect window."""

    def few(i: int, at: float) -> Columns:
        told = by_tenant(i, at) if i % 30 == 0 else {"tenant": "chat"}
        return told | slow(i, at)

    verdict = verdict_of(
        tmp_path, served("base", 1, told=few, rate=0.5), served("suspect", 2, told=by_tenant, rate=0.5)
    )
    first = next(cause for cause in verdict.causes if cause.cause == "mix_shift")
    assert not first.ended
    assert first.subject == {"kind": "tenant", "id": "batch"}
    told = " / ".join(evidence["statement"] for evidence in first.evidence)
    assert "tenant 'batch' has 20 % of the requests in the suspect window" in told
