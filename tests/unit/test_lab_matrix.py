"""The matrix: runs finished once, figures worked out by hand, an opponent that is tuned, a file that says it all, a page made of it."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diagnosis.lab import matrix
from diagnosis.lab.calibrate import calibrated, levels
from diagnosis.lab.catalogue import PAIRS, all_faults
from diagnosis.lab.code import code_version, still_true, without
from diagnosis.lab.confusion import confusion
from diagnosis.lab.gauges import GAUGES, gauges
from diagnosis.lab.matrix import MANIFEST, finished, run_matrix
from diagnosis.lab.page import page
from diagnosis.lab.plan import NULL_SEEDS, TUNED_UP_TO, chosen, is_null, nulls, published, tuning
from diagnosis.lab.reliability import chart, reliability, wilson
from diagnosis.lab.render import render_text
from diagnosis.lab.results import Result, from_document, read, results, text, write
from diagnosis.lab.run import Order
from diagnosis.lab.thresholds import NOTHING, RULES, Run, accuracy, named_by, tune
from engine_probe.errors import UsageError
from engine_probe.schema import table_from_rows


def result(fault: str = "slow_steps", outcome: str = "right", *causes: tuple[str, float], **more: Any) -> Result:
    """A graded run; certainty is the first cause's confidence unless told."""
    plain = Result(
        fault, "typical", 101, 2000, "full", False, outcome, "explained" if causes else "no_change", "mean", causes,
        causes[0][1] if causes else None, True, None, 0.1, 0.4, None, None, None, {}, {},
    )  # fmt: skip
    return replace(plain, **more)


RIGHT = ("slow_steps", 0.9)


# Runs


def document_of(order: Order) -> dict[str, Any]:
    return {
        "key": order.key(), "fault": order.fault, "severity": order.severity, "seed": order.seed, "requests": order.requests,
        "outcome": "right", "why": "", "causes": [], "truth": {},
    }  # fmt: skip


def test_finished_runs_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix that was stopped goes on where it was; half a line of a machine that went down is run once more."""
    played: list[str] = []

    def run_cell(order: Order, keep: Path | None) -> dict[str, Any]:
        played.append(order.key())
        return document_of(order)

    monkeypatch.setattr(matrix, "run_cell", run_cell)
    wanted = chosen(["slow_steps", "none"], ["typical"], [1, 2], Order("none", requests=50))
    assert [order.fault for order in wanted] == ["slow_steps", "none"] * 2
    run_matrix(wanted[:2], tmp_path, processes=1)
    path = tmp_path / MANIFEST
    path.write_bytes(path.read_bytes()[:-40])
    documents = run_matrix(wanted, tmp_path, processes=1)
    assert [each["key"] for each in documents] == [order.key() for order in wanted]
    assert played == [wanted[0].key(), wanted[1].key(), wanted[1].key(), wanted[2].key(), wanted[3].key()]
    assert set(finished(tmp_path)) == {order.key() for order in wanted}
    run_matrix(wanted, tmp_path, processes=1)
    assert len(played) == 5


def test_a_run_says_which_code_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the manifest, in the file of results, and on a page where it is not one version alone."""
    monkeypatch.setattr(matrix, "run_cell", lambda order, keep: document_of(order))
    (found,) = run_matrix([Order("none", requests=50)], tmp_path, processes=1)
    assert found["code"] == finished(tmp_path)[found["key"]]["code"] == code_version()
    ours = results([found])
    assert ours[0].code == code_version()
    assert "version of the code" not in page(confusion(ours), ours, "m.csv", "m.svg")
    mixed = [*ours, result(code="0123456789"), result(seed=102)]
    written = page(confusion(mixed), mixed, "m.csv", "m.svg")
    assert f"(1 by 0123456789, 1 by {code_version()}, 1 by a version that is not known)" in written.replace(
        f"1 by {code_version()}, 1 by 0123456789", f"1 by 0123456789, 1 by {code_version()}"
    )


def test_what_the_same_code_finished_elsewhere_is_not_played_again() -> None:
    """Of three known runs that are wanted one was made by other code and one failed; a fourth is not wanted."""
    known = [
        result("slow_steps", seed=1, code=code_version()),
        result("slow_steps", seed=2, code="0123456789"),
        result("slow_steps", "failed", seed=3, code=code_version()),
        result("slow_steps", seed=9, code=code_version()),
    ]
    wanted = [Order("slow_steps", seed=seed) for seed in (1, 2, 3)]
    taken, others = still_true(known, wanted)
    assert ([each.seed for each in taken], others) == ([1], 1)
    assert [order.seed for order in without(wanted, taken)] == [2, 3]
    assert without([Order("slow_steps", seed=1, independent=True)], taken), "a file of results has paired runs alone"


