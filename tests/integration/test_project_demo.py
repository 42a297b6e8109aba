"""The demo, whole: real recordings of vLLM in, the verdict, the capacity curve, SQL and the report out; README shows it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from collector.commands.demo import render, render_founding
from docs.readme import FOUNDING, MADE, part

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The document of `kvscope demo --json`, run as a user does: in an empty folder, without torch and without a network."""
    folder = tmp_path_factory.mktemp("demo")
    blocked = folder / "blocked"
    blocked.mkdir()
    (blocked / "torch.py").write_text("raise ImportError('the demo needs no torch')\n")
    env = os.environ | {"PYTHONPATH": f"{blocked}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "collector.cli", "demo", "--no-live", "--json", "--dir", "out", "--recordings"]
    ended = subprocess.run(
        [*command, str(ROOT / "examples" / "recordings")],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr
    document: dict[str, Any] = json.loads(ended.stdout)
    document["folder"] = str(folder)
    return document


def test_the_verdict_names_capacity_from_evidence(demo: dict[str, Any]) -> None:
    """The squeezed run has 111 blocks instead of 2,047: a cause of blocks comes first, with evidence that can be run."""
    verdict = demo["diagnosis"]
    assert verdict["status"] == "explained"
    assert verdict["n"] == {"baseline": 1246, "suspect": 1246}
    first = verdict["causes"][0]
    assert first["cause"] in ("admission_blocked_on_blocks", "premature_eviction", "preemption_recompute")
    assert first["subject"] == {"kind": "worker", "id": "worker-0"}
    assert any("111" in evidence["statement"] for evidence in first["evidence"])
    # a number that the ledger made names its requests; every other number brings the SQL that gives it
    assert all(evidence["sql"] or evidence["request_ids"] for evidence in first["evidence"])
    assert sum(bool(evidence["sql"]) for evidence in first["evidence"]) >= 4


def test_the_founding_case_is_told_with_its_reason(demo: dict[str, Any]) -> None:
    """At full size, without torch: the cache on, mean TTFT falls and P99 rises, both beyond noise, for the hot worker's queue."""
    full = demo["founding"]["full_size"]
    (pair,) = full["contrasts"]
    change = pair["difference"]["ttft"]
    assert change["mean"]["value"] < change["mean"]["interval_95"][1] < 0
    assert 0 < change["p99"]["interval_95"][0] < change["p99"]["value"]
    assert pair["reading"][0]["kind"] == "locality"
    assert demo["founding"]["live"] is None


def test_the_rows_of_the_attribution_sum_to_the_change(demo: dict[str, Any]) -> None:
    """Mean and P99: the sum of the causes is the change, within 1e-9 s."""
    verdict = demo["diagnosis"]
    for column in ("mean_s", "p99_s"):
        total = sum(row[column] for row in verdict["attribution"])
        assert total == pytest.approx(verdict["delta"][column]["value"], abs=1e-9)


def test_the_replay_agrees_with_the_engine_where_nothing_is_short(demo: dict[str, Any]) -> None:
    """With 2,047 blocks replay and engine reuse the same blocks; with 111 the engine reuses a little less."""
    ample, squeezed = demo["capacity"]["ample"], demo["capacity"]["squeezed"]
    replayed = {run["num_blocks"]: run for run in (ample, squeezed)}
    rates = {point["blocks"]: point["hit_rate"] for point in squeezed["points"]}
    assert set(replayed) == {2047, 111}
    assert rates[2047] == pytest.approx(ample["engine_ratio"], abs=1e-12)
    assert rates[111] - 0.1 < squeezed["engine_ratio"] < rates[111]


def test_the_capacity_verdict_tells_the_two_runs_apart(demo: dict[str, Any]) -> None:
    """The same traffic: 2,047 blocks are enough, 111 are short, and the size that would do lies between."""
    ample, squeezed = demo["capacity"]["ample"], demo["capacity"]["squeezed"]
    assert (ample["status"], squeezed["status"]) == ("enough", "short")
    assert 111 < squeezed["knee_blocks"] == ample["knee_blocks"] < 2047
    assert f"{squeezed['knee_blocks']:,} blocks" in squeezed["sentence"]


def test_kvscope_capacity_reads_the_same_curve_from_the_store(demo: dict[str, Any], kvscope: Any) -> None:
    """`kvscope capacity --store --run` answers the points of the demo's verdict; an unknown run is named."""
    store = Path(demo["folder"]) / demo["store"]
    points = demo["capacity"]["squeezed"]["points"]
    sizes = ",".join("inf" if point["blocks"] is None else str(point["blocks"]) for point in points)
    ended = kvscope("capacity", "--store", store, "--run", "squeezed", "--blocks", sizes, "--json")
    keys = ("blocks", "hit_rate", "hit_blocks", "requested_blocks")
    assert [{key: point[key] for key in keys} for point in json.loads(ended.out)] == points
    text = kvscope("capacity", "--store", store, "--run", "squeezed").out
    assert "  <- what the engine has" in text
    assert "18 warm-up requests fill the cache and are not counted" in text
    unknown = kvscope("capacity", "--store", store, "--run", "squeezd")
    assert (unknown.code, unknown.out) == (2, "")
    assert "runs there: ample, squeezed" in unknown.err


def test_the_statement_counts_the_blocks_events(demo: dict[str, Any]) -> None:
    """SQL over the raw events finds the evictions that the recordings hold: 13,351 squeezed, 4,593 ample."""
    answer = demo["sql"]
    names = [column["name"] for column in answer["columns"]]
    rows = {row[0]: dict(zip(names, row, strict=True)) for row in answer["rows"]}
    assert {run: row["evicted"] for run, row in rows.items()} == {"ample": 4593, "squeezed": 13351}
    assert rows["squeezed"]["median_life_s"] < rows["ample"]["median_life_s"] / 10


def test_report_and_store_lie_in_the_folder_asked_for(demo: dict[str, Any]) -> None:
    """Nothing is written elsewhere; the report is Markdown about this verdict."""
    folder = Path(demo["folder"])
    assert sorted(path.name for path in folder.iterdir()) == ["blocked", "out"]
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["founding", "kvscope.duckdb", "report.md"]
    report = (folder / "out" / "report.md").read_text()
    assert report.startswith("# P99 TTFT: explained")
    assert demo["diagnosis"]["causes"][0]["cause"] in report


def test_readme_shows_what_the_demo_prints_today(demo: dict[str, Any]) -> None:
    """The block in README is the demo's output: every line, every number (the paths are those of `make demo`)."""
    shown = part((ROOT / "README.md").read_text(), "demo output").removeprefix("```text\n").removesuffix("```\n")
    printed = render_founding(demo["founding"] | {"folder": FOUNDING}) + "\n\n" + render(demo | MADE)
    assert _lines(shown) == _lines(printed)


def test_recordings_that_are_not_there_are_said(tmp_path: Path, kvscope: Any) -> None:
    """Installed without the source tree, the demo says where its recordings are."""
    ended = kvscope("demo", "--dir", tmp_path / "out", "--recordings", tmp_path)
    assert ended.code == 2
    assert "examples/recordings" in ended.err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path, kvscope: Any) -> None:
    """A file in the way of --dir is a message with its name, not a traceback."""
    (tmp_path / "file").write_text("")
    ended = kvscope("demo", "--dir", tmp_path / "file")
    assert ended.code == 2
    assert str(tmp_path / "file") in ended.err


def _lines(text: str) -> list[str]:
    """Lines without the width of columns, which follows the longest path."""
    return [re.sub(r"\s+", " ", line).strip() for line in text.strip().splitlines()]
