"""Hand-overs by hand: a prefill worker w0, a decode worker d0 of 20 blocks, and each second of a hand-over with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnosis.facts import Facts, HandoverFacts
from diagnosis.ledger.values import metric_values
from diagnosis.loading.load import load
from store.interface import Store, Window
from store.open import open_store
from tests.store_rows import START_NS, S, batch

RUN = Window(run_id="r")


def at(seconds: float) -> int:
    return START_NS + round(seconds * S)


def leg(name: str, worker: str, arrival: float, begun: float, first: float, last: float, **more: Any) -> dict[str, Any]:
    """One worker's row of a request."""
    instants = {"arrival_ns": arrival, "first_scheduled_ns": begun, "first_token_ns": first, "last_token_ns": last}
    row = {"request_id": name, "run_id": "r", "worker": worker, "vantage": "engine", "state": "finished"}
    row |= {key: at(seconds) for key, seconds in instants.items()} | {"end_ns": at(last), "at_ns": at(last)}
    row |= {"prompt_tokens": 160, "queue_s": begun - arrival, "prefill_s": first - begun, "decode_s": last - first}
    return row | {"output_tokens": 1, "computed_tokens": 160, "cached_tokens": 0} | more


def caller(name: str, arrival: float, first: float, last: float) -> dict[str, Any]:
    row = {"request_id": name, "run_id": "r", "vantage": "client", "state": "finished", "prompt_tokens": 160}
    row |= {"arrival_ns": at(arrival), "first_token_ns": at(first), "last_token_ns": at(last), "end_ns": at(last)}
    return row | {"at_ns": at(last), "output_tokens": 11}


def transfer(name: str, ended: float, wait: float, wire: float, outcome: str = "ok") -> dict[str, Any]:
    moved = {"source_worker": "w0", "target_worker": "d0", "num_bytes": 1000, "attempts": 1, "outcome": outcome}
    return {
        "request_id": name,
        "run_id": "r",
        "worker": "d0",
        "at_ns": at(ended),
        "wait_s": wait,
        "wire_s": wire,
    } | moved


def step(ended: float, used: int) -> dict[str, Any]:
    told = {"run_id": "r", "worker": "d0", "at_ns": at(ended), "duration_s": 0.01, "step": round(ended * 1000)}
    return told | {"blocks_total": 20, "blocks_used": used, "num_running": 1, "prefill_tokens": 0, "decode_tokens": 1}


DECODING = {"output_tokens": 10, "computed_tokens": 1, "prefill_s": 0.1}


def rows() -> dict[str, list[dict[str, Any]]]:
    """Four hand-overs, as the tests below tell them; and a load of r1 from w0's own host tier, which is none."""
    tier = transfer("r1", 0.5, 0.1, 0.1) | {"source_worker": "w0/host", "target_worker": "w0"}
    return {
        "request": [
            leg("r1", "w0", 0.0, 0.0, 1.0, 1.0),
            leg("r1", "d0", 1.0, 1.8, 1.9, 2.9, **DECODING),
            caller("r1", 0.0, 1.0, 2.9),
            leg("r2", "w0", 3.0, 3.0, 4.0, 4.0),
            leg("r2", "d0", 4.0, 4.2, 4.3, 5.3, **DECODING),
            caller("r2", 3.0, 4.0, 5.3),
            leg("r3", "w0", 3.0, 3.0, 4.0, 4.0),
            leg("r3", "d0", 4.0, 4.5, 4.6, 5.6, **DECODING),
            caller("r3", 3.0, 4.0, 5.6),
            leg("r4", "w0", 6.0, 6.0, 7.0, 7.0),
            leg("r4", "d0", 7.0, 7.6, 8.0, 9.0, **(DECODING | {"prefill_s": 0.4, "computed_tokens": 160})),
            caller("r4", 6.0, 7.0, 9.0),
        ],
        "transfer": [
            tier,
            transfer("r1", 1.7, 0.5, 0.2),
            transfer("r2", 4.2, 0.1, 0.1),
            transfer("r3", 4.3, 0.2, 0.1),
            transfer("r4", 7.6, 0.1, 0.5, "fell_back"),
        ],
        "step": [step(0.9, 15), step(1.3, 5), step(9.0, 5)],
        "worker": [
            {"worker": name, "run_id": "r", "at_ns": START_NS, "block_size": 16, "num_blocks": 20}
            for name in ("w0", "d0")
        ],
    }


def loaded(path: Path, told: dict[str, list[dict[str, Any]]], vantage: str = "client") -> Facts:
    store: Store = open_store(str(path))
    try:
        store.append(batch(told))
        return load(store, RUN, "window", vantage)
    finally:
        store.close()


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return loaded(tmp_path_factory.mktemp("handover") / "k.duckdb", rows())


def parts(facts: Facts, name: str) -> dict[str, float]:
    moves = facts.handover
    assert moves is not None
    row = facts.requests.request_id.tolist().index(name)
    return {key: round(float(seconds[row]), 6) for key, seconds in moves.parts.items() if seconds[row]}