def test_a_run_of_another_kind_is_another_run() -> None:
    """Requests, severity, seed, the kind of baseline, what is seen and a mark are part of what was finished."""
    one = Order("none")
    others = [
        Order("none", requests=7), Order("none", "mild"), Order("none", seed=2), Order("none", independent=True),
        Order("none", observe="otlp"), Order("none", marked=True),
    ]  # fmt: skip
    assert len({order.key() for order in [one, *others]}) == 7


def test_a_manifest_of_something_else_is_not_touched(tmp_path: Path) -> None:
    """JSON lines of another program are no results."""
    (tmp_path / MANIFEST).write_text('{"request_id": "a"}\n')
    with pytest.raises(UsageError, match="not a matrix's manifest"):
        finished(tmp_path)


@pytest.mark.parametrize(
    ("faults", "seeds", "severity"), [(["nobody"], [1], "typical"), (["none"], [], "typical"), (["none"], [1], "0.2")]
)
def test_matrices_that_make_no_sense_are_refused(faults: list[str], seeds: list[int], severity: str) -> None:
    """An unknown fault, no seed, a severity that the fault has not."""
    with pytest.raises(UsageError):
        chosen(faults, [severity], seeds, Order("none", requests=10))


def test_the_published_matrix_has_all_that_is_promised_of_it() -> None:
    """20 seeds: every fault 20 times at each of its severities, 20 of each pair, 1,000 null runs, 300 or more with less to see, no seed tuned on."""
    orders = published(range(101, 121), 2000)
    assert len({order.key() for order in orders}) == len(orders)
    plain = [o for o in orders if o.observe == "full" and not o.marked and o.seed < NULL_SEEDS]
    counts = {(o.fault, o.severity): 0 for o in plain}
    for order in plain:
        counts[order.fault, order.severity] += 1
    assert set(counts.values()) == {20}
    assert {fault for fault, _ in counts} == {*all_faults(), *PAIRS}
    assert {severity for fault, severity in counts if fault == "slow_steps"} == {"mild", "typical", "strong"}
    assert sum(is_null(o.fault) and o.seed >= NULL_SEEDS for o in orders) == 1000
    assert len({o.seed for o in orders if o.seed >= NULL_SEEDS}) == 1000
    assert sum(o.observe != "full" for o in orders) >= 300
    assert sum(o.marked for o in orders) >= 100
    assert min(o.seed for o in orders) > TUNED_UP_TO


def test_tuning_and_publishing_share_no_run() -> None:
    """Neither faults nor null runs."""
    tuned = {(o.fault, o.seed) for o in tuning(range(1, 21), 2000)}
    assert not tuned & {(o.fault, o.seed) for o in published(range(101, 121), 2000)}


def test_null_runs_are_of_many_settings() -> None:
    """In the base scene, with a mark, and in the settings of faults: in ten or more of those over a hundred seeds."""
    kinds = {order.fault for order in nulls(range(100), 10)}
    assert {"aa", "innocent_mark"} < kinds
    assert len(kinds) >= 10
    assert all(is_null(kind) for kind in kinds)


# Figures


def test_counts_of_a_matrix_are_by_fault_and_severity() -> None:
    """Two right of four, one wrong, one that cannot tell; a mild run is a cell of its own and not in the pooled figures."""
    document = confusion(
        [
            result(
                "slow_steps",
                "right",
                RIGHT,
                seed=101,
                share_mean=0.5,
                share_p99=0.95,
                unexplained=0.05,
                carried_by="0.99",
            ),
            result("slow_steps", "right", RIGHT, seed=102, share_mean=0.80, unexplained=0.20),
            result("slow_steps", "wrong", ("load_step", 0.9), seed=103),
            result("slow_steps", "cannot_tell", seed=104),
            result("slow_steps", "wrong", ("load_step", 0.9), seed=101, severity="mild"),
        ]
    )
    mild, typical = sorted(document["cells"], key=lambda cell: cell["severity"])
    assert (typical["right"], typical["wrong"], typical["cannot_tell"], typical["n"]) == (2, 1, 1, 4)
    assert typical["named_first"] == {"slow_steps": 2, "load_step": 1, "nothing": 1}
    assert mild["n"] == 1
    assert (document["accuracy"], document["wrong"], document["abstained"], document["n"]) == (0.5, 0.25, 0.25, 4)
    assert document["attribution"]["error"] == pytest.approx(0.05)
    assert document["attribution"]["unexplained"] == pytest.approx(0.05)
    told = render_text(document)
    assert "slow_steps 2, load_step 1, nothing 1" in told
    assert "50.0%" in told


