"""Faults injected one at a time into a simulated engine go events -> store -> diagnose, at every level of observation."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from diagnosis.diagnose import diagnose
from diagnosis.telling.verdict import Verdict
from engine_probe.schema import table_from_rows
from store.interface import Batch, Store, Window
from store.open import open_store
from tests.simulate import Rows, Setup, at_level, simulate

BASE = Setup()
FAULTS: dict[str, dict[str, Any]] = {
    "base": {},
    "quiet": {"seed": 2},
    "squeeze": {"num_blocks": 300},
    "starve": {"num_blocks": 160},
    "chatty": {"output_tokens": (96, 320), "rate": 3.0, "groups": 1},
    "storm": {"output_tokens": (96, 320), "rate": 3.0, "groups": 1, "num_blocks": 175},
    "load": {"rate": 11.0},
    "slow": {"slow": 1.6},
    "off": {"caching": False},
    "long": {"long_every": 25},
    "many": {"groups": 60},
    "cold": {"groups": 60, "warm": False},
}


@cache
def rows(fault: str) -> Rows:
    return simulate(BASE, fault, **FAULTS[fault])


@pytest.fixture(scope="module", params=["plugin", "otlp", "client"])
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    folder: Path = tmp_path_factory.mktemp("faults")
    opened = {}
    for name in ("plugin", "otlp", "client"):
        opened[name] = open_store(str(folder / f"{name}.duckdb"))
        for fault in FAULTS:
            seen = at_level(rows(fault), name)
            opened[name].append(Batch({kind: table_from_rows(kind, part) for kind, part in seen.items() if part}))
    return opened


def judge(store: Store, suspect: str, metric: str = "ttft", base: str = "base") -> Verdict:
    return diagnose(store, Window(run_id=base), Window(run_id=suspect), metric=metric, now_ns=time.time_ns())


def first(verdict: Verdict) -> str | None:
    return verdict.causes[0].cause if verdict.causes else None


FIRST = [
    ("squeeze", "ttft", "premature_eviction"),
    ("starve", "ttft", "admission_blocked_on_blocks"),
    ("load", "ttft", "load_step"),
    ("load", "e2e", "load_step"),
    ("slow", "ttft", "slow_steps"),
    ("slow", "tpot", "slow_steps"),
    ("off", "ttft", "prefix_caching_off"),
    ("long", "ttft", "long_prefill_interference"),
    ("long", "tpot", "long_prefill_interference"),
]


@pytest.mark.parametrize(("fault", "metric", "expected"), FIRST)
def test_injected_fault_is_the_first_cause(stores: dict[str, Store], fault: str, metric: str, expected: str) -> None:
    """With everything observed the injected cause ranks first, and the quality checks find no contradiction."""
    verdict = judge(stores["plugin"], fault, metric)
    assert first(verdict) == expected, verdict.verdict
    assert all(check["status"] != "contradiction" for check in verdict.quality)


def test_preemption_storm_is_named(stores: dict[str, Store]) -> None:
    """Long answers outgrow the pool: running requests are preempted, and TPOT pays for it."""
    verdict = judge(stores["plugin"], "storm", "tpot", base="chatty")
    assert first(verdict) == "preemption_recompute", verdict.verdict


def test_cold_start_is_named(stores: dict[str, Store]) -> None:
    """60 prefix groups, an empty cache and a start mark: the first minute pays."""
    assert first(judge(stores["plugin"], "cold", base="many")) == "cold_start"


def test_another_seed_is_no_change(stores: dict[str, Store], level: str) -> None:
    """A quiet pair names nothing at any level, for any metric."""
    for metric in ("ttft", "tpot", "e2e"):
        verdict = judge(stores[level], "quiet", metric)
        assert verdict.status == "no_change"
        assert verdict.causes == []


def test_rows_sum_to_the_change_at_every_level(stores: dict[str, Store], level: str) -> None:
    """Whatever is seen, every second of the change stands in a row."""
    for fault in ("starve", "load", "long"):
        for metric in ("ttft", "tpot", "e2e"):
            verdict = judge(stores[level], fault, metric)
            assert sum(r.mean_s for r in verdict.attribution) == pytest.approx(verdict.delta.mean_s, abs=1e-9)
            assert sum(r.judged_s for r in verdict.attribution) == pytest.approx(verdict.delta.judged_s, abs=1e-9)
            assert sum(r.p99_s for r in verdict.attribution) == pytest.approx(verdict.delta.p99_s, abs=1e-9)


def test_client_alone_says_that_it_cannot_see_the_queue(stores: dict[str, Store]) -> None:
    """A client's clock sees that TTFT rose, not why: not observable, and no capacity cause is invented."""
    for fault in ("squeeze", "starve", "off"):
        verdict = judge(stores["client"], fault)
        assert verdict.status == "not_observable"
        assert verdict.causes == []
        assert {row["cause"] for row in verdict.not_observable} >= {"admission_blocked_on_blocks", "premature_eviction"}


def test_client_alone_still_sees_slow_steps(stores: dict[str, Store]) -> None:
    """Token times at equal concurrency tell slow steps without the engine's help."""
    assert first(judge(stores["client"], "slow", "tpot")) == "slow_steps"


def test_spans_and_metrics_name_what_they_can(stores: dict[str, Store]) -> None:
    """Spans and counters suffice for load, slow steps, caching off and long prompts."""
    for fault, expected in (("load", "load_step"), ("slow", "slow_steps"), ("off", "prefix_caching_off")):
        assert first(judge(stores["otlp"], fault)) == expected
    assert first(judge(stores["otlp"], "long")) == "long_prefill_interference"


def test_lost_reuse_without_block_events_is_not_observable(stores: dict[str, Store]) -> None:
    """The hit counter fell, but without KV events nobody can tell eviction from new prompts: it is said, not guessed."""
    verdict = judge(stores["otlp"], "squeeze")
    assert verdict.status == "not_observable"
    assert any(row.cause == "reuse_lost" and row.judged_s > 0 for row in verdict.attribution)
    assert all(cause.cause != "premature_eviction" for cause in verdict.causes)


def test_truth_of_the_share_is_met(stores: dict[str, Store]) -> None:
    """Slow steps are the only difference: they own at least three quarters, the knock-on of fuller batches the rest."""
    verdict = judge(stores["plugin"], "slow")
    assert 0.75 <= verdict.causes[0].share_p99 <= 1.02


def test_improvement_is_explained_too(stores: dict[str, Store]) -> None:
    """The same pair the other way round: it fell, for the same reason."""
    verdict = judge(stores["plugin"], "base", base="off")
    assert verdict.delta.judged_s < 0
    assert "fell" in verdict.verdict


def test_same_seed_gives_the_identical_verdict(stores: dict[str, Store]) -> None:
    """Judgement has no randomness of its own."""
    assert judge(stores["plugin"], "starve").to_dict() == judge(stores["plugin"], "starve").to_dict()
