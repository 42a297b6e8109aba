"""What a difference means: each reading from a situation made up for it, and what must not be read."""

from __future__ import annotations

import pytest

from diagnosis.experiments.observed import Observed, observe
from diagnosis.experiments.reading import read
from engine_probe.schema import table_from_rows
from tests.experiment_rows import START, Call, compared, observed, request

N = 140
"""Calls in a run: three of them are the 368 that an interval of P99 needs, and some."""


def flat(repeat: int, ttft_s: float = 0.3, **more: object) -> Observed:
    """Every call takes the same, but for some scatter that both arms have."""
    return observed(f"B/{repeat}", [_call(n, repeat, ttft_s, **more) for n in range(N)])


def _call(n: int, repeat: int, ttft_s: float, **more: object) -> Call:
    scatter = 0.001 * ((n * 7 + repeat) % 11)
    return Call(n * 0.5, ttft_s + scatter, dict(more))


def _class(n: int) -> dict[str, object]:
    """Three of four calls hit."""
    is_hit = n % 4 != 0
    return {"labels": {"reusable_tokens": "800" if is_hit else "0"}, "cached_tokens": 800 if is_hit else 0}


def test_better_everywhere() -> None:
    """300 ms become 100 ms for all."""
    (found,) = read(compared(flat, lambda repeat: flat(repeat, 0.1)))
    assert found.kind == "better"
    assert "everywhere" in found.sentence
    assert [row.unit for row in found.evidence] == ["s"] * 4


def test_no_difference_is_said_as_such() -> None:
    """The same numbers, and 3 % more: neither is a difference."""
    assert read(compared(flat, flat))[0].kind == "no_difference"
    assert read(compared(flat, lambda repeat: flat(repeat, 0.309)))[0].kind == "no_difference"


def test_what_repeats_scatter_by_too_is_not_told_apart() -> None:
    """One repeat of D takes 900 ms, the others 300 ms as B does: a third more on average, and nothing is known."""
    (found,) = read(compared(flat, lambda repeat: flat(repeat, 0.9 if repeat == 0 else 0.3)))
    assert found.kind == "not_distinguishable"
    assert "mean by +200 ms" in found.sentence
    assert "More repeats" in found.sentence


def test_worse_without_a_fingerprint_is_only_worse() -> None:
    """A third of the calls became twice as slow, and nothing says why: no cause is made up."""

    def some(repeat: int) -> Observed:
        return observed(f"D/{repeat}", [_call(n, repeat, 0.3 if n % 3 else 0.6) for n in range(N)])

    (found,) = read(compared(flat, some))
    assert found.kind == "worse"


def test_a_fixed_extra_is_no_lookup_where_the_cache_is_not_what_changed() -> None:
    """A canary whose every call takes 80 ms more, with the cache on in both."""
    found = read(compared(flat, lambda repeat: flat(repeat, 0.38), cache="on"))
    assert [reading.kind for reading in found] == ["fixed_extra"]


def test_too_few_requests_are_too_few() -> None:
    """Three runs of five calls carry no mean."""
    few = lambda repeat: observed(f"B/{repeat}", [_call(n, repeat, 0.3) for n in range(5)])  # noqa: E731
    (found,) = read(compared(few, few))
    assert found.kind == "too_few"
    assert "15 requests" in found.sentence


def test_without_enough_for_p99_the_rest_is_judged_and_p99_is_said_to_be_missing() -> None:
    """Three runs of 40: mean and P95 carry, P99 does not."""
    some = lambda repeat, ttft_s=0.3: observed(  # noqa: E731
        f"B/{repeat}", [_call(n, repeat, ttft_s) for n in range(40)]
    )
    (found,) = read(compared(some, lambda repeat: some(repeat, 0.1)))
    assert found.kind == "better"
    assert "everywhere" not in found.sentence
    assert "P99 cannot be told" in found.sentence


def capacity(repeat: int, evicted: int = 500, miss_s: float = 0.6) -> Observed:
    calls = []
    for n in range(N):
        more = _class(n)
        calls.append(_call(n, repeat, 0.05 if more["cached_tokens"] else miss_s, **more))
    return observed(f"D/{repeat}", calls, [{"blocks_evicted": evicted, "num_preempted": 0}])


def steady(repeat: int, evicted: int = 0) -> Observed:
    calls = [_call(n, repeat, 0.3) for n in range(N)]
    return observed(f"B/{repeat}", calls, [{"blocks_evicted": evicted, "num_preempted": 0}])


