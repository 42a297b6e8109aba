"""Numbers that were measured stand in one file, and causes and confidence are read from it; the published page is what its data say."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnosis import calibration
from diagnosis.calibration import FILE, all_reached, declared, listening, stated
from diagnosis.lab.calibrate import calibrated
from diagnosis.lab.catalogue import PAIRS, all_faults, find_fault
from diagnosis.lab.confusion import confusion
from diagnosis.lab.page import page
from diagnosis.lab.plan import NULLS, TUNED_UP_TO, is_null, severities, tuning
from diagnosis.lab.reliability import chart
from diagnosis.lab.results import read, text
from diagnosis.ledger.equal_work import ABOVE_DRIFT, SLOWER
from diagnosis.parallel import beside

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "confusion-matrix.md"


def _silent_numbers(path: Path) -> list[str]:
    """Constants of the module that are made of numbers and have neither a sentence behind them nor a comment beside them."""
    text = path.read_text(encoding="utf-8")
    lines, body = text.splitlines(), ast.parse(text).body
    found = []
    for node, behind in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        names = [each.id for each in ast.walk(target) if isinstance(each, ast.Name)]
        is_number = _is_numeric(node.value)
        is_told = isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant)
        if (
            is_number
            and names[0].isupper()
            and not is_told
            and "#" not in lines[node.end_lineno - 1 if node.end_lineno else 0]
        ):
            found.append(names[0])
    return found


def _is_numeric(node: ast.AST | None) -> bool:
    """Whether it is made of numbers alone: sums, tuples, tables by word, a function of numbers."""
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    parts: list[ast.expr]
    if isinstance(node, ast.UnaryOp):
        parts = [node.operand]
    elif isinstance(node, ast.BinOp):
        parts = [node.left, node.right]
    elif isinstance(node, ast.Tuple | ast.List):
        parts = node.elts
    elif isinstance(node, ast.Dict):
        parts = node.values
    else:
        parts = node.args if isinstance(node, ast.Call) and not node.keywords else []
    return bool(parts) and all(map(_is_numeric, parts))


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def test_every_threshold_of_a_cause_is_in_the_file_with_its_origin(told: dict[str, Any]) -> None:
    """What it is, in which unit, what is material, what null runs reached and in how many; none is left of a cause that is gone."""
    assert set(told["thresholds"]) == set(declared())
    for name, row in told["thresholds"].items():
        declaration = declared()[name]
        assert (row["says"], row["unit"], row["least"], row["why"]) == (
            declaration.says,
            declaration.unit,
            declaration.least,
            declaration.why,
        ), name
        assert row["value"] == pytest.approx(
            max(row["least"], told["origin"]["margin"] * row.get("within", 0.0)), rel=1e-4
        ), name
        assert ("within" in row) == (row["measured_in"] > 0), name
        assert row["measured_in"] <= told["origin"]["null_runs"], name


def test_what_no_run_measured_is_said_to_be_chosen_and_why(told: dict[str, Any]) -> None:
    """`chosen` where no null run was asked, `chance` where chance reaches beyond what is material, else `material`; each least has a reason."""
    for name, row in told["thresholds"].items():
        measured = row["measured_in"] > 0
        assert row["origin"] == (
            "chosen" if not measured else "chance" if row["value"] > row["least"] else "material"
        ), name
        assert len(row["why"].split()) >= 4, name


def test_every_number_of_a_judgement_is_a_threshold_or_says_what_it_is() -> None:
    """Module constants that are numbers are either in the calibration file or stand with a sentence about them."""
    silent = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "diagnosis").rglob("*.py"))
        if not {"lab", "postmortem"} & set(path.relative_to(ROOT).parts)
        for name in _silent_numbers(path)
    ]
    assert not silent, "say what it means, or measure it (calibration.threshold)"


def test_no_judgement_compares_with_a_number_that_has_no_name() -> None:
    """In causes, checks and hotspots: what is compared with is a threshold or a constant that says what it is; halves, doubles and rounding apart."""
    folders = [ROOT / "diagnosis" / name for name in ("causes", "checks", "hotspots")]
    bare = [
        f"{path.name}:{node.lineno}"
        for folder in folders
        for path in sorted(folder.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Compare) and any(map(_is_bare, ast.walk(node)))
    ]
    assert not bare, "give it a name and say what it means, or measure it (calibration.threshold)"


def _is_bare(node: ast.AST) -> bool:
    """A fraction that is no 0, 1, 2 or half of something, and larger than rounding."""
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, float)
        and node.value not in (0.0, 0.005, 1.0, 2.0)
        and node.value > 1e-6
    )


def test_a_sharper_null_run_raises_a_threshold_and_a_quiet_one_does_not() -> None:
    """Nulls that reach 0.2 make it 1.25 times that; those that reach 0.02 leave what is material; where none was asked it is a choice."""
    for reached, value, origin in ((0.2, 0.25, "chance"), (0.02, 0.10, "material"), (None, 0.10, "chosen")):
        noted = {} if reached is None else {SLOWER.name: reached}
        text = calibrated([_quiet(noted)], "1:1")
        row = tomllib.loads(text)["thresholds"][SLOWER.name]
        assert (row["value"], row["origin"]) == (pytest.approx(value), origin)
        assert row["measured_in"] == int(reached is not None)
        assert row["why"] == SLOWER.why


def test_a_run_with_a_fault_raises_no_threshold() -> None:
    """Of a run in which something is wrong only its certainty is taken."""
    row = tomllib.loads(calibrated([_quiet({SLOWER.name: 0.9}) | {"fault": "slow_steps"}], "1:1"))["thresholds"]
    assert row[SLOWER.name]["measured_in"] == 0


def test_a_part_can_be_measured_by_itself(told: dict[str, Any]) -> None:
    """Null runs alone make thresholds anew and leave confidence as it was; the other way round what null runs reached stays."""
    nulls = [_quiet({SLOWER.name: 0.2})]
    new = tomllib.loads(calibrated(nulls, "2:2", told, "thresholds"))
    assert new["confidence"] == told["confidence"]
    assert (new["origin"]["seeds"], new["thresholds"][SLOWER.name]["measured_in"]) == ("2:2", 1)
    again = tomllib.loads(calibrated(nulls, "3:3", new, "confidence"))
    assert again["confidence"]["seeds"] == "3:3"
    assert (again["origin"], again["thresholds"]) == (new["origin"], new["thresholds"])


def _quiet(noted: dict[str, float]) -> dict[str, Any]:
    """The document of a null run that named nothing."""
    return {
        "fault": "aa",
        "severity": "typical",
        "seed": 1,
        "requests": 10,
        "outcome": "right",
        "truth": {},
        "causes": [],
        "noted": noted,
    }


def test_what_is_said_on_another_thread_is_heard() -> None:
    """Hotspots are judged beside the rest of a window."""
    with listening() as heard, beside() as pool:
        pool.submit(SLOWER.note, 0.03).result()
    assert heard == {SLOWER.name: 0.03}


def test_twenty_seeds_of_tuning_have_all_that_is_measured() -> None:
    """A hundred null runs, of every setting; every fault, at each of its severities; fewer than half as many runs as all faults every seed."""
    orders = tuning(range(1, 21), 2000)
    quiet = [order.fault for order in orders if is_null(order.fault)]
    assert len(quiet) == 100
    assert {name.removeprefix("aa@") for name in quiet} >= {
        n for n, f in all_faults().items() if f.has_setting and not f.requests
    }
    assert not any(find_fault(name).requests for name in quiet)
    played = {(order.fault, order.severity) for order in orders if not is_null(order.fault)}
    assert played >= {
        (name, level) for name, fault in all_faults().items() for level in severities(fault) if name not in NULLS
    }
    assert {*PAIRS} <= {fault for fault, _ in played}
    assert len(orders) < 20 * len(all_faults()) / 2


def test_nothing_was_tuned_on_a_published_seed(told: dict[str, Any]) -> None:
    """Seeds of the calibration lie below those of the page, whose plain runs and null runs have others."""
    seeds = ",".join(told[part]["seeds"] for part in ("origin", "confidence"))
    last = max(int(seed) for part in seeds.split(",") for seed in part.replace("-", ":").split(":"))
    assert last <= TUNED_UP_TO < min(result.seed for result in read(PAGE.with_suffix(".csv")))


def test_a_threshold_is_what_the_file_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps 15 % slower: enough at 0.10, not where chance was found to reach 0.20; a lower number than what is material is not taken."""
    for value, reached in ((0.05, True), (0.10, True), (0.25, False)):
        monkeypatch.setattr(
            calibration, "measured", lambda value=value: {"thresholds": {SLOWER.name: {"value": value}}}
        )
        assert SLOWER.is_reached(0.15) is reached
        assert SLOWER.value == max(value, SLOWER.least)


