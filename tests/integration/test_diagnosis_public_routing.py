"""Faults of routing that people reported, as small inputs of the reported size: what the verdict says, and must not say.

As `test_diagnosis_public_reports.py`: numbers that a report does not tell are ours; each is jittered by about 5 %.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnosis.diagnose import diagnose
from diagnosis.hotspots.judge import hotspots
from diagnosis.telling.text import render
from diagnosis.telling.verdict import Verdict
from store.interface import Store, Window
from tests.diagnosed import judged, stored
from tests.simulate import T0_NS, Rows, ns

CAPACITY = {"admission_blocked_on_blocks", "premature_eviction", "preemption_recompute", "decode_block_shortage"}
TOKEN_S = 0.0006


pytestmark = pytest.mark.usefixtures("few_replicates")


def names(verdict: Verdict) -> list[str]:
    return [cause.cause for cause in verdict.causes]


def engine_row(
    run: str, i: int, worker: str, arrival: float, begun: float, first: float, last: float, **more: Any
) -> Any:
    """The engine's row of one request: it arrives, begins, gives its first token and its last (s)."""
    row = {"request_id": f"{run}-{i}", "run_id": run, "worker": worker, "vantage": "engine", "state": "finished"}
    instants = {"arrival_ns": arrival, "first_scheduled_ns": begun, "first_token_ns": first, "last_token_ns": last}
    row |= {name: ns(at) for name, at in instants.items()} | {"end_ns": ns(last), "at_ns": ns(last)}
    return (
        row
        | {"queue_s": begun - arrival, "prefill_s": first - begun, "decode_s": last - first, "frontend_s": 0.0}
        | more
    )


# The second worker receives only health checks: sgl-project/sglang PR 15473

SEATS, DECODE_S, SPAN_S = 48, 9.5, 120.0


def two_workers(run: str, seed: int, *, is_dead: bool, tells: str) -> Rows:
    """600 requests to w0 and w1 of 48 seats each, prompts that share nothing. tells: what the router tells (gauge, routes).

    A router whose loads live takes turns; one whose loads are dead sends all to the first.
    """
    rng = np.random.default_rng(seed)
    rows: Rows = {"request": [], "sample": [], "route": [], "worker": []}
    free = [np.zeros(SEATS), np.zeros(SEATS)]
    spans: list[list[tuple[float, float, float]]] = [[], []]
    for i, at in enumerate(np.sort(rng.uniform(0, SPAN_S, 600))):
        index = 0 if is_dead else i % 2
        seat = int(free[index].argmin())
        prompt = round(500 * rng.uniform(0.95, 1.05))
        begun = max(at, free[index][seat])
        first = begun + prompt * TOKEN_S
        last = first + DECODE_S * rng.uniform(0.95, 1.05)
        has = [sum(1 for arrival, _, end in mine if arrival <= at < end) for mine in spans]
        free[index][seat] = last
        spans[index].append((at, begun, last))
        lengths = {"prompt_tokens": prompt, "cached_tokens": 0, "computed_tokens": prompt, "output_tokens": 100}
        rows["request"].append(
            engine_row(run, i, f"w{index}", at, begun, first, last, prefix_hash=1000 * seed + i, **lengths)
        )
        loads = [0.0, 0.0] if is_dead else [float(n) for n in has]
        candidates = [{"worker": f"w{k}", "load": load, "score": -load} for k, load in enumerate(loads)]
        rows["route"].append(
            {
                "request_id": f"{run}-{i}",
                "run_id": run,
                "at_ns": ns(at) - 1,
                "policy": "cache_aware",
                "chosen": f"w{index}",
                "candidates": candidates,
            }
        )
    for second in range(round(SPAN_S)):
        for k in range(2):
            told = {"run_id": run, "worker": f"w{k}", "at_ns": ns(second)}
            running = sum(1 for _, begun, last in spans[k] if begun <= second < last)
            waiting = sum(1 for at, begun, _ in spans[k] if at <= second < begun)
            load = 0.0 if is_dead else float(running + waiting)
            for name, value in (("requests_running", running), ("requests_waiting", waiting), ("router_load", load)):
                rows["sample"].append({**told, "name": name, "value": float(value)})
    if tells == "routes":
        rows["sample"] = [row for row in rows["sample"] if row["name"] != "router_load"]
    else:
        rows["route"] = []
    return rows


