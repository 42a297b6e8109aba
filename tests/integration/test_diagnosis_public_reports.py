"""Faults that people who run LLM engines reported, as small inputs of the reported size: what the verdict says, and must not say.

Numbers that a report does not tell are ours; each is jittered, so that nothing rests on one number.
"""

from __future__ import annotations

import heapq
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnosis.telling.text import render
from tests.diagnosed import judged, stored
from tests.simulate import T0_NS, Rows, Setup, at_level, simulate

CAPACITY = {"admission_blocked_on_blocks", "premature_eviction", "preemption_recompute", "decode_block_shortage"}


pytestmark = pytest.mark.usefixtures("few_replicates")


def hits_with_self_hits(rows: Rows) -> Rows:
    """The rows with the hit counter of an engine that counts what preempted requests find of their own."""
    own = sorted((row["at_ns"], row["self_hit_tokens"]) for row in rows["request"])
    told = [
        {**row, "value": row["value"] + sum(tokens for at, tokens in own if at <= row["at_ns"])}
        if row["name"] == "prefix_hits_tokens_total"
        else row
        for row in rows["sample"]
    ]
    return {**rows, "sample": told}


# A hit rate of a third on traffic that shares nothing: vllm-project/vllm issue 25780

RANDOM_PROMPTS = Setup(
    num_requests=200, rate=3.0, prefix_tokens=0, groups=1, tail_tokens=(243, 269), output_tokens=(243, 269), seats=256
)


@pytest.fixture(scope="module")
def random_prompts() -> tuple[Rows, Rows]:
    """The same random prompts with blocks for all, and with so few that most requests are preempted."""
    short_of_blocks = simulate(RANDOM_PROMPTS, "short", num_blocks=300)
    assert sum(row["cached_tokens"] for row in short_of_blocks["request"]) == 0
    assert sum(row["self_hit_tokens"] for row in short_of_blocks["request"]) > 3_000
    return simulate(RANDOM_PROMPTS, "ample"), hits_with_self_hits(short_of_blocks)


def test_hits_of_preempted_requests_are_no_reuse(random_prompts: tuple[Rows, Rows], tmp_path: Path) -> None:
    """The finding is the shortage of blocks with its preemptions; the hit rate is named as self hits, reuse as none."""
    with stored(tmp_path / "s.duckdb", random_prompts) as store:
        verdict = judged(store, "ample", "short", "e2e")
    text = render(verdict.to_dict(), width=10_000)
    assert verdict.status == "explained"
    assert verdict.causes[0].cause in CAPACITY
    assert "the engine preempted" in text
    (check,) = [row for row in verdict.quality if row["check"] == "cached_tokens" and row["status"] == "warning"]
    assert "are self hits" in check["statement"]
    assert "reuse across requests is 0 tokens (0.0 % of the prompts)" in check["statement"]
    assert "caching worked" not in text
    assert "served from the cache" not in text


def test_hits_that_no_request_had_are_a_contradiction(random_prompts: tuple[Rows, Rows], tmp_path: Path) -> None:
    """Where nobody tells of self hits the counter contradicts the requests, and that is said; no reuse is made of it."""
    ample, short = random_prompts
    short = {**short, "request": [{**row, "self_hit_tokens": None} for row in short["request"]]}
    with stored(tmp_path / "s.duckdb", [ample, short]) as store:
        verdict = judged(store, "ample", "short", "e2e")
    assert any(row["check"] == "cached_tokens" and row["status"] == "contradiction" for row in verdict.quality)
    assert "served from the cache" not in render(verdict.to_dict(), width=10_000)


# Blamed on the CUDA version, was the offered load: NVIDIA/aicr issue 2385


def front_end_bound(run_id: str, seed: int, front_s: float, num: int = 400, span_s: float = 120.0) -> Rows:
    """Client and engine rows: `front_s` before the engine sees a request, then 0.1 s of queue and 0.4 s of prefill."""
    rng = np.random.default_rng(seed)
    rows: Rows = {"request": [], "sample": [], "worker": []}
    for i, at_s in enumerate(np.sort(rng.uniform(0, span_s, num))):
        front, queue, prefill = (x * rng.uniform(0.95, 1.05) for x in (front_s, 0.1, 0.4))
        arrival = T0_NS + round(at_s * 1e9)
        engine_arrival = arrival + round(front * 1e9)
        first = engine_arrival + round((queue + prefill) * 1e9)
        last = first + round(99 * 0.02 * rng.uniform(0.95, 1.05) * 1e9)
        shared: dict[str, Any] = {"request_id": f"{run_id}-{i}", "state": "finished", "run_id": run_id}
        shared |= {"first_token_ns": first, "last_token_ns": last, "end_ns": last, "at_ns": last}
        shared |= {"prompt_tokens": 1000, "output_tokens": 100}
        rows["request"].append({**shared, "vantage": "client", "arrival_ns": arrival})
        phases = {"queue_s": queue, "prefill_s": prefill, "decode_s": (last - first) / 1e9}
        rows["request"].append(
            {**shared, "vantage": "engine", "worker": "w0", "arrival_ns": engine_arrival, "cached_tokens": 0, **phases}
        )
    told = {"worker": "w0", "run_id": run_id}
    rows["worker"].append(
        {**told, "at_ns": T0_NS, "block_size": 16, "num_blocks": 50_000, "flags": {"max_num_seqs": "512"}}
    )
    for second in range(round(span_s)):
        at = {**told, "at_ns": T0_NS + second * 10**9}
        rows["sample"] += [
            {**at, "name": "kv_usage_ratio", "value": 0.4},
            {**at, "name": "preemptions_total", "value": 0.0},
        ]
    return rows


