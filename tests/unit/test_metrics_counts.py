"""What committed rows of a fleet come to on /metrics: hand-worked sums by worker, and labels that stay few."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collector.counts.blocks import Blocks
from collector.counts.book import Book
from collector.counts.bounded import CANDIDATES, LONGEST, Names, Tops
from collector.counts.fleet import Fleet
from collector.counts.reuse_gaps import ReuseGaps
from collector.counts.slos import Slos
from collector.live.durations import durations_of
from collector.live.latencies import Latencies
from engine_probe.schema import table_from_rows
from store import metric_catalogue as names
from store.metrics import PRESET_SLOS, Slo, SloRule, hit_class, meets_slo

T0 = 1_764_403_200_000_000_000
MS = 1_000_000
S = 1_000_000_000


def made(**more: Any) -> tuple[Fleet, Latencies, dict[str, int]]:
    """A fleet's counts, the latencies that feed them, and the block sizes that both know."""
    fleet = Fleet(**({"max_workers": 100, "slos": Slos(), "top_tenants": 3, "top_prefixes": 2} | more))
    sizes: dict[str, int] = {}
    return fleet, Latencies(100, sizes, fleet.outcomes), sizes


def request(number: int, **columns: Any) -> dict[str, Any]:
    """TTFT 100 ms, E2E 300 ms, 11 tokens: within the interactive SLO."""
    base = {
        "request_id": f"r{number}",
        "vantage": "engine",
        "state": "finished",
        "worker": "w0",
        "model": "m",
        "arrival_ns": T0,
        "first_token_ns": T0 + 100 * MS,
        "last_token_ns": T0 + 300 * MS,
        "at_ns": T0 + 300 * MS,
        "output_tokens": 11,
    }
    return base | columns


def observe(latencies: Latencies, *rows: dict[str, Any]) -> None:
    latencies.observe(table_from_rows("request", list(rows)), T0)


ENGINE = ("engine", "w0", "m")


def test_steps_are_summed_by_worker() -> None:
    """Two steps of a, one of b: parts, tokens without those computed again, batches; what no step tells has no series."""
    fleet, _, _ = made()
    step = {"at_ns": T0, "worker": "a"}
    rows = [
        step
        | {"step": 1, "duration_s": 0.02, "alloc_s": 0.001, "prefill_tokens": 100, "recomputed_tokens": 30}
        | {"decode_tokens": 5, "num_running": 6, "blocks_evicted": 2, "num_preempted": 1},
        step | {"step": 2, "duration_s": 0.04, "alloc_s": 0.002, "prefill_tokens": 0, "decode_tokens": 6},
        step | {"worker": "b", "step": 1, "duration_s": 0.5},
        step | {"worker": "c", "step": 1, "duration_s": 9.0, "run_id": "an import"},
    ]
    fleet.observe({"step": table_from_rows("step", rows)})
    value = fleet.book.value
    assert value(names.STEP, "a") == 2
    assert value(names.STEP, "b") == 1
    assert value(names.STEP, "c") is None, "an imported run is history"
    assert value(names.STEP_PART, "a", "alloc") == pytest.approx(0.003)
    assert value(names.STEP_PART, "a", "probe") is None, "unknown is absent"
    assert value(names.STEP_TOKENS, "a", "prefill") == 70
    assert value(names.STEP_TOKENS, "a", "recompute") == 30
    assert value(names.STEP_TOKENS, "a", "decode") == 11
    assert value(names.CHUNK_TOKENS, "a") == 1, "a step without prompt tokens has no chunk"
    assert value(names.BATCH_TOKENS, "a") == 2
    assert value(names.BATCH_REQUESTS, "a") == 1
    assert value(names.BLOCK_EVICTIONS, "a", "step") == 2
    assert value(names.STEP_PREEMPTIONS, "a") == 1
    assert value(names.STEP_TOKENS, "b", "decode") is None


