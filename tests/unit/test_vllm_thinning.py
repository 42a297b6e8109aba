"""Thinned pages lose no increment and no value; settings that change are said."""

from __future__ import annotations

from engine_probe.adapters.facts import WorkerFacts, changes
from engine_probe.adapters.thinning import Row, Thinner

LABELS = {"le": "1.0"}
SECOND = 1_000_000_000


def scrape(at_s: float, value: float, name: str = "step_tokens_bucket") -> list[Row]:
    return [("w", round(at_s * SECOND), name, LABELS, value)]


def test_a_run_of_equal_values_is_kept_at_its_edges() -> None:
    """0 0 0 5 5 5 at one a second: first, last before the change, the change, and the last sight."""
    thinner = Thinner(heartbeat_s=60.0)
    kept = [row for at, value in enumerate([0, 0, 0, 5, 5, 5]) for row in thinner.thin(scrape(at, value))]
    kept += thinner.flush()
    assert [(row[1] // SECOND, row[4]) for row in kept] == [(0, 0), (2, 0), (3, 5), (5, 5)]


def test_a_standing_number_has_a_heartbeat() -> None:
    """Every 15 s one row says that it still stands."""
    thinner = Thinner(heartbeat_s=15.0)
    kept = [row for at in range(31) for row in thinner.thin(scrape(at, 1))]
    assert [row[1] // SECOND for row in kept] == [0, 15, 30]


def test_canonical_numbers_are_kept_at_every_scrape() -> None:
    """A zero is an observation where means and windows are asked for."""
    thinner = Thinner()
    kept = [row for at in range(5) for row in thinner.thin(scrape(at, 0, "preemptions_total"))]
    assert len(kept) == 5
    assert thinner.flush() == []


def test_workers_and_label_sets_are_thinned_apart() -> None:
    """The same value of another series is no repetition."""
    thinner = Thinner()
    rows: list[Row] = [
        ("a", 0, "x", {"le": "1"}, 1.0),
        ("b", 0, "x", {"le": "1"}, 1.0),
        ("a", 0, "y", {"le": "1"}, 1.0),
    ]
    assert thinner.thin(rows) == rows


def test_first_facts_are_a_row_and_no_change() -> None:
    """Becoming known is not changing; the same facts again are nothing."""
    facts = WorkerFacts()
    told = {"block_size": 16, "num_blocks": None, "flags": {"max_num_seqs": "8"}}
    rows = facts.observe("w", told, 1)
    assert rows == {"worker": [{"worker": "w", "at_ns": 1, "block_size": 16, "flags": {"max_num_seqs": "8"}}]}
    assert facts.observe("w", told, 2) == {}
    assert list(facts.observe("w", {"num_blocks": 99}, 3)) == ["worker"]


def test_a_changed_setting_is_marked_with_old_and_new() -> None:
    """After a restart with other flags: a new row that keeps what is still known, and a mark a setting."""
    facts = WorkerFacts()
    facts.observe("w", {"num_blocks": 111, "flags": {"max_num_seqs": "16", "gpu_memory_utilization": "0.9"}}, 1)
    rows = facts.observe("w", {"num_blocks": 2047, "flags": {"max_num_seqs": "8"}}, 5)
    assert rows["worker"] == [
        {
            "worker": "w",
            "at_ns": 5,
            "num_blocks": 2047,
            "flags": {"max_num_seqs": "8", "gpu_memory_utilization": "0.9"},
        }
    ]
    assert [(row["mark"], row["subject"], row["attrs"]) for row in rows["mark"]] == [
        ("config_changed", "w", {"setting": "max_num_seqs", "old": "16", "new": "8"}),
        ("config_changed", "w", {"setting": "num_blocks", "old": "111", "new": "2047"}),
    ]
    assert rows["mark"][1]["text"] == "num_blocks changed from 111 to 2047 on w."


def test_workers_have_their_own_facts() -> None:
    """Two workers that differ are no change."""
    facts = WorkerFacts()
    facts.observe("a", {"block_size": 16}, 1)
    assert "mark" not in facts.observe("b", {"block_size": 32}, 2)


def test_unknown_is_no_change() -> None:
    """A fact that one side does not know is not compared."""
    assert changes({"a": 1, "flags": {"x": "1"}}, {"b": 2, "flags": {"y": "2"}}) == []