def test_false_causes_are_counted_where_nothing_is_wrong() -> None:
    """One of four null runs accuses somebody, with high confidence; a telemetry fault is none of them."""
    quiet = [result("aa", "right", seed=NULL_SEEDS + n, is_moved=False) for n in range(3)]
    accused = result("aa@hotspot_stale_index", "wrong", ("load_step", 0.9), seed=NULL_SEEDS + 4, is_moved=False)
    document = confusion([*quiet, accused, result("too_few", "wrong", ("load_step", 0.9))])
    assert document["false_cause_rate"] == 0.25
    assert document["nulls"] == {"n": 4, "false": 1, "false_high": 1, "named": {"load_step": 1}}
    assert document["accuracy"] is None


def test_a_pair_is_found_where_both_stand_in_the_first_three() -> None:
    """Third place counts, fourth does not; an acceptable name of a part counts for it."""
    pair = "slow_steps+cold_start"
    others = (("load_step", 0.3), ("front_end", 0.2))
    document = confusion(
        [
            result(pair, "right", RIGHT, others[0], ("cold_start", 0.2), seed=101),
            result(pair, "right", RIGHT, *others, ("cold_start", 0.1), seed=102),
        ]
    )
    assert document["pairs"]["by_pair"] == {pair: {"n": 2, "both": 1}}
    assert document["pairs"]["both"] == 0.5


def test_a_mark_that_changes_a_verdict_is_told() -> None:
    """The same run with and without: one has another first cause; a marked run without its twin is not counted."""
    document = confusion(
        [
            result("slow_steps", "right", RIGHT, seed=101),
            result("slow_steps", "right", RIGHT, seed=101, marked=True),
            result("slow_steps", "right", RIGHT, seed=102),
            result("slow_steps", "wrong", ("cold_start", 0.6), seed=102, marked=True),
            result("slow_steps", "wrong", ("cold_start", 0.6), seed=103, marked=True),
        ]
    )
    assert document["marks"] == {"n": 2, "changed": 1, "which": ["slow_steps, seed 102"]}


def test_wrong_with_high_confidence_is_counted_by_way_of_observing() -> None:
    """0.8 is high, 0.79 is not; what saw everything is not among them."""
    document = confusion(
        [
            result("slow_steps", "wrong", ("load_step", 0.8), observe="otlp", seed=101),
            result("slow_steps", "wrong", ("load_step", 0.79), observe="otlp", seed=102),
            result("slow_steps", "cannot_tell", observe="client", seed=101),
            result("slow_steps", "wrong", ("load_step", 0.9), seed=101),
        ]
    )
    assert document["observed"]["all"] == {"n": 3, "right": 0, "wrong": 2, "cannot_tell": 1, "wrong_high": 1}
    assert document["observed"]["otlp"]["wrong_high"] == 1
    assert document["observed"]["client"]["n"] == 1


def test_a_target_is_met_missed_or_not_tried_enough() -> None:
    """19 of 20 right over 20 seeds of each of two cells meets 95 %; one cell with 15 of 20 misses; 20 null runs are too few to say."""
    good = [
        result("slow_steps", "right" if seed > 101 else "cannot_tell", RIGHT, seed=seed, severity=severity)
        for seed in range(101, 121)
        for severity in ("typical", "strong")
    ]
    quiet = [result("aa", "right", seed=NULL_SEEDS + n, is_moved=False) for n in range(20)]
    told = {row["target"].split(",")[0]: row for row in confusion(good + quiet)["targets"]}
    assert told["first verdict right"]["met"] is True
    assert told["false causes"]["met"] is None
    assert told["cells (fault at typical or strong) with fewer than 16 of 20 right"]["met"] is True
    weak = [
        result("chunk_budget", "right" if seed > 105 else "wrong", ("chunk_budget", 0.9), seed=seed)
        for seed in range(101, 121)
    ]
    told = {row["target"].split(",")[0]: row for row in confusion(good + quiet + weak)["targets"]}
    cell = told["cells (fault at typical or strong) with fewer than 16 of 20 right"]
    assert (cell["met"], cell["found"]) == (False, 1)
    told = {row["target"].split(",")[0]: row for row in confusion([*good, result("chunk_budget", "wrong")])["targets"]}
    assert told["cells (fault at typical or strong) with fewer than 16 of 20 right"]["met"] is None, (
        "one run is no cell of 20"
    )


