"""Torch, Triton and what reads models are imported in one folder alone; text needs none of them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
INSIDE = ROOT / "engine_probe" / "engine" / "torch_executor"
HEAVY = {"torch", "triton", "safetensors", "tokenizers"}


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def test_torch_is_imported_in_one_folder() -> None:
    """Every other module of the product runs where torch is not installed."""
    packages = ("alerts", "collector", "dashboards", "diagnosis", "engine_probe", "store")
    outside = [
        str(path.relative_to(ROOT))
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        if INSIDE not in path.parents and imported(path) & HEAVY
    ]
    assert outside == []


def test_text_and_configs_need_no_torch() -> None:
    """Tokenizer, chat template, detokenizer and config are there for a server that computes nothing itself."""
    script = (
        "import sys\n"
        "from engine_probe.engine.torch_executor import chat_template, detokenizer, model_config, tokenizer\n"
        f"assert not {HEAVY!r} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=60)
