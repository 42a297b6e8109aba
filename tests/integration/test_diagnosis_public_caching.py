"""Faults of caches and their tiers that people who run LLM engines reported, as small inputs of the reported size.

Numbers that a report does not tell are ours; each is jittered by 5 %, so that nothing rests on one number. Each case comes with what must
not be said.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnosis.telling.text import render
from diagnosis.telling.verdict import NamedCause, Verdict
from tests.diagnosed import judged, stored
from tests.simulate import T0_NS, Rows, ns

CAPACITY = {"admission_blocked_on_blocks", "premature_eviction", "preemption_recompute", "decode_block_shortage"}
BLOCK = 16


pytestmark = pytest.mark.usefixtures("few_replicates")


def served(
    run_id: str,
    ttft_s: Sequence[float],
    *,
    gap_s: float = 1.0,
    decode_s: float = 0.5,
    queue_s: float = 0.0,
    block_size: int = BLOCK,
    columns: Sequence[dict[str, Any]],
) -> Rows:
    """One request after the other, each `gap_s` after its forerunner's end; `columns` of each, phases that they do not tell are prefill."""
    rows: Rows = {"request": [], "sample": [], "worker": []}
    at = 0.0
    for number, (ttft, told) in enumerate(zip(ttft_s, columns, strict=True)):
        beside = sum(told.get(f"{phase}_s", 0.0) for phase in ("cache_lookup", "kv_load", "unexplained"))
        first, end = at + ttft, at + ttft + decode_s
        rows["request"].append(
            {
                "request_id": f"{run_id}-{number}",
                "run_id": run_id,
                "worker": "w0",
                "vantage": "engine",
                "state": "finished",
                "at_ns": ns(end),
                "arrival_ns": ns(at),
                "first_scheduled_ns": ns(at + queue_s),
                "first_token_ns": ns(first),
                "last_token_ns": ns(end),
                "end_ns": ns(end),
                "queue_s": queue_s,
                "prefill_s": ttft - queue_s - beside,
                "decode_s": decode_s,
                "output_tokens": 20,
                "num_preemptions": 0,
                **{name: value for name, value in told.items() if name != "unexplained_s"},
            }
        )
        at = end + gap_s
    told = {"worker": "w0", "run_id": run_id}
    rows["worker"].append({**told, "at_ns": ns(-1.0), "block_size": block_size, "num_blocks": 50_000})
    for second in range(0, int(at) + 1, max(1, int(at) // 200)):
        rows["sample"] += [
            {**told, "at_ns": ns(second), "name": "kv_usage_ratio", "value": 0.35},
            {**told, "at_ns": ns(second), "name": "preemptions_total", "value": 0.0},
        ]
    return rows


def counted(rows: Rows, hits: float, queries: float) -> Rows:
    """The rows with the engine's counters, which rise evenly to these."""
    run_id = rows["request"][0]["run_id"]
    last = max(row["at_ns"] for row in rows["request"])
    more = [
        {"worker": "w0", "run_id": run_id, "at_ns": at, "name": name, "value": value * share}
        for name, value in (("prefix_hits_tokens_total", hits), ("prefix_queries_tokens_total", queries))
        for at, share in ((T0_NS, 0.0), ((T0_NS + last) // 2, 0.5), (last, 1.0))
    ]
    return {**rows, "sample": [*rows["sample"], *more]}


def text(verdict: Verdict) -> str:
    return render(verdict.to_dict(), width=10_000)


def first(verdict: Verdict) -> NamedCause:
    assert verdict.causes, verdict.verdict
    return verdict.causes[0]


def statements(cause: NamedCause) -> str:
    return " / ".join(evidence["statement"] for evidence in cause.evidence)


# Zero hits, though every request shares a system prompt: vllm-project/vllm issues 54607 and 53749

NUM = 500


def shared_system_prompt(run_id: str, block_size: int, seed: int, *, tells: bool = True) -> Rows:
    """240 shared and 260 unique tokens: at blocks of 784 nothing can hit, at 16 all 240 do; computing 1,000 tokens takes 1 s."""
    rng = np.random.default_rng(seed)
    usable = 240 // block_size * block_size
    hits = np.where(np.arange(NUM) > 0, usable, 0)
    ttft = (500 - hits) * 0.001 * rng.uniform(0.95, 1.05, NUM)
    columns = [{"prompt_tokens": 500, **({"cached_tokens": int(hit)} if tells else {})} for hit in hits]
    rows = served(run_id, ttft, block_size=block_size, columns=columns)
    return counted(rows, float(hits.sum()), 500.0 * NUM)


@pytest.mark.parametrize("tells", [True, False], ids=["requests-tell", "counters-alone"])
def test_a_shared_prefix_below_the_block_is_that_and_no_broken_cache(tmp_path: Path, tells: bool) -> None:
    """240 tokens are shared and the block has 784: the smallest piece is too large, at 16 about 48 % can hit."""
    runs = [shared_system_prompt(f"b{size}", size, size, tells=tells) for size in (16, 784)]
    with stored(tmp_path / "s.duckdb", runs) as store:
        verdict = judged(store, "b16", "b784")
    cause = first(verdict)
    assert cause.cause == "reuse_below_unit", verdict.verdict
    assert "784 tokens (16 in the baseline)" in statements(cause)
    assert "found 240 tokens" in statements(cause)
    assert "about 48 % of the prompts' tokens can hit" in statements(cause)
    assert not {c.cause for c in verdict.causes} & (CAPACITY | {"prompt_uncacheable", "prefix_caching_off"})
    assert "no shared prefix" not in text(verdict)


def test_the_same_the_other_way_round_is_the_end_of_it(tmp_path: Path) -> None:
    """Smaller blocks than before: TTFT falls, and for that reason."""
    runs = [shared_system_prompt(f"b{size}", size, size) for size in (16, 784)]
    with stored(tmp_path / "s.duckdb", runs) as store:
        verdict = judged(store, "b784", "b16")
    assert verdict.delta.mean_s < 0
    assert (first(verdict).cause, first(verdict).ended) == ("reuse_below_unit", True)


# Every fourth or fifth turn takes 90 s instead of 2 s: syv-ai/qwen38-27b-rtx3090 issue 52

PERIOD, UNIT, MARGIN = 2048, 448, 448


def conversation(run_id: str, seed: int, margin: int, *, session: str | None = "s0") -> Rows:
    """60 turns from 20,000 tokens on; a turn fails where the length before it modulo 2,048 is below the margin."""
    rng = np.random.default_rng(seed)
    lengths = 20_000 + np.cumsum(rng.integers(300, 901, 61))
    columns, ttft = [], []
    for before, prompt in zip(lengths[:-1].tolist(), lengths[1:].tolist(), strict=True):
        fails = before % PERIOD < margin
        hit = 0 if fails else before // PERIOD * PERIOD // UNIT * UNIT
        ttft.append((90.0 if fails else 2.0) * float(rng.uniform(0.95, 1.05)))
        columns.append({"prompt_tokens": prompt, "cached_tokens": hit, "session_id": session})
    return served(run_id, ttft, gap_s=5.0, block_size=UNIT, columns=columns)


@pytest.mark.parametrize("session", ["s0", None], ids=["session-told", "session-not-told"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_misses_on_a_grid_of_lengths_are_told_with_their_period(tmp_path: Path, seed: int, session: str | None) -> None:
    """Full misses that follow the length before the turn modulo 2,048, in about 22 % of the turns; not the load, not capacity."""
    runs = [conversation("fine", seed, 0, session=session), conversation("failing", seed, MARGIN, session=session)]
    with stored(tmp_path / "s.duckdb", runs) as store:
        verdict = judged(store, "fine", "failing")
    cause = first(verdict)
    assert cause.cause == "reuse_below_unit", verdict.verdict
    assert "modulo 2,048" in statements(cause)
    assert "the length of the turn before" in statements(cause)
    missed = sum(row["cached_tokens"] == 0 for row in runs[1]["request"]) / 60
    assert cause.evidence[0]["value"] == pytest.approx(missed, abs=0.03)
    assert not {c.cause for c in verdict.causes} & (CAPACITY | {"load_step", "length_shift", "slow_steps"})


def test_misses_at_any_length_are_no_grid(tmp_path: Path) -> None:
    """As many turns fail, drawn by lot: no period is made up for them."""
    rng = np.random.default_rng(5)
    runs = [conversation("fine", 1, 0), conversation("failing", 1, 0)]
    for row in runs[1]["request"]:
        if rng.random() < 0.22:
            slow = 88 * 10**9
            row |= {"cached_tokens": 0, "prefill_s": row["prefill_s"] + 88.0}
            row |= {name: row[name] + slow for name in ("first_token_ns", "last_token_ns", "end_ns", "at_ns")}
    with stored(tmp_path / "s.duckdb", runs) as store:
        verdict = judged(store, "fine", "failing")
    assert "modulo" not in text(verdict)
    assert "reuse_below_unit" not in {cause.cause for cause in verdict.causes}


# A 100 % hit in storage that can lose against recomputing: llm-d/llm-d-kv-cache issue 559

KV_BYTES, PROMPT, COMPUTE_S = 9.5e9, 65_536, 12.0


def from_storage(run_id: str, seed: int, slow_share: float) -> Rows:
    """200 requests with 9.5 GB of KV each at 1.25 GB/s, `slow_share` of them at 0.4; one in twenty comes first and computes its prompt."""
    rng = np.random.default_rng(seed)
    columns, ttft = [], []
    moves: list[dict[str, Any]] = []
    for number in range(200):
        is_new, is_slow = number % 20 == 0, rng.random() < slow_share
        rate = (0.4e9 if is_slow else 1.25e9) * float(rng.uniform(0.95, 1.05))
        load = 0.0 if is_new else KV_BYTES / rate
        computed = PROMPT if is_new else int(rng.integers(16, 64))
        work = computed * COMPUTE_S / PROMPT * float(rng.uniform(0.95, 1.05)) + 0.02
        ttft.append(load + work)
        told = {"prompt_tokens": PROMPT, "cached_tokens": PROMPT - computed, "cached_tokens_remote": PROMPT - computed}
        columns.append({**told, "cached_tokens_device": 0, **({} if is_new else {"kv_load_s": load})})
    rows = served(run_id, ttft, columns=columns)
    for row in rows["request"]:
        if row.get("kv_load_s"):
            load, at = row["kv_load_s"], row["arrival_ns"]
            moves.append(
                {
                    "request_id": row["request_id"],
                    "run_id": run_id,
                    "at_ns": at + round(load * 1e9),
                    "num_bytes": int(KV_BYTES),
                }
            )
            moves[-1] |= {"source_worker": "storage", "target_worker": "w0", "outcome": "ok", "wire_s": load}
    return {**rows, "transfer": moves}


def test_a_hit_in_slow_storage_names_its_break_even_and_who_was_below(tmp_path: Path) -> None:
    """A fifth of the loads at 0.4 GB/s take 24 s, computing takes 12: break-even 0.79 GB/s, and the requests under it."""
    runs = [from_storage("quick", 1, 0.0), from_storage("slow", 2, 0.2)]
    with stored(tmp_path / "s.duckdb", runs) as store:
        verdict = judged(store, "quick", "slow")
    cause = first(verdict)
    assert cause.cause == "tier_slower_than_recompute", verdict.verdict
    even = next(evidence for evidence in cause.evidence if evidence["unit"] == "bytes/s")
    assert even["value"] == pytest.approx(KV_BYTES / COMPUTE_S, rel=0.05)
    below = {row["request_id"] for row in runs[1]["request"] if (row.get("kv_load_s") or 0) > 15}
    assert set(even["request_ids"]) <= below
    assert len(even["request_ids"]) == 5
    assert not {c.cause for c in verdict.causes} & (CAPACITY | {"load_step", "slow_steps"})


def test_loads_above_the_break_even_are_no_fault(tmp_path: Path) -> None:
    """7.6 s a load against 12 s of computing: the tier pays, and it is not blamed."""
    runs = [from_storage("quick", 1, 0.0), from_storage("again", 3, 0.0)]
    with stored(tmp_path / "s.duckdb", runs) as store:
        verdict = judged(store, "quick", "again")
    assert (verdict.status, verdict.causes) == ("no_change", [])


def recomputing(run_id: str, seed: int, *, tells: bool) -> Rows:
    """The same 200 prompts without a tier: each is computed in 12 s; `tells`: requests say that nothing was found."""
    rng = np.random.default_rng(seed)
    found = {"cached_tokens": 0, "cached_tokens_device": 0} if tells else {}
    ttft = (COMPUTE_S * rng.uniform(0.95, 1.05, 200) + 0.02).tolist()
    return served(run_id, ttft, columns=[{"prompt_tokens": PROMPT, **found} for _ in ttft])


@pytest.mark.parametrize("slow_share", [0.2, 1.0], ids=["a fifth of the loads", "all loads"])
@pytest.mark.parametrize("tells", [True, False], ids=["zero-told", "nothing-told"])
def test_loads_are_held_against_a_baseline_that_computed(tmp_path: Path, tells: bool, slow_share: float) -> None:
    """No tier before, and loads at 0.4 GB/s now: those that computing would have beaten are the tail's cause, though most loads may pay."""
    runs = [recomputing("computed", 9, tells=tells), from_storage("loaded", 2, slow_share)]
    with stored(tmp_path / "s.duckdb", runs) as store:
        verdict, back = judged(store, "computed", "loaded"), judged(store, "loaded", "computed")
    assert [cause.cause for cause in verdict.causes] == ["tier_slower_than_recompute"], verdict.verdict
    assert "the baseline loaded nothing and computed it" in statements(first(verdict))
    even = next(evidence for evidence in first(verdict).evidence if evidence["unit"] == "bytes/s")
    assert even["value"] == pytest.approx(KV_BYTES / COMPUTE_S, rel=0.05)
    assert [(cause.cause, cause.ended) for cause in back.causes] == [("tier_slower_than_recompute", True)]


def test_a_tier_that_pays_is_no_fault_of_whoever_has_none(tmp_path: Path) -> None:
    """7.6 s a load in place of 12 s of computing: TTFT falls, no tier is blamed, and what it saved was not lost for reasons unseen."""
    runs = [recomputing("computed", 9, tells=True), from_storage("loaded", 1, 0.0)]
    with stored(tmp_path / "s.duckdb", runs) as store:
        verdicts = judged(store, "computed", "loaded"), judged(store, "loaded", "computed")
    for verdict in verdicts:
        assert verdict.causes == []
        assert "why it was lost" not in text(verdict)
        assert max(verdict.attribution, key=lambda row: abs(row.mean_s)).cause == "own_prefill"


# The offload tier reports a full hit and only adds time: LMCache/LMCache issue 1109

LONG = 15_444


def repeated(run_id: str, seed: int, *, tier: bool) -> Rows:
    """100 repeats of one prompt that the device holds: 62 ms; with a tier 81, of which look-up 5, load 7 and store 7."""
    rng = np.random.default_rng(seed)
    columns, ttft = [], []
    for _ in range(100):
        lookup, load, store = (x * float(rng.uniform(0.95, 1.05)) if tier else 0.0 for x in (0.005, 0.007, 0.007))
        ttft.append(0.062 * float(rng.uniform(0.95, 1.05)) + lookup + load + store)
        told: dict[str, Any] = {"prompt_tokens": LONG, "cached_tokens": 15_440, "cached_tokens_device": 15_440}
        if tier:
            told |= {"cached_tokens": 15_443, "cached_tokens_host": 15_444}
            told |= {"cache_lookup_s": lookup, "kv_load_s": load, "unexplained_s": store}
        columns.append(told)
    return served(run_id, ttft, columns=columns)


def test_a_tier_that_holds_what_the_device_holds_only_costs(tmp_path: Path) -> None:
    """It adds fixed seconds and saves nothing; 15,444 tokens are reported a request, and the hit is counted once."""
    runs = [repeated("without", 1, tier=False), repeated("with", 2, tier=True)]
    with stored(tmp_path / "s.duckdb", runs) as store:
        verdict = judged(store, "without", "with")
    cause = first(verdict)
    assert cause.cause == "tier_saves_nothing", verdict.verdict
    assert "1,544,400 tokens found" in statements(cause)
    assert "the hit is counted twice" in statements(cause)
    assert "tier_slower_than_recompute" not in {c.cause for c in verdict.causes}
    assert not {c.cause for c in verdict.causes} & (CAPACITY | {"load_step", "slow_steps"})


def test_without_it_the_seconds_are_gone(tmp_path: Path) -> None:
    """The other way round TTFT fell, because a tier that saved nothing is gone."""
    runs = [repeated("without", 1, tier=False), repeated("with", 2, tier=True)]
    with stored(tmp_path / "s.duckdb", runs) as store:
        verdict = judged(store, "with", "without")
    assert verdict.delta.mean_s < 0
    assert all(cause.ended for cause in verdict.causes)


# KV usage never comes down again: vllm-project/vllm-ascend issue 16662, of the same family vllm-project/vllm issue 46283

POOL, LEAKED, STEP_S = 20_000, 60, 0.5


def cancelled(run_id: str, seed: int, *, leaks: bool) -> Rows:
    """An hour and 10 s of steps each 10 s; one in twenty aborts while its KV is loaded, and 60 blocks of it are never given back."""
    rng = np.random.default_rng(seed)
    rows: Rows = {"request": [], "step": [], "sample": [], "worker": []}
    told = {"worker": "w0", "run_id": run_id}
    held = 0
    for number in range(1200):
        at = number * 3.0
        aborts = number % 20 == 7
        full = leaks and held > 0.9 * POOL
        queue = (40.0 if full else 0.05) * float(rng.uniform(0.95, 1.05))
        first, end = at + queue + 0.2, at + queue + 0.8
        row = {
            **told,
            "request_id": f"{run_id}-{number}",
            "vantage": "engine",
            "arrival_ns": ns(at),
            "prompt_tokens": 1000,
        }
        if aborts:
            held += 10 * LEAKED if leaks else 0
            row |= {"state": "aborted", "end_ns": ns(at + 0.1), "at_ns": ns(at + 0.1), "finish_reason": "abort"}
        else:
            row |= {"state": "finished", "first_scheduled_ns": ns(at + queue), "first_token_ns": ns(first)}
            row |= {"last_token_ns": ns(end), "end_ns": ns(end), "at_ns": ns(end), "output_tokens": 20}
            row |= {"queue_s": queue, "prefill_s": 0.2, "decode_s": 0.6, "cached_tokens": 0, "num_preemptions": 0}
        rows["request"].append(row)
        rows["step"].append(
            {
                **told,
                "step": number,
                "at_ns": ns(at + 2.9),
                "duration_s": STEP_S,
                "num_running": 0,
                "num_waiting_prefill": 40 if full else 0,
                "waiting_on": {
                    name: 40 * full if name == "blocks" else 0
                    for name in ("blocks", "budget", "seats", "dependency", "unknown")
                },
                "blocks_total": POOL,
                "blocks_used": min(held, POOL),
                "blocks_evicted": 0,
                "num_preempted": 0,
            }
        )
    rows["worker"].append({**told, "at_ns": ns(-1.0), "block_size": BLOCK, "num_blocks": POOL})
    for second in range(0, 3600, 10):
        rows["sample"].append({**told, "at_ns": ns(second), "name": "preemptions_total", "value": 0.0})
    return rows


def test_blocks_that_aborts_leave_behind_are_a_leak_and_no_load(tmp_path: Path) -> None:
    """The floor of used blocks with nothing running climbs to the top, with the aborts; requests wait for blocks, nothing is preempted."""
    runs = [cancelled("tight", 1, leaks=False), cancelled("leaking", 2, leaks=True)]
    with stored(tmp_path / "s.duckdb", runs) as store:
        verdict = judged(store, "tight", "leaking")
    cause = first(verdict)
    assert cause.cause == "block_leak", verdict.verdict
    assert "abort" in statements(cause)
    assert not {c.cause for c in verdict.causes} & {
        "load_step",
        "slow_steps",
        "preemption_recompute",
        "premature_eviction",
    }