def test_capacity_is_hits_faster_misses_slower_and_evictions_only_when_on() -> None:
    """Hits 300 to 50 ms, misses 300 to 600 ms, 500 blocks evicted a run and none without the cache."""
    found = read(compared(steady, capacity))
    assert [reading.kind for reading in found] == ["capacity"]
    text = " ".join(row.statement for row in found[0].evidence)
    assert "blocks evicted: 1,500 in D, 0 in B" in text
    assert found[0].evidence[0].value == pytest.approx(-0.25)
    assert found[0].evidence[1].value == pytest.approx(0.3)
    assert found[0].tail_share == pytest.approx(1.0)


def test_without_evictions_slow_misses_are_not_capacity() -> None:
    """The same times, but nothing was evicted; or as much was evicted without the cache."""
    kinds = [reading.kind for reading in read(compared(steady, lambda repeat: capacity(repeat, 0)))]
    assert kinds == ["mixed"]
    alike = compared(lambda repeat: steady(repeat, 500), capacity)
    assert [reading.kind for reading in read(alike)] == ["mixed"]


def test_misses_that_are_no_slower_are_not_capacity() -> None:
    """Evictions alone are what a cache does."""
    found = read(compared(steady, lambda repeat: capacity(repeat, 500, 0.3)))
    assert [reading.kind for reading in found] == ["better"]


def routed(repeat: int, *, hot_wait_s: float, share: int = 2) -> Observed:
    """Every `share`-th call has the hot prefix and goes to w0, the others to w1 to w3."""
    calls = []
    for n in range(N):
        is_hot = n % share == 0
        waits = hot_wait_s if is_hot else 0.001
        arrival = n * 0.5
        more = {
            "worker": "w0" if is_hot else f"w{1 + n % 3}",
            "prefix_hash": 7 if is_hot else None,
            "queue_s": waits,
            "first_scheduled_ns": START + round((arrival + waits) * 1e9),
            **_class(0 if not is_hot else 1),
        }
        calls.append(_call(n, repeat, 0.1 + waits, **more))
    return observed(f"D/{repeat}", calls)


def spread(repeat: int) -> Observed:
    calls = []
    for n in range(N):
        arrival = n * 0.5
        more = {"worker": f"w{n % 4}", "queue_s": 0.01, "first_scheduled_ns": START + round((arrival + 0.01) * 1e9)}
        calls.append(_call(n, repeat, 0.3, **more))
    return observed(f"B/{repeat}", calls)


def test_locality_is_one_worker_with_the_hot_prefix_that_queues() -> None:
    """w0 has the prefix, waits 800 ms a request; elsewhere 1 ms; before, 10 ms everywhere."""
    found = read(compared(spread, lambda repeat: routed(repeat, hot_wait_s=0.8)))
    assert [reading.kind for reading in found] == ["locality"]
    assert "(w0)" in found[0].sentence
    statements = [row.statement for row in found[0].evidence]
    assert statements[0] == "a request waits 800 ms there and 1.0 ms elsewhere"
    assert "100 % of the most common prefix's requests go there" in statements
    assert found[0].tail_share == pytest.approx(1.0)


def test_a_worker_that_gets_everything_is_the_worst_hotspot() -> None:
    """All calls go to w0; that there are three idle ones is told by their own rows alone."""
    workers = table_from_rows("worker", [{"worker": f"w{n}", "at_ns": START} for n in range(4)])

    def pinned(repeat: int) -> Observed:
        rows = []
        for n in range(N):
            scheduled = START + round((n * 0.5 + 0.8) * 1e9)
            more = {"worker": "w0", "prefix_hash": 7, "queue_s": 0.8, "first_scheduled_ns": scheduled}
            rows.append(request(n, _call(n, repeat, 0.9, **more)))
        return observe(f"D/{repeat}", table_from_rows("request", rows), None, workers)

    found = read(compared(spread, pinned))
    assert [reading.kind for reading in found] == ["locality"]
    assert "800 ms there and 0 ms elsewhere" in found[0].evidence[0].statement


def test_a_fleet_that_queues_everywhere_is_not_locality() -> None:
    """All wait 800 ms: that is load."""

    def everywhere(repeat: int) -> Observed:
        calls = []
        for n in range(N):
            more = {"worker": f"w{n % 4}", "queue_s": 0.8, "first_scheduled_ns": START + round((n * 0.5 + 0.8) * 1e9)}
            calls.append(_call(n, repeat, 1.1, **more))
        return observed(f"D/{repeat}", calls)

    assert [reading.kind for reading in read(compared(spread, everywhere))] == ["worse"]


def test_a_hot_worker_that_was_there_before_is_not_read_as_new() -> None:
    """The baseline has the same one: nothing changed."""
    same = lambda repeat: routed(repeat, hot_wait_s=0.8)  # noqa: E731
    assert [reading.kind for reading in read(compared(same, same))] == ["no_difference"]