def test_no_room_is_told_from_orchestration(facts: Facts) -> None:
    """r1 waits 0.5 s, of which hand-overs take 0.1 at least; the prompt needs 11 blocks and 5 are free up to 1.3 s.

    So of the 0.4 s from 1.1 to 1.5 s half was without room: 0.2 s; 0.3 s are orchestration. Then 0.2 s on the wire and 0.1 of queue.
    """
    assert parts(facts, "r1") == pytest.approx(
        {"decode_block_shortage": 0.2, "transfer_orchestration": 0.3, "transfer_wire": 0.2, "decode_queue": 0.1}
    )


def test_the_link_s_queue_is_the_wire_s(facts: Facts) -> None:
    """r3 begins when r2 ends (4.2 s): of its 0.2 s of waiting 0.1 are what r2 took on the link, 0.1 what any hand-over waits."""
    assert parts(facts, "r2") == pytest.approx({"transfer_orchestration": 0.1, "transfer_wire": 0.1})
    assert parts(facts, "r3") == pytest.approx(
        {"transfer_orchestration": 0.1, "transfer_wire": 0.2, "decode_queue": 0.2}
    )


def test_what_broke_costs_its_timeout_and_the_prompt_again(facts: Facts) -> None:
    """r4 breaks after 0.5 s; its first step takes 0.4 s where others take 0.1."""
    assert parts(facts, "r4") == pytest.approx({"transfer_orchestration": 0.1, "transfer_failures": 0.8})


def test_parts_fill_the_time_between_the_workers(facts: Facts) -> None:
    """From the end of the prefill to the first step at the decode worker; of r4 to the end of computing again, less a usual step."""
    moves, r = facts.handover, facts.requests
    assert moves is not None
    spent = sum(moves.parts.values(), np.zeros(4))
    assert spent.tolist() == pytest.approx([0.8, 0.2, 0.5, 0.9])
    assert (moves.first_s - r.engine_first_s - 0.1).tolist() == pytest.approx(spent.tolist())
    assert not moves.before_first.any()
    assert metric_values(facts, "ttft").tolist() == pytest.approx([1.0, 1.0, 1.0, 1.0])


def test_both_workers_tokens_are_the_engine_s(facts: Facts) -> None:
    """One token at the prefill worker and ten at the other are the caller's eleven."""
    assert facts.requests.get("engine_output_tokens").tolist() == [11.0, 11.0, 11.0, 11.0]


def test_a_first_token_of_the_decode_worker_comes_after_the_hand_over(tmp_path: Path) -> None:
    """Where the decode worker gives all of the caller's tokens, its hand-over lies in TTFT."""
    told = rows()
    told["request"] = [
        row | ({"output_tokens": 11} if row["worker"] == "d0" else {})
        for row in (row | {"worker": row.get("worker")} for row in told["request"])
    ]
    moves = loaded(tmp_path / "k.duckdb", told).handover
    assert moves is not None
    assert moves.before_first.all()


def test_without_steps_room_is_not_known(tmp_path: Path) -> None:
    """What the decode worker had free is told by nobody: the wait is orchestration's, and that is said."""
    told = rows()
    del told["step"]
    found = loaded(tmp_path / "k.duckdb", told)
    moves: HandoverFacts | None = found.handover
    assert moves is not None
    assert not moves.sees_room
    assert parts(found, "r1")["transfer_orchestration"] == pytest.approx(0.5)
    assert "step.blocks_used" not in found.visible


def test_a_tier_s_loads_are_no_hand_over(tmp_path: Path) -> None:
    """What comes from a worker's own tier moves no KV between workers."""
    told = rows()
    told["transfer"] = told["transfer"][:1]
    assert loaded(tmp_path / "k.duckdb", told).handover is None


@pytest.mark.parametrize("prompt", [161, 160], ids=["given the first token", "gives the first token"])
def test_engine_rows_of_two_workers_are_one_request(tmp_path: Path, prompt: int) -> None:
    """Without callers too. A decode worker that was given the first token has it in its prompt; else TTFT ends with its own first."""
    told = rows()
    told["request"] = [row | ({"prompt_tokens": prompt} if row["worker"] == "d0" else {}) for row in engine_rows(told)]
    found = loaded(tmp_path / "k.duckdb", told, "engine")
    is_given = prompt == 161
    assert sorted(found.requests.request_id.tolist()) == ["r1", "r2", "r3", "r4"]
    assert found.requests.worker_names == ("w0",)
    ttft = metric_values(found, "ttft").tolist()
    assert ttft == pytest.approx([1.0, 1.0, 1.0, 1.0] if is_given else [1.9, 1.3, 1.6, 2.0])
    assert metric_values(found, "e2e").tolist() == pytest.approx([2.9, 2.3, 2.6, 3.0])
    assert found.requests.get("output_tokens").tolist() == [11.0 if is_given else 10.0] * 4
    moves = found.handover
    assert moves is not None
    assert moves.before_first.all() != is_given


def engine_rows(told: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [row for row in told["request"] if row["vantage"] == "engine"]
