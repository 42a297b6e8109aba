"""Client and engine whose clocks are hours apart: the verdict, its SQL and its bundle are those of clocks that agree."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from diagnosis import bundle
from diagnosis.diagnose import diagnose
from diagnosis.loading.clocks import engine_ahead_ns, moved, moved_requests
from diagnosis.loading.load import load
from diagnosis.loading.requests import COLUMNS
from diagnosis.telling.verdict import Verdict
from engine_probe.schema import table_from_rows
from store.interface import Store, Window
from tests.diagnosed import as_run, few_replicates, runs, stored, with_client
from tests.simulate import T0_NS, Rows, Setup

HOUR_NS = 3600 * 1_000_000_000
SKEWS = {"agree": 0.0, "ahead": 7200.0, "behind": -10_800.0}
SMALL = Setup(num_requests=160, output_tokens=(8, 32))


def without(rows: Rows, *kinds: str) -> Rows:
    return {kind: ([] if kind in kinds else part) for kind, part in rows.items()}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A sound and a squeezed run as clients with three clocks saw them, without steps, so that blocks are found by elimination."""
    made = runs({"base": {}, "squeeze": {"num_blocks": 160}}, SMALL)
    parts = []
    for clock, skew_s in SKEWS.items():
        for name, rows in made.items():
            seen = with_client(without(rows, "step"), skew_s=skew_s)
            for row in seen["request"]:
                row["prompt_blocks"] = next(r for r in rows["request"] if r["request_id"] == row["request_id"])[
                    "prompt_blocks"
                ]
                row["cached_tokens"] = next(r for r in rows["request"] if r["request_id"] == row["request_id"])[
                    "cached_tokens"
                ]
            parts.append(as_run(seen, f"{name}-{clock}"))
    with few_replicates(), stored(tmp_path_factory.mktemp("clocks") / "store.duckdb", parts) as opened:
        yield opened


def window(name: str, clock: str, *, bounded: bool) -> Window:
    """The whole run, or the client's first 20 s of it by its own clock."""
    start = T0_NS + round(SKEWS[clock] * 1e9)
    return Window(start, start + 20_000_000_000, f"{name}-{clock}") if bounded else Window(run_id=f"{name}-{clock}")


def verdict(store: Store, clock: str, *, bounded: bool) -> Verdict:
    pair = [window(name, clock, bounded=bounded) for name in ("base", "squeeze")]
    return diagnose(store, pair[0], pair[1], now_ns=time.time_ns() + 10 * HOUR_NS)


@pytest.mark.parametrize("clock", ["ahead", "behind"])
def test_how_far_apart_is_told_by_the_requests_that_both_saw(store: Store, clock: str) -> None:
    """Two hours ahead, three behind, also where the engine's rows lie far outside the window by its own clock."""
    for bounded in (False, True):
        found = engine_ahead_ns(store, window("base", clock, bounded=bounded), "client")
        assert found == pytest.approx(-SKEWS[clock] * 1e9, abs=50_000_000)
    assert engine_ahead_ns(store, window("base", "agree", bounded=True), "client") == 0
    assert engine_ahead_ns(store, window("base", clock, bounded=True), "engine") == 0


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("clock", ["ahead", "behind"])
def test_the_verdict_is_that_of_clocks_that_agree(store: Store, clock: str, bounded: bool) -> None:
    """The same causes own the same seconds; that the clocks differ is said."""
    plain, skewed = (verdict(store, name, bounded=bounded) for name in ("agree", clock))
    assert [cause.cause for cause in skewed.causes] == [cause.cause for cause in plain.causes]
    assert plain.causes
    for one, other in zip(plain.attribution, skewed.attribution, strict=True):
        assert other.cause == one.cause
        assert (other.mean_s, other.p99_s) == pytest.approx((one.mean_s, one.p99_s), abs=1e-6)
    said = [row for row in skewed.quality if row["check"] == "clocks"]
    assert [row["status"] for row in said] == ["warning", "warning"]
    word = "behind" if clock == "ahead" else "ahead of"
    assert f"{word} the client's" in said[0]["statement"]


@pytest.mark.parametrize("bounded", [False, True])
def test_its_sql_gives_its_numbers(store: Store, bounded: bool) -> None:
    """Statements look for events by the engine's clock, and for requests by the client's."""
    tried = 0
    for cause in verdict(store, "ahead", bounded=bounded).causes:
        for found in cause.evidence:
            if found["sql"] is not None:
                told = store.query(found["sql"]).column(0)[0].as_py()
                assert told is not None, found["sql"]
                assert float(told) == pytest.approx(found["value"], rel=1e-6, abs=1e-9), found["sql"]
                tried += 1
    assert tried >= 4


def test_a_bundle_holds_what_lies_on_the_other_clock(store: Store, tmp_path: Path) -> None:
    """A window by the client's clock, events hours away: another machine comes to the identical verdict."""
    pair = [window(name, "ahead", bounded=True) for name in ("base", "squeeze")]
    now_ns = time.time_ns() + 10 * HOUR_NS
    found = diagnose(store, pair[0], pair[1], now_ns=now_ns)
    bundle.write(tmp_path / "b.zip", store, found, pair[0], pair[1], vantage=None, now_ns=now_ns, seed=0)
    assert bundle.diagnose(tmp_path / "b.zip").to_dict() == found.to_dict()


def test_durations_do_not_move(store: Store) -> None:
    """Every instant of a request moves alike, token times too; a request without them keeps none."""
    rows = [
        {
            "request_id": "a",
            "vantage": "client",
            "state": "finished",
            "at_ns": 9,
            "arrival_ns": 5,
            "end_ns": 9,
            "token_ns": [6, 8],
        },
        {"request_id": "b", "vantage": "client", "state": "failed", "at_ns": 9, "arrival_ns": 6, "token_ns": None},
        {"request_id": "c", "vantage": "client", "state": "failed", "at_ns": 9, "arrival_ns": 7, "token_ns": []},
    ]
    table = table_from_rows("request", rows).select(COLUMNS)
    later = moved_requests(table, 100)
    assert later.schema == table.schema
    assert later["arrival_ns"].to_pylist() == [105, 106, 107]
    assert later["end_ns"].to_pylist() == [109, None, None]
    assert later["token_ns"].to_pylist() == [[106, 108], None, []]
    assert moved_requests(pa.concat_tables([table.slice(1, 1), table.slice(0, 1)]), 100)["token_ns"].to_pylist() == [
        None,
        [106, 108],
    ]
    assert moved(Window(None, 7, "r"), 100) == Window(None, 107, "r")
    facts = load(store, window("base", "ahead", bounded=False), "baseline", "client")
    assert facts.requests.engine_ahead_ns != 0
