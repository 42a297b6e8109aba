"""`kvscope lab` from end to end: a run is imported and diagnosed like any recording, a small matrix is played, stopped and read."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from collector import cli
from collector.lab_runs.seeds import seed_list
from diagnosis.lab.catalogue import all_faults
from engine_probe.errors import UsageError

SMALL = ["--requests", "400"]


def kvscope(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any, str]:
    """(exit code, JSON document of stdout, stderr)."""
    with pytest.raises(SystemExit) as end:
        cli.main([*words, "--json"])
    told = capsys.readouterr()
    code = end.value.code
    assert isinstance(code, int)
    return code, json.loads(told.out), told.err


def test_a_lab_run_is_imported_and_diagnosed_like_any_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps that take twice as long: both windows come in through `import`, and the verdict names them."""
    folder, store = tmp_path / "run", str(tmp_path / "lab.duckdb")
    code, document, _ = kvscope(capsys, "lab", "run", "slow_steps", "--severity", "strong", "-o", str(folder), *SMALL)
    assert code == 0
    assert document["truth"] == json.loads((folder / "truth.json").read_text())
    for name in ("baseline", "suspect"):
        code, summary, _ = kvscope(capsys, "import", str(folder / name), "--run", name, "--store", store)
        assert code == 0
        assert summary["rows"]["request"] > 400
        assert summary["left_out"] == []
    code, verdict, _ = kvscope(capsys, "diagnose", "--baseline", "baseline", "--suspect", "suspect", "--store", store)
    assert code == 1
    assert verdict["causes"][0]["cause"] == "slow_steps"
    truth = document["truth"]["attribution"]["slow_steps"]["ttft"]
    assert verdict["delta"]["p99_s"]["value"] == pytest.approx(truth["p99_s"], rel=1e-6)


def test_a_small_matrix_runs_in_processes_of_its_own_and_is_not_run_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three faults, one seed, rows kept; again: nothing is played. Page, data and JSON say the same, and the page is made from its data."""
    target = tmp_path / "m.md"
    words = ["lab", "matrix", "--fault", "slow_steps", "--fault", "none", "--fault", "chunk_budget", "--seeds", "1:1"]
    words += ["--severity", "typical", "-o", str(tmp_path / "m"), "--page", str(target)]
    words += ["--processes", "2", "--keep-rows", *SMALL]
    code, document, talk = kvscope(capsys, *words)
    cells = {cell["fault"]: cell for cell in document["cells"]}
    assert (cells["slow_steps"]["right"], cells["slow_steps"]["n"]) == (1, 1)
    assert cells["none"]["right"] == 1
    assert cells["none"]["is_silent"]
    assert document["accuracy"] == sum(cells[name]["right"] for name in ("slow_steps", "chunk_budget")) / 2
    assert {"false_cause_rate", "baseline_accuracy", "targets", "reliability"} < set(document)
    (slow,) = [each for each in document["results"] if each["fault"] == "slow_steps"]
    assert slow["suspect"]["tpot_mean_s"] > 1.5 * slow["base"]["tpot_mean_s"]
    assert 0 < slow["certainty"] <= 1
    assert code == 0
    assert talk.count("seed 1:") == 3
    assert "3 of 3, about 0 min left" in talk
    assert (tmp_path / "m" / "runs").is_dir()
    assert len(list((tmp_path / "m" / "runs").iterdir())) == 3
    written = target.read_text()
    assert "| slow_steps |  | 1/1 |" in written
    assert (tmp_path / "m.svg").read_text().startswith("<svg")
    _, again, talk = kvscope(capsys, *words)
    assert "3 of 3 runs are finished already" in talk
    assert "seed 1:" not in talk
    assert again == document
    target.unlink()
    kvscope(capsys, "lab", "matrix", "--from", str(tmp_path / "m.csv"), "--page", str(target))
    assert target.read_text() == written
    target.unlink()
    kvscope(capsys, "lab", "matrix", "--from", str(tmp_path / "m"), "--page", str(target))
    assert target.read_text() == written


def test_a_matrix_goes_on_from_the_data_of_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two runs the data have one by this code: it is not played; by other code it is, and that is said. A folder's older runs are told."""
    data, words = (
        tmp_path / "m.csv",
        ["lab", "matrix", "--fault", "none", "--severity", "typical", "--processes", "1", *SMALL],
    )
    _, first, _ = kvscope(capsys, *words, "--seeds", "1:1", "-o", str(tmp_path / "a"), "--page", str(tmp_path / "m.md"))
    more = [*words, "--seeds", "1:2", "--known", str(data), "--page", str(tmp_path / "both.md")]
    _, both, talk = kvscope(capsys, *more, "-o", str(tmp_path / "b"))
    assert f"1 of 2 runs are taken from {data}" in talk.replace("\n", " ")
    assert [each["seed"] for each in both["results"]] == [1, 2]
    assert both["results"][0] == first["results"][0]
    assert (
        (tmp_path / "b" / "manifest.jsonl").read_text().count("\n"),
        (tmp_path / "both.csv").read_text().count("\n"),
    ) == (1, 3)
    code = first["results"][0]["code"]
    data.write_text(data.read_text().replace(code, "0123456789"))
    _, again, talk = kvscope(capsys, *more, "-o", str(tmp_path / "c"))
    assert "1 that are there were made by other code" in talk
    assert again["results"] == both["results"]
    manifest = tmp_path / "c" / "manifest.jsonl"
    manifest.write_text(manifest.read_text().replace(code, "0123456789", 1))
    _, _, talk = kvscope(capsys, *words, "--seeds", "1:2", "-o", str(tmp_path / "c"))
    assert "1 of them were made by other code" in talk


