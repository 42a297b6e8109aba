"""What an engine's counters gained over a run, by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest

from diagnosis.experiments.gains import Gains
from diagnosis.experiments.observed import observe
from engine_probe.schema import table_from_rows
from tests.experiment_rows import MS, START, Call, request


def samples(*rows: tuple[str, str, Sequence[float]]) -> pa.Table:
    """(name, worker, its numbers, one a second)."""
    return table_from_rows(
        "sample",
        [
            {"name": name, "worker": worker, "at_ns": START + at * 1000 * MS, "value": value, "labels": {"k": "v"}}
            for name, worker, values in rows
            for at, value in enumerate(values)
        ],
    )


def test_a_gain_is_the_last_number_less_the_first_of_every_series() -> None:
    """w0 from 5 to 9, w1 from 1 to 2: 5 together. A gauge gains nothing."""
    found = Gains.of(samples(("preemptions_total", "w0", [5, 9]), ("preemptions_total", "w1", [1, 2]), ("kv_usage_ratio", "w0", [0, 1])))  # fmt: skip
    assert found.total("preemptions_total") == 5
    assert found.total("kv_usage_ratio") is None
    assert found.total("blocks_evicted_total") is None


@pytest.mark.parametrize("values", [[9, 2], [1, 5, 3], [4]])
def test_what_fell_or_was_seen_once_gains_nothing_that_is_known(values: list[float]) -> None:
    """A restart sets counters back: of one worker unknown, and of all together too."""
    found = Gains.of(samples(("preemptions_total", "w0", values), ("preemptions_total", "w1", [0, 3])))
    assert found.total("preemptions_total") is None


def test_queues_of_workers_from_their_histograms() -> None:
    """w0: 4 requests waited 2 s together within 10 s: 0.2 in its queue over time. The longest queue nobody tells."""
    found = Gains.of(samples(("queue_time_seconds_sum", "w0", [1, 3]), ("queue_time_seconds_count", "w0", [10, 14])))
    (load,) = found.loads(10.0)
    assert (load.worker, load.num_requests, load.queue_s, load.waiting_mean, load.waiting_max) == (
        "w0",
        4,
        2,
        0.2,
        None,
    )


def test_a_clients_run_takes_from_the_engine_what_it_cannot_know() -> None:
    """The client tells no worker, queue, eviction or preemption: the page's 1.5 s of 2 requests, 7 and 3 stand; and of 200
    tokens looked up 50 were found."""
    rows = [
        request(0, Call(0.0, 0.1, {"vantage": "client"})),
        request(1, Call(1.0, 0.1, {"vantage": "client"})),
    ]
    page = samples(
        ("queue_time_seconds_sum", "w0", [0, 1.5]),
        ("queue_time_seconds_count", "w0", [0, 2]),
        ("blocks_evicted_total", "w0", [1, 8]),
        ("preemptions_total", "w0", [2, 5]),
        ("prefix_hits_tokens_total", "w0", [10, 60]),
        ("prefix_queries_tokens_total", "w0", [100, 300]),
    )
    run = observe("D/1", table_from_rows("request", rows), None, None, page)
    assert [(load.worker, load.queue_s) for load in run.workers] == [("w0", 1.5)]
    assert (run.evicted_blocks, run.preemptions) == (7, 3)
    assert (run.reused_tokens, run.prompt_tokens_known) == (50, 200)


def test_what_requests_and_steps_tell_goes_before_the_page() -> None:
    """Usage says 400 of 1,000, a step says 2 evicted; the page's other numbers are not taken."""
    rows = [request(0, Call(0.0, 0.1, {"cached_tokens": 400}))]
    steps = table_from_rows("step", [{"worker": "w0", "at_ns": START + MS, "step": 1, "blocks_evicted": 2}])
    page = samples(("blocks_evicted_total", "w0", [0, 9]), ("prefix_hits_tokens_total", "w0", [0, 1]), ("prefix_queries_tokens_total", "w0", [0, 9]))  # fmt: skip
    run = observe("D/1", table_from_rows("request", rows), steps, None, page)
    assert run.evicted_blocks == 2
    assert (run.reused_tokens, run.prompt_tokens_known) == (400, 1000)