def block(change: str, number: int, worker: str = "a", **columns: Any) -> dict[str, Any]:
    return {"at_ns": T0, "worker": worker, "change": change, "block_hash": number, "num_tokens": 16} | columns


def count_blocks(*batches: list[dict[str, Any]]) -> Book:
    fleet, _, _ = made()
    for rows in batches:
        fleet.observe({"block": table_from_rows("block", rows)})
    return fleet.book


def test_a_block_that_is_stored_again_was_evicted_too_early() -> None:
    """Blocks 1 and 2 go and 1 comes back, in a later batch; once, though it is told twice. A new block 3 is none."""
    book = count_blocks(
        [block("stored", 1), block("stored", 2)],
        [block("evicted", 1, age_s=4.0), block("evicted", 2, age_s=90.0)],
        [block("stored", 1), block("stored", 3)],
        [block("stored", 1)],
    )
    assert book.value(names.PREMATURE_EVICTIONS, "a") == 1
    assert book.value(names.PREMATURE_EVICTION_TOKENS, "a") == 16
    assert book.value(names.BLOCK_EVICTIONS, "a", "block") == 2
    assert book.value(names.BLOCK_RESIDENCE, "a") == 2
    assert book.value(names.BLOCK_CHANGES, "a", "stored", "") == 5
    assert book.value(names.BLOCK_CHANGE_TOKENS, "a", "evicted", "") == 32


def test_order_within_a_batch_decides_whether_a_block_came_back() -> None:
    """Stored and then evicted is an ordinary life; evicted and then stored is a return."""
    assert count_blocks([block("stored", 1), block("evicted", 1)]).value(names.PREMATURE_EVICTIONS, "a") == 0
    assert count_blocks([block("evicted", 1), block("stored", 1)]).value(names.PREMATURE_EVICTIONS, "a") == 1


def test_another_worker_or_tier_is_no_return() -> None:
    """What b stores was never a's; a copy in host memory is not computed again."""
    book = count_blocks(
        [block("evicted", 1), block("evicted", 2)],
        [block("stored", 1, "b"), block("stored", 2, tier="host")],
    )
    assert book.value(names.PREMATURE_EVICTIONS, "a") is None
    assert book.value(names.PREMATURE_EVICTIONS, "b") == 0, "it stores, and nothing came back"


def test_self_hits_are_no_reuse() -> None:
    """A preempted request that finds its own blocks says nothing about how long the cache has to keep them."""
    book = count_blocks(
        [block("stored", n) for n in range(64)],
        [block("hit", n, reason="self", at_ns=T0 + S) for n in range(64)],
    )
    assert book.value(names.BLOCK_REUSE_GAP, "a") is None
    assert book.value(names.BLOCK_SELF_HITS, "a") == 64
    assert book.value(names.BLOCK_CHANGES, "a", "hit", "") == 64


def gaps(book: Book) -> tuple[float, float]:
    """(number, sum in s) of the reuse gaps of worker a."""
    samples = {
        sample.name: sample.value
        for metric in book.metrics()
        for sample in metric.samples
        if sample.labels.get("worker") == "a"
    }
    return samples[names.BLOCK_REUSE_GAP.count], samples[names.BLOCK_REUSE_GAP.sum]


def test_a_reuse_gap_lasts_from_one_use_to_the_next() -> None:
    """Stored, hit 2 s later, and stored again after an eviction, 5 s after that. One block in eight is looked at, and stands for eight."""
    hashes = [n << 3 for n in range(1, 4001)]
    after = [block("evicted", n, at_ns=T0 + 3 * S) for n in hashes]
    book = count_blocks(
        [block("stored", n) for n in hashes] + [block("hit", n, at_ns=T0 + 2 * S) for n in hashes],
        [*after, *(block("stored", n, at_ns=T0 + 7 * S) for n in hashes)],
    )
    counted, total_s = gaps(book)
    assert counted == pytest.approx(8000, rel=0.15)
    assert total_s == pytest.approx(counted * 3.5)


