"""Lives of an engine: restarts, resets, totals over all lives, and what nobody saw. All numbers by hand."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine_probe.attach.life import Lives, Unseen

S = 1_000_000_000


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [row["mark"] for row in rows]


def test_first_sight_tells_when_the_process_started() -> None:
    """worker_up stands at the process' start, not at the moment somebody began to look."""
    (mark,) = Lives("w").seen({"a_total": 5.0}, 100.0, 160 * S)
    assert (mark["mark"], mark["at_ns"], mark["attrs"]["attached_ns"]) == ("worker_up", 100 * S, str(160 * S))
    assert Lives("w").seen({}, None, 160 * S) == []


def test_a_killed_engine_is_down_then_up_and_its_last_second_is_said() -> None:
    """Refused scrape: down. New process start: up, restarted, and the stretch after the last scrape is a gap."""
    lives = Lives("w")
    lives.seen({"a_total": 5.0, "b_total": 100.0}, 100.0, 200 * S)
    lives.seen({"a_total": 7.0, "b_total": 150.0}, 100.0, 201 * S)
    down = lives.failed("connection refused", 202 * S)
    assert names(down) == ["worker_down"]
    assert down[0]["attrs"]["last_seen_ns"] == str(201 * S)
    assert lives.failed("connection refused", 203 * S) == []
    gap, up = lives.seen({"a_total": 1.0, "b_total": 20.0}, 230.0, 260 * S)
    assert (gap["mark"], gap["attrs"]["first_ns"], gap["attrs"]["last_ns"]) == ("gap", str(201 * S), str(202 * S))
    assert (gap["attrs"]["last_a_total"], gap["attrs"]["last_b_total"]) == ("7", "150")
    assert (up["mark"], up["at_ns"], up["attrs"]["down_s"]) == ("worker_up", 260 * S, "58.000")
    assert lives.restarts == 1
    assert lives.unseen == [Unseen(201 * S, 202 * S, "its process start time moved")]
    # 7 of the first life and 1 of the second; since the first scrape 2 + 1 and 50 + 20.
    assert lives.totals == {"a_total": 8.0, "b_total": 170.0}
    assert lives.gains == {"a_total": 3.0, "b_total": 70.0}


def test_rows_that_die_with_the_plugin_are_said_too() -> None:
    """A probe inside the engine holds rows for a moment: they are gone, from a moment before the last scrape on."""
    lives = Lives("w")
    lives.plugin_delay_s = 1.0
    lives.seen({"a_total": 5.0}, 100.0, 200 * S)
    lives.failed("refused", 201 * S)
    rows = lives.seen({"a_total": 0.0}, 230.0, 260 * S)
    assert [(row["mark"], row["attrs"].get("source")) for row in rows] == [
        ("gap", "metrics"),
        ("gap", "plugin"),
        ("worker_up", None),
    ]
    assert (rows[1]["attrs"]["first_ns"], rows[1]["attrs"]["last_ns"]) == (str(199 * S), str(201 * S))


def test_a_restart_between_two_scrapes_is_both_down_and_up() -> None:
    """No scrape failed, yet the process is another one."""
    lives = Lives("w")
    lives.seen({"a_total": 9.0}, 100.0, 200 * S)
    rows = lives.seen({"a_total": 30.0}, 200.5, 201 * S)
    assert names(rows) == ["worker_down", "gap", "worker_up"]
    assert rows[0]["at_ns"] == 200 * S
    assert lives.totals == {"a_total": 39.0}


def test_falling_counters_are_a_restart_where_no_start_time_is_told() -> None:
    """Several API servers share a page without process_*: then the fall itself tells."""
    lives = Lives("w")
    lives.seen({"a_total": 9.0, "b_total": 1.0}, None, 200 * S)
    rows = lives.seen({"a_total": 4.0, "b_total": 1.0}, None, 201 * S)
    assert names(rows) == ["worker_down", "gap", "worker_up"]
    assert "a_total fell from 9 to 4" in rows[1]["text"]
    assert lives.gains == {"a_total": 4.0, "b_total": 1.0}


def test_counters_that_fall_in_the_same_process_are_a_reset_too() -> None:
    """vLLM re-creates its engine inside one process: the start time stays, the counters begin again."""
    lives = Lives("w")
    lives.seen({"a_total": 9.0}, 100.0, 200 * S)
    assert "gap" in names(lives.seen({"a_total": 2.0}, 100.0, 201 * S))
    assert lives.totals == {"a_total": 11.0}


def test_a_pause_without_restart_loses_nothing() -> None:
    """The same process answers again: no gap, no reset."""
    lives = Lives("w")
    lives.seen({"a_total": 9.0}, 100.0, 200 * S)
    lives.failed("refused", 201 * S)
    rows = lives.seen({"a_total": 12.0}, 100.3, 205 * S)
    assert names(rows) == ["worker_up"]
    assert "did not restart" in rows[0]["text"]
    assert (lives.restarts, lives.unseen, lives.gains) == (0, [], {"a_total": 3.0})


def test_one_timeout_is_a_busy_engine_three_are_a_dead_one() -> None:
    """A long step must not be reported as a death."""
    lives = Lives("w")
    lives.seen({}, 100.0, 200 * S)
    assert [names(lives.failed("slow", (201 + i) * S, is_timeout=True)) for i in range(3)] == [[], [], ["worker_down"]]
    lives.seen({}, 100.0, 210 * S)
    assert lives.failed("slow", 211 * S, is_timeout=True) == []
    assert lives.is_up


def test_an_engine_that_stays_dead_is_said_at_the_end() -> None:
    """What it did after its last scrape was not seen, also when watching ends before it returns."""
    lives = Lives("w")
    lives.seen({"a_total": 9.0}, 100.0, 200 * S)
    assert lives.end(201 * S) == []
    lives.failed("refused", 202 * S)
    (gap,) = lives.end(300 * S)
    assert (gap["attrs"]["first_ns"], gap["attrs"]["last_ns"]) == (str(200 * S), str(202 * S))
    assert lives.unseen == [Unseen(200 * S, 202 * S, "the engine ended")]


def test_a_counter_that_appears_later_counts_from_zero() -> None:
    """Labelled counters come with their first use."""
    lives = Lives("w")
    lives.seen({"a_total": 9.0}, 100.0, 200 * S)
    lives.seen({"a_total": 9.0, "new_total": 4.0}, 100.0, 201 * S)
    assert lives.gains == {"a_total": 0.0, "new_total": 4.0}


@given(
    st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=6), min_size=1, max_size=5),
    st.booleans(),
)
def test_totals_are_the_sum_of_the_last_sights(lives_of_steps: list[list[int]], is_seen_down: bool) -> None:
    """Whatever the increments and however many lives, the total is the sum over lives of the last value scraped."""
    lives, at_ns, expected = Lives("w"), 1000 * S, 0.0
    for number, steps in enumerate(lives_of_steps):
        value = 0.0
        for step in steps:
            value += step
            at_ns += S
            lives.seen({"a_total": value}, 100.0 * (number + 1), at_ns)
        expected += value
        if is_seen_down:
            at_ns += S
            lives.failed("refused", at_ns)
    assert lives.totals == {"a_total": expected}
    assert lives.restarts == len(lives_of_steps) - 1