def test_two_images_past_the_knee_are_the_same(tmp_path: Path) -> None:
    """32 s before the engine in both: no change, whatever the image; against a lighter load the time lies before the engine."""
    image_a, image_b = front_end_bound("a", 1, 32.0), front_end_bound("b", 2, 32.0)
    lighter = front_end_bound("lighter", 3, 0.3)
    with stored(tmp_path / "s.duckdb", [image_a, image_b, lighter]) as store:
        same, against_lighter = judged(store, "a", "b"), judged(store, "lighter", "a")
    assert (same.status, same.causes) == ("no_change", [])
    assert max(against_lighter.attribution, key=lambda row: row.mean_s).cause == "front_end"
    assert not {cause.cause for cause in against_lighter.causes} & CAPACITY


def test_a_quarter_of_the_load_below_the_knee_tells_the_knee(tmp_path: Path) -> None:
    """As many requests in four times the time waited 0.3 s: it is the load, past the knee, and the time lies before the engine."""
    quarter, full = front_end_bound("quarter", 3, 0.3, num=100), front_end_bound("full", 1, 32.0)
    with stored(tmp_path / "s.duckdb", [quarter, full]) as store:
        up, down = judged(store, "quarter", "full"), judged(store, "full", "quarter")
    assert [(cause.cause, cause.ended) for cause in up.causes] == [("load_step", False)]
    assert "load_step (past the knee) owns 100 %" in up.verdict
    told = next(e for e in up.causes[0].evidence if "the load is past the knee" in e["statement"])
    assert told["value"] == pytest.approx(4.0, rel=0.05)
    assert "before the engine" in told["statement"]
    assert max(up.attribution, key=lambda row: row.mean_s).cause == "front_end"
    assert "its seconds follow from load_step" in next(e["because"] for e in up.excluded if e["cause"] == "front_end")
    assert [(cause.cause, cause.ended) for cause in down.causes] == [("load_step", True)]


def test_twice_the_load_that_waits_in_proportion_is_not_past_the_knee(tmp_path: Path) -> None:
    """Four times the load and 0.3 s -> 0.6 s before the engine: more of it, but no more than the load; the front end is named for itself."""
    quarter, full = front_end_bound("quarter", 3, 0.3, num=100), front_end_bound("full", 1, 0.6)
    with stored(tmp_path / "s.duckdb", [quarter, full]) as store:
        verdict = judged(store, "quarter", "full")
    assert [cause.cause for cause in verdict.causes] == ["front_end"]
    assert "past the knee" not in render(verdict.to_dict(), width=10_000)


def closed_loop(run_id: str, callers: int, seed: int, num: int = 800) -> Rows:
    """Callers that send the next request when an answer comes: one front end takes 15 ms a request, then 1 s of engine."""
    rng = np.random.default_rng(seed)
    rows: Rows = {"request": [], "sample": [], "worker": []}
    due, front_free = [k * 0.002 for k in range(callers)], 0.0
    for i in range(num):
        at = heapq.heappop(due)
        front_free = max(at, front_free) + 0.015 * float(rng.uniform(0.9, 1.1))
        prefill, decode = 0.1 * float(rng.uniform(0.9, 1.1)), 0.9 * float(rng.uniform(0.8, 1.2))
        arrival, engine = T0_NS + round(at * 1e9), T0_NS + round(front_free * 1e9)
        first, last = engine + round(prefill * 1e9), engine + round((prefill + decode) * 1e9)
        heapq.heappush(due, front_free + prefill + decode + 0.001)
        shared: dict[str, Any] = {"request_id": f"{run_id}-{i}", "state": "finished", "run_id": run_id}
        shared |= {"first_token_ns": first, "last_token_ns": last, "end_ns": last, "at_ns": last}
        shared |= {"prompt_tokens": 1000, "output_tokens": 50}
        rows["request"].append({**shared, "vantage": "client", "arrival_ns": arrival})
        phases = {"queue_s": 0.0, "prefill_s": prefill, "decode_s": decode, "cached_tokens": 0}
        rows["request"].append({**shared, "vantage": "engine", "worker": "w0", "arrival_ns": engine, **phases})
    return rows