def test_a_bin_is_stated_against_observed() -> None:
    """Three named with 0.9 in the mean, two of them right; 0.79 and 0.49 are held down by rule and stand apart."""
    document = confusion(
        [
            result("slow_steps", "right", ("slow_steps", 0.92), seed=101),
            result("slow_steps", "right", ("slow_steps", 0.90), seed=102),
            result("slow_steps", "wrong", ("load_step", 0.91), seed=103),
            result("slow_steps", "right", ("slow_steps", 0.79), seed=104),
            result("slow_steps", "cannot_tell", ("slow_steps", 0.49), seed=105),
        ]
    )
    high = document["reliability"][-1]
    assert (high["n"], high["observed"]) == (3, pytest.approx(2 / 3))
    assert high["stated"] == pytest.approx(0.91)
    assert [(row["at"], row["n"], row["observed"]) for row in document["held_down"]] == [(0.49, 1, 1.0), (0.79, 1, 1.0)]


def test_the_interval_of_a_share_is_wilsons() -> None:
    """8 of 10: 0.49 to 0.94 (Agresti and Coull 1998, table of the score interval)."""
    low, high = wilson(8, 10)
    assert (round(low, 3), round(high, 3)) == (0.490, 0.943)


def test_the_diagram_has_a_dot_a_bin() -> None:
    """Two bins with runs: two dots with their n; an SVG that any browser reads."""
    drawn = chart(reliability([(0.95, True)] * 60 + [(0.55, False)] * 10))
    assert drawn.startswith("<svg ")
    assert drawn.count("<circle") == 2
    assert ">n 60<" in drawn
    assert ">n 10<" in drawn


def test_levels_of_confidence_never_fall() -> None:
    """Certainty 0.4: 10 of 38 right; 0.9: 30 of 38; 1.0: 28 of 38, which is less and is pooled with the level below: (58 + 1) of (76 + 2)."""
    named = [(0.4, n < 10) for n in range(38)] + [(0.9, n < 30) for n in range(38)] + [(1.0, n < 28) for n in range(38)]
    (low, right_low, n_low), (high, right_high, n_high) = levels(named)
    assert (low, right_low, n_low) == (pytest.approx(0.4), pytest.approx(11 / 40), 38)
    assert (high, right_high, n_high) == (pytest.approx(0.95), pytest.approx(59 / 78), 76)


def test_few_runs_make_no_level_of_their_own() -> None:
    """Five with certainty 0.4 are joined with their neighbours; nothing named gives no level."""
    assert len(levels([(0.4, False)] * 5 + [(1.0, True)] * 40)) == 1
    assert levels([]) == []


def test_a_calibration_is_a_file_that_is_read() -> None:
    """Of two null runs the larger statistic counts, a fourth more of it; without a run in which it was measured the least stands."""
    nulls_heard = [
        document_of(Order("aa", seed=100_000 + n)) | {"noted": {"load_step.growth": 0.08 + 0.04 * n}} for n in range(2)
    ]
    found = tomllib.loads(calibrated(nulls_heard, "1:2"))
    assert found["origin"] == {"seeds": "1:2", "runs": 2, "null_runs": 2, "margin": 1.25}
    assert found["thresholds"]["load_step.growth"]["value"] == pytest.approx(0.15)
    assert found["thresholds"]["load_step.growth"]["measured_in"] == 2
    assert found["thresholds"]["front_end.rise"]["value"] == found["thresholds"]["front_end.rise"]["least"] == 0.001
    assert "within" not in found["thresholds"]["front_end.rise"]
    assert found["confidence"]["certainty"] == [0.0, 1.0]


# The opponent


def _gauges(**told: float) -> dict[str, float | None]:
    plain: dict[str, float | None] = dict.fromkeys(GAUGES, 1.0)
    return plain | {"preemptions": 0.0} | told


