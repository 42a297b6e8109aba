"""Lab runs: the truth by hand, the same bytes at every run, verdicts graded, cells finished once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnosis.lab.catalogue import find_fault
from diagnosis.lab.coverage import CASES, Case, bursty_queue, check, correlated, independent, render
from diagnosis.lab.grade import grade
from diagnosis.lab.run import LabRun, Order, forget, run_lab, write_lab
from diagnosis.lab.truth import effect, is_material, latencies
from engine_probe.errors import UsageError
from engine_probe.schema import table_from_rows

SMALL = 60


def small(fault: str, **changes: Any) -> LabRun:
    return run_lab(Order(fault, requests=SMALL, **changes))


# The truth


def _request(name: str, first_s: float | None, last_s: float | None, **more: Any) -> dict[str, Any]:
    ns = 10**9
    return {
        "request_id": name,
        "vantage": "engine",
        "state": "finished",
        "at_ns": 20 * ns,
        "arrival_ns": ns,
        "first_token_ns": None if first_s is None else ns + round(first_s * ns),
        "last_token_ns": None if last_s is None else ns + round(last_s * ns),
        "end_ns": 3 * ns,
        "output_tokens": 11,
        **more,
    }


def test_latencies_are_those_of_the_definitions() -> None:
    """TTFT of 1 s, 0.5 s, and 2 s of who never got a token; TPOT 0.1 s and 0.05 s over ten gaps; warm-up does not count."""
    rows = [
        _request("a", 1.0, 2.0),
        _request("b", 0.5, 1.0),
        _request("c", None, None, state="aborted", output_tokens=0),
        _request("warm", 9.0, 9.5, labels={"phase": "warmup"}),
    ]
    found = latencies(table_from_rows("request", rows))
    assert (found["ttft"].n, found["tpot"].n) == (3, 2)
    assert found["ttft"].mean_s == pytest.approx((1.0 + 0.5 + 2.0) / 3)
    assert found["ttft"].p99_s == pytest.approx(2.0)
    assert found["tpot"].mean_s == pytest.approx(0.075)
    assert found["e2e"].p99_s == pytest.approx(2.0)


def test_callers_count_where_they_told() -> None:
    """With rows at the client's vantage the engine's are left alone."""
    rows = [_request("a", 1.0, 2.0), _request("a", 1.5, 2.5, vantage="client")]
    found = latencies(table_from_rows("request", rows))
    assert (found["ttft"].n, found["ttft"].mean_s) == (1, pytest.approx(1.5))


def test_the_truth_is_with_less_without() -> None:
    """0.9 s with the fault, 0.6 s without: it owns 0.3 s, half of what there was, which is material; 0.02 s is not."""
    everything = latencies(table_from_rows("request", [_request("a", 0.9, 1.0)]))
    without = latencies(table_from_rows("request", [_request("a", 0.6, 1.0)]))
    told = effect(everything, without)["ttft"]
    assert told["p99_s"] == pytest.approx(0.3)
    assert told["without"]["p99_s"] == pytest.approx(0.6)
    assert is_material(told)
    nearly = latencies(table_from_rows("request", [_request("a", 0.62, 1.0)]))
    assert not is_material(effect(nearly, without)["ttft"])


# Runs


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    """Every file of two runs is equal; another seed is not."""
    contents = []
    for name, seed in (("one", 3), ("again", 3), ("other", 4)):
        forget()  # each is played, and none remembered
        files = write_lab(small("hotspot_straggler", seed=seed), tmp_path / name)
        contents.append({str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files})
    assert contents[0] == contents[1]
    assert contents[0] != contents[2]
    kinds = {path.split("/")[1] for path in contents[0] if path.startswith("suspect/")}
    assert kinds == {f"kind={kind}" for kind in ("request", "step", "block", "route", "worker", "sample", "mark")}


def test_faults_of_a_seed_share_the_baseline_that_they_have_in_common() -> None:
    """The healthy fleet is played once for two faults of a seed; another seed, or another setting, is another run."""
    forget()
    straggler, leak = small("hotspot_straggler", seed=5), small("lookup_overhead", seed=5)
    assert straggler.baseline["block"] is leak.baseline["block"]
    assert straggler.suspect["block"] is not leak.suspect["block"]
    others = small("hotspot_straggler", seed=6), small("eviction_overhead", seed=5)
    assert all(other.baseline["block"] != straggler.baseline["block"] for other in others)


def test_the_truth_says_what_was_done_and_what_it_cost(tmp_path: Path) -> None:
    """Subject, interval inside the judged window, what was changed and to what, seconds with and without."""
    run = small("hotspot_straggler", severity="3")
    write_lab(run, tmp_path)
    truth = json.loads((tmp_path / "truth.json").read_text())
    assert truth["subject"] == {"kind": "worker", "id": "w1"}
    assert truth["severity"]["value"] == 3.0
    assert 0 < truth["interval"]["start_ns"] < truth["interval"]["end_ns"]
    assert truth["expected"]["causes"] == ["hotspot_straggler"]
    assert set(truth["changed"]) == {"hooks_at_s"}
    told = truth["attribution"]["hotspot_straggler"]["ttft"]
    assert told["p99_s"] == pytest.approx(told["all"]["p99_s"] - told["without"]["p99_s"])
    assert set(run.baseline["request"]["run_id"].to_pylist()) == {"baseline"}
    assert set(run.suspect["request"]["run_id"].to_pylist()) == {"suspect"}


def test_nothing_done_costs_nothing() -> None:
    """`none` is the same run twice: equal rows but for the run's name; `aa` is two, and its truth is 0."""
    run = small("none")
    for kind, table in run.baseline.items():
        assert table.drop(["run_id"]).equals(run.suspect[kind].drop(["run_id"])), kind
    other = small("aa")
    assert not other.baseline["request"].drop(["run_id"]).equals(other.suspect["request"].drop(["run_id"]))
    for one in (run, other):
        assert {told["p99_s"] for told in one.truth["attribution"][one.fault.name].values()} == {0.0}


