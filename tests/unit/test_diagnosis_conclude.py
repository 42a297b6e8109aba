"""Every status and every branch of the one sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diagnosis.attribution.traffic import Traffic
from diagnosis.telling.conclude import conclude
from diagnosis.telling.movement import fell, only_tail, outweighed, seems_to_fall, suspicious
from diagnosis.telling.phrases import owners
from diagnosis.telling.verdict import Conclusion, LedgerRow, NamedCause
from diagnosis.telling.wording import tentative
from tests.verdicts import case, change, judged, named, significance

NOT_ENOUGH = significance(enough=False, interval_95=None, changed=False, reason="too few tail episodes")
EVICTION = named("premature_eviction")


def said(
    made: Any = None,
    found: Any = None,
    causes: list[NamedCause] | None = None,
    delta: Any = None,
    rows: list[LedgerRow] | None = None,
    **known: Any,
) -> Conclusion:
    return conclude(
        made or case(),
        found or judged(),
        [EVICTION] if causes is None else causes,
        delta or change(),
        rows or [],
        **known,
    )


def row(name: str, mean_s: float, judged_s: float) -> LedgerRow:
    return LedgerRow(name, f"text of {name}", mean_s, judged_s, judged_s, judged_s)


def traffic(**known: Any) -> Traffic:
    plain: dict[str, Any] = {
        "row": "length_shift",
        "mean_s": 0.09,
        "quantile_s": 0.19,
        "raw_mean_s": 0.1,
        "raw_quantile_s": 0.2,
        "changed": True,
        "by_mean": False,
        "p_value": 0.002,
    }
    return Traffic(**(plain | known))


def test_what_the_baseline_has_nothing_of_is_named_although_few_requests_carry_the_change() -> None:
    """The mean doubled without an interval: a cause that began is named, and why no interval is given; any other only pointed at."""
    made, found = case(), judged(enough=False, interval_95=None, changed=False, changed_mean=False)
    assert said(made, found, [replace(EVICTION, began=True)]).status == "explained"
    sentence = said(made, found, [replace(EVICTION, began=True)]).sentence
    assert "the baseline shows nothing of premature_eviction" in sentence
    assert "Too few independent requests carry the change for an interval" in sentence
    assert said(made, found, [EVICTION]).status == "not_distinguishable"


@pytest.mark.parametrize(
    ("p99_s", "mean_s", "enough", "answer"),
    [(0.03, 0.005, False, True), (0.015, 0.005, False, False), (0.03, 0.02, False, False), (0.03, 0.005, True, False)],
)
def test_a_tail_that_moved_alone(p99_s: float, mean_s: float, enough: bool, answer: bool) -> None:
    """P99 +30 % and the mean +10 %, no interval; P99 +15 % is little, a mean of +40 % is looked at itself, and an interval around 0 decides."""
    made = case({"premature_eviction": (mean_s, p99_s)})
    quiet = judged(
        "0.95", "0.99", requested=replace(NOT_ENOUGH, enough=enough, delta_s=p99_s), changed=False, changed_mean=False
    )
    assert only_tail(made, quiet, change(p99_s=p99_s)) is answer
    assert not seems_to_fall(made, quiet, change(p99_s=p99_s))


def test_of_a_tail_that_moved_alone_what_began_is_named_and_nobody_else() -> None:
    """The mean hardly moved and P99 has no interval: a cause that the baseline has nothing of explains it; without one it is no change."""
    made = case({"premature_eviction": (0.005, 0.03)})
    few = replace(NOT_ENOUGH, delta_s=0.03, episodes=(4, 7))
    quiet = judged("0.95", "0.99", requested=few, changed=False, changed_mean=False)
    delta = change(p99_s=0.03, suspect_p99_s=0.13, suspect_mean_s=0.055)
    found = said(made, quiet, [replace(EVICTION, began=True)], delta)
    assert (found.status, found.named) == ("explained", True)
    assert found.sentence == (
        "P99 TTFT went 100 ms -> 130 ms (mean 50.0 ms -> 55.0 ms): premature_eviction owns 80 % of it, and the baseline shows nothing of "
        "premature_eviction. Too few independent requests carry the change for an interval (4 separate episodes of slow ones in the baseline)."
    )
    assert said(made, quiet, [], delta).status == "no_change"
    falling = judged("0.95", "0.99", requested=replace(few, delta_s=-0.03), changed=False, changed_mean=False)
    assert seems_to_fall(made, falling, delta)


def test_too_few_requests() -> None:
    """19 in one window: nothing is said about a change, and how many are needed for the quantile that was asked for."""
    found = said(case(n=19), judged("0.95", "0.99", n=(19, 19), n_needed=4321))
    assert found == Conclusion(
        "not_distinguishable",
        "Too few requests to say anything: 19 in the baseline, 19 in the suspect window; at least 20 each are needed, and 4,321 for P99.",
    )


def test_too_few_where_no_number_would_do() -> None:
    """A change too small for any window: the least that bounds the quantile is named; where nothing bounds it, that is said."""
    found = said(case(n=19), judged("0.95", "0.999", n=(19, 19), n_needed=None))
    assert found.sentence.endswith("at least 20 each are needed, and 3,688 for P99.9.")
    found = said(case(n=19), judged("0.95", "0.999999999999", n=(19, 19), n_needed=None))
    assert found.sentence.endswith("at least 20 each are needed, and more than 1,000,000,000 for P99.9999999999.")


def test_too_few_comparable_requests() -> None:
    """400 requests, of which only 7 and 9 are of kinds that both windows hold."""
    found = said(case(), judged(n=(7, 9)))
    assert found.status == "not_distinguishable"
    assert found.sentence.startswith(
        "Too few comparable requests to say anything: 7 in the baseline and 9 in the suspect"
    )


def test_explained_by_the_quantile() -> None:
    """P99 carries it: from, to, mean, and who owns how much of the 200 ms."""
    made = case({"premature_eviction": (0.08, 0.16), "queue_load": (0.02, 0.04)})
    assert said(made) == Conclusion(
        "explained",
        "P99 TTFT rose from 100 ms to 300 ms (mean 50.0 ms -> 150 ms): premature_eviction owns 80 % of the change.",
        named=True,
    )


def test_explained_by_several_causes() -> None:
    """At most three are in the sentence, the largest first as they come."""
    rows = dict.fromkeys(("a", "b", "c", "d"), (0.025, 0.05))
    found = said(case(rows), causes=[named(name) for name in rows])
    assert found.sentence.endswith(": a owns 25 %, b owns 25 % and c owns 25 % of the change.")


def test_explained_by_a_lower_quantile() -> None:
    """P99 has no interval, P95 has: P95 carries it, and P99 is an aside."""
    found = said(
        found=judged("0.95", "0.99", requested=NOT_ENOUGH), delta=change(p99_interval_95=None, suspect_p99_s=0.9)
    )
    assert found.sentence == (
        "P95 TTFT rose from 100 ms to 300 ms (mean 50.0 ms -> 150 ms): premature_eviction owns 100 % of the change. "
        "P99 went 100 ms -> 900 ms, but too few independent requests carry an interval for it."
    )


def test_explained_by_the_mean_where_no_quantile_has_an_interval() -> None:
    """The mean carries it, with its interval; shares are of the mean."""
    found = said(
        case({"premature_eviction": (0.09, 0.16), "queue_load": (0.01, 0.04)}),
        judged("0.95", "0.99", requested=NOT_ENOUGH, enough=False, interval_95=None, changed=False),
    )
    assert found.sentence == (
        "Mean TTFT rose (50.0 ms -> 150 ms, difference +50.0 ms to +150 ms): premature_eviction owns 90 % of the change of the mean. "
        "P99 went 100 ms -> 300 ms, but too few independent requests carry an interval for it."
    )


def test_explained_by_the_mean_although_the_quantile_stands() -> None:
    """P99 has an interval around 0, the mean does not: both are said."""
    found = said(found=judged(changed=False, interval_95=(-0.1, 0.2)), delta=change(suspect_p99_s=0.11))
    assert found.sentence.startswith(
        "P99 TTFT did not change beyond noise (100 ms -> 110 ms), but its mean rose (50.0 ms -> 150 ms): "
    )


def test_an_improvement_names_what_is_over() -> None:
    """P99 fell because a cause that the baseline had is gone."""
    made = case({"premature_eviction": (-0.1, -0.2)}).exchanged()
    delta = change(judged_s=-0.2, base_p99_s=0.3, suspect_p99_s=0.1, base_judged_s=0.3, suspect_judged_s=0.1)
    found = said(made, causes=[replace(EVICTION, ended=True)], delta=delta)
    assert found.sentence == (
        "P99 TTFT fell from 300 ms to 100 ms (mean 50.0 ms -> 150 ms): the end of premature_eviction owns 100 % of the change."
    )


def test_what_the_traffic_outweighs_is_told_behind_it() -> None:
    """P99 rose by 200 ms, the traffic made 250 of them, and at a common mix it fell by 50: each with its own direction."""
    shift = traffic(quantile_s=0.25, raw_quantile_s=0.2, mean_s=0.15, raw_mean_s=0.1)
    made = case({"slow_steps": (-0.05, -0.05)}, traffic=shift).exchanged()
    found = judged(raw=significance(), delta_s=-0.05, interval_95=(-0.06, -0.04))
    causes = [named("length_shift"), named("slow_steps", ended=True)]
    assert outweighed(made, found)
    concluded = said(made, found, causes)
    assert concluded == Conclusion(
        "explained",
        "P99 TTFT rose from 100 ms to 300 ms because the traffic changed (longer or shorter prompts and answers in the traffic: +250 ms); "
        "at a common mix of requests it fell by 50.0 ms (-60.0 ms to -40.0 ms): the end of slow_steps owns 100 % of that.",
        named=True,
    )
    assert not outweighed(replace(made, traffic=replace(shift, changed=False)), found)
    assert not outweighed(replace(made, traffic=None), found)


def test_no_change_of_the_quantile() -> None:
    """The interval of P99's difference holds 0, and the mean hardly moved."""
    made = case({"queue_load": (0.001, 0.002)}, base_s=0.05)
    found = said(
        made,
        judged(changed=False, changed_mean=False, interval_95=(-0.01, 0.012), mean_interval_95=(-0.002, 0.004)),
        delta=change(interval_95=(-0.01, 0.012), suspect_p99_s=0.102, suspect_mean_s=0.051),
    )
    assert found == Conclusion(
        "no_change",
        "P99 TTFT did not change beyond noise: 100 ms -> 102 ms (difference -10.0 ms to +12.0 ms), mean 50.0 ms -> 51.0 ms.",
    )