def _run(*names: str, **told: float) -> Run:
    return Run(_gauges(), _gauges(**told), frozenset(names))


def test_the_opponent_finds_its_thresholds_by_itself() -> None:
    """KV usage tells one fault, the request rate another, and nothing wrong has neither: all are right after tuning."""
    runs = [
        *(_run("admission_blocked_on_blocks", kv_usage_max=1.5 + n / 100) for n in range(5)),
        *(_run("load_step", rate_rps=1.3 + n / 100) for n in range(5)),
        *(_run(kv_usage_max=1.0 + n / 100, rate_rps=1.0 + n / 100) for n in range(5)),
    ]
    rules = tune(runs)
    assert accuracy(rules, runs) == 1.0
    assert named_by(rules, _gauges(), _gauges(kv_usage_max=2.0)) == "admission_blocked_on_blocks"
    assert named_by(rules, _gauges(), _gauges(rate_rps=2.0)) == "load_step"
    assert named_by(rules, _gauges(), _gauges()) == NOTHING


def test_a_rule_names_who_is_mostly_behind_it() -> None:
    """Of ten runs with a fallen hit rate seven expired by age: the rule names that."""
    runs = [_run("ttl_expiry" if n < 7 else "premature_eviction", hit_ratio=0.2) for n in range(10)]
    rules = tune([*runs, _run(), _run()])
    assert named_by(rules, _gauges(), _gauges(hit_ratio=0.2)) == "ttl_expiry"


def test_a_gauge_that_nobody_told_fires_nothing() -> None:
    """Unknown is not high."""
    rules = tuple(replace(rule, threshold=-1e9, cause=rule.family[0]) for rule in RULES)
    assert named_by(rules, dict.fromkeys(GAUGES), dict.fromkeys(GAUGES)) == NOTHING


def test_the_opponent_is_judged_on_seeds_it_was_not_tuned_on() -> None:
    """Four seeds: two to tune, two to publish; on the latter its cause moved to another gauge, and it is wrong there."""

    def of(seed: int, **told: float) -> Result:
        return result("load_step", "right", ("load_step", 0.9), seed=seed, base=_gauges(), suspect=_gauges(**told))

    told = confusion([of(101, rate_rps=2.0), of(102, rate_rps=2.0), of(103, queue_mean=9.0), of(104, queue_mean=9.0)])[
        "baseline"
    ]
    assert (told["tuned_on"], told["n"]) == (2, 2)
    assert (told["accuracy"], told["diagnosis"], told["margin"]) == (0.0, 1.0, 1.0)


def test_gauges_are_those_of_the_judged_time() -> None:
    """Two requests 1 s apart with 100 and 300 prompt tokens, TTFT 0.1 and 0.3 s; KV usage of samples before them does not count."""
    ns = 10**9

    def request(name: str, at_s: int, ttft_s: float, tokens: int, **more: Any) -> dict[str, Any]:
        start = at_s * ns
        return {
            "request_id": name, "vantage": "engine", "state": "finished", "worker": "w0", "at_ns": start + 2 * ns, "arrival_ns": start,
            "first_token_ns": start + round(ttft_s * ns), "last_token_ns": start + ns, "end_ns": start + ns, "prompt_tokens": tokens,
            "output_tokens": 11, **more,
        }  # fmt: skip

    def sample(name: str, at_s: float, value: float, worker: str = "w0") -> dict[str, Any]:
        return {"worker": worker, "at_ns": round(at_s * ns), "name": name, "value": value}

    requests = [
        request("warm", 1, 0.9, 9000, labels={"phase": "warmup"}),
        request("a", 10, 0.1, 100),
        request("b", 11, 0.3, 300),
    ]
    samples = [
        sample("kv_usage_ratio", 1.0, 0.99),
        sample("kv_usage_ratio", 10.5, 0.4),
        sample("requests_running", 10.5, 3.0),
        sample("requests_waiting", 10.5, 1.0),
        sample("requests_running", 10.5, 0.0, "w1"),
        sample("requests_waiting", 10.5, 0.0, "w1"),
        sample("preemptions_total", 10.1, 5.0),
        sample("preemptions_total", 10.9, 7.0),
    ]
    told = gauges({"request": table_from_rows("request", requests), "sample": table_from_rows("sample", samples)})
    assert told["prompt_tokens_mean"] == 200
    assert told["ttft_mean_s"] == pytest.approx(0.2)
    assert told["kv_usage_max"] == pytest.approx(0.4)
    assert told["imbalance_ratio"] == pytest.approx(2.0)
    assert told["preemptions"] == pytest.approx(1.0)
    assert told["hit_ratio"] is None


