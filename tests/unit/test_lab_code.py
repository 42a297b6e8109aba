"""Which sources make a run what it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from diagnosis.lab import code

ROOT = Path(code.__file__).parents[2]

PLAYS = """
import json, sys
from diagnosis.lab import matrix
from diagnosis.lab.cell import run_cell
from diagnosis.lab.run import Order

for observe in ("full", "otlp", "client", "lossy"):
    run_cell(Order("premature_eviction", requests=60, observe=observe, marked=observe == "full"))
run_cell(Order("load_step+length_shift", requests=60))
json.dump([getattr(module, "__file__", None) for module in list(sys.modules.values())], sys.stdout)
"""


def test_no_run_imports_what_its_version_leaves_out() -> None:
    """Whatever is observed, of one fault or two: of the files that make no other version none is loaded."""
    told = subprocess.run([sys.executable, "-c", PLAYS], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    loaded = {
        Path(name).relative_to(ROOT).as_posix() for name in json.loads(told) if name and name.startswith(str(ROOT))
    }
    assert "diagnosis/lab/cell.py" in loaded
    assert [name for name in loaded if name.startswith(code.IDLE)] == []


@pytest.mark.parametrize("idle", code.IDLE)
def test_what_is_left_out_is_there(idle: str) -> None:
    """A room that moved would make a version again, unseen."""
    assert (ROOT / idle).exists()


def test_comments_and_layout_make_no_other_version(tmp_path: Path) -> None:
    """A word of the program does."""
    texts = {"a": "x = 1  # one\n", "b": "# two\nx = (1)\n", "c": "x = 2\n"}
    said = {}
    for name, text in texts.items():
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        said[name] = code._said(path)
    assert said["a"] == said["b"] != said["c"]
