"""Further faults of the kinds that people report, seen by poorer telemetry than one would like: what the verdict says, and must not say.

Reports that a case follows are named above it; numbers that they do not tell are ours.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnosis.hotspots.judge import hotspots
from diagnosis.telling.verdict import Verdict
from engine_probe.errors import BadWindow
from store.interface import Window
from tests.diagnosed import judged, stored
from tests.simulate import Rows, Setup, at_level, ns, simulate

QUERIES, HITS = "prefix_queries_tokens_total", "prefix_hits_tokens_total"
CAPACITY = {"admission_blocked_on_blocks", "premature_eviction", "preemption_recompute", "decode_block_shortage"}
SMALL = Setup(num_requests=400, output_tokens=(8, 32))
QUIET = replace(SMALL, rate=1.5, prefix_tokens=768)
BARE = ("at_ns", "run_id", "request_id", "state", "vantage", "worker", "arrival_ns", "first_token_ns", "last_token_ns")
BARE += ("end_ns", "prompt_tokens", "output_tokens")


pytestmark = pytest.mark.usefixtures("few_replicates")


def names(verdict: Verdict) -> list[str]:
    return [cause.cause for cause in verdict.causes]


def said(verdict: Verdict) -> str:
    return " / ".join(evidence["statement"] for cause in verdict.causes for evidence in cause.evidence)


def verdict_of(folder: Path, base: Rows, suspect: Rows, metric: str = "ttft") -> Verdict:
    with stored(folder / "s.duckdb", [base, suspect]) as store:
        return judged(store, "base", "suspect", metric)


def only(rows: Rows, columns: tuple[str, ...], *kinds: str) -> Rows:
    """The requests with these columns alone, and the other kinds that are named."""
    requests = [{name: row[name] for name in columns if name in row} for row in rows["request"]]
    return {"request": requests, **{kind: rows[kind] for kind in kinds}}


def forgetting(rows: Rows, *columns: str) -> Rows:
    """The rows without steps and blocks, and their requests without these columns."""
    told = [{name: value for name, value in row.items() if name not in columns} for row in rows["request"]]
    return {**rows, "request": told, "step": [], "block": []}


def counting(rows: Rows, name: str, factor: float) -> Rows:
    """The rows with this counter times a factor."""
    told = [{**row, "value": row["value"] * factor} if row["name"] == name else row for row in rows["sample"]]
    return {**rows, "sample": told}


# Who tells of reuse, and who is believed


def test_requests_that_tell_of_no_hits_do_not_make_a_cache_cold(tmp_path: Path) -> None:
    """sgl-project/sglang issue 20451: with speculation every request says 0 cached tokens, while the cache works as before."""
    base, suspect = simulate(SMALL, "base"), simulate(SMALL, "suspect", seed=2)
    zero = [{**row, "cached_tokens": 0, "computed_tokens": None} for row in suspect["request"]]
    verdict = verdict_of(tmp_path, forgetting(base, "prompt_blocks"), forgetting({**suspect, "request": zero}))
    assert (verdict.status, names(verdict)) == ("no_change", ["telemetry_contradiction"])


@pytest.mark.parametrize("is_true", [True, False], ids=["nothing is found", "the counter stands still"])
def test_a_counter_at_0_is_held_against_ttft_where_nobody_tells_prefill(tmp_path: Path, is_true: bool) -> None:
    """Callers' times and counters are all there is: 0 hits are believed where first tokens take longer for it, and else not."""
    base = only(simulate(QUIET, "base"), BARE, "sample")
    suspect = only(simulate(QUIET, "suspect", seed=2, caching=not is_true), BARE, "sample")
    if is_true:  # with caching off nothing is looked up; here it is, in vain
        asked = sum(row["prompt_tokens"] for row in suspect["request"])
        times = sorted({row["at_ns"] for row in suspect["sample"]})
        kept = [row for row in suspect["sample"] if row["name"] != QUERIES]
        kept += [
            {"worker": "w0", "run_id": "suspect", "at_ns": at, "name": QUERIES, "value": asked * k / (len(times) - 1)}
            for k, at in enumerate(times)
        ]
        suspect = {**suspect, "sample": kept}
    verdict = verdict_of(tmp_path, base, counting(suspect, HITS, 0.0))
    checks = {row["check"]: row["status"] for row in verdict.quality if row["statement"].startswith("suspect:")}
    if is_true:
        assert verdict.delta.mean_s > 0.03
        assert names(verdict) == []
        assert checks["hits_against_times"] == "ok"
    else:
        assert (verdict.status, names(verdict)) == ("no_change", ["telemetry_contradiction"])
        assert checks["hits_against_ttft"] == "contradiction"
        assert verdict.causes[0].confidence_word == "medium"


