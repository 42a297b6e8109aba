"""`diagnose` at exactly the level of observation of each engine: it runs, and names nothing that this engine cannot show.

Rows of a simulated engine are cut down to the names that the sources declare; whatever else the simulation knows is gone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from diagnosis.diagnose import diagnose
from diagnosis.ledger.rows import ROWS
from diagnosis.observability import judgeable
from diagnosis.telling.verdict import Verdict
from engine_probe.adapters.provides import declared, visible
from engine_probe.errors import BadWindow
from store.interface import Store, Window
from tests.diagnosed import as_run, few_replicates, runs, stored, with_client
from tests.simulate import Rows, Setup

MINE = ("sglang", "llamacpp", "trtllm", "triton-trtllm", "tgi")
FAULTS: dict[str, dict[str, Any]] = {
    "base": {},
    "quiet": {"seed": 2},
    "squeeze": {"num_blocks": 300},
    "load": {"rate": 11.0},
    "slow": {"slow": 1.6},
}
SETUP = Setup(num_requests=300)


@dataclass(frozen=True)
class Level:
    """What somebody looks at; `vantages` whose request rows are there."""

    engine: str
    sources: tuple[str, ...]
    vantages: tuple[str, ...]

    def __str__(self) -> str:
        return "+".join((self.engine, *self.sources))

    @property
    def names(self) -> frozenset[str]:
        return visible(self.engine, self.sources)


LEVELS = [
    Level("sglang", ("metrics", "server_info", "kv_events", "log"), ("engine",)),
    Level("sglang", ("metrics", "server_info", "client"), ("client",)),
    Level("sglang", ("otlp",), ("engine",)),
    Level("sglang", ("kv_events", "server_info", "log", "client"), ("engine", "client")),
    Level("llamacpp", ("metrics", "props", "slots", "log", "client"), ("client",)),
    Level("trtllm", ("metrics", "perf_metrics", "kv_events"), ("engine",)),
    Level("trtllm", ("iterations", "kv_events", "client"), ("client",)),
    Level("triton-trtllm", ("metrics", "client"), ("client",)),
    Level("tgi", ("metrics", "info", "log"), ("engine",)),
    Level("tgi", ("metrics", "client"), ("client",)),
]
SILENT = [
    Level("sglang", ("metrics", "server_info", "kv_events"), ()),
    Level("llamacpp", ("metrics", "slots"), ()),
    Level("trtllm", ("metrics", "iterations", "kv_events"), ()),
    Level("triton-trtllm", ("metrics",), ()),
    Level("tgi", ("metrics", "info"), ()),
]


def cut(rows: Rows, level: Level) -> Rows:
    """The rows with the declared names alone."""
    names = level.names
    kept: Rows = {"request": []}
    for vantage in level.vantages:
        sources = [one for one in declared() if one.engine == level.engine and one.source in level.sources]
        client = {name for one in sources if one.source == "client" for name in one.names}
        engine = {name for one in sources if one.source != "client" for name in one.names}
        shown = client if vantage == "client" else engine
        told = (
            [row for row in with_client(rows)["request"] if row["vantage"] == "client"] if vantage == "client" else None
        )
        for row, full in zip(told or rows["request"], rows["request"], strict=True):
            kept["request"].append(_shown("request", {**full, **row, "vantage": vantage}, shown))
    for kind in ("step", "worker", "sample"):
        kept[kind] = [_shown(kind, row, names) for row in rows[kind] if _speaks(kind, row, names)]
    kept["block"] = [_shown("block", row, names) for row in rows["block"] if f"block.{row['change']}" in names]
    return kept


def _speaks(kind: str, row: Mapping[str, Any], names: frozenset[str]) -> bool:
    if kind == "sample":
        return f"sample.{row['name']}" in names
    return any(name.startswith(f"{kind}.") for name in names)


def _shown(kind: str, row: Mapping[str, Any], names: frozenset[str] | set[str]) -> dict[str, Any]:
    always = {"run_id", "vantage", "change", "name", "value", "at_ns", "state"}
    return {key: value for key, value in row.items() if key in always or f"{kind}.{key}" in names}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    simulated = runs(FAULTS, SETUP)
    pairs = [(level, name) for level in LEVELS for name in FAULTS]
    pairs += [(level, name) for level in SILENT for name in ("base", "load")]
    parts = [as_run(cut(simulated[name], level), f"{level}:{name}") for level, name in pairs]
    return stored(tmp_path_factory.mktemp("engines") / "s.duckdb", parts)


def metrics_of(level: Level) -> tuple[str, ...]:
    return judgeable(level.names).metrics


def judge(store: Store, level: Level, fault: str, metric: str) -> Verdict:
    base, suspect = (Window(run_id=f"{level}:{name}") for name in ("base", fault))
    with few_replicates():
        return diagnose(store, base, suspect, metric=metric, now_ns=time.time_ns())


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_only_what_is_observable_is_named(store: Store, level: Level) -> None:
    """Every fault, the first metric that this level can judge: no cause outside the declared ones, the others say why not."""
    can = judgeable(level.names)
    metric = can.metrics[0]
    for fault in ("squeeze", "load", "slow"):
        verdict = judge(store, level, fault, metric)
        named = {cause.cause for cause in verdict.causes}
        assert named <= set(can.causes), (fault, named - set(can.causes))
        blind = {one["cause"]: one["because"] for one in verdict.excluded if "not observable here" in one["because"]}
        blind |= {one["cause"]: one["because"] for one in verdict.not_observable}
        assert set(can.lacking) <= blind.keys(), (fault, set(can.lacking) - blind.keys())
        assert all(check["status"] != "contradiction" for check in verdict.quality), verdict.quality
        total = sum(row.mean_s for row in verdict.attribution)
        assert total == pytest.approx(verdict.delta.mean_s, abs=1e-6)


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_seconds_that_nobody_told_are_not_split(store: Store, level: Level) -> None:
    """Where queue or prefill is unknown, no row of the ledger speaks of it."""
    if metrics_of(level)[0] != "ttft":
        return
    verdict = judge(store, level, "load", "ttft")
    rows = {row.cause for row in verdict.attribution}
    knows = {name for name in ("queue_s", "prefill_s") if f"request.{name}" in level.names}
    if len(knows) < 2:
        assert not rows & {"queue_load", "own_prefill", "admission_blocked_on_blocks"}, rows
        assert "ttft_unobserved" in rows
    else:
        assert "ttft_unobserved" not in rows


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_a_quiet_pair_names_nothing(store: Store, level: Level) -> None:
    """Another seed of the same load, at every metric that this level can judge."""
    for metric in metrics_of(level):
        verdict = judge(store, level, "quiet", metric)
        assert verdict.status == "no_change", (metric, verdict.verdict)
        assert verdict.causes == []


@pytest.mark.parametrize("level", SILENT, ids=str)
def test_without_requests_no_latency_is_judged(store: Store, level: Level) -> None:
    """Metrics and events alone explain what others observe: diagnose says that there are no requests."""
    assert metrics_of(level) == ()
    with pytest.raises(BadWindow, match="holds no"):
        judge(store, level, "load", "ttft")


def test_every_source_of_these_engines_is_looked_through() -> None:
    """No declared source is left out of the levels above."""
    used = {(level.engine, source) for level in [*LEVELS, *SILENT] for source in level.sources}
    assert used == {(one.engine, one.source) for one in declared() if one.engine in MINE}


def test_rows_have_texts() -> None:
    """The rows that are looked for here are rows of the ledger."""
    assert {"ttft_unobserved", "queue_load", "own_prefill", "admission_blocked_on_blocks"} <= set(ROWS)
