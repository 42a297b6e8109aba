"""Hand-overs that are told otherwise than one would like: timeouts in other columns, seconds by requests alone, or by nobody."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.diagnosed import judged, stored
from tests.simulate import Rows, ns

TIMEOUT_S, PREFILL_S, WIRE_S, WAIT_S = 2.0, 0.12, 0.02, 0.004


pytestmark = pytest.mark.usefixtures("few_replicates")


def split_fleet(run: str, seed: int, *, broken: float = 0.0, told: str = "nowhere", wire_s: float = WIRE_S) -> Rows:
    """300 requests of 2,000 tokens from p0 to d0; this share of hand-overs breaks after 2 s, and d0 computes the prompt itself.

    told: the column that holds the timeout (wait_s, wire_s), that nothing does (nowhere), or that the transfer is told when it broke and
    all else comes after it (before)."""
    rng = np.random.default_rng(seed)
    rows: Rows = {"request": [], "transfer": [], "worker": []}
    for worker, role in (("p0", "prefill"), ("d0", "decode")):
        fact = {"worker": worker, "run_id": run, "at_ns": ns(-1), "role": role, "block_size": 16, "num_blocks": 9000}
        rows["worker"].append(fact)
    at = free_at = 0.0
    for i in range(300):
        at += rng.exponential(0.35)
        begun = max(at, free_at)
        free_at = done = begun + PREFILL_S * rng.uniform(0.9, 1.1)
        wait, wire = WAIT_S * rng.uniform(0.8, 1.2), wire_s * rng.uniform(0.9, 1.1)
        is_broken = rng.random() < broken
        lost = TIMEOUT_S if is_broken else 0.0
        end = done + wait + wire + lost
        first = end + (PREFILL_S if is_broken else 0.0) + 0.02
        output = int(rng.integers(50, 100))
        last = first + 0.02 * output
        one = {"request_id": f"{run}-{i}", "run_id": run, "state": "finished", "prompt_tokens": 2000}
        leg = {
            **one,
            "vantage": "engine",
            "worker": "p0",
            "output_tokens": 1,
            "cached_tokens": 0,
            "queue_s": begun - at,
        }
        leg |= {"arrival_ns": ns(at), "first_scheduled_ns": ns(begun), "prefill_s": done - begun}
        rows["request"].append(
            {**leg, **dict.fromkeys(("first_token_ns", "last_token_ns", "end_ns", "at_ns"), ns(done))}
        )
        leg = {**one, "vantage": "engine", "worker": "d0", "output_tokens": output, "prefill_s": first - end}
        leg |= {
            "arrival_ns": ns(done),
            "first_scheduled_ns": ns(end),
            "first_token_ns": ns(first),
            "queue_s": end - done,
        }
        leg |= {"cached_tokens": 0 if is_broken else 2000, "computed_tokens": 2000 if is_broken else 0}
        rows["request"].append({**leg, **dict.fromkeys(("last_token_ns", "end_ns", "at_ns"), ns(last))})
        seen = {**one, "vantage": "client", "arrival_ns": ns(at - 0.001), "first_token_ns": ns(first + 0.001)}
        seen |= {"output_tokens": output, **dict.fromkeys(("last_token_ns", "end_ns", "at_ns"), ns(last + 0.001))}
        rows["request"].append(seen)
        move = {"request_id": f"{run}-{i}", "run_id": run, "worker": "d0", "source_worker": "p0", "target_worker": "d0"}
        move |= {"at_ns": ns(end - (lost if told == "before" else 0.0)), "wait_s": wait, "wire_s": wire}
        move |= {"num_bytes": 262_144_000, "outcome": "fell_back" if is_broken else "ok"}
        if told in ("wait_s", "wire_s"):
            move[told] += lost
        rows["transfer"].append(move)
    return rows


@pytest.mark.parametrize("told", ["nowhere", "wait_s", "wire_s", "before"])
def test_what_a_broken_transfer_costs_is_the_failure_s(tmp_path: Path, told: str) -> None:
    """A fifth breaks: no fixed offset without a cause, no orchestration, no slow wire, and no backlog of KV that never came."""
    runs = [
        split_fleet(run, seed, broken=share, told=told) for run, seed, share in (("base", 1, 0.0), ("suspect", 2, 0.2))
    ]
    with stored(tmp_path / "s.duckdb", runs) as store:
        verdict = judged(store, "base", "suspect")
    assert [cause.cause for cause in verdict.causes] == ["transfer_failures"], verdict.verdict
    seconds = {row.cause: row.mean_s for row in verdict.attribution}
    assert seconds["transfer_failures"] / verdict.delta.mean_s == pytest.approx(1.0, abs=0.05)
    (cost,) = (e["statement"] for e in verdict.causes[0].evidence if e["statement"].startswith("one that broke"))
    assert cost.startswith("one that broke cost 2.1")


def by_requests(rows: Rows, *, tell: bool) -> Rows:
    """Nobody records transfers; the decode worker's row of each request tells its seconds of them, or nothing."""
    moved = {row["request_id"]: row for row in rows["transfer"]}
    requests = []
    for row in rows["request"]:
        move = moved[row["request_id"]]
        seconds = {"kv_transfer_s": move["wire_s"], "handover_s": move["wait_s"]}
        requests.append({**row, **(seconds if tell and row.get("worker") == "d0" else {})})
    return {**rows, "request": requests, "transfer": []}