def test_what_moved_by_less_than_a_tenth_is_not_called_noise() -> None:
    """P99 +4 ms of 100 and the mean +2 ms of 50, of which no interval holds 0: both are told, and neither is a change."""
    made = case({"queue_load": (0.002, 0.004)}, base_s=0.05)
    moved = {"delta_s": 0.004, "delta_mean_s": 0.002, "interval_95": (0.001, 0.007), "mean_interval_95": (0.001, 0.003)}
    delta = change(interval_95=(0.001, 0.007), suspect_p99_s=0.104, suspect_mean_s=0.052)
    found = said(made, judged(changed=False, changed_mean=False, **moved), delta=delta)
    assert found == Conclusion(
        "no_change",
        "P99 TTFT did not change by a tenth: 100 ms -> 104 ms (difference +1.0 ms to +7.0 ms), mean 50.0 ms -> 52.0 ms. "
        "P99 rose by 4.0 ms (+1.0 ms to +7.0 ms) and the mean rose by 2.0 ms (+1.0 ms to +3.0 ms): beyond noise, and less than the "
        "tenth from which on it is called a change.",
    )
    noisy = moved | {"interval_95": (-0.001, 0.009)}
    found = said(made, judged(changed=False, changed_mean=False, **noisy), delta=delta)
    assert found.sentence.startswith("P99 TTFT did not change beyond noise: ")
    assert found.sentence.endswith(
        "The mean rose by 2.0 ms (+1.0 ms to +3.0 ms): beyond noise, and less than the tenth from which on it is called a change."
    )


