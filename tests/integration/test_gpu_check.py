"""`make gpu-check` measures where there is a GPU, and elsewhere says why it did not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def gpu_check(*args: object) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own: Triton's interpreter is chosen when a kernel is defined."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.gpu_check", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)


def test_every_part_runs_in_rehearsal(tmp_path: Path) -> None:
    """The code that a GPU would run, tiny and interpreted: kernels agree, each part has its rows, and it calls itself that."""
    pytest.importorskip("triton")
    ended = gpu_check("--rehearse", tmp_path / "page.md")
    assert ended.returncode == 0, ended.stderr
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("# Rehearsal of the GPU check on a CPU\n\nThese figures mean nothing")
    parts = [part.splitlines() for part in page.split("\n## ")[1:]]
    assert [part[0] for part in parts] == [
        "Kernels against oracles",
        "The same tokens",
        "Speed of the kernels",
        "Memory of a step",
        "The roofline against measured steps",
        "What the recorder costs",
    ]
    num_rows = [sum(line.startswith("| ") for line in part) - 1 for part in parts]
    assert num_rows == [4, 1, 2, 1, 2, 3]
    assert "NO" not in page
    assert "not measured" not in page


def test_without_a_gpu_it_says_why_and_writes_nothing() -> None:
    """No failure, and the page of an earlier run stays as it was."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    page = ROOT / "bench" / "gpu.md"
    before = page.read_bytes() if page.exists() else None
    ended = gpu_check()
    assert ended.returncode == 0
    assert ended.stdout.startswith("GPU check did not run: ")
    assert (page.read_bytes() if page.exists() else None) == before


def test_time_that_is_up_is_said() -> None:
    """A part that finds no time left claims nothing."""
    from bench.gpu_check import table

    lines, failures = table("Speed", iter([("a", "1")]), "work | time", "", deadline=0.0)
    assert lines[-2] == "\nThe time was up: further rows of 'Speed' were not measured."
    assert failures == []
    lines, failures = table("Kernels", iter([("x", "yes"), ("y", "NO")]), "case | agrees", "n", deadline=float("inf"))
    assert lines == ["## Kernels", "", "n", "", "| case | agrees |", "|---|---|", "| x | yes |", "| y | NO |", ""]
    assert failures == ["Kernels: y"]
