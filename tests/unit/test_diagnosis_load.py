"""From rows to facts: joining vantages, deliveries and retries, values that cannot be, and who served the window."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from diagnosis.facts import Facts
from diagnosis.loading.load import load
from diagnosis.loading.requests import COLUMNS, floats, join_vantages, told_twice
from engine_probe.errors import BadWindow
from engine_probe.schema import table_from_rows
from store.interface import Batch, Store, Window
from store.open import open_store

T0 = 1_780_000_000_000_000_000
NS = 1_000_000_000
WINDOW = Window(T0, T0 + 100 * NS)


def row(
    request_id: str, at_s: float = 0.0, *, ttft_s: float | None = 0.2, vantage: str = "engine", **more: Any
) -> dict[str, Any]:
    """A request that arrived `at_s` after T0; its last token came one second after the first."""
    arrival = T0 + round(at_s * NS)
    first = None if ttft_s is None else arrival + round(ttft_s * NS)
    return {
        "request_id": request_id,
        "vantage": vantage,
        "state": "finished" if first is not None else "failed",
        "at_ns": arrival + 3 * NS,
        "arrival_ns": arrival,
        "first_token_ns": first,
        "last_token_ns": None if first is None else first + NS,
        "end_ns": arrival + 3 * NS,
        **more,
    }


def table(*rows: dict[str, Any]) -> pa.Table:
    return table_from_rows("request", rows).select(COLUMNS)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path / "store.duckdb")) as opened:
        yield opened


def loaded(
    store: Store, *rows: dict[str, Any], window: Window = WINDOW, vantage: str = "client", **kinds: Any
) -> Facts:
    tables = {"request": table_from_rows("request", rows)}
    tables |= {kind: table_from_rows(kind, part) for kind, part in kinds.items()}
    store.append(Batch(tables))
    return load(store, window, "suspect", vantage)


def test_ids_that_come_twice_are_noticed() -> None:
    """Told twice or tried again: both are looked at; where ids are unique nothing is."""
    assert told_twice(table(row("a"), row("b"), row("a", attempt=1)))
    assert not told_twice(table(row("a"), row("b")))


def test_plugin_and_spans_of_the_same_requests_count_once(store: Store) -> None:
    """Each of 2 requests is told by the plugin and by a span of another service name: 2 requests that know what either knows."""
    told = [row(rid, at_s, queue_s=0.05, cached_tokens=64, worker="w0") for rid, at_s in (("a", 0.0), ("b", 1.0))]
    spans = [
        row(rid, at_s, queue_s=0.05, prefill_s=0.1, worker="service", labels={"span_id": "1"})
        for rid, at_s in (("a", 0.0), ("b", 1.0))
    ]
    facts = loaded(store, *told, *spans, vantage="engine")
    assert facts.requests.request_id.tolist() == ["a", "b"]
    assert facts.requests.num_duplicates == 2
    assert facts.requests.get("cached_tokens").tolist() == [64.0, 64.0]
    assert facts.requests.get("prefill_s").tolist() == [0.1, 0.1]
    assert facts.requests.worker_names == ("w0",)


def test_a_request_told_twice_misses_its_blocks_once(store: Store) -> None:
    """Block 7 was stored, lost and stored again; two requests missed it, one of them told by two rows: 2 misses, not 3."""
    asked: dict[str, Any] = {"prompt_tokens": 16, "cached_tokens": 0, "prompt_blocks": [7], "worker": "w0"}
    blocks = [
        {"worker": "w0", "at_ns": T0 + at_ns, "change": change, "block_hash": 7}
        for at_ns, change in ((0, "stored"), (NS, "evicted"), (3 * NS, "stored"))
    ]
    rows = [row("a", 2.0, **asked), row("a", 2.0, **asked), row("b", 2.5, **asked)]
    facts = loaded(
        store,
        *rows,
        vantage="engine",
        block=blocks,
        worker=[{"worker": "w0", "at_ns": T0, "block_size": 16, "num_blocks": 4}],
    )
    assert facts.lineage is not None
    assert [block["times"] for block in facts.lineage.worst] == [2]
    assert facts.lineage.evicted_blocks == 2


@pytest.mark.parametrize(("found", "unused", "evicted"), [(0, 48.0, 0), (16, 0.0, 3)])
def test_where_nobody_is_given_anything_it_is_asked_what_was_there(
    store: Store, found: int, unused: float, evicted: int
) -> None:
    """Block 7 is in the cache and 3 requests compute it again, while 4 blocks that nobody asked for go.

    So many evictions could be what they lost. Where nobody was ever given a block it is looked up: it was there. Where one was, it is not.
    """
    asked: dict[str, Any] = {
        "prompt_tokens": 16,
        "cached_tokens": 0,
        "prompt_blocks": [7],
        "worker": "w0",
        "first_scheduled_ns": T0 + 3 * NS,
    }
    other = row("z", 9.0, **{**asked, "prompt_blocks": [99], "cached_tokens": found})
    told = [(at_s, "stored", 7) for at_s in (0, 1)] + [(2, "evicted", block) for block in range(20, 24)]
    facts = loaded(
        store,
        *(row(name, 3.0, **asked) for name in "abc"),
        other,
        vantage="engine",
        block=[
            {"worker": "w0", "at_ns": T0 + at_s * NS, "change": what, "block_hash": block} for at_s, what, block in told
        ],
        worker=[{"worker": "w0", "at_ns": T0, "block_size": 16, "num_blocks": 40}],
    )
    assert facts.lineage is not None
    assert float(np.sum(facts.lineage.unused_tokens)) == unused
    assert facts.lineage.evicted_blocks == evicted


def test_a_clients_row_is_joined_to_all_that_the_engine_told(store: Store) -> None:
    """The span came first and does not know what was cached; the plugin's row does."""
    facts = loaded(
        store,
        row("a", vantage="client"),
        row("a", 0.1, queue_s=0.05, prefill_s=0.1, worker="service", labels={"span_id": "1"}),
        row("a", 0.1, queue_s=0.05, cached_tokens=64, worker="w0"),
    )
    assert facts.requests.get("cached_tokens").tolist() == [64.0]
    assert facts.requests.get("prefill_s").tolist() == [0.1]
    assert facts.requests.engine_merged