CHOSEN = [
    n
    for n in range(1, 200)
    if len(ReuseGaps().observe(*[np.array([n] * 2, dtype=t) for t in (np.uint64, np.int64)], np.arange(2))[0])
]
"""Hashes of blocks that are looked at."""


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=12), max_size=6))
def test_reuse_gaps_are_those_of_a_dictionary(batches: list[list[tuple[int, int]]]) -> None:
    """Whatever comes within a batch or in the next: the time since the use before, of the blocks that are looked at."""
    counting, last, expected, found = ReuseGaps(), dict[int, int](), [], []
    now = 0
    for batch in batches:
        instants = np.cumsum([now, *(passed for _, passed in batch)])[1:].astype(np.int64) * S
        now = int(instants[-1] // S)
        keys = np.array([CHOSEN[number] for number, _ in batch], dtype=np.uint64)
        for key, at_ns in zip(keys.tolist(), instants.tolist(), strict=True):
            if key in last:
                expected.append((at_ns - last[key]) / 1e9)
            last[key] = at_ns
        found += counting.observe(keys, instants, np.arange(len(keys)))[1].tolist()
    assert sorted(found) == pytest.approx(sorted(expected))


def test_a_sampled_block_stands_for_many() -> None:
    """One row in ten was kept: one return is ten."""
    book = count_blocks([block("evicted", 1, sample_rate=0.1)], [block("stored", 1, sample_rate=0.1)])
    assert book.value(names.PREMATURE_EVICTIONS, "a") == pytest.approx(10)
    assert book.value(names.BLOCK_EVICTIONS, "a", "block") == pytest.approx(10)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.tuples(st.booleans(), st.integers(1, 6)), min_size=1, max_size=8), max_size=6))
def test_returns_are_those_that_a_set_counts(batches: list[list[tuple[bool, int]]]) -> None:
    """Any order over any batches: never more than a set of evicted blocks counts, and the same where no batch turns a block over twice."""
    book = Book()
    counting = Blocks(book, Names(10))
    gone: set[int] = set()
    expected, is_plain = 0, True
    for batch in batches:
        counting.count(table_from_rows("block", [block("evicted" if out else "stored", n) for out, n in batch]))
        is_plain = is_plain and len({n for _, n in batch}) == len(batch)
        for out, number in batch:
            if out:
                gone.add(number)
            elif number in gone:
                gone.remove(number)
                expected += 1
    counted = book.value(names.PREMATURE_EVICTIONS, "a") or 0
    assert counted <= expected
    assert not is_plain or counted == expected


def test_routes_transfers_and_marks() -> None:
    """By the worker that was chosen or that received; a ninth policy is `other` when eight fit."""
    fleet, _, _ = made()
    route = {"request_id": "r", "at_ns": T0, "policy": "affinity", "decision_s": 0.001}
    fleet.observe(
        {
            "route": table_from_rows("route", [route | {"chosen": name} for name in ("a", "b", "a")]),
            "transfer": table_from_rows(
                "transfer",
                [
                    {"at_ns": T0, "target_worker": "a", "outcome": "ok", "num_bytes": 100, "wire_s": 0.2},
                    {"at_ns": T0, "target_worker": "a", "outcome": "failed", "wait_s": 3.0},
                ],
            ),
            "mark": table_from_rows("mark", [{"at_ns": T0, "mark": "deployed"}] * 2),
        }
    )
    value = fleet.book.value
    assert (value(names.ROUTES, "a", "affinity"), value(names.ROUTES, "b", "affinity")) == (2, 1)
    assert value(names.ROUTE_DECISION, "affinity") == 3
    assert (value(names.TRANSFERS, "a", "ok"), value(names.TRANSFERS, "a", "failed")) == (1, 1)
    assert value(names.TRANSFER_BYTES, "a") == 100
    assert (value(names.TRANSFER_WIRE, "a"), value(names.TRANSFER_WAIT, "a")) == (1, 1)
    assert value(names.MARKS, "deployed") == 2