def test_a_pair_owns_each_its_own() -> None:
    """Each part's cost is what is gone when it alone is left out; together they need not sum to the change."""
    truth = small("slow_steps+cold_start").truth
    assert set(truth["attribution"]) == {"slow_steps", "cold_start"}
    all_of_them = {told["ttft"]["all"]["p99_s"] for told in truth["attribution"].values()}
    assert len(all_of_them) == 1
    assert truth["attribution"]["slow_steps"]["ttft"]["mean_s"] > 0


def test_an_independent_baseline_leaves_the_truth_as_it_was() -> None:
    """The baseline's rows are another draw; what the fault cost comes from the paired run all the same."""
    paired, independent_ = small("slow_steps"), small("slow_steps", independent=True)
    assert paired.truth["attribution"] == independent_.truth["attribution"]
    assert not paired.baseline["request"].equals(independent_.baseline["request"])


@pytest.mark.parametrize(
    "order",
    [
        Order("slow_steps", requests=0),
        Order("slow_steps", requests=1_000_000),
        Order("slow_steps", severity="7"),
        Order("nothing_like_it"),
    ],
)
def test_orders_that_make_no_sense_are_refused(order: Order) -> None:
    """Before anything is played."""
    with pytest.raises(UsageError):
        run_lab(order)


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    """A run is not mixed with another, and a file is no folder."""
    run = small("none")
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        write_lab(run, tmp_path)
    with pytest.raises(UsageError, match="not empty"):
        write_lab(run, tmp_path / "kept.txt")
    assert (tmp_path / "kept.txt").read_text() == "mine"


# Grades


def _truth(p99_s: float, fault: str = "slow_steps") -> dict[str, Any]:
    told = {"mean_s": p99_s / 4, "p99_s": p99_s, "without": {"mean_s": 0.25, "p99_s": 1.0}}
    return {"subject": {"kind": "worker", "id": "w1"}, "attribution": {fault: {"ttft": told}}}


def _verdict(status: str, *causes: tuple[str, float], quality: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "status": status,
        "causes": [
            {
                "cause": name,
                "confidence": confidence,
                "p99_s": 0.4,
                "mean_s": 0.1,
                "subject": {"kind": "worker", "id": "w1"},
            }
            for name, confidence in causes
        ],
        "quality": [{"check": name, "status": "contradiction"} for name in quality],
    }


@pytest.mark.parametrize(
    ("fault", "p99_s", "verdict", "outcome"),
    [
        ("slow_steps", 0.5, _verdict("explained", ("slow_steps", 0.9)), "right"),
        ("probe_overhead", 0.5, _verdict("explained", ("slow_steps", 0.9)), "right"),
        ("slow_steps", 0.5, _verdict("explained", ("cold_start", 0.9)), "wrong"),
        ("slow_steps", 0.5, _verdict("explained", ("slow_steps", 0.9), ("load_step", 0.6)), "wrong"),
        ("slow_steps", 0.5, _verdict("explained", ("slow_steps", 0.9), ("load_step", 0.3)), "right"),
        ("slow_steps", 0.5, _verdict("no_change"), "wrong"),
        ("slow_steps", 0.5, _verdict("not_distinguishable", ("slow_steps", 0.4)), "cannot_tell"),
        ("slow_steps", 0.5, _verdict("not_observable"), "cannot_tell"),
        ("slow_steps", 0.01, _verdict("no_change"), "right"),
        ("slow_steps", 0.01, _verdict("explained", ("slow_steps", 0.9)), "wrong"),
        ("none", 0.0, _verdict("no_change"), "right"),
        ("aa", 0.0, _verdict("not_distinguishable", ("load_step", 0.2)), "right"),
        ("aa", 0.0, _verdict("not_distinguishable", ("load_step", 0.6)), "wrong"),
        ("innocent_mark", 0.0, _verdict("explained", ("load_step", 0.2)), "wrong"),
        ("none", 0.0, _verdict("no_change", ("clock_skew", 0.9)), "wrong"),
        ("telemetry_contradiction", 0.0, _verdict("no_change", ("telemetry_contradiction", 0.9)), "right"),
        ("telemetry_contradiction", 0.0, _verdict("no_change", quality=("cached_tokens",)), "cannot_tell"),
        ("telemetry_contradiction", 0.0, _verdict("explained", ("prefix_caching_off", 0.9)), "wrong"),
        ("clock_skew", 0.5, _verdict("explained", ("slow_steps", 0.9), ("clock_skew", 0.9)), "wrong"),
    ],
)
def test_a_verdict_is_right_wrong_or_cannot_tell(
    fault: str, p99_s: float, verdict: dict[str, Any], outcome: str
) -> None:
    """By the cause in the first place, by what must not be named, and by whether there was anything to find."""
    assert grade(find_fault(fault), _truth(p99_s, fault), verdict).outcome == outcome