# The file and the page


def test_a_file_of_results_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Whatever the order in which runs finished, the text is the same; unknown stays unknown."""
    many = [
        result(
            "slow_steps",
            "right",
            RIGHT,
            ("cold_start", 0.25),
            seed=102,
            share_p99=0.9,
            is_subject_right=True,
            suspect=_gauges(),
        ),
        result("aa", "right", seed=101, is_moved=False),
        result("slow_steps", "failed", seed=101, marked=True, observe="otlp"),
    ]
    write(many, tmp_path / "m.csv")
    back = read(tmp_path / "m.csv")
    assert text(back) == text(many) == text(reversed(many)) == (tmp_path / "m.csv").read_text()
    assert [each.fault for each in back] == ["aa", "slow_steps", "slow_steps"]
    (plain,) = [each for each in back if each.seed == 102]
    assert plain.causes == (RIGHT, ("cold_start", 0.25))
    assert (plain.share_p99, plain.unexplained, plain.is_subject_right) == (0.9, None, True)
    assert plain.suspect["queue_mean"] == 1.0
    assert back[0].suspect["queue_mean"] is None


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", None])
def test_another_file_is_refused(tmp_path: Path, content: str | None) -> None:
    """Empty, other columns, not there: said, with what to do."""
    path = tmp_path / "m.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match="kvscope lab matrix"):
        read(path)


def test_a_line_that_is_no_result_is_refused(tmp_path: Path) -> None:
    """A seed that is no number."""
    write([result()], tmp_path / "m.csv")
    broken = (tmp_path / "m.csv").read_text().replace(",101,", ",many,")
    (tmp_path / "m.csv").write_text(broken)
    with pytest.raises(UsageError, match="no result"):
        read(tmp_path / "m.csv")


def test_a_finished_run_keeps_what_is_published_of_it() -> None:
    """From its document: the first cause with its certainty, the truth of a single fault, the share claimed."""
    document = document_of(Order("slow_steps", seed=7)) | {
        "causes": [{"cause": "slow_steps", "confidence": 0.9, "certainty": 0.97}],
        "truth": {"slow_steps": {"mean_s": 0.1, "p99_s": 0.4}},
        "share_of_truth": 0.8,
        "share_of_mean": 0.9,
        "carried_by": "mean",
        "is_moved": True,
    }
    found = from_document(document)
    assert (found.first, found.confidence, found.certainty) == ("slow_steps", 0.9, 0.97)
    assert (found.truth_p99_s, found.share_p99, found.share_mean) == (0.4, 0.8, 0.9)
    assert results([document])[0].share_p99 == found.share_p99


def test_the_page_says_what_the_figures_say() -> None:
    """Targets with their verdict, a row a fault, the matrix with its legend, and a warning where seeds were tuned on."""
    many = [
        result("slow_steps", "right", RIGHT, seed=101),
        result("slow_steps", "wrong", ("load_step", 0.9), seed=102, severity="strong"),
        result("aa", "right", seed=NULL_SEEDS, is_moved=False),
    ]
    written = page(confusion(many), many, "m.csv", "m.svg")
    assert "| first verdict right, pooled over typical and strong | 95% or more | 50.0% | 2 | MISSED |" in written
    assert "| slow_steps |  | 1/1 | 0/1 | load_step 1, slow_steps 1 |" in written
    assert "nothing was tuned on these" in written
    assert "**3 of the " in written
    assert "- slow_steps, strong: 0 right, 1 wrong, 0 cannot tell of 1; first: load_step 1" in written
    assert "[m.csv](m.csv)" in written
    tuned = [replace(each, seed=5) for each in many[:2]]
    assert "these figures are no proof" in page(confusion(tuned), tuned, "m.csv", "m.svg")


def test_without_a_run_there_is_nothing_to_say() -> None:
    """An empty file gives a page without a figure, and no target that is met."""
    document = confusion([])
    assert document["accuracy"] is None
    assert all(row["met"] is None for row in document["targets"])
    assert page(document, [], "m.csv", "m.svg").startswith("# Confusion matrix")
