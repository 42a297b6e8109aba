"""Which engine row is of which caller's request, where an id alone does not say it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from diagnosis.loading.pairing import pair
from diagnosis.loading.requests import COLUMNS
from engine_probe.schema import table_from_rows


def rows(*told: dict[str, Any], vantage: str) -> pa.Table:
    plain = {"vantage": vantage, "state": "finished", "request_id": "a", "at_ns": 0}
    return table_from_rows("request", [plain | row for row in told]).select(COLUMNS)


def paired(callers: list[dict[str, Any]], engine: list[dict[str, Any]]) -> tuple[list[int | None], int]:
    position, num_shared = pair(rows(*callers, vantage="client"), rows(*engine, vantage="engine"))
    return position.to_pylist(), num_shared


def test_an_id_of_one_request_takes_its_first_row() -> None:
    """A prefill and a decode worker tell of one request: the same prompt, so the first row is its own as ever."""
    engine = [
        {"worker": "p", "arrival_ns": 5, "prompt_tokens": 100, "output_tokens": 1},
        {"worker": "d", "arrival_ns": 9, "prompt_tokens": 100, "output_tokens": 20},
    ]
    assert paired([{"arrival_ns": 4, "prompt_tokens": 100, "output_tokens": 20}], engine) == ([0], 0)


def test_two_requests_of_one_id_are_told_apart_by_their_prompts() -> None:
    """The caller of 300 tokens came later by its own clock; its row is the one with 300 tokens, whenever that arrived."""
    callers = [{"arrival_ns": 10, "prompt_tokens": 100}, {"arrival_ns": 20, "prompt_tokens": 300}]
    engine = [
        {"worker": "w0", "arrival_ns": 11, "prompt_tokens": 300},
        {"worker": "w1", "arrival_ns": 21, "prompt_tokens": 100},
    ]
    assert paired(callers, engine) == ([1, 0], 1)


def test_requests_of_one_length_are_told_apart_by_arrival_and_each_row_is_taken_once() -> None:
    """Arrivals 10 and 12 against 11 and 13: 10 and 12 are both 1 away from 11; whoever is left takes the other."""
    callers = [{"arrival_ns": 10, "prompt_tokens": 100}, {"arrival_ns": 12, "prompt_tokens": 100}]
    engine = [
        {"worker": "w0", "arrival_ns": 11, "prompt_tokens": 100},
        {"worker": "w1", "arrival_ns": 13, "prompt_tokens": 100},
    ]
    assert paired(callers, engine) == ([0, 1], 1)


def test_who_finds_no_row_of_its_own_stays_without() -> None:
    """Three callers, and the engine tells of two: the third is not given the row of another."""
    callers = [{"arrival_ns": at, "prompt_tokens": 100} for at in (10, 20, 30)]
    engine = [{"worker": "w0", "arrival_ns": at, "prompt_tokens": 100} for at in (11, 31)]
    assert paired(callers, engine) == ([0, None, 1], 1)


def test_a_worker_that_callers_name_comes_first() -> None:
    """Both came at once; the caller of w1 is served by w1."""
    callers = [{"arrival_ns": 10, "worker": "w1"}, {"arrival_ns": 10, "worker": "w0"}]
    engine = [{"worker": "w0", "arrival_ns": 11}, {"worker": "w1", "arrival_ns": 11}]
    assert paired(callers, engine) == ([1, 0], 1)


def test_attempts_of_one_request_are_no_other_requests() -> None:
    """Two attempts under one id: each takes the row of its attempt."""
    callers = [{"arrival_ns": 10, "attempt": 0}, {"arrival_ns": 20, "attempt": 1}]
    engine = [{"worker": "w1", "arrival_ns": 21, "attempt": 1}, {"worker": "w0", "arrival_ns": 11, "attempt": 0}]
    assert paired(callers, engine) == ([1, 0], 0)


def test_an_id_that_everybody_has_joins_nobody() -> None:
    """101 callers and 100 rows under one id are more than 10,000 pairs: no row is anybody's."""
    callers = [{"arrival_ns": at} for at in range(101)]
    engine = [{"worker": "w0", "arrival_ns": at} for at in range(100)]
    assert paired(callers, engine) == ([None] * 101, 1)