def test_what_cannot_be_is_unknown() -> None:
    """Negative, infinite and NaN are unknown; 0 and whole numbers beyond 2^53 are not."""
    values = floats(pa.chunked_array([[1.5, 0.0, -1.0, float("inf"), float("nan"), None]]))
    assert values.tolist() == pytest.approx([1.5, 0.0, *[np.nan] * 4], nan_ok=True)
    assert floats(pa.chunked_array([pa.array([2**62], pa.int64())])).tolist() == [float(2**62)]


def test_invalid_values_are_counted_and_null_is_not() -> None:
    """Two of the three are wrong; the null is merely unknown."""
    facts = join_vantages(
        table(row("a", queue_s=-1.0), row("b", queue_s=None), row("c", prefill_s=float("inf"))), None, "engine", T0
    )
    assert facts.num_invalid == 2
    assert not np.isfinite(facts.get("queue_s")).any()


def test_durations_travel_instants_do_not() -> None:
    """The client's clock is an hour ahead: phases come from the engine's row, each array of instants keeps its own clock."""
    client = table(row("a", 3600.0, ttft_s=0.25, vantage="client"))
    engine = table(row("a", 0.0, ttft_s=0.2, queue_s=0.05, first_scheduled_ns=T0 + 50_000_000, worker="w0"))
    facts = join_vantages(client, engine, "client", T0)
    assert facts.arrival_s.tolist() == [3600.0]
    assert facts.engine_arrival_s.tolist() == [0.0]
    assert facts.scheduled_s.tolist() == [0.05]
    assert facts.get("queue_s").tolist() == [0.05]
    assert facts.get("network_s").tolist() == pytest.approx([0.05])
    assert facts.worker_names == ("w0",)
    assert facts.sources == {"queue_s": "engine"}


