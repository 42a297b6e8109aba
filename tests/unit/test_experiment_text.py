"""An experiment for people: what the terminal and the report say, from situations made up by hand."""

from __future__ import annotations

from typing import Any

from diagnosis.experiments.contrast import contrast
from diagnosis.experiments.design import schedule
from diagnosis.experiments.document import experiment_document, sweep_document
from diagnosis.experiments.knee import Level, find_knee
from diagnosis.experiments.reading import read
from diagnosis.experiments.text import render, render_markdown, render_sweep, render_sweep_markdown
from tests.experiment_rows import Call, arm, observed

N = 140


def found() -> dict[str, Any]:
    """B takes 300 ms a call, D 100 ms where it hits and 600 ms where it does not, and evicts."""

    def before(repeat: int) -> Any:
        calls = [Call(n * 0.5, 0.3, {"worker": "w0", "queue_s": 0.01}) for n in range(N)]
        return observed(f"B/{repeat}", calls, [{"blocks_evicted": 0, "num_preempted": 0}])

    def after(repeat: int) -> Any:
        calls = []
        for n in range(N):
            hit = n % 4 != 0
            labels = {"reusable_tokens": "800" if hit else "0"}
            more = {"labels": labels, "cached_tokens": 800 * hit, "worker": "w0", "queue_s": 0.01}
            calls.append(Call(n * 0.5, 0.1 if hit else 0.6, more))
        return observed(f"D/{repeat}", calls, [{"blocks_evicted": 500, "num_preempted": 2}])

    arms = [arm("B", before, cache="off"), arm("D", after, cache="on")]
    pair = contrast(*arms)
    trials = schedule([each.arm for each in arms], 3, 0)
    fixed = {"model": "m", "tokenizer": None, "routing.policy": {"differs": {"B": "random", "D": "sticky"}}}
    return experiment_document("a test", fixed, trials, arms, [(pair, read(pair))], ["a note"])


def test_terminal_says_the_numbers_the_reading_and_what_was_fixed() -> None:
    """Mean (3 * 100 + 600) / 4 = 225 ms; P99 600 ms; 1,500 blocks; what is not told, and what differs."""
    text = render(found())
    assert text.startswith(
        "a test: B against D\n\nTTFT: mean 300 ms to 225 ms (-75.0 ms), P99 300 ms to 600 ms (+300 ms).\nCapacity:"
    )
    assert "same calls, hit" in text
    assert "-200 ms" in text
    assert "blocks evicted: 1,500 in D, 0 in B" in text
    assert "tokenizer            not told" in text
    assert "differs: B=random, D=sticky" in text
    assert "note  a note" in text


def test_report_is_markdown_with_every_pair_and_the_order() -> None:
    """Tables are rectangular; the order of the runs stands in it; the same document gives the same report."""
    document = found()
    report = render_markdown(document, "1.2")
    assert report.startswith("# Experiment: a test\n\n## B to D\n\n**capacity**: Capacity: in D hits are fast")
    assert "| evicted blocks | 0 | 1,500 |" in report
    assert "kvscope 1.2" in report
    assert ", ".join(document["order"]) in report
    for block in report.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count(" | ") for line in block.splitlines() if " --- " not in line}) == 1, block
    assert report == render_markdown(found(), "1.2")


def test_what_nobody_told_is_unknown_in_the_table() -> None:
    """A client sees no evictions: the cell says unknown, not 0."""
    plain = arm("x", lambda repeat: observed(f"x/{repeat}", [Call(n * 0.5, 0.3) for n in range(N)]))
    pair = contrast(plain, plain)
    trials = schedule([plain.arm, arm("y", lambda repeat: plain.runs[0]).arm], 3, 0)
    document = experiment_document("t", {}, trials, [plain], [(pair, read(pair))], [])
    assert document["contrasts"][0]["only_when_on"]["evicted_blocks"] == {"baseline": None, "suspect": None}
    assert "unknown" in render(document)


def test_sweep_marks_its_knee() -> None:
    """The level before the break carries the arrow; the report has the same rows."""
    levels = [
        Level(load, arm("D", lambda repeat, s=s: observed(f"D/{repeat}", [Call(n * 0.5, s) for n in range(N)])))
        for load, s in ((4.0, 0.5), (1.0, 0.1), (2.0, 0.15))
    ]
    document = sweep_document("t", {"model": "m"}, "requests/s", levels, find_knee(levels, None, "requests/s"), ["n"])
    assert [level["load"] for level in document["levels"]] == [1.0, 2.0, 4.0]
    (line,) = [line for line in render_sweep(document).splitlines() if "<- knee" in line]
    assert line.split()[0] == "2"
    report = render_sweep_markdown(document, "1.2")
    assert "The knee is at 2 requests/s" in report
    assert report.count("\n| 4 |") == 1
