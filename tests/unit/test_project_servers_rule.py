"""The rule for server tests: absent servers skip with a reason, and fail where CI requires them."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from tests import servers

ROOT = Path(__file__).parents[2]


def test_an_absent_server_skips_and_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without KVSCOPE_REQUIRE_SERVERS the test is skipped, naming the server and its package."""
    monkeypatch.setattr(servers, "FINDERS", {**servers.FINDERS, "prometheus": lambda: None})
    monkeypatch.delenv("KVSCOPE_REQUIRE_SERVERS", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"prometheus is not installed here \(apt-get install prometheus\)"):
        servers.require("prometheus")


def test_an_absent_server_fails_where_servers_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under KVSCOPE_REQUIRE_SERVERS=1 the same test fails."""
    monkeypatch.setattr(servers, "FINDERS", {**servers.FINDERS, "prometheus": lambda: None})
    monkeypatch.setenv("KVSCOPE_REQUIRE_SERVERS", "1")
    with pytest.raises(pytest.fail.Exception, match="KVSCOPE_REQUIRE_SERVERS=1 asks for it"):
        servers.require("prometheus")


def test_a_present_server_is_its_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the finder finds is what the test gets."""
    monkeypatch.setattr(servers, "FINDERS", {**servers.FINDERS, "prometheus": lambda: tmp_path})
    assert servers.require("prometheus") == tmp_path


def test_an_unknown_server_is_a_mistake_of_the_test() -> None:
    """A typing slip must not look like an absent server."""
    with pytest.raises(KeyError, match="unknown server postgress"):
        servers.require("postgress")


@pytest.mark.parametrize("script", sorted(p.name for p in (ROOT / ".ci").iterdir() if p.suffix != ".txt"))
def test_the_scripts_of_ci_parse_and_may_be_run(script: str) -> None:
    """Each script in .ci is executable and has no syntax error in its shell."""
    path = ROOT / ".ci" / script
    shell = "bash" if "bash" in path.read_text().splitlines()[0] else "sh"
    assert path.stat().st_mode & stat.S_IXUSR
    assert subprocess.run([shell, "-n", path], capture_output=True, text=True, timeout=10).stderr == ""


def test_a_stage_passes_on_its_exit_code_and_says_how_long_it_took() -> None:
    """.ci/stage: the command's own code, its name and its seconds."""
    ended = subprocess.run(
        ["sh", ROOT / ".ci" / "stage", "three", "sh", "-c", "exit 3"], capture_output=True, text=True
    )
    assert ended.returncode == 3
    assert "== three: FAILED with exit code 3 after" in ended.stdout
    ended = subprocess.run(["sh", ROOT / ".ci" / "stage", "fine", "true"], capture_output=True, text=True)
    assert ended.returncode == 0
    assert "== fine: ok," in ended.stdout