@pytest.mark.parametrize("sees", ["both sides", "client"])
def test_more_callers_are_more_load_though_hardly_more_arrive(tmp_path: Path, sees: str) -> None:
    """64 callers use the 67 requests/s that the front end can take; 256 get no more of it, and each waits three seconds longer."""
    runs = [closed_loop("few", 64, 1), closed_loop("again", 64, 3), closed_loop("many", 256, 2, num=1200)]
    if sees == "client":
        runs = [{"request": [row for row in rows["request"] if row["vantage"] == "client"]} for rows in runs]
    with stored(tmp_path / "s.duckdb", runs) as store:
        verdict, same = judged(store, "few", "many"), judged(store, "few", "again")
    assert [cause.cause for cause in verdict.causes] == ["load_step"], verdict.verdict
    said = " / ".join(e["statement"] for e in verdict.causes[0].evidence)
    assert "callers kept 256 requests in flight" in said
    assert "64 in the baseline" in said
    assert "the load is past the knee: at 4 times the load" in said
    assert verdict.status == ("explained" if sees == "both sides" else "not_observable")
    assert same.status == "no_change"


# A control, caching on and everything is better: 0xBakeer/qwen38-flash-next-spark issue 9


@pytest.mark.parametrize("level", ["plugin", "otlp", "client"])
def test_caching_turned_on_is_no_regression(tmp_path: Path, level: str) -> None:
    """192 requests, 16 at once: mean and tail fell, nothing got worse, and P99 has no interval with so few."""
    setup = Setup(num_requests=192, rate=3.5, groups=4, prefix_tokens=1600, tail_tokens=(700, 900), seats=16)
    runs = [at_level(simulate(setup, name, caching=name == "on"), level) for name in ("off", "on")]
    with stored(tmp_path / "s.duckdb", runs) as store:
        verdicts = {metric: judged(store, "off", "on", metric) for metric in ("ttft", "e2e")}
    for verdict in verdicts.values():
        assert verdict.delta.mean_s < 0
        assert verdict.delta.p99_s < 0
        assert verdict.delta.p99_interval_95 is None
        assert all(cause.ended for cause in verdict.causes)
        assert " rose" not in verdict.verdict
    if level == "plugin":
        assert verdicts["ttft"].causes[0].cause == "prefix_caching_off"


# The tail explodes in some windows, one worker turns slow for a while: NVIDIA/aicr issues 1192 and 1197


def fleet(run_id: str, slow_worker: int | None) -> list[Rows]:
    """Four workers with an equal share each; one of them takes four times as long a step from 20 s to 40 s."""
    return [
        simulate(
            Setup(num_requests=180, rate=3.0, worker=f"w{k}", seed=k + 1),
            run_id,
            slow=4.0 if k == slow_worker else 1.0,
            slow_span=(20.0, 40.0),
        )
        for k in range(4)
    ]


@pytest.mark.parametrize("level", ["plugin", "otlp"])
def test_a_straggler_is_no_shortage_of_blocks(tmp_path: Path, level: str) -> None:
    """P99 is several times as high: whoever is named, it is not capacity, and not the load, which was the same."""
    parts = [at_level(rows, level) for rows in (*fleet("clean", None), *fleet("bad", 2))]
    with stored(tmp_path / "s.duckdb", parts) as store:
        verdict = judged(store, "clean", "bad")
    assert verdict.delta.p99_s > 0.1
    assert not {cause.cause for cause in verdict.causes} & (CAPACITY | {"load_step", "prefix_caching_off"})


# Of the same kind: a run goes on until its last answer


def test_a_run_that_took_longer_to_drain_was_offered_no_less(random_prompts: tuple[Rows, Rows], tmp_path: Path) -> None:
    """The same arrivals, but half a minute more of answering: less TPOT of emptier batches is not the end of a load step."""
    with stored(tmp_path / "s.duckdb", random_prompts) as store:
        there, back = judged(store, "ample", "short", "tpot"), judged(store, "short", "ample", "tpot")
    for verdict in (there, back):
        assert "load_step" not in {cause.cause for cause in verdict.causes}, verdict.verdict
    because = next(row["because"] for row in there.excluded if row["cause"] == "load_step")
    assert "(unchanged)" in because