@pytest.mark.parametrize("tells", ["gauge", "routes"])
def test_a_dead_load_signal_is_no_prefix_skew(tmp_path: Path, tells: str) -> None:
    """All 600 go to the first of two workers: the router's load of 0 disagrees with engines that queue, and no prefix is blamed."""
    runs = [two_workers(name, seed, is_dead=name == "dead", tells=tells) for seed, name in ((1, "alive"), (2, "dead"))]
    most = max(row["value"] for row in runs[1]["sample"] if row["name"] == "requests_waiting")
    assert most > 20
    with stored(tmp_path / "s.duckdb", runs) as store:
        found, quiet = hotspots(store, Window(run_id="dead")), hotspots(store, Window(run_id="alive"))
        verdict = judged(store, "alive", "dead")
        spot = found.hotspots[0]
        for fact in spot.evidence:
            if fact.sql is not None and fact.value is not None:
                assert store.query(fact.sql).column(0)[0].as_py() == pytest.approx(fact.value)
    assert quiet.status == "none"
    assert [each.kind for each in found.hotspots] == ["dead_signal"]
    assert spot.subject == {"kind": "worker", "id": "w0"}
    said = " ".join(fact.statement for fact in spot.evidence)
    assert "the router read a load of 0 of every worker" in said
    assert "requests waited in an engine" in said
    assert "w0 got 600 of 600 requests" in said
    assert names(verdict)[0] == "hotspot_dead_signal", verdict.verdict
    assert verdict.causes[0].subject == {"kind": "worker", "id": "w0"}
    assert not set(names(verdict)) & (CAPACITY | {"hotspot_affinity", "hotspot_tie_breaking", "load_step"})


# The tail explodes in some windows, one worker turns slow for a while: NVIDIA/aicr issues 1192 and 1197

NUM_WORKERS, SLOW_WORKER, SLOW_FROM_S, SLOW_FOR_S, FLEET_S = 8, 5, 120.0, 40.0, 170.0
EACH_S, STEP_S = 11.0, 0.0727
"""Requests a second at each worker, and what one takes: four fifths of its time; four times as long, it falls behind by 7.6 a second."""


def fleet(run: str, seed: int, *, slow: float, has_steps: bool) -> Rows:
    """Eight workers by turn, first come first served, a step a request; w5's take `slow` times as long from 120 s to 160 s."""
    rng = np.random.default_rng(seed)
    num = round(NUM_WORKERS * EACH_S * FLEET_S)
    rows: Rows = {"request": [], "route": [], "step": [], "sample": [], "worker": []}
    free = np.zeros(NUM_WORKERS)
    ends: list[list[float]] = [[] for _ in range(NUM_WORKERS)]
    for i, at in enumerate(np.sort(rng.uniform(0, FLEET_S, num))):
        k = i % NUM_WORKERS
        begun = max(at, free[k])
        is_slow = k == SLOW_WORKER and SLOW_FROM_S <= begun < SLOW_FROM_S + SLOW_FOR_S
        took = STEP_S * rng.uniform(0.95, 1.05) * (slow if is_slow else 1.0)
        free[k] = begun + took
        lengths = {"prompt_tokens": 700, "cached_tokens": 0, "computed_tokens": 700, "output_tokens": 1}
        rows["request"].append(engine_row(run, i, f"w{k}", at, begun, begun + took, begun + took, **lengths))
        ends[k].append(begun)
        told = {"run_id": run, "request_id": f"{run}-{i}", "at_ns": ns(at) - 1}
        rows["route"].append({**told, "policy": "round_robin", "chosen": f"w{k}", "candidates": []})
        rows["step"].append(
            {
                "run_id": run,
                "worker": f"w{k}",
                "at_ns": ns(begun + took),
                "step": len(ends[k]),
                "duration_s": took,
                "prefill_tokens": 700,
                "decode_tokens": 0,
                "num_running": 1,
                "blocks_total": 1000,
                "blocks_used": 600,
            }
        )
    for row, step in zip(rows["request"], rows["step"], strict=True):
        k = int(row["worker"][1:])
        came = (row["first_token_ns"] - T0_NS) / 1e9 * EACH_S  # by turn: about so many came to it by then
        step["num_waiting_prefill"] = max(0, round(min(came, len(ends[k]))) - step["step"])
    for second in range(round(FLEET_S)):
        for k in range(NUM_WORKERS):
            value = 0.12 * rng.uniform(0.95, 1.05)
            rows["sample"].append(
                {"run_id": run, "worker": f"w{k}", "at_ns": ns(second), "name": "cpu_util", "value": value}
            )
    for k in range(NUM_WORKERS):
        facts = {"run_id": run, "worker": f"w{k}", "at_ns": T0_NS, "block_size": 16, "num_blocks": 1000}
        rows["worker"].append({**facts, "flags": {"max_num_seqs": "256"}})
    if not has_steps:
        rows["step"], rows["route"] = [], []
    return rows


