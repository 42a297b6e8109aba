"""Overheads of engines and preemptions as people report them, told by few columns: rows built by hand, one prompt at a time.

Numbers are ours. Requests compute about 350 tokens of 1,400 at 0.1 ms each and decode at 20 ms a token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnosis.telling.verdict import Verdict
from tests.diagnosed import judged, stored
from tests.simulate import Rows, ns

NUM = 300
Columns = dict[str, Any]


pytestmark = pytest.mark.usefixtures("few_replicates")


def served(
    run: str, seed: int, *, told: Callable[[int, float], Columns], rate: float = 1.0, steps: bool = False
) -> Rows:
    """`told(i, at)` of the i-th request: extra_s beside its prefill, hidden_s within it, out_s within its decode, and columns."""
    rng = np.random.default_rng(seed)
    rows: Rows = {"request": [], "step": []}
    at = free_at = 0.0
    for i in range(NUM):
        at += rng.exponential(1 / rate)
        more = told(i, at)
        extra, hidden, out = (more.pop(name, 0.0) for name in ("extra_s", "hidden_s", "out_s"))
        prompt, cached = more.get("prompt_tokens", int(rng.integers(1300, 1500))), more.get("cached_tokens", 1024)
        start = max(at, free_at)
        prefill = 0.02 + (prompt - cached) * 1e-4 * rng.uniform(0.97, 1.03) + hidden
        first = free_at = start + extra + prefill
        output = int(rng.integers(40, 80))
        last = first + (output - 1) * 0.02 * rng.uniform(0.97, 1.03) + out
        row = {"request_id": f"{run}-{i}", "run_id": run, "worker": "w0", "vantage": "engine", "state": "finished"}
        row |= {"arrival_ns": ns(at), "first_scheduled_ns": ns(start), "first_token_ns": ns(first)}
        row |= dict.fromkeys(("last_token_ns", "end_ns", "at_ns"), ns(last))
        row |= {"queue_s": start - at, "prefill_s": prefill, "prompt_tokens": prompt, "output_tokens": output}
        rows["request"].append({**row, "cached_tokens": cached, "computed_tokens": prompt - cached, **more})
        if steps:
            step = {"worker": "w0", "run_id": run, "at_ns": ns(first), "step": i, "duration_s": prefill}
            rows["step"].append({**step, "num_running": 1, "prefill_tokens": prompt - cached, "decode_tokens": 0})
    return rows


def verdict_of(folder: Path, base: Rows, suspect: Rows, metric: str = "ttft") -> Verdict:
    with stored(folder / "s.duckdb", [base, suspect]) as store:
        return judged(store, "base", "suspect", metric)


def names(verdict: Verdict) -> list[str]:
    return [cause.cause for cause in verdict.causes]


def test_a_look_up_that_grows_with_the_cache_waits_for_no_lock(tmp_path: Path) -> None:
    """2 ms at first, 120 ms in the end, for everybody alike: what late look-ups take beyond early ones is no wait."""

    def looked(seconds: float, growth: float) -> Callable[[int, float], Columns]:
        def told(_: int, at: float) -> Columns:
            lookup = seconds + growth * at / NUM
            return {"cache_lookup_s": lookup, "extra_s": lookup}

        return told

    base = served("base", 1, told=looked(0.002, 0.0))
    verdict = verdict_of(tmp_path, base, served("suspect", 2, told=looked(0.002, 0.12)))
    assert names(verdict) == ["lookup_overhead"], verdict.verdict


def test_waits_for_the_lock_in_the_middle_of_a_window_stay_waits(tmp_path: Path) -> None:
    """All look-ups of 60 s wait half a second; before and after they take 2 ms: no growth, for it comes and goes."""

    def told(_: int, at: float) -> Columns:
        lookup = 0.5 if 120.0 <= at < 180.0 else 0.002
        return {"cache_lookup_s": lookup, "extra_s": lookup}

    base = served("base", 1, told=lambda _, __: {"cache_lookup_s": 0.002, "extra_s": 0.002})
    verdict = verdict_of(tmp_path, base, served("suspect", 2, told=told))
    assert names(verdict)[0] == "cache_lock_contention", verdict.verdict
    assert "lookup_overhead" not in names(verdict)


def test_three_steps_in_four_swap_an_adapter_in_and_none_is_slow(tmp_path: Path) -> None:
    """16 adapters in turn for four slots, 0.4 s a swap: the median step swaps, and that is no slower machine."""

    def asked(num: int, seed: int) -> Callable[[int, float], Columns]:
        draws, held = np.random.default_rng(seed).integers(num, size=NUM), list[str]()

        def told(i: int, _: float) -> Columns:
            name = f"lora-{draws[i]}"
            swap = 0.0 if name in held else 0.4
            held[:] = [name, *(other for other in held if other != name)][:4]
            return {"model": name, "hidden_s": swap}

        return told

    base = served("base", 1, told=asked(4, 1), steps=True)
    verdict = verdict_of(tmp_path, base, served("suspect", 2, told=asked(16, 2), steps=True))
    assert names(verdict) == ["adapter_swap"], verdict.verdict


def test_half_of_the_steps_compile_and_none_is_slow(tmp_path: Path) -> None:
    """The first 150 shapes that are new stand still for 0.8 s each: all of it is the compiler's."""

    def of_lengths(draws: Any, stands_s: float) -> Callable[[int, float], Columns]:
        seen = set[int]()

        def told(i: int, _: float) -> Columns:
            is_new = int(draws[i]) not in seen and len(seen) < 150
            seen.add(int(draws[i]))
            return {"prompt_tokens": int(draws[i]), "hidden_s": stands_s if is_new else 0.0}

        return told

    rng = np.random.default_rng(3)
    base = served("base", 1, told=of_lengths(rng.choice([1300, 1350, 1400, 1450, 1500], NUM), 0.0), steps=True)
    suspect = served("suspect", 2, told=of_lengths(rng.integers(1300, 1500, NUM), 0.8), steps=True)
    verdict = verdict_of(tmp_path, base, suspect)
    assert names(verdict) == ["recompile"], verdict.verdict