@pytest.mark.parametrize("enough", [True, False])
def test_no_change_where_the_asked_quantile_has_no_interval(enough: bool) -> None:
    """P95 stands in where it can, else the mean; P99 is shown for what it is."""
    made = case({"queue_load": (0.001, 0.002)}, base_s=0.05)
    quiet = {"changed": False, "changed_mean": False, "enough": enough}
    quiet |= {"interval_95": (-0.15, 0.25), "mean_interval_95": (-0.05, 0.15)}
    delta = change(suspect_mean_s=0.051, interval_95=(-0.15, 0.25), mean_interval_95=(-0.05, 0.15))
    found = said(made, judged("0.95", "0.99", requested=NOT_ENOUGH, **quiet), delta=delta)
    carrier = "P95 100 ms -> 300 ms (difference -150 ms to +250 ms), mean 50.0 ms -> 51.0 ms"
    means = "mean 50.0 ms -> 51.0 ms (difference -50.0 ms to +150 ms)"
    assert found.status == "no_change"
    assert found.sentence == (
        f"TTFT did not change beyond noise: {carrier if enough else means}. P99 went 100 ms -> 300 ms, but too few independent "
        "requests carry it."
    )


def test_a_large_change_in_one_burst_is_not_called_none() -> None:
    """The mean doubled, but in one episode: not established, who it points at is said, and causes stay (tentatively)."""
    quiet = judged(changed=False, changed_mean=False, enough=False, interval_95=None, episodes=(3, 1), n_needed=5000)
    found = said(case(), quiet, delta=change())
    assert found.status == "not_distinguishable"
    assert found.named
    assert found.sentence == (
        "P99 TTFT went 100 ms -> 300 ms (mean 50.0 ms -> 150 ms), but too few independent requests carry it: 1 separate episode of slow "
        "ones in the suspect window, difference of the mean +50.0 ms to +150 ms; if it is real, premature_eviction owns most of it. About 5,000 requests a "
        "window would show a change of 20 %."
    )


