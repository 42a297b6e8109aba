"""Who is blamed for how much: one owner a second, the size that counts, and how sure the ranking is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diagnosis import calibration
from diagnosis.attribution.ranking import CHEAPER, NOTHING_TO_DO, rank
from diagnosis.attribution.traffic import Traffic
from diagnosis.cause import Cause, Claim, Evidence
from diagnosis.checks.check import Check
from diagnosis.statistics.judged import Judged
from diagnosis.telling.verdict import LedgerRow, NamedCause
from tests.verdicts import case, change, judged, significance

OK = [Check("gaps", "ok", "no gap")]


def cause(name: str, *rows: str) -> Cause:
    text = f"What {name} is.\n\nWhy: because.\n\nRefuted by: the opposite.\n\nRemedy:\n- vLLM: change {name}"
    return Cause(name, (), rows or (name,), lambda _: None, text)


def claim(**known: Any) -> Claim:
    return Claim([Evidence("seen", 1.0, "s")], **known)


def ranked(
    rows: dict[str, tuple[float, float]],
    causes: Sequence[tuple[Cause, Claim]],
    found: Judged | None = None,
    checks: Sequence[Check] = OK,
    **attributed: Any,
) -> tuple[list[NamedCause], dict[str, str]]:
    """Named causes and exclusions by name."""
    made = attributed.pop("made", None) or case(rows, **attributed)
    table = [LedgerRow(name, name, mean, tail, tail, tail) for name, (mean, tail) in rows.items()]
    delta = change(p99_s=sum(tail for _, tail in rows.values()))
    named, excluded = rank(causes, made, found or judged(), checks, table, delta)
    return named, {row["cause"]: row["because"] for row in excluded}


def test_the_largest_owner_comes_first() -> None:
    """Of 200 ms: slow_steps 120, premature_eviction 60, and 20 that nobody claims."""
    rows = {"premature_eviction": (0.03, 0.06), "slow_steps": (0.06, 0.12), "unexplained": (0.01, 0.02)}
    named, excluded = ranked(rows, [(cause("premature_eviction"), claim()), (cause("slow_steps"), claim())])
    assert [c.cause for c in named] == ["slow_steps", "premature_eviction"]
    assert [c.share_p99 for c in named] == pytest.approx([0.6, 0.3])
    assert [c.p99_s for c in named] == pytest.approx([0.12, 0.06])
    assert excluded == {}


def test_queueing_follows_from_the_one_who_fills_the_steps() -> None:
    """slow_steps owns 60 of 200 ms by its own seconds, the queue behind it 120: nobody else claims them, and no more requests came."""
    rows = {"slow_steps": (0.03, 0.06), "queue_load": (0.06, 0.12), "unexplained": (0.01, 0.02)}
    named, _ = ranked(rows, [(cause("slow_steps"), claim())])
    assert named[0].rows == ["slow_steps", "queue_load"]
    assert named[0].share_p99 == pytest.approx(0.9)
    assert "120 ms of it followed from this" in named[0].evidence[-1]["statement"]
    named, _ = ranked(rows, [(cause("slow_steps"), claim()), (cause("load_step", "queue_load"), claim())])
    assert {c.cause: c.share_p99 for c in named} == pytest.approx({"load_step": 0.6, "slow_steps": 0.3})


def test_what_got_shorter_is_said_to_be_shorter() -> None:
    """Attempts that were given up cost 180 ms, and who is served waits 30 ms less in the queue: 150 ms, all of the change."""
    rows = {"client_retries": (0.09, 0.18), "queue_load": (-0.015, -0.03)}
    named, _ = ranked(rows, [(cause("client_retries"), claim())])
    assert named[0].rows == ["client_retries", "queue_load"]
    assert named[0].share_p99 == pytest.approx(1.0)
    assert "30.0 ms less were waited because of this" in named[0].evidence[-1]["statement"]


def test_a_second_is_blamed_once() -> None:
    """load_step explains three rows, decode_bandwidth one of them: the wider cause owns it, the other one says so with its number."""
    rows = {"queue_load": (0.04, 0.1), "decode_bandwidth": (0.06, 0.1)}
    wide, narrow = cause("load_step", "queue_load", "decode_bandwidth", "shared_prefill"), cause("decode_bandwidth")
    named, excluded = ranked(rows, [(narrow, claim()), (wide, claim())])
    assert [c.cause for c in named] == ["load_step"]
    assert named[0].rows == ["queue_load", "decode_bandwidth"]
    assert sum(c.p99_s for c in named) == pytest.approx(0.2)
    assert excluded == {
        "decode_bandwidth": "its seconds follow from load_step; it owns 0 ms of the change (0.0 %), less than 10 %"
    }


def test_what_is_not_material_is_excluded_with_its_number() -> None:
    """10 of 200 ms are 5 %."""
    rows = {"slow_steps": (0.095, 0.19), "cold_start": (0.005, 0.01)}
    named, excluded = ranked(rows, [(cause("slow_steps"), claim()), (cause("cold_start"), claim())])
    assert [c.cause for c in named] == ["slow_steps"]
    assert excluded == {"cold_start": "it owns +10.0 ms of the change (5.0 %), less than 10 %"}


def test_a_cause_that_pushed_the_other_way_is_excluded() -> None:
    """It took 40 ms off a change of +160 ms."""
    rows = {"slow_steps": (0.1, 0.2), "cold_start": (-0.02, -0.04)}
    _, excluded = ranked(rows, [(cause("slow_steps"), claim()), (cause("cold_start"), claim())])
    assert excluded == {"cold_start": "it owns -40.0 ms of the change (-25 %), less than 10 %"}


def test_the_mean_is_what_counts_where_it_carries_the_verdict() -> None:
    """90 % of the mean, 5 % of the quantile."""
    rows = {"slow_steps": (0.09, 0.01), "cold_start": (0.01, 0.19)}
    by_mean = judged(changed=False)
    named, excluded = ranked(rows, [(cause("slow_steps"), claim()), (cause("cold_start"), claim())], by_mean)
    assert [c.cause for c in named] == ["slow_steps", "cold_start"]
    assert excluded == {}
    assert named[0].mean_s == pytest.approx(0.09)


def test_confidence_is_read_off_the_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of causes with certainty 1 the lab found 90 % right, of such with 0.5 40 %: that is what is stated, and the word follows."""
    told = {"thresholds": {}, "confidence": {"certainty": [0.0, 0.5, 1.0], "right": [0.0, 0.4, 0.9]}}
    monkeypatch.setattr(calibration, "measured", lambda: told)
    rows = {"slow_steps": (0.05, 0.17), "cold_start": (0.05, 0.03)}
    named, _ = ranked(rows, [(cause("slow_steps"), claim()), (cause("cold_start"), claim())], spread=0.025)
    assert [(c.certainty, c.confidence, c.confidence_word) for c in named] == [(1.0, 0.9, "high"), (0.5, 0.4, "low")]