def test_a_cause_that_is_not_in_the_file_is_judged_by_its_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new cause works before the next calibration."""
    monkeypatch.setattr(calibration, "measured", lambda: {"thresholds": {}})
    assert SLOWER.value == SLOWER.least


def test_whoever_listens_hears_the_largest_statistic() -> None:
    """Two pairs of windows with 2 % and 4 %; what is not finite says nothing, and outside nobody listens."""
    with listening() as heard:
        for statistic in (0.02, 0.04, float("nan"), float("inf")):
            SLOWER.is_reached(statistic)
    SLOWER.is_reached(0.9)
    assert heard == {SLOWER.name: 0.04}


def test_confidence_never_falls_with_certainty(told: dict[str, Any]) -> None:
    """From 0 at none to less than 1 at all, by few levels, each of which says of how many runs it is."""
    said = [stated(certainty) for certainty in np.linspace(0.0, 1.0, 101)]
    assert said == sorted(said)
    assert said[0] == 0.0
    assert 0.5 < said[-1] < 1.0
    curve = told["confidence"]
    assert len(curve["certainty"]) == len(curve["right"]) == len(curve["runs"]) <= 9
    assert sum(curve["runs"]) > 0


def test_the_published_page_is_what_its_data_say() -> None:
    """Page and diagram are rendered anew from the runs (`kvscope lab matrix --from docs/confusion-matrix.csv`), which are sorted."""
    data = PAGE.with_suffix(".csv")
    results = read(data)
    document = confusion(results)
    assert text(results) == data.read_text(encoding="utf-8")
    assert page(document, results, data.name, PAGE.with_suffix(".svg").name) == PAGE.read_text(encoding="utf-8")
    assert chart(document["reliability"]) == PAGE.with_suffix(".svg").read_text(encoding="utf-8")


def test_every_published_run_is_of_a_fault_that_exists() -> None:
    """By its name in the catalogue."""
    assert all(find_fault(result.fault) for result in read(PAGE.with_suffix(".csv")))


def test_what_has_to_be_reached_together_is_measured_together() -> None:
    """A pair that is far above one threshold and far below the other is quiet; the one that keeps it quiet is the one that is told."""
    with listening() as heard:
        assert not all_reached((SLOWER, 0.01), (ABOVE_DRIFT, 1.2 * ABOVE_DRIFT.value))
    assert heard == {SLOWER.name: 0.01, ABOVE_DRIFT.name: 0.0}
    with listening() as heard:
        assert not all_reached((SLOWER, 0.01), (ABOVE_DRIFT, 0.5))
    assert heard == {SLOWER.name: 0.0, ABOVE_DRIFT.name: 0.0}
    with listening() as heard:
        assert all_reached((SLOWER, 0.5), (ABOVE_DRIFT, 1.2 * ABOVE_DRIFT.value))
    assert heard == {SLOWER.name: 0.5, ABOVE_DRIFT.name: 1.2 * ABOVE_DRIFT.value}
    with listening() as heard:
        assert not all_reached((SLOWER, 0.5), (ABOVE_DRIFT, float("nan")))
    assert heard == {SLOWER.name: 0.0}