def test_the_engine_row_that_served_is_joined(store: Store) -> None:
    """Of three engine rows of one request the first try failed and a decode worker has a copy: the try with the tokens counts."""
    facts = loaded(
        store,
        row("a", vantage="client", ttft_s=1.2),
        row("a", 0.0, ttft_s=None, attempt=0, queue_s=9.0, worker="w0"),
        row("a", 1.0, ttft_s=0.2, attempt=1, queue_s=0.01, worker="w1"),
        row("a", 1.1, ttft_s=0.2, attempt=1, queue_s=0.02, worker="w2"),
    )
    assert facts.requests.get("queue_s").tolist() == [0.01]
    assert facts.requests.worker_names == ("w1",)


def test_each_attempt_of_the_client_gets_its_own_engine_row(store: Store) -> None:
    """Both sides count attempts: the second try is joined to the second."""
    facts = loaded(
        store,
        row("a", 0.0, vantage="client", ttft_s=None, attempt=0),
        row("a", 2.0, vantage="client", attempt=1),
        row("a", 0.1, ttft_s=None, attempt=0, queue_s=1.9),
        row("a", 2.1, attempt=1, queue_s=0.1),
    )
    assert facts.requests.get("queue_s").tolist() == [1.9, 0.1]


def test_an_engine_row_just_outside_the_window_is_joined(store: Store) -> None:
    """Arrived at the client 0.1 s before the window's end, at the engine 0.1 s after it."""
    facts = loaded(
        store, row("a", 99.9, vantage="client"), row("a", 100.1, queue_s=0.05), row("b", 50.0, vantage="client")
    )
    assert facts.requests.get("queue_s").tolist() == pytest.approx([np.nan, 0.05], nan_ok=True)


def test_warm_up_and_double_delivery_are_counted(store: Store) -> None:
    """One warm-up request is left out, one row came twice."""
    facts = loaded(store, row("a"), row("a"), row("w", labels={"phase": "warmup"}), vantage="engine")
    assert len(facts.requests) == 1
    assert facts.num_warmup == 1
    assert facts.requests.num_duplicates == 1


def test_an_empty_window_says_what_was_left_out(store: Store) -> None:
    """Only warm-up: the error says so."""
    with pytest.raises(BadWindow, match=r"holds no engine requests \(1 warm-up requests are left out\)"):
        loaded(store, row("w", labels={"phase": "warmup"}), vantage="engine")


def test_workers_that_are_gone_do_not_count(store: Store) -> None:
    """The live store remembers w0, which served yesterday; only w1 served this window. Sizes of 0 are no sizes."""
    workers = [
        {"worker": "w0", "at_ns": T0 - NS, "block_size": 32, "num_blocks": 9},
        {"worker": "w1", "at_ns": T0 - NS, "block_size": 16, "num_blocks": 500, "flags": {"max_num_seqs": "8"}},
        {"worker": "w1", "at_ns": T0 - 1, "num_blocks": 0, "flags": {"max_num_seqs": "0"}},
    ]
    facts = loaded(store, row("a", worker="w1"), vantage="engine", worker=workers)
    assert (facts.num_blocks(), facts.block_size()) == (500, 16)
    assert facts.seats("w1") is None


def test_all_workers_count_where_no_row_names_one(store: Store) -> None:
    """The requests do not say who served them."""
    workers = [{"worker": "w1", "at_ns": T0 - NS, "block_size": 16, "num_blocks": 500}]
    assert loaded(store, row("a"), vantage="engine", worker=workers).num_blocks() == 500


