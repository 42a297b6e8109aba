"""`diagnose` at exactly the level of Dynamo, llm-d, LMCache, Mooncake, hosts and metrics servers: it names nothing beyond it.

Dynamo's request trace alone judges a latency, as its router saw it; the others explain what somebody else observes.
"""

from __future__ import annotations

import pytest

from diagnosis.observability import judgeable
from engine_probe.adapters.provides import declared
from engine_probe.errors import BadWindow
from store.interface import Store
from tests.diagnosed import as_run, runs, stored
from tests.integration.test_engines_diagnosis import FAULTS, SETUP, Level, cut, judge, metrics_of

MINE = ("dynamo", "llm-d", "lmcache", "mooncake", "dcgm", "nvidia-smi", "node", "cadvisor", "prometheus")
LEVELS = [
    Level("dynamo", ("trace",), ("router",)),
    Level("dynamo", ("metrics", "log", "trace"), ("router",)),
]
SILENT = [
    Level("dynamo", ("metrics", "log"), ()),
    Level("llm-d", ("metrics", "log"), ()),
    Level("lmcache", ("metrics", "log"), ()),
    Level("mooncake", ("metrics",), ()),
    Level("dcgm", ("metrics",), ()),
    Level("nvidia-smi", ("metrics",), ()),
    Level("node", ("metrics",), ()),
    Level("cadvisor", ("metrics",), ()),
    Level("prometheus", ("server",), ()),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    simulated = runs(FAULTS, SETUP)
    pairs = [(level, name) for level in LEVELS for name in FAULTS]
    pairs += [(level, name) for level in SILENT for name in ("base", "load")]
    parts = [as_run(cut(simulated[name], level), f"{level}:{name}") for level, name in pairs]
    return stored(tmp_path_factory.mktemp("sources") / "s.duckdb", parts)


@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("fault", ["squeeze", "load", "slow"])
def test_a_router_names_only_what_it_can_see(store: Store, level: Level, fault: str) -> None:
    """No cause that lies within an engine, each of them said to be not observable, and the seconds left unexplained."""
    can = judgeable(level.names)
    assert can.metrics == ("ttft",)
    verdict = judge(store, level, fault, "ttft")
    assert {cause.cause for cause in verdict.causes} <= set(can.causes)
    blind = {one["cause"] for one in verdict.excluded if "not observable here" in one["because"]}
    blind |= {one["cause"] for one in verdict.not_observable}
    assert set(can.lacking) <= blind
    assert "ttft_unobserved" in {row.cause for row in verdict.attribution}
    assert sum(row.mean_s for row in verdict.attribution) == pytest.approx(verdict.delta.mean_s, abs=1e-6)


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_a_quiet_pair_names_nothing(store: Store, level: Level) -> None:
    """Another seed of the same load."""
    verdict = judge(store, level, "quiet", "ttft")
    assert verdict.status == "no_change", verdict.verdict
    assert verdict.causes == []


@pytest.mark.parametrize("level", SILENT, ids=str)
def test_without_requests_no_latency_is_judged(store: Store, level: Level) -> None:
    """Numbers and decisions alone judge no latency: diagnose says that there are no requests."""
    assert metrics_of(level) == ()
    with pytest.raises(BadWindow, match="holds no"):
        judge(store, level, "load", "ttft")


def test_every_source_is_looked_through() -> None:
    """No declared source is left out of the levels above."""
    used = {(level.engine, source) for level in [*LEVELS, *SILENT] for source in level.sources}
    assert used == {(one.engine, one.source) for one in declared() if one.engine in MINE}