def test_what_chance_may_do_accuses_nobody() -> None:
    """Beyond its interval, by as much as one quiet pair in 50 is too: who it points at is said, and stays tentatively."""
    made, doubtful = case(), judged(p_quantile=0.02, p_mean=0.03, n_needed=5000)
    pointed_at = [replace(named("premature_eviction"), tentative=True)]
    found = said(made, doubtful, causes=pointed_at, delta=change())
    assert (found.status, found.named) == ("not_distinguishable", True)
    assert found.sentence == (
        "P99 TTFT went 100 ms -> 300 ms (mean 50.0 ms -> 150 ms). That is beyond noise, but once in 50 times two draws of the same traffic "
        "differ by as much, and the baseline has what it points at too, so nobody is accused; if it is real, premature_eviction owns 100 % of "
        "the change. About 5,000 requests a window would show a change of 20 %."
    )
    assert said(made, doubtful, causes=[*pointed_at, named("block_leak")]).status == "explained", (
        "one of them is no guess"
    )


def test_the_window_with_fewer_episodes_is_the_one_that_is_told() -> None:
    """What got better: the baseline held the one burst, however many episodes of its own the suspect window has."""
    quiet = judged(changed=False, changed_mean=False, enough=False, interval_95=None, episodes=(1, 43))
    assert "1 separate episode of slow ones in the baseline, " in said(case(), quiet, delta=change()).sentence


@pytest.mark.parametrize(("delta_mean", "large"), [(0.0099, False), (0.0101, True), (-0.0101, True), (0.0, False)])
def test_large_is_a_fifth_of_the_mean(delta_mean: float, large: bool) -> None:
    """20 % of 50 ms."""
    made = case({"queue_load": (delta_mean, 0.0)}, base_s=0.05)
    assert suspicious(made) is large
    assert suspicious(made.exchanged()) is large, "measured against the baseline, whichever side is asked"


def test_not_observable() -> None:
    """Most of the change stands in rows that cannot be seen into: which, and how much of it."""
    made = case({"queue_unobserved": (0.08, 0.16), "own_prefill": (0.02, 0.04)})
    rows = [row("queue_unobserved", 0.08, 0.16), row("own_prefill", 0.02, 0.04)]
    found = said(made, causes=[], rows=rows)
    assert found == Conclusion(
        "not_observable",
        "P99 TTFT rose from 100 ms to 300 ms (mean 50.0 ms -> 150 ms); 80 % of the change lies where this setup cannot look: queue, cause "
        "not observable here.",
    )