@pytest.mark.parametrize(
    ("token_s", "counts", "gap_s", "tokens"),
    [
        ([0.1, 0.2, 0.4], None, [0.1, 0.2], [1.0, 1.0]),
        ([0.1, 0.2, 0.4], [1, 2, 3], [0.1, 0.2], [2.0, 3.0]),
        ([0.1, 0.2, 0.4], [1, 2], [0.1, 0.2], [1.0, 1.0]),  # counts that do not fit are no counts
        ([0.4, 0.2, 0.3], None, [0.1], [1.0]),  # a gap below zero is none
        ([0.1], None, [], []),
        ([0.1, None, 0.3, 0.4], None, [0.1], [1.0]),  # a gap needs both its ends
    ],
)
def test_gaps_between_chunks(
    token_s: list[Any], counts: list[int] | None, gap_s: list[float], tokens: list[float]
) -> None:
    """Each gap belongs to one request and to the tokens that ended it."""
    instants = [None if s is None else T0 + round(s * NS) for s in token_s]
    facts = join_vantages(
        table(row("a", token_ns=None), row("b", token_ns=instants, token_counts=counts), row("c", token_ns=[])),
        None,
        "engine",
        T0,
    )
    assert facts.gaps is not None
    assert facts.gaps.gap_s.tolist() == pytest.approx(gap_s)
    assert facts.gaps.tokens.tolist() == tokens
    assert facts.gaps.request.tolist() == [1] * len(gap_s)


def test_chunks_tell_their_tokens_or_the_mean_is_taken() -> None:
    """Seven tokens in three chunks: the counts where they are told, else 6 tokens in 2 gaps; one a chunk, and one that ends it unseen."""
    streams = {"token_ns": [T0, T0 + NS, T0 + 2 * NS], "output_tokens": 7}
    told = join_vantages(
        table(
            row("a", **streams, token_counts=[1, 4, 2]),
            row("b", **streams),
            row("c", **{**streams, "output_tokens": 4}),
        ),
        None,
        "engine",
        T0,
    )
    assert told.gaps is not None
    assert told.gaps.tokens.tolist() == [4.0, 2.0, 3.0, 3.0, 1.0, 1.0]
    assert told.gaps.is_even


def test_no_chunk_at_all_is_no_gap() -> None:
    """Nobody recorded token times."""
    assert join_vantages(table(row("a")), None, "engine", T0).gaps is None


def test_marks_with_words_for_numbers_are_survived(store: Store) -> None:
    """A clock mark says `unknown`, another one nothing, the third 5 ms."""
    marks = [
        {"at_ns": T0 + 1, "mark": "clock", "attrs": {"error_s": text} if text is not None else None}
        for text in ("unknown", None, "0.005", "-3", "inf")
    ]
    assert loaded(store, row("a"), vantage="engine", mark=marks).clock_error_s == 0.005


@pytest.mark.parametrize(
    ("window", "offered_s"),
    [
        (Window(run_id="x"), 20.0),  # 15 s between the first and the last of four: 3 of 4 shares
        (Window(T0, T0 + 100 * NS, "x"), 100.0),
        (Window(T0 - 5 * NS, None, "x"), 20.0),
        (Window(None, T0 + 40 * NS, "x"), 40.0),
    ],
)
def test_load_is_offered_as_long_as_requests_come(store: Store, window: Window, offered_s: float) -> None:
    """A run read whole goes on until its last answer, half a minute after the last request; nobody sent any meanwhile."""
    rows = [row(f"r{i}", 5.0 * i, vantage="client", run_id="x", end_ns=T0 + 45 * NS) for i in range(4)]
    facts = loaded(store, *rows, window=window)
    assert facts.offered_s == pytest.approx(offered_s)
    assert facts.duration_s >= facts.offered_s


def test_requests_that_came_at_once_have_no_rate_of_milliseconds(store: Store) -> None:
    """A burst is counted as one second of load, however many microseconds it took to send."""
    rows = [row(f"r{i}", i * 1e-6, vantage="client", run_id="x") for i in range(4)]
    assert loaded(store, *rows, window=Window(run_id="x")).offered_s == 1.0