@pytest.mark.parametrize("says", ["hit events", "computed tokens"])
def test_a_counter_at_0_is_held_against_blocks_and_computed_tokens(tmp_path: Path, says: str) -> None:
    """No request tells its cached tokens; the blocks' own events do, or what requests computed of their prompts."""
    base, suspect = simulate(SMALL, "base"), simulate(SMALL, "suspect", seed=2)
    found: list[dict[str, Any]] = []
    for row in suspect["request"] if says == "hit events" else []:
        told = {"worker": "w0", "run_id": "suspect", "at_ns": row["first_scheduled_ns"], "change": "hit"}
        hits = row["prompt_blocks"][: row["cached_tokens"] // SMALL.block_size]
        found += [{**told, "block_hash": block, "num_tokens": 16, "tier": "device"} for block in hits]
    hidden = ("cached_tokens", "prompt_blocks", *(("computed_tokens",) if says == "hit events" else ()))
    base, suspect = forgetting(base, *hidden), {**forgetting(suspect, *hidden), "block": found}
    verdict = verdict_of(tmp_path, base, counting(suspect, HITS, 0.0))
    assert (verdict.status, names(verdict)) == ("no_change", ["telemetry_contradiction"])
    assert ("by the hit blocks' own events" in said(verdict)) == (says == "hit events")


def test_a_time_in_the_system_prompt_is_no_eviction(tmp_path: Path) -> None:
    """Mintplex-Labs/anything-llm issue 6398: prompts part in their first block; by chains that is named, without them nobody is."""
    base = simulate(SMALL, "base")
    suspect = simulate(SMALL, "suspect", seed=2, prefix_tokens=0, groups=1, tail_tokens=(416, 512))
    named = verdict_of(tmp_path, base, suspect)
    assert names(named) == ["prompt_uncacheable"]
    assert "chains part at token 0" in said(named)
    (tmp_path / "blind").mkdir()
    blind = verdict_of(tmp_path / "blind", forgetting(base, "prompt_blocks"), forgetting(suspect, "prompt_blocks"))
    assert (blind.status, names(blind)) == ("not_observable", [])


def test_chains_alone_tell_that_prompts_part(tmp_path: Path) -> None:
    """The same without a word of blocks' lives: how prompts begin is told by their own chains."""
    base = simulate(SMALL, "base")
    suspect = simulate(SMALL, "suspect", seed=2, prefix_tokens=0, groups=1, tail_tokens=(416, 512))
    verdict = verdict_of(tmp_path, forgetting(base), forgetting(suspect))
    assert names(verdict) == ["prompt_uncacheable"], verdict.verdict


@pytest.mark.parametrize("flags", [{"enable_prefix_caching": "False"}, {"--disable-radix-cache": "true"}])
def test_caching_that_a_flag_switched_off_is_off(tmp_path: Path, flags: dict[str, str]) -> None:
    """A worker's row tells its engine's flags and no column of ours; requests tell no more than that nothing was found."""
    base = forgetting(simulate(SMALL, "base"), "prompt_blocks")
    suspect = forgetting(simulate(SMALL, "suspect", seed=2, caching=False), "prompt_blocks")
    for rows, told in ((base, {}), (suspect, flags)):
        rows["sample"] = []
        rows["worker"] = [{**row, "prefix_caching": None, "flags": told} for row in rows["worker"]]
    verdict = verdict_of(tmp_path, base, suspect)
    assert names(verdict) == ["prefix_caching_off"], verdict.verdict


# Drafts


def drafted(run: str, chance: float, seed: int, *, tells: str) -> Rows:
    """300 requests, four drafts a step, each accepted with this chance until one is refused; who tells: requests, counters, a gauge."""
    rng = np.random.default_rng(seed)
    rows: Rows = {"request": [], "sample": []}
    at, drafts, taken, counted = 0.0, 0, 0, 0
    for i in range(300):
        at += rng.exponential(0.5)
        output, steps, accepted = int(rng.integers(60, 120)), 0, 0
        left = output - 1
        while left > 0:
            run_of = next((k for k in range(4) if rng.random() >= chance), 4)
            took = min(run_of, left - 1)
            accepted, left, steps = accepted + took, left - took - 1, steps + 1
        first = at + 0.05 * rng.uniform(0.95, 1.05)
        last = first + steps * 0.02 * rng.uniform(0.98, 1.02)
        row = {"request_id": f"{run}-{i}", "run_id": run, "worker": "w0", "vantage": "engine", "state": "finished"}
        row |= {"arrival_ns": ns(at), "first_scheduled_ns": ns(at), "first_token_ns": ns(first), "at_ns": ns(last)}
        row |= {"last_token_ns": ns(last), "end_ns": ns(last), "prompt_tokens": 300, "output_tokens": output}
        drafts, taken, counted = drafts + 4 * steps, taken + accepted, counted + output - 1
        if tells == "requests":
            row |= {"draft_tokens": 4 * steps, "accepted_tokens": accepted}
        told = {"worker": "w0", "run_id": run, "at_ns": ns(at)}
        if "counters" in tells:
            for word, total in (("draft", drafts), ("accepted", taken)):
                name = (
                    f"{word}_tokens_total" if tells == "our counters" else f"vllm:spec_decode_num_{word}_tokens_total"
                )
                rows["sample"].append({**told, "name": name, "value": float(total)})
        if tells == "gauge":
            length = counted / max(counted - taken, 1)
            rows["sample"].append({**told, "name": "sglang:spec_accept_length", "value": length})
        rows["request"].append(row)
    return rows


@pytest.mark.parametrize("tells", ["requests", "counters", "our counters", "gauge"])
def test_refused_drafts_are_no_slow_machine_whoever_tells_of_them(tmp_path: Path, tells: str) -> None:
    """vllm-project/vllm issue 41838: the acceptance length falls; requests tell of it, or counters alone, or a gauge."""
    base, suspect = drafted("base", 0.7, 1, tells=tells), drafted("suspect", 0.25, 2, tells=tells)
    verdict = verdict_of(tmp_path, base, suspect, "tpot")
    assert names(verdict) == ["speculation_collapse"], verdict.verdict


# Slow for a while


def hot_fleet(run: str, slow: float, seed: int) -> Rows:
    """Four workers with caches of their own; w2's steps take `slow` times as long from 40 s to 80 s, its GPU hot meanwhile."""
    out: Rows = {}
    for k in range(4):
        setup = Setup(num_requests=250, rate=3.0, worker=f"w{k}", seed=seed + k, output_tokens=(8, 32))
        rows = simulate(setup, run, slow=slow if k == 2 else 1.0, slow_span=(40.0, 80.0))
        for kind, part in rows.items():
            out.setdefault(kind, []).extend(part)
        for second in range(0, 90, 2):
            is_hot = slow > 1.0 and k == 2 and 40 <= second < 80
            told = {"worker": f"w{k}", "run_id": run, "at_ns": ns(second)}
            out["sample"] += [
                {**told, "name": "gpu_throttled", "labels": {"reason": "hw_thermal"}, "value": float(is_hot)},
                {**told, "name": "gpu_clock_hertz", "value": 0.75e9 if is_hot else 1.4e9},
                {**told, "name": "cpu_util", "value": 0.1},
            ]
    return out


def test_a_straggler_whose_cache_is_full_is_found_without_routes(tmp_path: Path) -> None:
    """Nobody tells what others hold of a prompt, so each has most of it itself: a worker three times as slow costs all the same."""
    runs = [hot_fleet("base", 1.0, 1), hot_fleet("suspect", 3.0, 11)]
    with stored(tmp_path / "s.duckdb", runs) as store:
        verdict = judged(store, "base", "suspect")
        before, found = (hotspots(store, Window(run_id=run)) for run in ("base", "suspect"))
    assert before.status == "none"
    assert [(spot.kind, spot.subject["id"]) for spot in found.hotspots] == [("straggler", "w2")]
    interval = found.hotspots[0].interval
    assert abs(interval["start_ns"] - ns(40)) <= 10e9, (
        "it is told from when it was slow, not from when others looked fast"
    )
    assert abs(interval["end_ns"] - ns(80)) <= 10e9
    assert names(verdict)[0] == "hotspot_straggler", verdict.verdict
    assert "its clocks were held down for hw_thermal at w2" in said(verdict)
    assert "host's CPU use 10 % (10 %): not the reason" in said(verdict)
    assert not set(names(verdict)) & CAPACITY


def test_slow_steps_of_the_last_fifth_alone_are_found(tmp_path: Path) -> None:
    """Four times as long for the last 40 of 200 s: so few steps that they fill one span of equal counts, and three of equal time."""
    setup = replace(SMALL, num_requests=1000)
    base = simulate(setup, "base")
    verdict = verdict_of(tmp_path, base, simulate(setup, "suspect", seed=2, slow=4.0, slow_span=(160.0, 200.0)))
    assert names(verdict)[0] == "slow_steps", verdict.verdict
    interval = verdict.causes[0].interval
    assert interval is not None
    assert abs(interval["start_ns"] - ns(160)) <= 13e9


# Windows that differ in what they are


def test_another_model_comes_before_whatever_the_engine_did(tmp_path: Path) -> None:
    """8B against 70B: every step takes longer, and that is no slow machine; no cause is named with more than low confidence."""
    base = simulate(replace(SMALL, rate=2.0), "base")
    suspect = simulate(SMALL, "suspect", seed=2, rate=2.0, fixed_s=0.04, per_token_s=0.0006, per_seq_s=0.002)
    for rows, model in ((base, "llama-3-8b"), (suspect, "llama-3-70b")):
        for row in (*rows["request"], *rows["worker"]):
            row["model"] = model
    verdict = verdict_of(tmp_path, base, suspect)
    assert verdict.status == "not_distinguishable"
    assert (
        "served by different models (llama-3-8b in the baseline, llama-3-70b in the suspect window)" in verdict.verdict
    )
    assert {cause.confidence_word for cause in verdict.causes} <= {"low"}


def test_other_names_for_one_model_of_the_workers_are_no_other_model(tmp_path: Path) -> None:
    """Requests name adapters; the workers' own model is the same in both windows, so slower steps are slower steps."""
    base, suspect = simulate(SMALL, "base"), simulate(SMALL, "suspect", seed=2, slow=2.0)
    for rows, model in ((base, "tuned-a"), (suspect, "tuned-b")):
        for row in rows["request"]:
            row["model"] = model
        for row in rows["worker"]:
            row["model"] = "llama-3-8b"
    verdict = verdict_of(tmp_path, base, suspect)
    assert (verdict.status, names(verdict)[0]) == ("explained", "slow_steps")


def test_answers_that_were_not_streamed_are_judged_as_a_whole(tmp_path: Path) -> None:
    """No first token: TTFT says what to ask instead, and E2E rose where nobody can look, however slow the steps were."""
    seen = ("at_ns", "run_id", "request_id", "state", "arrival_ns", "end_ns", "prompt_tokens", "output_tokens")
    base, suspect = simulate(SMALL, "base"), simulate(SMALL, "suspect", seed=2, slow=2.0)
    runs = [only(at_level(rows, "client"), (*seen, "vantage")) for rows in (base, suspect)]
    with stored(tmp_path / "s.duckdb", runs) as store:
        whole = judged(store, "base", "suspect", "e2e")
        with pytest.raises(BadWindow, match="--metric e2e"):
            judged(store, "base", "suspect")
    assert (whole.status, names(whole)) == ("not_observable", [])
    assert whole.delta.mean_s == pytest.approx(sum(row.mean_s for row in whole.attribution), abs=1e-9)
    assert "was not streamed" in whole.verdict


# A decode worker without room, behind a hand-over


def handed_over(run: str, seed: int, *, seats: int, tells: str, blocks: int | None = None) -> Rows:
    """300 requests from p0 to d0, which holds the blocks of `seats` of them; the wire takes 15 ms. tells: steps, gauge, nothing.

    blocks: it has that many, and seats for `seats` requests, which it tells where it tells of what runs.
    """
    rng = np.random.default_rng(seed)
    rows: Rows = {"request": [], "transfer": [], "worker": [], "sample": [], "step": []}
    pool = blocks or seats * 130
    for worker, role, size in (("p0", "prefill", 8000), ("d0", "decode", pool)):
        fact = {"worker": worker, "run_id": run, "at_ns": ns(-1), "role": role, "block_size": 16, "num_blocks": size}
        rows["worker"].append(fact | ({"flags": {"max_num_seqs": str(seats)}} if blocks and tells != "nothing" else {}))
    at = free_at = 0.0
    held: list[tuple[float, float]] = []
    for i in range(300):
        at += rng.exponential(0.25)
        begun = max(at, free_at)
        free_at = done = begun + 0.12 * rng.uniform(0.95, 1.05)
        ends = sorted(end for _, end in held if end > done)
        start = (done if len(ends) < seats else ends[len(ends) - seats]) + 0.002
        wire = 0.015 * rng.uniform(0.95, 1.05)
        got, output = start + wire, int(rng.integers(100, 200))
        last = got + 0.02 * (output + 1)
        held.append((got, last))
        one = {"request_id": f"{run}-{i}", "run_id": run, "state": "finished", "prompt_tokens": 2000}
        engine = {**one, "vantage": "engine"}
        first = {"queue_s": begun - at, "prefill_s": done - begun, "cached_tokens": 0, "output_tokens": 1}
        first |= {"arrival_ns": ns(at), "first_scheduled_ns": ns(begun), "first_token_ns": ns(done), "end_ns": ns(done)}
        rows["request"].append({**engine, **first, "worker": "p0", "last_token_ns": ns(done), "at_ns": ns(done)})
        then = {"queue_s": got - done, "prefill_s": 0.02, "cached_tokens": 2000, "output_tokens": output}
        then |= {"arrival_ns": ns(done), "first_scheduled_ns": ns(got), "first_token_ns": ns(got + 0.02)}
        rows["request"].append(
            {**engine, **then, "worker": "d0", **dict.fromkeys(("last_token_ns", "end_ns"), ns(last))}
        )
        rows["request"][-1]["at_ns"] = ns(last)
        seen = {"arrival_ns": ns(at - 0.001), "first_token_ns": ns(got + 0.021), "output_tokens": output}
        seen |= dict.fromkeys(("at_ns", "last_token_ns", "end_ns"), ns(last + 0.001))
        rows["request"].append({**one, **seen, "vantage": "client"})
        move = {"run_id": run, "worker": "d0", "request_id": f"{run}-{i}", "source_worker": "p0", "target_worker": "d0"}
        move |= {"at_ns": ns(got), "num_bytes": 262_144_000, "wait_s": start - done, "wire_s": wire, "outcome": "ok"}
        rows["transfer"].append(move)
    for half in range(int(at) * 2 + 8):
        running = sum(begun <= half / 2 < end for begun, end in held)
        told = {"worker": "d0", "run_id": run, "at_ns": ns(half / 2)}
        used = min(running * 130, pool)
        if tells == "steps":
            step = {
                "step": half,
                "duration_s": 0.02,
                "num_running": running,
                "decode_tokens": running,
                "prefill_tokens": 0,
            }
            rows["step"].append({**told, **step, "blocks_total": pool, "blocks_used": used})
        if tells == "gauge":
            rows["sample"].append({**told, "name": "kv_usage_ratio", "value": used / pool})
            rows["sample"].append({**told, "name": "requests_running", "value": float(running)})
    return rows


@pytest.mark.parametrize("tells", ["steps", "gauge"])
def test_a_decode_worker_without_room_is_no_slow_transfer(tmp_path: Path, tells: str) -> None:
    """sgl-project/sglang issue 5450: the second half of a burst takes minutes to hand over; by steps, or by scraped usage alone."""
    base, suspect = (
        handed_over(run, seed, seats=seats, tells=tells) for run, seed, seats in (("base", 1, 60), ("suspect", 2, 12))
    )
    verdict = verdict_of(tmp_path, base, suspect)
    assert names(verdict)[0] == "decode_block_shortage", verdict.verdict
    assert verdict.causes[0].subject == {"kind": "worker", "id": "d0"}
    assert "transfer_wire" not in names(verdict)


@pytest.mark.parametrize("tells", ["steps", "gauge"])
def test_full_seats_of_a_decode_worker_are_no_orchestration(tmp_path: Path, tells: str) -> None:
    """12 seats in place of 60 and blocks for many more: hand-overs wait for a seat, by steps or by scraped gauges, and not for nothing."""
    base, suspect = (
        handed_over(run, seed, seats=seats, tells=tells, blocks=20_000)
        for run, seed, seats in (("base", 1, 60), ("suspect", 2, 12))
    )
    verdict = verdict_of(tmp_path, base, suspect)
    assert names(verdict) == ["decode_backlog"], verdict.verdict
    assert verdict.causes[0].subject == {"kind": "worker", "id": "d0"}
    assert "d0 has seats for 12 requests at once (60 in the baseline)" in said(verdict)
    assert sum(row.mean_s for row in verdict.attribution if row.cause == "decode_block_shortage") == 0.0


def test_where_seats_are_not_told_a_batch_at_its_most_may_be_full(tmp_path: Path) -> None:
    """The same with no word on seats: as many run as ever while hand-overs wait, so nobody says that nothing was in the way."""
    base, suspect = (
        handed_over(run, seed, seats=seats, tells="steps", blocks=20_000)
        for run, seed, seats in (("base", 1, 60), ("suspect", 2, 12))
    )
    for row in (*base["worker"], *suspect["worker"]):
        del row["flags"]
    verdict = verdict_of(tmp_path, base, suspect)
    assert names(verdict) == ["transfer_orchestration"]
    assert verdict.causes[0].confidence_word == "low"
    assert "whether there was a seat at the decode worker no step and no gauge tells" in said(verdict)
    assert "nothing was in the way" not in said(verdict)


def test_without_sight_of_its_room_nobody_is_sure(tmp_path: Path) -> None:
    """Neither steps nor gauges: the wire is let off, and orchestration is named with low confidence, since it may be room."""
    base, suspect = (
        handed_over(run, seed, seats=seats, tells="nothing")
        for run, seed, seats in (("base", 1, 60), ("suspect", 2, 12))
    )
    verdict = verdict_of(tmp_path, base, suspect)
    assert names(verdict) == ["transfer_orchestration"]
    assert verdict.causes[0].confidence_word == "low"
    assert "no step and no gauge tells" in said(verdict)
