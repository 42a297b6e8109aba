"""Promises about the files themselves: what they may not name, what every folder and verb must say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("alerts", "collector", "dashboards", "diagnosis", "engine_probe", "store")
# Written in two parts, so that this file does not name them itself.
FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.-])/(?:wo" r"rk|ro" r"ot|fa" r"rm|op" r"t/wheels|tm" r"p)/"),
    "a package registry's host": re.compile(r"pyp" r"i\.org|pythonho" r"sted|deb\.deb" r"ian|npm" r"js\.(?:org|com)"),
}
TEXT = (".py", ".sql", ".md", ".toml", ".html", ".js", ".css", ".yml", ".yaml", ".json", ".sh", ".txt", ".prom", "")


def tracked() -> list[Path]:
    """Files that git tracks and that are there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, timeout=30).stdout
    return [path for name in listed.decode().split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_a_machine_path_or_a_registry() -> None:
    """The project speaks of itself alone: no absolute path of a developer's machine, no registry's host."""
    found = []
    for path in tracked():
        if path.suffix not in TEXT or path.name == "LICENSE":
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            found += [
                f"{path.relative_to(ROOT)}:{number}: {what}" for what, rule in FORBIDDEN.items() if rule.search(line)
            ]
    assert found == []


def test_the_rule_would_notice() -> None:
    """The patterns catch what they are for, and leave relative paths and words alone."""
    path_rule, host_rule = FORBIDDEN.values()
    assert path_rule.search("open('/wo" + "rk/main/x')")
    assert path_rule.search("cache: /ro" + "ot/.cache")
    assert not path_rule.search("see store/work/main and docs/root/")
    assert host_rule.search("https://pyp" + "i.org/simple")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_says_what_it_is_for(package: str) -> None:
    """`__init__.py` of each folder is one docstring."""
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    assert ast.get_docstring(tree)
    assert all(
        isinstance(node, ast.Expr | ast.ImportFrom | ast.Import | ast.Assign | ast.AnnAssign) for node in tree.body
    )


def test_every_module_says_its_idea() -> None:
    """Every module of the product begins with a docstring."""
    silent = [
        str(path.relative_to(ROOT))
        for path in tracked()
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in (*PACKAGES, "bench", "tests")
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_help_loads_nothing_heavy() -> None:
    """`kvscope --help` imports no numeric, web or database library: that is how it stays quick."""
    script = (
        "import sys\n"
        "from collector.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print('|', *sorted({name.split('.')[0] for name in sys.modules}))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    )
    loaded = set(ended.stdout.rsplit("|", 1)[1].split())
    heavy = {
        "numpy",
        "pyarrow",
        "duckdb",
        "sqlalchemy",
        "fastapi",
        "pydantic",
        "httpx",
        "jinja2",
        "plotly",
        "zmq",
        "torch",
    }
    assert loaded & heavy == set()
    assert "typer" in loaded
