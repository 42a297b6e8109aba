"""Recordings of a real vLLM give the causes that are known of them, from evidence and not from names."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from collector.commands.import_ import import_source
from diagnosis.diagnose import diagnose
from diagnosis.hotspots.judge import hotspots
from diagnosis.telling.verdict import Verdict
from engine_probe.readers.detect import open_source
from engine_probe.readers.source import RECORDINGS_SALT, ReadOptions
from store.interface import Store, Window
from store.open import open_store

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "r1": ROOT / "examples/recordings/a-ample-long",
    "r2": ROOT / "tests/data/pairs/a2-ample-long",
    "r3": ROOT / "examples/recordings/c-squeeze-long",
    "r4": ROOT / "tests/data/pairs/a-ample",
    "r5": ROOT / "tests/data/pairs/b-cache-off",
    "r6": ROOT / "tests/data/pairs/c-squeeze",
    "r7": ROOT / "tests/data/pairs/c-squeeze-slow-steps",
}
CAPACITY = {"admission_blocked_on_blocks", "premature_eviction", "preemption_recompute"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Every recording as a run whose name tells nothing."""
    opened = open_store(str(tmp_path_factory.mktemp("recordings") / "store.duckdb"))
    for run, folder in FOLDERS.items():
        import_source(open_source(folder), opened, run, ReadOptions(salt=RECORDINGS_SALT))
    return opened


def judge(store: Store, base: str, suspect: str, metric: str = "ttft") -> Verdict:
    return diagnose(store, Window(run_id=base), Window(run_id=suspect), metric=metric, now_ns=time.time_ns())


def names(verdict: Verdict) -> list[str]:
    return [cause.cause for cause in verdict.causes]


def test_squeezed_against_ample_names_capacity_with_block_lineage(store: Store) -> None:
    """112 blocks in place of 2,048: waiting for blocks owns most of the tail, and lineage tells which tokens were computed twice."""
    verdict = judge(store, "r1", "r3")
    assert verdict.status == "explained"
    assert set(names(verdict)) <= CAPACITY
    assert names(verdict)[0] == "admission_blocked_on_blocks"
    assert "premature_eviction" in names(verdict)
    lineage = next(c for c in verdict.causes if c.cause == "premature_eviction").evidence[0]
    assert lineage["unit"] == "tokens"
    # counted apart, by a plain loop over the raw messages: full blocks that a request missed although a BlockStored before
    # its arrival held them
    assert lineage["value"] == 214_720
    assert store.query(lineage["sql"]).column("tokens").to_pylist() == [214_720]
    assert lineage["request_ids"]
    assert verdict.causes[0].share_p99 > 0.7
    owned = {row.cause: row.mean_s * 1e3 for row in verdict.attribution}
    assert owned["admission_blocked_on_blocks"] == pytest.approx(144.0, abs=0.5)
    assert owned["premature_eviction"] == pytest.approx(18.8, abs=0.05)
    assert {"load_step", "prefix_caching_off"} <= {row["cause"] for row in verdict.excluded}


def test_rows_of_a_real_pair_sum_to_the_change(store: Store) -> None:
    """Attribution, in every column, is the whole change."""
    verdict = judge(store, "r1", "r3")
    rows, delta = verdict.attribution, verdict.delta
    assert sum(r.mean_s for r in rows) == pytest.approx(delta.mean_s, abs=1e-9)
    assert sum(r.p99_s for r in rows) == pytest.approx(delta.p99_s, abs=1e-9)
    assert sum(r.judged_s for r in rows) == pytest.approx(delta.judged_s, abs=1e-9)


@pytest.mark.parametrize("metric", ["ttft", "tpot", "e2e"])
def test_a_pair_of_equal_runs_gives_no_cause(store: Store, metric: str) -> None:
    """The same engine under the same load with another seed: nothing is named, in either order."""
    for base, suspect in (("r1", "r2"), ("r2", "r1")):
        verdict = judge(store, base, suspect, metric)
        assert verdict.status == "no_change", verdict.verdict
        assert verdict.causes == []


