"""What a row implies: phases by its instants, cached tokens by those that it computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diagnosis.loading.implied import names_implied, with_implied
from diagnosis.observability import judgeable
from engine_probe.schema import table_from_rows
from tests.diagnosed import judged, runs, stored
from tests.simulate import Rows, Setup

S = 1_000_000_000
AT = {"arrival_ns": 0, "first_scheduled_ns": 2 * S, "first_token_ns": 5 * S, "last_token_ns": 9 * S}


def told(*rows: dict[str, Any]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """queue_s, prefill_s and decode_s of engine rows, and the columns that were filled."""
    whole = [
        {"request_id": f"r{i}", "at_ns": 9 * S, "vantage": "engine", "state": "finished", **AT, **row}
        for i, row in enumerate(rows)
    ]
    table, filled = with_implied(table_from_rows("request", whole))
    return table.select(["queue_s", "prefill_s", "decode_s"]).to_pylist(), filled


def test_instants_alone_tell_queue_prefill_and_decoding() -> None:
    """2 s to the first schedule, 3 to the first token, 4 to the last."""
    rows, filled = told({})
    assert rows == [{"queue_s": 2.0, "prefill_s": 3.0, "decode_s": 4.0}]
    assert filled == ("queue_s", "prefill_s", "decode_s")


def test_what_rows_tell_is_kept() -> None:
    """A column that one row tells is nobody's to fill: who tells it left it out of the other on purpose."""
    rows, filled = told({"queue_s": 0.5}, {})
    assert [row["queue_s"] for row in rows] == [0.5, None]
    assert filled == ("prefill_s", "decode_s")
    assert told({"queue_s": 0.5, "prefill_s": 0.1, "decode_s": 0.2})[1] == ()


def test_of_a_prompt_what_was_not_computed_was_cached() -> None:
    """500 tokens of which 140 were computed; more computed than there are leave nothing."""
    whole = [
        {"request_id": f"r{n}", "at_ns": 9 * S, "vantage": "engine", "state": "finished", "arrival_ns": 0}
        | {"prompt_tokens": 500, "computed_tokens": n}
        for n in (140, 520)
    ]
    table, filled = with_implied(table_from_rows("request", whole))
    assert (table["cached_tokens"].to_pylist(), filled) == ([360, 0], ("cached_tokens",))


def test_what_is_told_beside_is_taken_off() -> None:
    """0.5 s of front end lie before the queue, 1 s of loading and 0.2 of look-up behind it, 1.5 s of stalls in decoding."""
    rows, _ = told({"frontend_s": 0.5, "kv_load_s": 1.0, "cache_lookup_s": 0.2, "stalled_s": 1.5})
    assert rows == [{"queue_s": 1.5, "prefill_s": pytest.approx(1.8), "decode_s": 2.5}]


def test_a_load_that_does_not_fit_behind_the_schedule_lay_before_it() -> None:
    """4 s of loading in 3 s after the first schedule: one of them was waited through before it."""
    assert told({"kv_load_s": 4.0})[0] == [{"queue_s": 1.0, "prefill_s": 0.0, "decode_s": 4.0}]


@pytest.mark.parametrize(
    ("row", "phases"),
    [
        ({"first_scheduled_ns": None}, (None, None, None)),
        ({"first_token_ns": None, "last_token_ns": None}, (2.0, None, None)),
        ({"first_scheduled_ns": 6 * S}, (6.0, None, 4.0)),
        ({"arrival_ns": 3 * S}, (None, 3.0, 4.0)),
    ],
    ids=["never scheduled", "no first token", "scheduled after its token", "scheduled before it came"],
)
def test_what_instants_do_not_tell_stays_unknown(row: dict[str, Any], phases: tuple[float | None, ...]) -> None:
    """Unknown is null, and what is in the wrong order is no duration."""
    rows, _ = told(row, {})
    assert tuple(rows[0].values()) == phases


def test_names_are_told_as_rows_are() -> None:
    """The page of what can be seen counts what instants tell."""
    names = {f"request.{name}" for name in AT} | {"step.num_running"}
    assert names_implied(names) == {"request.queue_s", "request.prefill_s", "request.decode_s"}
    assert names_implied(names - {"request.first_scheduled_ns"}) == frozenset()
    assert "fixed_offset" in judgeable(names).causes


def without_phases(rows: Rows) -> Rows:
    phases = ("frontend_s", "cache_lookup_s", "queue_s", "prefill_s", "decode_s", "stalled_s", "token_ns")
    return {**rows, "request": [{k: v for k, v in row.items() if k not in phases} for row in rows["request"]]}


def test_a_shortage_of_blocks_is_named_by_instants_alone(tmp_path: Path) -> None:
    """The same cause as with phases that are told, and nearly the same seconds."""
    made = runs({"ample": {}, "short": {"num_blocks": 170}}, Setup(num_requests=200, output_tokens=(64, 160)))
    bare = {f"{name}-bare": without_phases(rows) for name, rows in made.items()}
    parts = [*made.values()]
    for name, rows in bare.items():
        parts.append({kind: [{**row, "run_id": name} for row in part] for kind, part in rows.items()})
    store = stored(tmp_path / "store.duckdb", parts)
    try:
        whole, found = judged(store, "ample", "short"), judged(store, "ample-bare", "short-bare")
    finally:
        store.close()
    assert found.status == "explained", found.verdict
    assert found.causes[0].cause == whole.causes[0].cause == "admission_blocked_on_blocks"
    assert found.causes[0].mean_s == pytest.approx(whole.causes[0].mean_s, rel=0.05)
    assert not any(row.cause.endswith("_unobserved") and abs(row.mean_s) > 1e-6 for row in found.attribution)