def test_certainty_is_support_times_strength_times_quality() -> None:
    """First in every replicate (1.0), strength 0.8, one warning (0.95) among contradictions (0.7): 0.56, medium."""
    rows = {"slow_steps": (0.1, 0.2)}
    checks = [Check("a", "warning", ""), Check("b", "contradiction", ""), Check("c", "ok", "")]
    named, _ = ranked(rows, [(cause("slow_steps"), claim(strength=0.8))], checks=checks)
    assert named[0].certainty == pytest.approx(0.56)
    clean, _ = ranked(rows, [(cause("slow_steps"), claim())])
    assert clean[0].certainty == 1.0


def test_support_is_the_share_of_replicates_in_which_it_comes_first() -> None:
    """Two causes 110 and 90 ms; in half of the replicates a wave of 40 ms moves both alike: the order never changes.
    Where the second is material in every replicate its support is 1 too."""
    rows = {"slow_steps": (0.05, 0.11), "cold_start": (0.05, 0.09)}
    named, _ = ranked(rows, [(cause("slow_steps"), claim()), (cause("cold_start"), claim())], spread=0.04)
    assert [c.certainty for c in named] == [1.0, 1.0]


def test_support_falls_where_replicates_disagree() -> None:
    """A cause of 30 ms among 200: in every second replicate all rows lose 25 ms, and 5 of 125 ms are not material."""
    rows = {"slow_steps": (0.05, 0.17), "cold_start": (0.05, 0.03)}
    named, _ = ranked(rows, [(cause("slow_steps"), claim()), (cause("cold_start"), claim())], spread=0.025)
    assert [(c.cause, c.certainty) for c in named] == [("slow_steps", 1.0), ("cold_start", 0.5)]


