"""How a verdict is shown: golden files of a hand-made one, and every way in which a part can be absent or unknown.

Golden files are written anew by `python -m tests.unit.test_diagnosis_text`; read the difference before it is committed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diagnosis.report import render_markdown
from diagnosis.telling.text import WIDTH, render, summary, table
from diagnosis.telling.verdict import LedgerRow, confidence_word
from diagnosis.telling.wording import (
    interval,
    listing,
    metric_name,
    number,
    percent,
    quantile_name,
    seconds,
    share_of,
    signed,
    wrapped,
)
from tests.verdicts import change, named, verdict

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
DESIGN_KEYS = {
    *("status", "verdict", "metric", "windows", "n", "n_effective", "delta", "composition", "attribution", "causes"),
    *("side_effects", "unexplained", "excluded", "quality", "next_experiment"),
}
OUR_KEYS = {
    *("quantile", "requested_quantile", "carried_by", "vantage", "not_observable", "notes", "calibration", "side"),
}


def document(**known: Any) -> dict[str, Any]:
    return verdict(**known).to_dict()


def shown() -> dict[str, str]:
    """What the golden files hold, by their name."""
    return {
        "verdict.txt": render(document()) + "\n",
        "verdict.md": render_markdown(document(), version="0.0.0"),
        "verdict.json": json.dumps(document(), indent=2) + "\n",
    }


@pytest.mark.parametrize("name", ["verdict.txt", "verdict.md", "verdict.json"])
def test_golden(name: str) -> None:
    """Long ids, missing intervals, unknown numbers, open quantiles and foreign markup are shown as they were approved."""
    assert shown()[name] == (GOLDEN / name).read_text(encoding="utf-8")


def test_the_document_has_the_keys_of_the_design() -> None:
    """Scripts rely on them; what we add is listed here."""
    assert set(document()) == DESIGN_KEYS | OUR_KEYS


def test_numbers_that_are_not_finite_become_null() -> None:
    """JSON has no NaN and no infinity."""
    text = json.dumps(document(delta=change(interval_95=(0.1, float("inf")))), allow_nan=False)
    assert json.loads(text)["delta"]["judged_s"]["interval_95"] == [0.1, None]
    assert json.loads(text)["causes"][0]["evidence"][1]["value"] is None


def test_sql_can_be_left_out_and_is_never_broken() -> None:
    """A statement stands on one line, so that it can be copied."""
    with_sql, without = render(document()), render(document(), sql=False)
    lines = [line.strip() for line in with_sql.splitlines()]
    assert "sql: SELECT count(*) * 16 AS tokens FROM block WHERE run_id = 'before' AND change = 'evicted'" in lines
    assert "SELECT" not in without


@pytest.mark.parametrize("width", [WIDTH, 100, 120])
@pytest.mark.parametrize("known", [{}, {"quantile": "0.95"}, {"carried_by": "mean", "delta": change(interval_95=None)}])
def test_lines_fit_a_terminal_unless_they_cannot(known: dict[str, Any], width: int) -> None:
    """Tables too: only SQL and names from outside are longer than the terminal is wide."""
    rows = [
        LedgerRow(
            "admission_blocked_on_blocks", "waiting for KV blocks", *[0.0163] * 4, (0.0165, 0.0213), (-0.0165, 0.0213)
        ),
        LedgerRow(
            "other", "small parts together: " + ", ".join(["decode_bandwidth"] * 5), *[-0.0993] * 4, (-1.25, 0.0993)
        ),
    ]
    told = document(attribution=rows, **known)
    for text in (render(told, sql=False, width=width), summary(told, width=width)):
        for line in text.splitlines():
            assert len(line) <= width or "0123456789abcdef" in line


def test_what_rows_are_stands_beside_them_or_below() -> None:
    """Where the terminal is wide enough the words stand in the table, else under it; no row loses them."""
    wide, narrow = summary(document(), width=120), summary(document(), width=60)
    assert "  evicted prompt blocks\n" in wide
    assert "  premature_eviction: evicted prompt blocks\n" in narrow


def test_a_number_without_sql_says_who_worked_it_out() -> None:
    """Every number can be traced: to its SQL, or to what computed it."""
    assert "     computed by the ledger" in render(document())
    assert "computed by" not in render(document(), sql=False)
    assert "Computed by the ledger" in render_markdown(document(), version="1")


def test_nothing_to_say_is_left_out() -> None:
    """No cause, no exclusion, no experiment, no side effect: no empty heading."""
    text = render(
        document(causes=[], excluded=[], not_observable=[], side_effects=[], next_experiment=None, quality=[])
    )
    for heading in ("Causes", "What it is not", "Meanwhile", "Next experiment"):
        assert heading not in text
    assert "Data quality: 0 checks, no contradiction." in text
    report = render_markdown(
        document(causes=[], excluded=[], not_observable=[], side_effects=[], next_experiment=None), version="1"
    )
    assert "No cause is named." in report
    assert "Nothing was excluded." in report
    assert "None is needed." in report


@pytest.mark.parametrize(
    ("status", "heading"),
    [
        ("explained", "EXPLAINED"),
        ("no_change", "NO CHANGE"),
        ("not_distinguishable", "NOT DISTINGUISHABLE"),
        ("not_observable", "NOT OBSERVABLE HERE"),
    ],
)
def test_every_status_opens_the_text(status: str, heading: str) -> None:
    """One word first, then the sentence."""
    assert render(document(status=status, verdict="So it is.")).startswith(f"{heading}: So it is.\n")
    assert summary(document(status=status, verdict="So it is.")).startswith(f"{heading}: So it is.\n\nWhere the change")


def test_tentative_causes_say_so() -> None:
    """Causes beside a change that is not established are under a warning."""
    warning = "Tentative: the change itself is not established."
    doubtful = document(status="not_distinguishable")
    assert warning in render(doubtful)
    assert warning in render_markdown(doubtful, version="1")
    assert warning not in render(document())


def test_the_quantile_asked_for_has_its_own_column_where_another_is_judged() -> None:
    """P95 carries the verdict; P99 is shown beside it, without an interval."""
    lower = document(quantile="0.95")
    header = next(line for line in render(lower).splitlines() if "95 % of" in line)
    assert header.split() == ["mean", "P95", "P99", "95", "%", "of", "P95"]
    assert "| row | what it is | mean | P95 | 95 % of P95 | P99 | shortfall beyond P99 |" in render_markdown(
        lower, version="1"
    )


def test_the_mean_s_interval_stands_where_the_quantile_has_none() -> None:
    """The column says whose interval it is."""
    by_mean = document(carried_by="mean", delta=change(interval_95=None))
    assert "95 % of the mean" in render(by_mean)
    assert "+50.0 to +100 ms" in render(by_mean)
    assert "The mean carries the verdict" in render_markdown(by_mean, version="1")


def test_names_from_outside_are_no_markup() -> None:
    """A tenant called like a tag, a worker with a pipe, an id with a line break."""
    cause = named(
        "slow_steps",
        subject={"kind": "tenant", "id": "<script>|\nx"},
        evidence=[{"statement": "a <b> c", "value": 1.0, "unit": "s", "sql": None, "request_ids": ["a\n# b"]}],
    )
    row = {"cause": "x", "because": "tenant <i>|y"}
    report = render_markdown(document(causes=[cause], excluded=[row]), version="1")
    assert "<script>" not in report
    assert "<b>" not in report
    assert "\n# b" not in report
    assert "tenant &lt;i>\\|y" in report


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "unknown"),
        (float("nan"), "unknown"),
        (0.0, "0 ms"),
        (0.0004, "0.40 ms"),
        (0.0123, "12.3 ms"),
        (0.0995, "100 ms"),
        (0.123, "123 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (12.345, "12.35 s"),
        (1234.5, "1,234 s"),
        (-0.25, "-250 ms"),
        (-0.000004, "0 ms"),
        (0.000006, "0.01 ms"),
    ],
)
def test_seconds(value: float | None, text: str) -> None:
    """Three digits that matter, in the unit people think in."""
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "unknown"),
        (0.0, "0.0 %"),
        (0.05, "5.0 %"),
        (0.1, "10 %"),
        (1.234, "123 %"),
        (-0.5, "-50 %"),
        (-0.0004, "0.0 %"),
    ],
)
def test_percent(value: float | None, text: str) -> None:
    """One digit more below ten percent."""
    assert percent(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.78, "78 %"), (1.004, "100 %"), (1.11, "more than all (111 %)"), (-0.2, "-20 %"), (None, "unknown")],
)
def test_shares(value: float | None, text: str) -> None:
    """More than the whole is said, since it looks like a mistake otherwise."""
    assert share_of(value) == text


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        (None, "-"),
        ((0.01, 0.02), "+10.0 ms to +20.0 ms"),
        ((-0.01, None), "at least -10.0 ms"),
        ((0.01, float("inf")), "at least +10.0 ms"),
    ],
)
def test_interval(bounds: Any, text: str) -> None:
    """A one-sided bound is no interval to infinity."""
    assert interval(bounds) == text


def test_small_words() -> None:
    """Quantiles, metrics, counts and lists."""
    assert [quantile_name(q) for q in ("0.5", "0.95", "0.99", "0.999")] == ["P50", "P95", "P99", "P99.9"]
    assert [metric_name(m) for m in ("ttft", "tpot", "e2e")] == ["TTFT", "TPOT", "E2E latency"]
    assert [number(x) for x in (3.0, 1.25, 99.5, 12345.6)] == ["3", "1.25", "99.5", "12,346"]
    assert [listing(w) for w in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]
    assert signed(0.2) == "+200 ms"
    assert [signed(x) for x in (0.000004, -0.000004)] == ["0 ms", "0 ms"]
    assert [confidence_word(x) for x in (0.8, 0.79, 0.5, 0.49)] == ["high", "medium", "medium", "low"]


def test_tables_align() -> None:
    """Names left, numbers right, a rule above a total."""
    assert (
        table(["", "a"], [["x", "1"], ["long", "100"]], total=True)
        == "          a\n  x       1\n  ---------\n  long  100"
    )


if __name__ == "__main__":
    for file, content in shown().items():
        (GOLDEN / file).write_text(content, encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("of the slowest 5 % of all", ["of the slowest", "5 % of all"]),
        ("it took about 12.5 ms longer", ["it took about", "12.5 ms longer"]),
        ("block has 16 tokens in it", ["block has 16", "tokens in it"]),
        ("a number with 512 KiB", ["a number with", "512 KiB"]),
    ],
)
def test_no_line_ends_between_a_number_and_its_unit(text: str, lines: list[str]) -> None:
    """Sixteen columns; a number goes on with its unit, but for words that are none; the space stays an ordinary one."""
    assert wrapped(text, 16).split("\n") == lines