def test_errors_by_status_and_reason() -> None:
    """The first reason that fits: 429, then a timeout, then who gave up, then whose fault the status says it was."""
    fleet, latencies, _ = made()
    ends = [
        {"state": "rejected", "http_status": 429},
        {"state": "failed", "http_status": 504},
        {"state": "failed", "error": "read timed out after 30 s"},
        {"state": "aborted"},
        {"state": "failed", "http_status": 500},
        {"state": "failed", "http_status": 400},
        {"state": "rejected"},
        {"state": "failed", "http_status": 99_999},
    ]
    observe(latencies, request(99), *(request(number, **end) for number, end in enumerate(ends)))
    expected = [
        ("429", "too_many_requests"),
        ("504", "timeout"),
        ("", "timeout"),
        ("", "aborted"),
        ("500", "server_error"),
        ("400", "client_error"),
        ("", "rejected"),
        ("", "failed"),
    ]
    assert [fleet.book.value(names.REQUEST_ERRORS, *ENGINE, *labels) for labels in expected] == [1] * 8


def test_slo_counts_follow_rules_then_workloads_then_the_default() -> None:
    """acme is held to 50 ms, batch jobs to 300 s in all, everybody else to a second: 100 ms meets the last two."""
    rules = [SloRule("gold", Slo(ttft_s=0.05), tenant="acme")]
    fleet, latencies, _ = made(slos=Slos(rules))
    observe(
        latencies,
        request(1),
        request(2, tenant="acme"),
        request(3, workload="batch", first_token_ns=T0 + 9 * S, last_token_ns=T0 + 10 * S),
        request(4, tenant="acme", workload="batch"),
        request(5, state="failed"),
    )
    value = fleet.book.value
    assert value(names.SLO_REQUESTS, *ENGINE, "interactive", "met") == 1
    assert value(names.SLO_REQUESTS, *ENGINE, "interactive", "missed") == 1
    assert value(names.SLO_REQUESTS, *ENGINE, "gold", "missed") == 2
    assert value(names.SLO_REQUESTS, *ENGINE, "gold", "met") == 0, "told of, and none"
    assert value(names.SLO_REQUESTS, *ENGINE, "code", "met") is None, "not told of"
    assert value(names.SLO_REQUESTS, *ENGINE, "batch", "met") == 1


def test_a_request_that_two_rows_tell_is_held_to_its_slo_once() -> None:
    """Plugin and span."""
    fleet, latencies, _ = made()
    observe(latencies, request(1, tenant="t"))
    observe(latencies, request(1, tenant="t", labels={"span_id": "s"}))
    assert fleet.book.value(names.SLO_REQUESTS, *ENGINE, "interactive", "met") == 1
    assert fleet.book.value(names.TENANT_REQUESTS, "engine", "m", "t", "finished") == 1


_row = st.fixed_dictionaries(
    {
        "state": st.sampled_from(["finished", "failed"]),
        "workload": st.sampled_from([None, "code", "batch", "interactive", "odd"]),
        "first_token_ns": st.none() | st.integers(T0, T0 + 2 * S),
        "last_token_ns": st.none() | st.integers(T0, T0 + 400 * S),
        "output_tokens": st.none() | st.integers(0, 40),
    }
)


@settings(deadline=None, max_examples=100)
@given(st.lists(_row, min_size=1, max_size=20))
def test_bulk_slos_are_those_of_the_definition(rows: list[dict[str, Any]]) -> None:
    """`meets_slo` row by row says the same."""
    slos = Slos()
    table = table_from_rows("request", [request(number, **row) for number, row in enumerate(rows)])
    of_rule = slos.assign(table)
    met = slos.met(table, of_rule, durations_of(table))
    for number, row in enumerate(rows):
        name = row["workload"] if row["workload"] in PRESET_SLOS else "interactive"
        assert slos.names[of_rule[number]] == name
        assert met[number] == meets_slo(request(number, **row), PRESET_SLOS[name])