def test_dependence_counts_against_a_share() -> None:
    """The rows say 40 of 40 ms, but 360 ms more are dependence: in no replicate is the cause material."""
    rows = {"slow_steps": (0.05, 0.04), "other": (0.0, 0.0)}
    named, excluded = ranked(rows, [(cause("slow_steps"), claim())], dependence=0.36)
    assert named[0].certainty == 1.0, "40 of 400 ms are 10 %, just material"
    named, excluded = ranked(rows, [(cause("slow_steps"), claim())], dependence=0.37)
    assert named == []
    assert "slow_steps" in excluded


def test_too_few_requests_cap_confidence_at_medium() -> None:
    """The quantile that was asked for has no interval: 0.79 at most, whatever the evidence."""
    thin = judged("0.95", "0.99", requested=significance(enough=False, interval_95=None, changed=False))
    named, _ = ranked({"slow_steps": (0.1, 0.2)}, [(cause("slow_steps"), claim())], thin)
    assert (named[0].confidence, named[0].confidence_word) == (0.79, "medium")


def test_a_change_that_is_not_established_caps_confidence_at_low() -> None:
    """A large move of the mean that one burst may be all of: causes are tentative."""
    burst = judged(changed=False, changed_mean=False)
    named, _ = ranked({"slow_steps": (0.1, 0.2)}, [(cause("slow_steps"), claim())], burst)
    assert (named[0].confidence, named[0].confidence_word) == (0.49, "low")