@pytest.mark.parametrize("has_steps", [True, False], ids=["steps and routes", "requests alone"])
def test_a_straggler_is_named_with_its_time(tmp_path: Path, has_steps: bool) -> None:
    """w5 and the 40 s in which it was slow; not the host's CPU, which was as elsewhere, not capacity, no prefix, no load."""
    runs = [
        fleet(name, seed, slow=slow, has_steps=has_steps) for name, seed, slow in (("good", 1, 1.0), ("bad", 2, 4.0))
    ]
    late = [row["worker"] for row in runs[1]["request"] if row["first_token_ns"] - row["arrival_ns"] > 2e9]
    assert late.count("w5") / len(late) > 0.97
    with stored(tmp_path / "s.duckdb", runs) as store:
        verdict = judged(store, "good", "bad")
    first = verdict.causes[0]
    assert first.cause == "hotspot_straggler", verdict.verdict
    assert first.subject == {"kind": "worker", "id": "w5"}
    assert first.interval is not None
    assert abs(first.interval["start_ns"] - ns(SLOW_FROM_S)) <= 15e9
    assert abs(first.interval["end_ns"] - ns(SLOW_FROM_S + SLOW_FOR_S)) <= 15e9
    assert first.share_p99 is not None
    assert first.share_p99 > 0.8
    told = [evidence["statement"] for evidence in first.evidence]
    assert any("host's CPU use 12 %" in said and "not the reason" in said for said in told), told
    wrong = CAPACITY | {
        "load_step",
        "hotspot_affinity",
        "hotspot_dead_signal",
        "front_end",
        "length_shift",
        "mix_shift",
    }
    assert not set(names(verdict)) & wrong


# After the router restarts, warm prefixes look cold: llm-d/llm-d-kv-cache issue 372

BLOCK, PREFIX_BLOCKS, TAIL_BLOCKS = 16, 40, 10
RESTART_S, END_S, GROUPS = 300.0, 600.0, 320


def restarted(seed: int) -> Rows:
    """Four workers, 4 requests a second; prompts of 50 blocks, 40 of them a group's prefix, in 7 of 10 groups behind one common block.

    The router's index is cleared at 300 s and hears live events only: a stored block whose parent it does not know is dropped.
    """
    rng = np.random.default_rng(seed)
    rows: Rows = {"request": [], "route": [], "block": [], "worker": []}
    held: list[set[int]] = [set() for _ in range(4)]
    index: list[set[int]] = [set() for _ in range(4)]
    is_cleared = False
    for i, at in enumerate(np.sort(rng.uniform(0, END_S, round(END_S * 4)))):
        if at >= RESTART_S and not is_cleared:
            index, is_cleared = [set() for _ in range(4)], True
        group = int(rng.integers(GROUPS))
        root = 7 if group % 10 < 7 else 1_000 * (group + 1)
        chain = [root, *(1_000 * (group + 1) + j for j in range(1, PREFIX_BLOCKS))]
        chain += [10_000_000 + 100 * i + j for j in range(TAIL_BLOCKS)]
        believed = [_depth(chain, known) for known in index]
        best = [k for k in range(4) if believed[k] == max(believed)]
        k = best[0] if max(believed) > 1 else int(rng.integers(4))
        found = _depth(chain, held[k])
        computed = (len(chain) - found) * BLOCK
        begun = at + 0.001
        first = begun + 0.02 + computed * TOKEN_S * rng.uniform(0.98, 1.02)
        last = first + 0.2 * rng.uniform(0.95, 1.05)
        lengths = {"prompt_tokens": len(chain) * BLOCK, "cached_tokens": found * BLOCK, "computed_tokens": computed}
        rows["request"].append(
            engine_row("r", i, f"w{k}", at, begun, first, last, output_tokens=10, prompt_blocks=chain, **lengths)
        )
        told = {"run_id": "r", "request_id": f"r-{i}"}
        candidates = [{"worker": f"w{n}", "matched_tokens": believed[n] * BLOCK} for n in range(4)]
        rows["route"].append(
            {**told, "at_ns": ns(at) - 1, "policy": "precise_prefix", "chosen": f"w{k}", "candidates": candidates}
        )
        for j in range(found, len(chain)):
            parent = chain[j - 1] if j else None
            event = {**told, "worker": f"w{k}", "at_ns": ns(first) + j, "change": "stored", "block_hash": chain[j]}
            rows["block"].append({**event, "parent_hash": parent, "num_tokens": BLOCK, "tier": "device"})
            held[k].add(chain[j])
            if parent is None or parent in index[k]:
                index[k].add(chain[j])
    for k in range(4):
        rows["worker"].append(
            {"run_id": "r", "worker": f"w{k}", "at_ns": T0_NS, "block_size": BLOCK, "num_blocks": 200_000}
        )
    return rows