def test_a_named_cause_does_not_hide_that_most_cannot_be_seen() -> None:
    """Eviction owns a fifth, the rest is a queue that nobody can look into: the cause is shown, and the status is not `explained`."""
    made = case({"queue_unobserved": (0.08, 0.16), "premature_eviction": (0.02, 0.04)})
    rows = [row("queue_unobserved", 0.08, 0.16), row("premature_eviction", 0.02, 0.04)]
    found = said(made, causes=[named("premature_eviction")], rows=rows)
    assert (found.status, found.named) == ("not_observable", True)
    assert found.sentence == (
        "P99 TTFT rose from 100 ms to 300 ms (mean 50.0 ms -> 150 ms): premature_eviction owns 20 % of the change; 80 % of the change "
        "lies where this setup cannot look: queue, cause not observable here."
    )
    shown = {"status": "not_observable", "causes": [{}]}
    assert tentative(shown) == "In part: more than half of the change lies where this setup cannot look.\n\n"


def test_windows_in_which_nobody_got_a_token_are_not_compared() -> None:
    """All 400 requests of both windows gave up: what they waited is no TTFT."""
    made = case()
    everybody = np.ones(400, dtype=np.bool_)
    made = replace(
        made,
        base_ledger=replace(made.base_ledger, censored=everybody),
        suspect_ledger=replace(made.suspect_ledger, censored=everybody),
    )
    found = said(made)
    assert found.status == "not_distinguishable"
    assert found.sentence == (
        "TTFT cannot be compared: no request of either window got a first token; they ended after 50.0 ms and 150 ms in the mean."
    )


def test_no_cause_has_evidence() -> None:
    """The change is seen, and nobody claims it: the largest row is named, beside dependence."""
    made = case({"own_prefill": (0.08, 0.15), "front_end": (0.02, 0.02)}, dependence=0.03)
    rows = [row("dependence", 0.0, 0.5), row("front_end", 0.02, 0.02), row("own_prefill", 0.08, 0.15)]
    found = said(made, causes=[], rows=rows)
    assert found.status == "not_distinguishable"
    assert found.sentence.endswith(
        "; no cause has evidence for a material part of it; the largest part is text of own_prefill (+150 ms)."
    )


def test_no_kind_of_request_in_common() -> None:
    """Whatever the numbers, they are not compared."""
    found = said(replace(case(), apart=("prompt_tokens",)))
    assert found.status == "not_distinguishable"
    assert "no kind of request in common" in found.sentence
    assert found.named is False


@pytest.mark.parametrize(
    ("base", "suspect", "changed", "rows", "compared"),
    [
        (None, (0.05, None), False, 0.001, False),  # refused at once in the suspect window
        (None, (0.05, None), True, -0.2, False),  # "fell", but only for those that were served
        ((0.05, None), None, True, 0.2, False),  # the baseline may have been as bad
        (
            None,
            (0.3, None),
            True,
            0.2,
            True,
        ),  # timeouts far above the baseline: worse, however long they would have been
        ((0.3, None), None, True, -0.2, True),  # and the other way round (the suspect's P99 is 0.1 s there)
        ((0.05, None), (0.05, None), True, 0.2, True),  # open on both sides alike
        (None, (0.2, 0.4), True, 0.2, True),  # a range with an end
    ],
)
def test_open_waits_stop_a_comparison_only_where_they_can_turn_it(
    base: Any, suspect: Any, changed: bool, rows: float, compared: bool
) -> None:
    """A quantile without upper limit is compared where its lower limit lies above the other window."""
    delta = change(base_judged_range=base, suspect_judged_range=suspect)
    if rows < 0:
        delta = change(base_judged_s=0.3, suspect_judged_s=0.1, base_judged_range=base, suspect_judged_range=suspect)
    made = case({"premature_eviction": (rows / 2, rows)})
    found = said(made, judged(changed=changed, changed_mean=changed), delta=delta)
    assert ("cannot be compared" in found.sentence) is not compared