@pytest.mark.parametrize(
    ("known", "confidence"),
    [
        ({"p_quantile": 0.004, "p_mean": 0.02}, 0.49),
        ({"p_quantile": 0.003, "p_mean": 0.02}, 0.95),
        ({"p_quantile": 0.02, "p_mean": 0.001}, 0.95),
        ({"p_quantile": 0.02, "p_mean": 0.001, "changed_mean": False}, 0.49),
    ],
)
def test_chance_has_to_be_less_for_what_both_windows_have(
    known: dict[str, Any], confidence: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of numbers that changed, one has to be rarer than 3 in 1,000; then calibration decides (0.95 here)."""
    monkeypatch.setattr("diagnosis.attribution.ranking.stated", lambda certainty: 0.95)
    made, _ = ranked({"slow_steps": (0.1, 0.2)}, [(cause("slow_steps"), claim())], judged(**known))
    assert made[0].confidence == confidence
    begun, _ = ranked({"slow_steps": (0.1, 0.2)}, [(cause("slow_steps"), claim(began=True))], judged(**known))
    assert begun[0].confidence == 0.95, "what began is no other draw of the same"
    sure, _ = ranked({"slow_steps": (0.1, 0.2)}, [(cause("slow_steps"), claim(is_sure=True))], judged(**known))
    assert (sure[0].confidence, sure[0].began) == (0.95, False), "it has evidence of its own"
    assert [each[0].tentative for each in (made, begun, sure)] == [confidence == 0.49, False, False]


def test_nothing_is_named_where_nothing_changed() -> None:
    """The mean moved by 2 %: what a cause would own is said as an exclusion."""
    quiet = judged(changed=False, changed_mean=False)
    named, excluded = ranked({"slow_steps": (0.001, 0.2)}, [(cause("slow_steps"), claim())], quiet)
    assert named == []
    assert excluded == {"slow_steps": "it would own +1.0 ms, but that change is not beyond noise"}


def test_a_share_of_a_tail_that_went_the_other_way_is_unknown() -> None:
    """The mean rose by 100 ms, P99 fell by 10: the cause owns the mean, and no share of the fall."""
    rows = {"slow_steps": (0.1, -0.01)}
    named, _ = ranked(rows, [(cause("slow_steps"), claim())], judged(changed=False))
    assert named[0].share_p99 is None
    assert named[0].mean_s == pytest.approx(0.1)


def test_what_is_over_needs_no_remedy() -> None:
    """An improvement: the cause stands in the baseline, and there is nothing to do."""
    rows = {"slow_steps": (-0.1, -0.2)}
    made = case(rows).exchanged()
    named, _ = ranked(rows, [(cause("slow_steps"), claim())], made=made)
    assert named[0].ended
    assert named[0].share_p99 == pytest.approx(1.0)
    assert named[0].remedy == [NOTHING_TO_DO]
    assert named[0].summary == "What the baseline had and is over: What slow_steps is."


def test_the_traffic_is_measured_against_the_raw_change() -> None:
    """At a common mix +50 ms, of which slow_steps owns all; raw +200 ms, of which 150 are the traffic's: it comes first."""
    shift = Traffic("length_shift", 0.05, 0.15, 0.1, 0.2, changed=True, by_mean=False, p_value=0.002)
    made = case({"slow_steps": (0.05, 0.05)}, traffic=shift)
    rows = {"slow_steps": (0.05, 0.05), "length_shift": (0.05, 0.15)}
    named, _ = ranked(rows, [(cause("slow_steps"), claim()), (cause("length_shift"), claim())], made=made)
    assert [c.cause for c in named] == ["length_shift", "slow_steps"]
    assert [c.share_p99 for c in named] == pytest.approx([0.75, 0.25])
    assert [c.certainty for c in named] == pytest.approx([0.998, 1.0])


@pytest.mark.parametrize("fell", [False, True])
def test_the_traffic_keeps_its_own_direction(fell: bool) -> None:
    """Raw numbers move by 200 ms because of the traffic; at a common mix 50 ms go the other way, for which the sides are exchanged."""
    way = -1.0 if fell else 1.0
    shift = Traffic("length_shift", way * 0.15, way * 0.25, way * 0.1, way * 0.2, True, False, 0.002)
    made = replace(case({"slow_steps": (way * -0.05, way * -0.05)}, traffic=shift), traffic_fell=fell)
    rows = {"slow_steps": (way * -0.05, way * -0.05), "length_shift": (way * 0.15, way * 0.25)}
    claims = [(cause("slow_steps"), claim()), (cause("length_shift"), claim())]
    named, _ = ranked(rows, claims, made=made if fell else made.exchanged())
    assert [(c.cause, c.ended) for c in named] == [("length_shift", fell), ("slow_steps", not fell)]
    assert named[0].summary == "What length_shift is."
    assert (named[0].remedy == [CHEAPER]) is fell


def test_an_interval_in_time_is_told_in_ns() -> None:
    """1.5 to 2 s after the suspect's first request."""
    named, _ = ranked({"slow_steps": (0.1, 0.2)}, [(cause("slow_steps"), claim(interval_s=(1.5, 2.0)))])
    origin = 1_780_000_000_000_000_000
    assert named[0].interval == {"start_ns": origin + 1_500_000_000, "end_ns": origin + 2_000_000_000}


@pytest.mark.parametrize(("met_by", "before", "answer"), [(40, 0.0, ["client_retries"]), (10, 0.0, []), (40, 0.4, [])])
def test_a_tail_without_an_interval_is_explained_by_what_began(met_by: int, before: float, answer: list[str]) -> None:
    """P99 rose by 60 ms and the mean by 2: 40 requests met it, and the baseline had none. Few who met it, or as many before: no cause."""
    rows = {"client_retries": (0.002, 0.05), "queue_load": (0.0, 0.01)}
    made = case(rows)
    seconds = np.where(np.arange(400) < met_by, 0.5, 0.0)
    ledgers = [
        replace(ledger, names=("client_retries",), parts=(seconds * scale)[:, None])
        for ledger, scale in ((made.base_ledger, before), (made.suspect_ledger, 1.0))
    ]
    few = significance(enough=False, interval_95=None, changed=False, delta_s=0.06)
    quiet = judged("0.95", "0.99", requested=few, changed=False, changed_mean=False)
    named, excluded = ranked(
        rows,
        [(cause("client_retries"), claim()), (cause("load_step", "queue_load"), claim())],
        quiet,
        made=replace(made, base_ledger=ledgers[0], suspect_ledger=ledgers[1]),
    )
    assert [each.cause for each in named] == answer
    assert all(each.began and each.certainty == 1.0 and each.confidence == 0.79 for each in named), "counted, not drawn"
    assert "load_step" in excluded


@pytest.mark.parametrize(("growth", "answer"), [(0.2, ["length_shift"]), (0.05, []), (-0.2, [])])
def test_longer_requests_own_what_waits_for_them_however_little_is_their_own(growth: float, answer: list[str]) -> None:
    """Of a raw P99 of +260 ms 20 are the longer prompts' own, 200 wait behind them: named where they ask for a tenth more work."""
    rows = {"queue_load": (0.09, 0.2), "own_prefill": (0.02, 0.04)}
    shift = Traffic("length_shift", 0.01, 0.02, 0.12, 0.26, True, False, 0.002, growth)
    told = {"length_shift": (0.01, 0.02), **rows}
    named, excluded = ranked(
        told, [(cause("length_shift"), claim())], judged(raw=significance()), made=case(rows, traffic=shift)
    )
    assert [each.cause for each in named] == answer
    assert ("length_shift" in excluded) is not bool(answer)
    if answer:
        assert named[0].rows == ["length_shift", "queue_load"]
