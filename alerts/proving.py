"""Are the rules right? promtool reads them and plays their scenarios; a live Prometheus evaluates each expression.

promtool comes with Prometheus (Debian: package prometheus). Where it is missing that is said, not passed over.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from alerts.files import ALERTMANAGER_FILE, RULES_FILE, TESTS_FILE
from alerts.rules import groups
from engine_probe.errors import AlertError

TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Proof:
    """What was checked, whether it holds, and what was said."""

    what: str
    is_right: bool
    said: str


def promtool() -> str:
    """The program. Raises AlertError where it is not installed."""
    return _program("promtool", "it comes with Prometheus (Debian: apt-get install prometheus)")


def check_rules(folder: Path) -> list[Proof]:
    """promtool reads the rules, and amtool (where it is installed) the configuration for Alertmanager."""
    found = [_run([promtool(), "check", "rules", RULES_FILE], folder, f"promtool check rules {RULES_FILE}")]
    amtool = shutil.which("amtool")
    if amtool is not None and (folder / ALERTMANAGER_FILE).is_file():
        found.append(
            _run([amtool, "check-config", ALERTMANAGER_FILE], folder, f"amtool check-config {ALERTMANAGER_FILE}")
        )
    return found


def play_scenarios(folder: Path) -> Proof:
    """promtool plays the scenarios against the rules."""
    return _run([promtool(), "test", "rules", TESTS_FILE], folder, f"promtool test rules {TESTS_FILE}")


def ask_prometheus(ask: Callable[[str], Any]) -> list[Proof]:
    """Each expression, evaluated by a live Prometheus. `ask`: an expression to the answer of /api/v1/query."""
    found = []
    for rules in groups().values():
        for rule in rules:
            answer = ask(rule.expr)
            fine = answer.get("status") == "success"
            said = f"{len(answer['data']['result'])} series" if fine else str(answer.get("error", "no answer"))
            found.append(Proof(rule.name, fine, said))
    return found


def _program(name: str, where: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise AlertError(f"{name} is not installed here; {where}", program=name)
    return found


def _run(command: list[str], folder: Path, what: str) -> Proof:
    """In a copy of the folder: promtool resolves rule files beside the tests, and writes nothing where people keep theirs."""
    with tempfile.TemporaryDirectory(prefix="kvscope-alerts-") as copy:
        for path in folder.glob("*.yml"):
            shutil.copy(path, copy)
        try:
            ended = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise AlertError(f"{what} did not end within {TIMEOUT_S:g} s") from error
    return Proof(what, ended.returncode == 0, (ended.stdout + ended.stderr).strip())