def test_at_a_common_mix_the_change_there_comes_first() -> None:
    """Causes are measured against the change at the common mix; the traffic's part stands beside it."""
    made = case({"premature_eviction": (0.008, 0.05)}, traffic=traffic(mean_s=0.09, quantile_s=0.15))
    found = said(
        made,
        judged(raw=significance(), delta_s=0.05, interval_95=(0.03, 0.07)),
        causes=[EVICTION, named("length_shift")],
    )
    assert found.sentence == (
        "At a common mix of requests P99 TTFT rose by 50.0 ms (+30.0 ms to +70.0 ms; raw: P99 100 ms -> 300 ms): premature_eviction owns "
        "100 % of the change; length_shift (the traffic) adds +150 ms to the raw numbers."
    )


def test_what_waits_for_the_traffic_and_what_is_its_own_are_two_numbers() -> None:
    """Of the change at the common mix 40 of 50 ms wait for the longer prompts, which take 150 ms more themselves."""
    rows = {"length_shift": (0.006, 0.04), "premature_eviction": (0.002, 0.01)}
    made = case(rows, traffic=traffic(mean_s=0.09, quantile_s=0.15))
    found = judged(raw=significance())
    told = owners(made, found, [named("length_shift"), named("premature_eviction")])
    assert told == (
        "length_shift owns 80 % and premature_eviction owns 20 % of the change; length_shift itself adds +150 ms to the raw numbers"
    )
    over = [replace(named("length_shift"), ended=True), replace(named("premature_eviction"), ended=True)]
    assert owners(made, found, over).startswith("length_shift owns 80 % and the end of premature_eviction owns 20 %")


@pytest.mark.parametrize("by_mean", [False, True])
def test_only_the_traffic_changed(by_mean: bool) -> None:
    """Nothing at the common mix, everything in the raw numbers: the traffic is the explanation."""
    made = case({"own_prefill": (0.001, 0.002)}, traffic=traffic(by_mean=by_mean))
    quiet = judged(
        raw=significance(changed=not by_mean),
        changed=False,
        changed_mean=False,
        delta_s=0.002,
        interval_95=(-0.01, 0.01),
        delta_mean_s=0.001,
        mean_interval_95=(-0.004, 0.006),
    )
    found = said(made, quiet, causes=[named("length_shift")])
    what = "mean TTFT rose from 50.0 ms to 150 ms" if by_mean else "P99 TTFT rose from 100 ms to 300 ms"
    rest = "(+1.0 ms, -4.0 ms to +6.0 ms)" if by_mean else "(+2.0 ms, -10.0 ms to +10.0 ms)"
    assert found.status == "explained"
    assert found.sentence == (
        f"{what} because the traffic changed (longer or shorter prompts and answers in the traffic); at a common mix of requests it did "
        f"not change beyond noise {rest}."
    )


def test_the_traffic_changed_without_a_claim() -> None:
    """The raw numbers moved, at a common mix nothing did, and the traffic's row is not material: said as it is."""
    made = case({"own_prefill": (0.001, 0.002)}, traffic=traffic())
    quiet = judged(raw=significance(), changed=False, changed_mean=False, interval_95=(-0.01, 0.01), delta_s=0.0)
    assert said(made, quiet, causes=[]).status == "not_distinguishable"


@pytest.mark.parametrize(
    ("found", "made", "down"),
    [
        (judged(), case({"a": (0.1, 0.2)}), False),
        (judged(), case({"a": (0.1, -0.2)}), True),
        (judged(changed=False), case({"a": (-0.1, 0.2)}), True),  # carried by the mean
        (judged(changed=False, changed_mean=False), case({"a": (-0.1, -0.2)}), False),  # no change has no direction
        (
            judged(changed=False, changed_mean=False, raw=significance()),
            case({"a": (0.1, 0.2)}, traffic=traffic(raw_quantile_s=-0.3)),
            True,
        ),
    ],
)
def test_direction(found: Any, made: Any, down: bool) -> None:
    """The direction is that of the number that carries the verdict."""
    assert fell(made, found) is down


def test_a_document_holds_plain_numbers() -> None:
    """numpy's float64 is a float in Python, and an encoder of JSON refuses it all the same."""
    import numpy as np

    from diagnosis.telling.verdict import _clean

    found = _clean({"a": np.float64(0.5), "b": [np.float64("nan"), np.int64(3), np.float32(1.0)]})
    assert found == {"a": 0.5, "b": [None, 3, 1.0]}
    assert [type(found["a"]), *map(type, found["b"])] == [float, type(None), int, float]