def preempted(run: str, seed: int, share: float, *, columns: tuple[str, ...] = ()) -> Rows:
    """`share` of the requests are out for about 6 s; a counter alone tells how many were. Without `columns` of the requests."""
    rng = np.random.default_rng(seed)
    lost = np.where(rng.random(NUM) < share, rng.uniform(3.0, 9.0, NUM), 0.0)
    rows = served(run, seed, told=lambda i, _: {"out_s": float(lost[i])})
    counted = np.cumsum(lost > 0)
    told = {"worker": "w0", "run_id": run, "name": "preemptions_total"}
    rows["sample"] = [
        {**told, "at_ns": row["first_token_ns"], "value": float(count)}
        for row, count in zip(rows["request"], counted, strict=True)
    ]
    for row in rows["request"]:
        row["decode_s"] = (row["last_token_ns"] - row["first_token_ns"]) / 1e9
        for name in columns:
            row.pop(name)
    return rows


ENGINES = ("first_scheduled_ns", "queue_s", "prefill_s", "decode_s", "cached_tokens", "computed_tokens")


@pytest.mark.parametrize("hidden", [(), ENGINES], ids=["engine's times", "callers' times"])
@pytest.mark.parametrize("metric", ["tpot", "e2e"])
def test_preemptions_that_a_counter_alone_tells_are_no_slow_machine(
    tmp_path: Path, metric: str, hidden: tuple[str, ...]
) -> None:
    """Two requests in five take 6 s more, as many as the counter says were preempted; the others decode as before."""
    base, suspect = (
        preempted(run, seed, share, columns=hidden) for run, seed, share in (("base", 1, 0.0), ("suspect", 2, 0.4))
    )
    verdict = verdict_of(tmp_path, base, suspect, metric)
    assert names(verdict) == ["preemption_recompute"], verdict.verdict


def test_slow_tokens_are_not_preemptions_that_were_counted_elsewhere(tmp_path: Path) -> None:
    """Everybody's tokens take twice as long, and the counter rose by nine: those nine explain nothing of it."""
    base, suspect = preempted("base", 1, 0.0), preempted("suspect", 2, 0.03)
    for row in suspect["request"]:
        longer = round(row["decode_s"] * 1e9)
        row |= {name: row[name] + longer for name in ("last_token_ns", "end_ns", "at_ns")}
        row["decode_s"] *= 2
    verdict = verdict_of(tmp_path, base, suspect, "tpot")
    assert names(verdict)[0] == "slow_steps", verdict.verdict


