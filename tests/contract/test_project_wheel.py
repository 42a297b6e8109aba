"""The wheel: what is in it, and that it works in an environment where this source tree does not exist."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("alerts", "collector", "dashboards", "diagnosis", "engine_probe", "store")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built with what is installed (no network)."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return next(out.glob("kvscope-*.whl"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of programs of a new environment: kvscope from the wheel, its dependencies from ours (a .pth file)."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True, text=True, timeout=120)
    packages = next(home.glob("lib/python*/site-packages"))
    # A plain path line: packages become importable there, but the .pth of our own editable install is not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


def _run(command: list[str | Path], cwd: Path) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "KVSCOPE_", "VIRTUAL_ENV"))}
    ended = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_wheel_holds_the_six_folders_whole_and_nothing_else(wheel: Path) -> None:
    """Every tracked file of the six packages is in it (SQL, templates), and no tests, bench or docs are."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in names} == set(PACKAGES)
    tracked = subprocess.run(
        ["git", "ls-files", "-z", *PACKAGES], cwd=ROOT, check=True, capture_output=True, text=True, timeout=30
    ).stdout.split("\0")
    present = {name for name in tracked if name and (ROOT / name).exists()}
    assert present - names == set()


def test_the_wheel_carries_its_licence(wheel: Path) -> None:
    """LICENSE and NOTICE travel with it."""
    with zipfile.ZipFile(wheel) as archive:
        held = {Path(name).name for name in archive.namelist() if ".dist-info/licenses/" in name}
    assert held == {"LICENSE", "NOTICE"}


def test_kvscope_runs_from_the_wheel_alone(environment: Path, tmp_path: Path) -> None:
    """`kvscope --help` answers, and its modules are those of the wheel."""
    assert "Usage: kvscope" in _run([environment / "kvscope", "--help"], tmp_path)
    where = "import collector, store, engine_probe; print(*(m.__file__ for m in (collector, store, engine_probe)))"
    for file in _run([environment / "python", "-c", where], tmp_path).split():
        assert Path(file).is_relative_to(environment.parent)


def test_a_store_is_made_and_migrated_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    """The migrations are in the wheel: a new store opens, is at the newest schema, and verifies as sound."""
    script = (
        "from store.open import open_store\n"
        "store = open_store('new.duckdb')\n"
        "print(store.query('SELECT count(*) AS n FROM request').to_pylist(), list(store.verify()))\n"
        "store.close()\n"
    )
    assert _run([environment / "python", "-c", script], tmp_path).strip() == "[{'n': 0}] []"


def test_the_command_without_its_extra_says_what_to_install(environment: Path, tmp_path: Path) -> None:
    """In an engine's environment (the probe alone) `kvscope` ends with one line, and the probe still imports."""
    script = "import engine_probe, sys; sys.modules['typer'] = None; import collector.cli"
    ended = subprocess.run(
        [environment / "python", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert "pip install '.[service]' in kvscope's folder" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_what_is_declared_is_what_is_shipped() -> None:
    """pyproject names the same six folders for the wheel, the type checker and the layers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tool = project["tool"]
    assert set(tool["hatch"]["build"]["targets"]["wheel"]["packages"]) == set(PACKAGES)
    assert set(tool["mypy"]["packages"]) == set(PACKAGES)
    assert set(tool["importlinter"]["root_packages"]) == set(PACKAGES)
    assert tool["importlinter"]["contracts"][0]["layers"] == [
        "collector",
        "dashboards | alerts",
        "diagnosis",
        "store",
        "engine_probe",
    ]