def one_row(rows: Rows) -> Rows:
    """Both workers told of each request in one row: that of the one who decoded it, from its arrival on."""
    first = {row["request_id"]: row for row in rows["request"] if row.get("worker") == "p0"}
    kept = ("arrival_ns", "first_scheduled_ns", "queue_s", "prefill_s", "cached_tokens")
    requests = [
        {**row, **({name: first[row["request_id"]][name] for name in kept} if row.get("worker") == "d0" else {})}
        for row in rows["request"]
        if row.get("worker") != "p0"
    ]
    return {**rows, "request": requests, "worker": []}


def of_vantage(rows: Rows, vantage: str) -> Rows:
    return {**rows, "request": [row for row in rows["request"] if vantage in ("both", row["vantage"])]}


@pytest.mark.parametrize("vantage", ["both", "engine"])
@pytest.mark.parametrize("shape", ["two rows", "one row"])
def test_a_slow_wire_is_told_by_requests_alone(tmp_path: Path, shape: str, vantage: str) -> None:
    """0.4 s on the wire for 20 ms: it lies between the two workers, and not before the engine."""
    runs = [
        of_vantage(by_requests(split_fleet(run, seed, wire_s=wire), tell=True), vantage)
        for run, seed, wire in (("base", 1, WIRE_S), ("suspect", 2, 0.4))
    ]
    with stored(tmp_path / "s.duckdb", map(one_row, runs) if shape == "one row" else runs) as store:
        verdict = judged(store, "base", "suspect")
    assert [cause.cause for cause in verdict.causes] == ["transfer_wire"], verdict.verdict
    seconds = {row.cause: row.mean_s for row in verdict.attribution}
    assert seconds["transfer_wire"] == pytest.approx(0.38, abs=0.02)
    assert abs(seconds.get("slow_steps", 0.0)) < 0.02


def test_what_nobody_tells_between_two_workers_is_not_before_the_engine(tmp_path: Path) -> None:
    """The same with no second of it in any column: two rows of a request say that it lies between them, and no more."""
    runs = [
        by_requests(split_fleet(run, seed, wire_s=wire), tell=False)
        for run, seed, wire in (("base", 1, WIRE_S), ("suspect", 2, 0.4))
    ]
    with stored(tmp_path / "s.duckdb", runs) as store:
        verdict = judged(store, "base", "suspect")
    assert (verdict.status, verdict.causes) == ("not_distinguishable", []), verdict.verdict
    seconds = {row.cause: row.mean_s for row in verdict.attribution}
    assert seconds["unexplained"] == pytest.approx(0.38, abs=0.02)
    assert {unseen["cause"] for unseen in verdict.not_observable} >= {"transfer_wire", "transfer_failures"}


def test_what_the_decode_worker_s_row_holds_is_no_fixed_time_outside_of_all(tmp_path: Path) -> None:
    """A fifth waits 2.12 s at the decode worker, and nobody tells of its hand-over: its row's queue and prefill hold them, so they do not
    lie between the caller and the engine, and why is not known."""
    runs = [
        by_requests(split_fleet(run, seed, broken=share), tell=False)
        for run, seed, share in (("base", 1, 0.0), ("suspect", 2, 0.2))
    ]
    with stored(tmp_path / "s.duckdb", runs) as store:
        verdict = judged(store, "base", "suspect")
    assert not verdict.causes, verdict.verdict
    seconds = {row.cause: row.mean_s for row in verdict.attribution}
    assert abs(seconds.get("fixed_offset", 0.0)) < 0.01
    assert seconds["unexplained"] / verdict.delta.mean_s == pytest.approx(1.0, abs=0.1)