def test_a_right_verdict_is_held_against_subject_and_share() -> None:
    """It names w1 as the truth does, and claims 0.4 of 0.5 s of P99, 0.1 of 0.125 s of the mean."""
    found = grade(find_fault("slow_steps"), _truth(0.5), _verdict("explained", ("slow_steps", 0.9)))
    assert found.share_of_mean == pytest.approx(0.8)
    assert found.is_subject_right is True
    assert found.share_of_truth == pytest.approx(0.8)
    assert found.judgements == (("slow_steps", 0.9, True),)


def test_what_a_fault_does_by_way_of_counts_as_its_claim() -> None:
    """Too few blocks: waiting for them and computing the evicted again are 0.4 s each of 1 s; a third name counts nothing."""
    causes = (("admission_blocked_on_blocks", 0.9), ("premature_eviction", 0.6), ("front_end", 0.3))
    squeeze = find_fault("admission_blocked_on_blocks")
    found = grade(squeeze, _truth(1.0, squeeze.name), _verdict("explained", *causes))
    assert found.share_of_truth == pytest.approx(0.8)


def test_an_innocent_mark_is_one_row_more_and_nothing_else() -> None:
    """At the instant at which the fault begins; the truth and all other rows are the same."""
    plain, marked = small("hotspot_straggler"), small("hotspot_straggler", marked=True)
    assert marked.truth["attribution"] == plain.truth["attribution"]
    extra = [row for row in marked.suspect["mark"].to_pylist() if row not in plain.suspect["mark"].to_pylist()]
    assert [(row["mark"], row["at_ns"]) for row in extra] == [("deployed", plain.truth["interval"]["start_ns"])]
    for kind in set(plain.suspect) - {"mark"}:
        assert marked.suspect[kind].equals(plain.suspect[kind]), kind


def test_a_quiet_run_in_the_setting_of_a_fault_has_nothing_wrong() -> None:
    """`aa@FAULT`: two draws of the traffic, in the fleet in which that fault would be injected."""
    run = small("aa@preemption_recompute")
    assert run.fault.expected.is_silent
    assert (
        run.truth["settings"]["engine.max_num_seqs"]
        == small("preemption_recompute").truth["settings"]["engine.max_num_seqs"]
    )
    assert (
        run.truth["settings"]["traffic.rate"] == small("preemption_recompute").truth["settings"]["traffic.rate"] == 20.0
    )
    assert set(run.truth["changed"]) <= {"traffic.seed"}


# Coverage of the intervals


def test_intervals_hold_the_true_change_where_they_are_given_and_are_refused_where_none_is_right() -> None:
    """40 pairs of independent windows, and windows that hold five correlation times."""
    cases = [
        Case("independent", independent, 1500, "0.99", 0.93, 0.99),
        Case("a fifth", correlated(300), 1500, "0.99", None),
    ]
    document = check(40, 2, cases=cases)
    covered, refused = document["cases"]
    assert covered["refused"] == 0.0
    assert covered["coverage"] >= 0.85
    assert refused["refused"] == 1.0
    assert all(row["met"] for row in document["cases"])
    assert "a fifth" in render(document)


def test_a_bursty_queue_is_the_queue_it_says() -> None:
    """Waits are not negative, services add to them, and neighbours depend on each other; bursts make the tail longer."""
    waits = bursty_queue()(np.random.default_rng(1), 20_000)
    assert waits.min() >= 0.1
    assert np.corrcoef(waits[:-1], waits[1:])[0, 1] > 0.5
    calm = bursty_queue(burst_ratio=1.0001)(np.random.default_rng(1), 20_000)
    assert np.quantile(waits, 0.99) > np.quantile(calm, 0.99)


def test_a_correlated_process_forgets_in_the_time_it_says() -> None:
    """The logarithm at a distance of its time is correlated by about 1/e."""
    series = np.log(correlated(50)(np.random.default_rng(1), 200_000))
    assert np.corrcoef(series[:-50], series[50:])[0, 1] == pytest.approx(np.exp(-1), abs=0.05)
    assert series.std() == pytest.approx(0.7, rel=0.1)


def test_the_cases_are_those_of_the_design() -> None:
    """Independent, correlated up to a fiftieth of the window, bursts, and one that must be refused."""
    assert {case.low for case in CASES} == {0.93, 0.90, 0.88, None}