def test_cache_switched_off_is_named(store: Store) -> None:
    """Prefix caching off: named, alone, and 348 requests are said to be too few for a P99 interval."""
    verdict = judge(store, "r4", "r5")
    assert names(verdict) == ["prefix_caching_off"]
    assert verdict.quantile == "0.95"
    assert any("too few" in note for note in verdict.notes)
    assert verdict.delta.p99_interval_95 is None
    assert verdict.causes[0].confidence_word != "high"


def test_short_squeezed_run_names_capacity(store: Store) -> None:
    """Without prompt blocks the eviction is seen from blocks stored again."""
    verdict = judge(store, "r4", "r6")
    assert names(verdict)[0] == "admission_blocked_on_blocks"
    assert set(names(verdict)) <= CAPACITY


@pytest.mark.parametrize(("base", "metric"), [("r4", "ttft"), ("r6", "ttft"), ("r4", "e2e")])
def test_slow_steps_are_not_put_down_to_capacity_alone(store: Store, base: str, metric: str) -> None:
    """Steps took 1.7 times as long: capacity is named, and so are the slow steps."""
    verdict = judge(store, base, "r7", metric)
    assert "slow_steps" in names(verdict)
    assert "admission_blocked_on_blocks" in names(verdict)


def test_slow_steps_lead_where_decoding_is_judged(store: Store) -> None:
    """TPOT hardly depends on capacity, so it points at the steps."""
    assert names(judge(store, "r4", "r7", "tpot"))[0] == "slow_steps"


def test_names_do_not_matter(store: Store, tmp_path: Path) -> None:
    """The truth and the folder's name are not read: a renamed copy with a wrong truth gives the identical verdict."""
    copy = tmp_path / "everything-is-fine"
    shutil.copytree(FOLDERS["r6"], copy)
    scenario = json.loads((copy / "scenario.json").read_text())
    scenario |= {"truth": {"cause": "none", "sentence": "nothing"}, "scenario": "x", "title": "x", "workload": {}}
    (copy / "scenario.json").write_text(json.dumps(scenario))
    other = open_store(str(tmp_path / "other.duckdb"))
    import_source(open_source(FOLDERS["r4"]), other, "r4", ReadOptions(salt=RECORDINGS_SALT))
    import_source(open_source(copy), other, "r6", ReadOptions(salt=RECORDINGS_SALT))
    assert without_noise(judge(other, "r4", "r6")) == without_noise(judge(store, "r4", "r6"))


def without_noise(verdict: Verdict) -> dict[str, Any]:
    return verdict.to_dict()


@pytest.mark.parametrize("folder", ["vllm-0.32.0-two-workers", "sglang-0.5.23", "llamacpp"])
def test_engines_in_which_nothing_is_wrong_accuse_nobody(folder: str, tmp_path: Path) -> None:
    """First and second half of a sound recording of each engine: no cause, nothing that contradicts itself, no hotspot."""
    opened = open_store(str(tmp_path / "sound.duckdb"))
    import_source(open_source(ROOT / "tests/data/recordings" / folder), opened, "r", ReadOptions(salt=RECORDINGS_SALT))
    measured = "coalesce(labels['phase'], '') <> 'warmup'"
    arrivals = opened.query(f"SELECT min(arrival_ns) AS first, max(arrival_ns) AS last FROM request WHERE {measured}")
    start, end = arrivals["first"][0].as_py(), arrivals["last"][0].as_py() + 1
    middle = (start + end) // 2
    halves = Window(start, middle, "r"), Window(middle, end, "r")
    for pair in (halves, halves[::-1]):
        verdict = diagnose(opened, *pair, now_ns=time.time_ns())
        assert verdict.causes == [], verdict.verdict
        assert not [row for row in verdict.quality if row["status"] == "contradiction"]
    assert hotspots(opened, Window(start, end, "r")).hotspots == ()
