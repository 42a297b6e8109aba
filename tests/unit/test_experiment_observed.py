"""One run's rows as numbers: warm-up, classes, queues, load; worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from diagnosis.experiments.design import Arm
from diagnosis.experiments.observed import observe
from diagnosis.experiments.summary import goodput_rps, summarise, tokens_per_s
from engine_probe.errors import BadWindow
from engine_probe.schema import table_from_rows
from store.metrics import Slo
from tests.experiment_rows import MS, START, Call, observed, request


def test_warm_up_is_left_out_and_counted() -> None:
    """Three rows, one of them warm-up: two count, and the first of these is instant 0."""
    warm = Call(0.0, 9.0, {"labels": {"phase": "warmup"}})
    run = observed("D/1", [warm, Call(5.0, 0.2), Call(6.0, 0.3)])
    assert len(run) == 2
    assert run.num_warmup == 1
    assert run.arrival_s.tolist() == [0.0, 1.0]
    assert run.ttft_s == pytest.approx([0.2, 0.3])


def test_a_run_of_warm_up_alone_is_refused() -> None:
    """It says how many there were."""
    with pytest.raises(BadWindow, match="1 were warm-up"):
        observed("D/1", [Call(0.0, 1.0, {"labels": {"phase": "warmup"}})])


def test_latencies_of_a_request() -> None:
    """First token after 0.2 s, nine more 10 ms apart: TPOT 10 ms, E2E 0.29 s."""
    run = observed("D/1", [Call(0.0, 0.2)])
    assert run.tpot_s == pytest.approx([0.01])
    assert run.e2e_s == pytest.approx([0.29])


def test_what_failed_has_no_latency() -> None:
    """A request that was cut off counts as unfinished, and its instants tell nothing of latency."""
    run = observed("D/1", [Call(0.0, 0.2), Call(1.0, 0.1, {"state": "failed"})])
    assert np.isnan(run.ttft_s[1])
    assert run.finished.tolist() == [True, False]


@pytest.mark.parametrize(
    ("reusable", "cached", "expected"),
    [
        ("800", 800, "hit"),
        ("800", 720, "hit"),
        ("800", 700, "partial"),
        ("800", 0, "miss"),
        ("0", 0, "new"),
        ("800", None, ""),
        (None, 0, "miss"),
    ],
)
def test_class_is_against_what_could_be_reused(reusable: str | None, cached: int | None, expected: str) -> None:
    """800 tokens had been sent before: 720 of them (nine tenths) are a hit, 700 a part, none a miss; nothing sent is new."""
    labels = {} if reusable is None else {"reusable_tokens": reusable}
    table = table_from_rows("request", [request(0, Call(0.0, 0.1, {"labels": labels, "cached_tokens": cached}))])
    workers = table_from_rows("worker", [{"at_ns": START, "block_size": 16}])
    assert observe("D/1", table, None, workers).outcome.tolist() == [expected]


def test_load_that_was_really_there() -> None:
    """Arrivals at 0, 1, 2 s: two gaps in 2 s, so 1/s. Each is there for 1.09 s of 3.09 s: 3.27 / 3.09 under way, two at most."""
    run = observed("D/1", [Call(0.0, 1.0), Call(1.0, 1.0), Call(2.0, 1.0)])
    assert run.arrival_rate == pytest.approx(1.0)
    assert run.span_s == pytest.approx(3.09)
    assert run.concurrency_mean == pytest.approx(3.27 / 3.09)
    assert run.concurrency_max == 2


def test_queues_by_worker_come_from_the_requests() -> None:
    """w0: two requests wait 0.5 s at the same time, w1: one does not wait. Mean queue is waited seconds over the span."""

    def waits(worker: str, arrival_s: float, wait_s: float) -> Call:
        scheduled = START + round((arrival_s + wait_s) * 1e9)
        return Call(arrival_s, 1.0, {"worker": worker, "queue_s": wait_s, "first_scheduled_ns": scheduled})

    run = observed("D/1", [waits("w0", 0.0, 0.5), waits("w0", 0.1, 0.5), waits("w1", 0.2, 0.0)])
    first, second = run.workers
    assert (first.worker, first.num_requests, first.waiting_max) == ("w0", 2, 2)
    assert first.queue_s == pytest.approx(1.0)
    assert first.waiting_mean == pytest.approx(1.0 / run.span_s)
    assert (second.queue_s, second.waiting_max) == (0.0, 0)


def test_evictions_are_those_of_the_counted_stretch() -> None:
    """A step before the first counted request is not counted; without steps nothing is known."""
    steps = [
        {"blocks_evicted": 100, "num_preempted": 1, "at_ns": START - 10 * MS},
        {"blocks_evicted": 7, "num_preempted": 2},
    ]
    run = observed("D/1", [Call(0.0, 2.0)], steps)
    assert (run.evicted_blocks, run.preemptions) == (7, 2)
    assert observed("D/1", [Call(0.0, 2.0)]).evicted_blocks is None


def test_client_and_engine_rows_of_one_request_are_one_request() -> None:
    """Where the client tells, it is the client's."""
    rows = [request(0, Call(0.0, 0.2)), request(0, Call(0.0, 0.3, {"vantage": "client"}))]
    run = observe("D/1", table_from_rows("request", rows))
    assert run.vantage == "client"
    assert run.ttft_s == pytest.approx([0.3])


def test_goodput_counts_who_kept_every_limit() -> None:
    """Of four, one is too slow to its first token and one failed: 2 good ones over 3.29 s."""
    run = observed("D/1", [Call(0.0, 0.2), Call(1.0, 0.2), Call(2.0, 1.2), Call(3.0, 0.2, {"state": "failed"})])
    assert run.span_s == pytest.approx(3.29)
    assert goodput_rps(run, Slo(ttft_s=1.0, tpot_s=0.1)) == pytest.approx(2 / 3.29)
    assert goodput_rps(run, Slo(ttft_s=1.0, tpot_s=0.005)) == 0
    assert tokens_per_s(run) == pytest.approx(40 / 3.29)


def test_summary_adds_up_its_runs() -> None:
    """Three runs of 20: 60 requests, by class, by phase, and what nobody told is None."""
    calls = [
        Call(float(n), 0.1, {"labels": {"reusable_tokens": "800"}, "cached_tokens": 800 * (n % 2), "queue_s": 0.05})
        for n in range(20)
    ]
    found = summarise(Arm("D"), [observed(f"D/{repeat}", calls) for repeat in (1, 2, 3)])
    assert found.num_requests == 60
    assert {name: row["num_requests"] for name, row in found.by_class.items()} == {"hit": 30, "miss": 30}
    assert found.by_class["hit"]["share"] == 0.5
    assert found.phases == pytest.approx({"queue": 0.05})
    assert found.evicted_blocks is None
    assert found.latency["ttft"]["mean"].value == pytest.approx(0.1)
    assert found.latency["ttft"]["p99"].reason == "60 requests; quantile 0.99 needs 299"