def test_hit_class_needs_the_block_size_of_the_worker() -> None:
    """Blocks of 16: 64 of 65 is a hit, 48 partial, 0 a miss; a worker without a known size has no class."""
    _, latencies, sizes = made()
    sizes["w0"] = 16
    cached = {"hit": 64, "partial": 48, "miss": 0}
    rows = [request(n, prompt_tokens=65, cached_tokens=value) for n, value in enumerate(cached.values())]
    observe(latencies, *rows, request(9, worker="w1", prompt_tokens=65, cached_tokens=64))
    shown = {(key.worker, key.hit): series for key, series in latencies.shown()}
    assert set(shown) == {("w0", "hit"), ("w0", "partial"), ("w0", "miss"), ("w1", "")}
    for name, value in cached.items():
        assert hit_class(value, 65, 16) == name
        assert shown["w0", name].total["ttft"].counts.sum() == 1
    assert shown["w0", "hit"].reuse == {"reused_some": 1, "reused_none": 0, "cache_prompt_tokens": 65}
    assert shown["w0", "miss"].reuse == {"reused_some": 0, "reused_none": 1, "cache_prompt_tokens": 65}
    ((_, recent), _) = sorted(latencies.recent(T0 + S, 5), key=lambda pair: pair[0].worker)
    assert recent["ttft"].sum() == 3, "the recent picture does not part by class"


def test_newest_request_of_a_bucket_is_its_exemplar() -> None:
    """100 ms falls into the bucket up to 0.1 s, 120 ms into the next; an id that does not fit names nothing."""
    _, latencies, _ = made()
    later = {"first_token_ns": T0 + 120 * MS}
    observe(latencies, request(1), request(2), request(3, **later), request(4, request_id="x" * 200, **later))
    ((_, series),) = latencies.shown()
    place = names.LATENCY_BOUNDS_S.index(0.1)
    found = series.total["ttft"].exemplars
    assert found[place] == ("r2", pytest.approx(0.1), pytest.approx((T0 + 300 * MS) / 1e9))
    assert found[place + 1][0] == "r3"


def test_a_hundred_thousand_tenants_have_as_many_series_as_the_settings_allow() -> None:
    """Invented ones share `other`, the heavy ones keep their name, and nothing is lost from the sum."""
    fleet, latencies, _ = made()
    number = 0
    for _ in range(20):
        rows = []
        for position in range(5_000):
            tenant = f"big-{position % 3}" if position % 10 < 3 else f"invented-{number}"
            rows.append((f"r{number}", tenant))
            number += 1
        table = table_from_rows("request", [request(0)]).take(pa.array(np.zeros(len(rows), dtype=np.int64)))
        for column, values in zip(("request_id", "tenant"), zip(*rows, strict=True), strict=True):
            table = table.set_column(table.schema.get_field_index(column), column, pa.array(values))
        latencies.observe(table, T0)
    assert number == 100_000
    series = {
        sample.labels["tenant"]: sample.value
        for metric in fleet.book.metrics()
        for sample in metric.samples
        if sample.name == names.TENANT_REQUESTS.name
    }
    assert sum(series.values()) <= 100_000
    assert set(series) <= {"big-0", "big-1", "big-2", "other"}
    assert sum(series[f"big-{n}"] for n in range(3)) >= 0.9 * 30_000
    assert sum(len(metric.samples) for metric in fleet.book.metrics()) < 400