def tiered(run: str, seed: int, *, device: int, host: int, read: float) -> Rows:
    """Prompts find these tokens on the device and in host memory; counters say that the tier took 10 GB in, and what was read."""
    found = {"cached_tokens": device + host, "cached_tokens_device": device, "cached_tokens_host": host}
    rows = served(run, seed, told=lambda _, __: dict(found))
    told = {"worker": "w0", "run_id": run}
    rows["worker"] = [{**told, "at_ns": ns(-1.0), "block_size": 16, "num_blocks": 8000}]
    rows["sample"] = [
        {**told, "at_ns": ns(share * NUM), "name": f"tier_{way}_bytes_total", "value": share * amount}
        for share in (0.0, 0.5, 1.0)
        for way, amount in (("written", 1e10), ("read", read))
    ]
    return rows


def test_a_tier_that_is_written_and_never_read_owns_what_it_gave(tmp_path: Path) -> None:
    """512 tokens a request came from host memory and come no more, as many as before from the device; no row tells of blocks."""
    base = tiered("base", 1, device=512, host=512, read=5e9)
    verdict = verdict_of(tmp_path, base, tiered("suspect", 2, device=512, host=0, read=0.0))
    assert (verdict.status, names(verdict)) == ("explained", ["tier_never_read"]), verdict.verdict
    assert verdict.causes[0].mean_s > 0.04


def test_a_device_that_finds_less_is_not_the_tier_s(tmp_path: Path) -> None:
    """64 tokens a request came from host memory; what is lost is the device's 512, and nobody tells why."""
    base = tiered("base", 1, device=960, host=64, read=5e9)
    verdict = verdict_of(tmp_path, base, tiered("suspect", 2, device=448, host=0, read=0.0))
    assert (verdict.status, names(verdict)) == ("not_observable", []), verdict.verdict


def test_more_hits_than_before_are_no_lost_reuse(tmp_path: Path) -> None:
    """The suspect window is the better one: it is the baseline that computed what the other found."""
    base, suspect = (
        served(run, seed, told=lambda _, __, cached=cached: {"cached_tokens": cached})
        for run, seed, cached in (("base", 1, 256), ("suspect", 2, 1024))
    )
    verdict = verdict_of(tmp_path, base, suspect)
    assert verdict.delta.mean_s < 0.0
    assert "computing what the other window found cached" in verdict.verdict
    assert "lost" not in verdict.verdict


def fleet(run: str, seed: int, *, off: tuple[int, ...]) -> Rows:
    """Four workers with 300 requests each; those that are off find nothing, and say so."""
    out: Rows = {"request": [], "worker": []}
    for k in range(4):
        cached = 0 if k in off else 1024
        rows = served(
            f"{run}", seed + k, told=lambda i, _, k=k, cached=cached: {"cached_tokens": cached, "worker": f"w{k}"}
        )
        for row in rows["request"]:
            row["request_id"] = f"{row['request_id']}-{k}"
        out["request"] += rows["request"]
        fact = {"worker": f"w{k}", "run_id": run, "at_ns": ns(-1.0), "block_size": 16, "num_blocks": 8000}
        out["worker"].append({**fact, "prefix_caching": k not in off})
    return out


def test_caching_that_is_off_at_one_worker_is_named_with_it(tmp_path: Path) -> None:
    """w1 came back without its flag: a quarter of the requests computes 1,024 tokens more each, and nobody else does."""
    verdict = verdict_of(tmp_path, fleet("base", 1, off=()), fleet("suspect", 11, off=(1,)))
    assert names(verdict) == ["prefix_caching_off"], verdict.verdict
    assert verdict.causes[0].subject == {"kind": "worker", "id": "w1"}


def test_a_worker_that_never_cached_is_no_change(tmp_path: Path) -> None:
    """w1 is off in both windows."""
    verdict = verdict_of(tmp_path, fleet("base", 1, off=(1,)), fleet("suspect", 11, off=(1,)))
    assert (verdict.status, names(verdict)) == ("no_change", []), verdict.verdict
