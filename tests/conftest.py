"""Fixtures that every test may use: the command line in this process, one PostgreSQL a session, a database a test."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings

from tests.servers import Postgres, running_postgres

# Two cores: a numeric library's thread pool only makes tests wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No test asserts a time, so a busy machine must not fail one; CI draws the same examples every time.
settings.register_profile(
    "kvscope",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
)
settings.load_profile("kvscope")

_database_number = itertools.count()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under KVSCOPE_REQUIRE_SERVERS=1 a server test that was skipped, for whatever reason, has failed."""
    report = yield
    if report.skipped and os.environ.get("KVSCOPE_REQUIRE_SERVERS") == "1" and item.get_closest_marker("server"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"server test skipped under KVSCOPE_REQUIRE_SERVERS=1: {reason}"
    return report


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own KVSCOPE_* variables do not reach the tests."""
    for name in list(os.environ):
        if name.startswith("KVSCOPE_") and name not in ("KVSCOPE_REQUIRE_SERVERS", "KVSCOPE_VLLM_HOME"):
            monkeypatch.delenv(name)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended: exit code, and what it wrote."""

    code: int
    out: str
    err: str


@pytest.fixture
def kvscope(capsysbinary: pytest.CaptureFixture[bytes]) -> Callable[..., Ended]:
    """Run `kvscope ARGS...` in this process: `kvscope("capacity", "--json")` answers an `Ended`."""
    from collector.cli import main

    def run(*args: object) -> Ended:
        capsysbinary.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(arg) for arg in args])
        written = capsysbinary.readouterr()
        code = end.value.code
        return Ended(
            code if isinstance(code, int) else int(code is not None), written.out.decode(), written.err.decode()
        )

    return run


@pytest.fixture(scope="module")
def few_replicates() -> Iterator[None]:
    """A module's verdicts with fewer replicates: for tests that look at many verdicts, and at no interval."""
    from tests import diagnosed

    with diagnosed.few_replicates():
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A running PostgreSQL, shared by the session; skips or fails as `require("postgres")` does."""
    with running_postgres() as server:
        yield server


@pytest.fixture
def postgres_database(postgres: Postgres) -> str:
    """DSN (key=value) of an empty database that no other test uses."""
    return postgres.create_database(f"kvscope_{next(_database_number)}")