def looked_up(repeat: int, lookup_s: float, *, paid_by: int = 1) -> Observed:
    calls = []
    for n in range(N):
        paid = lookup_s if n % paid_by == 0 else 0.0
        calls.append(_call(n, repeat, 0.3 + paid, **_class(n), cache_lookup_s=paid))
    return observed(f"D/{repeat}", calls)


def test_lookup_is_a_fixed_extra_that_every_request_pays() -> None:
    """80 ms more for each, hit or not, all of it looking up."""
    found = read(compared(flat, lambda repeat: looked_up(repeat, 0.08)))
    assert [reading.kind for reading in found] == ["lookup"]
    assert found[0].evidence[0].value == pytest.approx(0.08)
    assert "100 % of the requests pay it" in found[0].evidence[1].statement
    assert found[0].tail_share == pytest.approx(1.0)


def test_a_lookup_that_only_some_pay_or_that_is_small_is_not_the_reading() -> None:
    """Half of them; or 1 ms of 300."""
    half = read(compared(flat, lambda repeat: looked_up(repeat, 0.08, paid_by=2)))
    assert "lookup" not in [reading.kind for reading in half]
    small = read(compared(flat, lambda repeat: looked_up(repeat, 0.001)))
    assert [reading.kind for reading in small] == ["no_difference"]


def test_without_the_phase_the_same_extra_for_all_is_told_by_its_shape() -> None:
    """A client sees no look-up; 80 ms more for nine of ten and for one of ten alike is a fixed extra."""
    found = read(compared(flat, lambda repeat: flat(repeat, 0.38, vantage="client")))
    assert [reading.kind for reading in found] == ["lookup"]
    assert "of the same calls" in found[0].evidence[0].statement


def test_two_causes_stand_in_the_order_of_the_tail() -> None:
    """A hot worker with all of the tail, and a look-up that is a tenth of it."""

    def both(repeat: int) -> Observed:
        calls = []
        for n in range(N):
            is_hot = n % 2 == 0
            waits, arrival = (0.8 if is_hot else 0.001), n * 0.5
            more = {
                "worker": "w0" if is_hot else f"w{1 + n % 3}",
                "prefix_hash": 7 if is_hot else None,
                "queue_s": waits,
                "first_scheduled_ns": START + round((arrival + waits) * 1e9),
                "cache_lookup_s": 0.08,
            }
            calls.append(_call(n, repeat, 0.3 + waits + 0.08, **more))
        return observed(f"D/{repeat}", calls)

    found = read(compared(spread, both))
    assert [reading.kind for reading in found] == ["locality", "lookup"]
    assert found[1].tail_share == pytest.approx(0.08 / 0.88, rel=0.02)


def test_side_effects_say_what_else_moved() -> None:
    """Tokens come 10 ms apart in both arms, so TPOT did not move; E2E did, and nothing failed."""
    rows = {row["metric"]: row for row in compared(flat, lambda repeat: flat(repeat, 0.9)).side_effects}
    assert not rows["tpot_mean_s"]["changed"]
    assert rows["e2e_mean_s"]["changed"]
    assert rows["e2e_mean_s"]["difference"] == pytest.approx(0.6)
    assert rows["unfinished_ratio"]["suspect"] == 0


@pytest.mark.parametrize(("failed", "p", "changed"), [((11, 14, 20), 0.029, False), ((14, 14, 14), 0.0, True)])
def test_of_nine_side_effects_one_with_an_interval_without_0_may_be_chance(
    failed: tuple[int, ...], p: float, changed: bool
) -> None:
    """11, 14 and 20 of 140 calls fail: 10.7 %, t = 5.67 of two degrees of freedom, p = 0.029. Of nine rows the smallest needs
    0.05 / 9 = 0.0056, the two smallest (goodput falls with it) 0.011: chance. The same number in every repeat is none."""

    def failing(repeat: int) -> Observed:
        calls = [_call(n, repeat, 0.3, state="failed" if n < failed[repeat] else "finished") for n in range(140)]
        return observed(f"D/{repeat}", calls)

    def whole(repeat: int) -> Observed:
        return observed(f"B/{repeat}", [_call(n, repeat, 0.3) for n in range(140)])

    rows = {row["metric"]: row for row in compared(whole, failing).side_effects}
    lost = rows["unfinished_ratio"]
    assert lost["interval_95"][0] > 0
    assert lost["p_value"] == pytest.approx(p, abs=1e-3)
    assert lost["changed"] is changed
    assert rows["tpot_p99_s"]["p_value"] == 1.0
    assert len(rows) == 9