def test_names_of_a_megabyte_are_cut_and_stay_apart() -> None:
    """They would stand on the page a thousand times, once a bucket."""
    fleet, latencies, _ = made()
    long = ["x" * 1_000_000 + letter for letter in "ab"]
    observe(latencies, *(request(n, worker=name, model=name, tenant=name) for n, name in enumerate(long)))
    observe(latencies, *(request(9 + n, worker=name, model=name, tenant=name) for n, name in enumerate(long)))
    keys = [key for key, _ in latencies.shown()]
    assert len({key.worker for key in keys}) == len({key.model for key in keys}) == 2
    assert all(len(label) <= LONGEST for key in keys for label in (key.worker, key.model))
    told = [sample for metric in fleet.book.metrics() for sample in metric.samples]
    assert all(len(label) <= LONGEST for sample in told for label in sample.labels.values())
    tenants = {sample.labels["tenant"]: sample.value for sample in told if sample.name == names.TENANT_REQUESTS.name}
    assert sorted(tenants.values()) == [2, 2]
    steps = table_from_rows("step", [{"worker": name, "at_ns": T0, "step": 1, "duration_s": 0.1} for name in long])
    fleet.observe({"step": steps})
    assert (
        len(
            {sample.labels["worker"] for m in fleet.book.metrics() for sample in m.samples if "worker" in sample.labels}
        )
        == 2
    )


def test_the_heaviest_are_found_whatever_comes_first() -> None:
    """A thousand light values come first and take the places; what clearly outweighs them takes them over."""
    tops = Tops(2)
    tops.offer([f"light-{n}" for n in range(1000)], np.ones(1000, dtype=np.int64), T0)
    gone = tops.offer(["heavy", "heavier"], np.array([50, 90]), T0)
    assert set(tops.shown) == {"heavy", "heavier"}
    assert len(gone) == 2
    assert tops.offer(["newcomer"], np.array([60]), T0) == [], "not twice as heavy: nobody moves"


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 2000), min_size=1, max_size=3000), st.integers(1, 400))
def test_no_weight_is_overrated_and_the_heavy_are_never_lost(values: list[int], batch: int) -> None:
    """Misra-Gries: an estimate lies at most n / CANDIDATES below the truth and never above."""
    tops = Tops(5)
    for start in range(0, len(values), batch):
        found, counts = np.unique(values[start : start + batch], return_counts=True)
        tops.offer(found.tolist(), counts, T0)
    found, counts = np.unique(values, return_counts=True)
    for value, count in zip(found.tolist(), counts.tolist(), strict=True):
        estimate = tops._weights.get(value, 0.0)
        assert count - len(values) / CANDIDATES - 1e-9 <= estimate <= count + 1e-9


def test_old_weight_decays() -> None:
    """Yesterday's largest tenant makes room for today's."""
    tops = Tops(1)
    tops.offer(["old"], np.array([1000]), T0)
    tops.offer(["new"], np.array([100]), T0 + 3 * 3600 * S)
    assert set(tops.shown) == {"new"}


def test_hot_prefixes_by_worker() -> None:
    """At the engine, where blocks are: two shown, the third is `other`."""
    fleet, latencies, _ = made()
    rows = [request(n, prefix_hash=7, worker=f"w{n % 2}", prompt_tokens=100, cached_tokens=50) for n in range(6)]
    rows += [request(10 + n, prefix_hash=9) for n in range(4)] + [request(20, prefix_hash=11)]
    observe(latencies, *rows, request(30, vantage="client", prefix_hash=7))
    value = fleet.book.value
    assert value(names.HOT_PREFIX_REQUESTS, "w0", f"{7:016x}") == 3
    assert value(names.HOT_PREFIX_HIT_TOKENS, "w1", f"{7:016x}") == 150
    assert value(names.HOT_PREFIX_REQUESTS, "w0", f"{9:016x}") == 4
    assert value(names.HOT_PREFIX_REQUESTS, "w0", "other") == 1
    assert value(names.HOT_PREFIX_PROMPT_TOKENS, "w0", f"{9:016x}") is None