def test_calibration_is_measured_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two null runs and a fault: each threshold says what chance reached, and in how many runs; seeds kept for publishing are refused."""
    from diagnosis.lab import plan
    from diagnosis.lab.run import Order

    few = [
        Order("aa", seed=100_001, requests=400),
        Order("aa", seed=100_002, requests=400),
        Order("slow_steps", seed=1, requests=400),
    ]
    monkeypatch.setattr(plan, "tuning", lambda seeds, requests: few)
    target = tmp_path / "calibration.toml"
    words = ["lab", "calibrate", "--seeds", "1:1", "-o", str(tmp_path / "c"), "--to", str(target), "--processes", "1"]
    code, document, _ = kvscope(capsys, *words)
    assert code == 0
    assert document == tomllib.loads(target.read_text())
    assert document["origin"] == {"seeds": "1:1", "runs": 3, "null_runs": 2, "margin": 1.25}
    load = document["thresholds"]["load_step.growth"]
    assert load["value"] >= load["least"] == 0.1
    assert document["thresholds"]["slow_steps.ratio"]["measured_in"] == 2
    assert document["confidence"]["certainty"][0] == 0.0
    code, problem, _ = kvscope(capsys, *words[:2], "--seeds", "101:102", "--to", str(target))
    assert code == 2
    assert "kept for what is published" in problem["detail"]


def test_a_matrix_that_is_interrupted_says_what_it_keeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after the first of three runs: no traceback, exit 1, one run kept, and how to go on."""
    from diagnosis.lab import matrix

    def run_cell(order: Any, keep: Path | None) -> dict[str, Any]:
        if order.seed == 2:
            raise KeyboardInterrupt
        return {
            "key": order.key(),
            "fault": order.fault,
            "severity": "typical",
            "seed": 1,
            "outcome": "right",
            "why": "",
        }

    monkeypatch.setattr(matrix, "run_cell", run_cell)
    words = ["lab", "matrix", "--fault", "none", "--seeds", "3", "--severity", "typical", "--processes", "1"]
    with pytest.raises(SystemExit) as end:
        cli.main([*words, "-o", str(tmp_path / "m")])
    told = capsys.readouterr()
    assert end.value.code == 1
    assert told.out == ""
    assert (
        f"stopped: 1 of 3 runs are kept in {tmp_path / 'm'}; the same command goes on from there"
        in told.err.replace("\n", " ")
    )
    assert "Traceback" not in told.err


def test_the_list_holds_every_fault(capsys: pytest.CaptureFixture[str]) -> None:
    """With its range and what should be said of it."""
    code, rows, _ = kvscope(capsys, "lab", "list")
    assert code == 0
    assert [row["fault"] for row in rows] == list(all_faults())
    assert all(row["severity"]["unit"] for row in rows)


@pytest.mark.parametrize(
    "words",
    [
        ["run", "nobody"],
        ["run", "slow_steps", "--severity", "9"],
        ["run", "slow_steps", "--requests", "0"],
        ["matrix", "--fault", "none+aa"],
        ["matrix", "--seeds", "x"],
        ["matrix", "--seeds", "0"],
        ["matrix", "--page", "no/such/folder/m.md"],
        ["matrix", "--from", "no/such/file.csv", "--page", "m.md"],
        ["matrix", "--severity", "grim", "--fault", "none"],
        ["matrix", "--from", "docs/confusion-matrix.csv", "--known", "docs/confusion-matrix.csv", "--page", "m.md"],
        ["matrix", "--known", "no/such/file.csv", "--fault", "none"],
        ["calibrate", "--to", "no/such/folder/c.toml"],
        ["calibrate", "--only", "everything"],
        ["coverage", "--pairs", "1"],
    ],
)
def test_what_makes_no_sense_is_misuse(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2 and a problem document, before anything is played."""
    output = ["-o", str(tmp_path / "out")] if words[0] != "coverage" else []
    code, problem, _ = kvscope(capsys, "lab", *words, *output)
    assert code == 2
    assert problem["title"]
    assert not (tmp_path / "out").exists()


def test_a_file_is_no_folder_for_a_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said, not overwritten."""
    (tmp_path / "file").write_text("mine")
    code, _, _ = kvscope(capsys, "lab", "matrix", "-o", str(tmp_path / "file"), "--fault", "none", "--seeds", "1")
    assert code == 2
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "words",
    [
        ["run", "none", "-o", "file/out"],
        ["matrix", "--fault", "none", "--seeds", "1", "-o", "file/out"],
        ["matrix", "--fault", "none", "--seeds", "1", "--page", "folder"],
        ["matrix", "--fault", "none", "--seeds", "1", "--page", "m.md"],
        ["calibrate", "--to", "folder"],
    ],
)
def test_what_could_not_be_written_is_said_before_anything_is_played(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder below a file, a page or its data in the place of a folder."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    Path("folder").mkdir()
    Path("m.csv").mkdir()
    code, problem, told = kvscope(capsys, "lab", *words)
    assert code == 2
    assert "folder" in problem["detail"]
    assert "of 1" not in told
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "m.csv"]


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("3", [1, 2, 3]), ("5,9", [5, 9]), ("4-6", [4, 5, 6]), ("1,7-8", [1, 7, 8]), ("101:103", [101, 102, 103])],
)
def test_seeds_are_a_number_a_list_or_a_range(text: str, seeds: list[int]) -> None:
    """A bare number is how many; the others are which."""
    assert seed_list(text) == seeds


@pytest.mark.parametrize("text", ["", "-", "3-1", "1-99999", "1:1000000000000", "1000000000000", "a,b", "1.5"])
def test_other_texts_are_no_seeds(text: str) -> None:
    """Empty, backwards, too many, no numbers."""
    with pytest.raises(UsageError):
        seed_list(text)