def _depth(chain: list[int], known: set[int]) -> int:
    return next((j for j, block in enumerate(chain) if block not in known), len(chain))


@pytest.fixture(scope="module")
def restart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    rows = restarted(1)
    with stored(tmp_path_factory.mktemp("restart") / "s.duckdb", [rows]) as store:
        yield store


def test_the_case_is_as_reported(restart: Store) -> None:
    """Engine hits fall from about 0.8 to 0.3; what the router believes falls to 0.1; the worst TTFT is some four times as long."""

    def told(select: str, since_s: float, until_s: float) -> float:
        return float(
            restart.query(
                f"SELECT {select} FROM request WHERE arrival_ns >= {ns(since_s)} AND arrival_ns < {ns(until_s)}"
            )
            .column(0)[0]
            .as_py()
        )

    hits = "sum(cached_tokens) / sum(prompt_tokens)"
    assert told(hits, 200, 300) == pytest.approx(0.75, abs=0.08)
    assert told(hits, 300, 400) == pytest.approx(0.35, abs=0.1)


def test_an_index_that_lost_its_past_is_stale_and_the_caches_are_not(restart: Store) -> None:
    """From the restart on: the match that was believed is not what was found, other workers hold the blocks, events were dropped."""
    found = hotspots(restart, Window(run_id="r"))
    spot = found.hotspots[0]
    assert spot.kind == "stale_index"
    assert abs(spot.interval["start_ns"] - ns(RESTART_S)) <= 15e9
    verdict = diagnose(
        restart,
        Window(ns(150), ns(RESTART_S), "r"),
        Window(ns(RESTART_S), ns(450), "r"),
        now_ns=ns(1000),
    )
    assert names(verdict)[0] == "hotspot_stale_index", verdict.verdict
    told = " ".join(evidence["statement"] for evidence in verdict.causes[0].evidence)
    assert "stood in another worker's cache" in told
    assert "the workers still hold them" in told
    assert "an index that begins then cannot attach them" in told
    assert not set(names(verdict)) & (CAPACITY | {"load_step", "prefix_caching_off", "hotspot_affinity", "slow_steps"})
    text = render(verdict.to_dict(), width=10_000)
    assert "cold start" not in text
    owned = sum(row.mean_s for row in verdict.attribution if row.cause in verdict.causes[0].rows)
    assert owned / verdict.delta.mean_s == pytest.approx(1.0, abs=0.25)


def test_without_block_events_the_baseline_s_hit_rate_tells_what_was_lost(tmp_path: Path) -> None:
    """The same restart where only routes and requests are seen: who really held the blocks is not known, that hits are missing is."""
    rows = restarted(2)
    rows["block"] = []
    rows["request"] = [{**row, "prompt_blocks": None} for row in rows["request"]]
    with stored(tmp_path / "s.duckdb", [rows]) as store:
        verdict = diagnose(
            store, Window(ns(150), ns(RESTART_S), "r"), Window(ns(RESTART_S), ns(450), "r"), now_ns=ns(1000)
        )
    first = verdict.causes[0]
    assert first.cause == "hotspot_stale_index", verdict.verdict
    assert first.confidence < 0.8
    assert first.mean_s / verdict.delta.mean_s > 0.6
    assert not any("another worker's cache" in evidence["statement"] for evidence in first.evidence)
