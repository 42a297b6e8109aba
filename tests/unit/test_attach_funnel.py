"""Rows of all sources reach the sink, or are counted and told: no third way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest

from engine_probe.attach.funnel import Funnel
from engine_probe.errors import BatchRejected, InvalidRows, StoreBusy
from engine_probe.schema import table_from_rows

NOW = 1_700_000_000_000_000_000


class Recorder:
    """A sink that raises what it is told to, in order, then accepts."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.offers: list[Mapping[str, pa.Table]] = []
        self.taken: list[Mapping[str, pa.Table]] = []
        self.closed = False

    def write(self, tables: Mapping[str, pa.Table]) -> None:
        self.offers.append(tables)
        if self.errors:
            raise self.errors.pop(0)
        self.taken.append(tables)

    def close(self) -> None:
        self.closed = True

    def rows(self, kind: str) -> list[dict[str, Any]]:
        return [row for tables in self.taken if kind in tables for row in tables[kind].to_pylist()]


def samples(*values: float) -> dict[str, pa.Table]:
    return {"sample": table_from_rows("sample", [{"at_ns": NOW, "name": "x", "value": value} for value in values])}


def test_tables_and_rows_of_several_sources_become_one_write() -> None:
    """What waits is written together, kind by kind."""
    sink = Recorder()
    funnel = Funnel(sink)
    funnel.put(samples(1.0))
    funnel.put(samples(2.0))
    funnel.put_rows("mark", [{"at_ns": NOW, "mark": "gap"}])
    funnel.put_rows("mark", [])
    assert funnel.flush()
    assert len(sink.taken) == 1
    assert [row["value"] for row in sink.rows("sample")] == [1.0, 2.0]
    assert funnel.written == {"sample": 2, "mark": 1}


def test_a_busy_sink_gets_the_very_same_tables_again_before_newer_ones() -> None:
    """A store may have committed what it reported as failed: unchanged it is recognised, merged it would be doubled."""
    sink = Recorder(StoreBusy("later"), OSError("disk"))
    funnel = Funnel(sink)
    funnel.put(samples(1.0))
    assert not funnel.flush()
    funnel.put(samples(2.0))
    assert not funnel.flush()
    assert funnel.error == "disk"
    assert funnel.flush()
    assert sink.offers[0] is sink.offers[1] is sink.offers[2]
    assert [row["value"] for row in sink.rows("sample")] == [1.0, 2.0]
    assert (funnel.error, funnel.lost) == (None, {})


@pytest.mark.parametrize("error", [InvalidRows("bad", kind="mark"), BatchRejected("bad")])
def test_one_bad_kind_does_not_take_the_others_with_it(error: Exception) -> None:
    """After a refusal each kind is offered alone; the bad one is lost, counted, and told by a gap mark."""
    sink = Recorder(error, error)
    funnel = Funnel(sink, clock=lambda: NOW)
    funnel.put(samples(1.0))
    funnel.put_rows("mark", [{"at_ns": NOW, "mark": "clock"}])
    assert funnel.flush()
    assert funnel.lost == {"sample": 1}
    assert funnel.written == {"mark": 1}
    funnel.flush()
    (_, gap) = sink.rows("mark")
    assert (gap["mark"], dict(gap["attrs"])["dropped_rows"], gap["at_ns"]) == ("gap", "1", NOW)


def test_too_many_waiting_rows_shed_blocks_before_samples_before_requests() -> None:
    """Ten rows fit: the order is that of the contract."""
    sink = Recorder()
    funnel = Funnel(sink, max_rows=10, clock=lambda: NOW)
    funnel.put_rows("block", [{"at_ns": NOW, "change": "stored"}] * 4)
    funnel.put(samples(*range(6)))
    funnel.put_rows("request", [{"at_ns": NOW, "request_id": "r"}])
    assert funnel.lost == {"block": 4}
    funnel.put_rows("request", [{"at_ns": NOW, "request_id": "r"}] * 9)
    assert funnel.lost == {"block": 4, "sample": 6}
    funnel.flush()
    assert len(sink.rows("request")) == 10
    assert dict(sink.rows("mark")[0]["attrs"])["dropped_rows"] == "10"


def test_close_writes_what_is_left_and_counts_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink that never takes anything loses all of it, and says how much."""
    monkeypatch.setattr("engine_probe.attach.funnel.DRAIN_S", 0.0)
    sink = Recorder()
    funnel = Funnel(sink)
    funnel.start()
    funnel.put(samples(1.0))
    funnel.close()
    assert len(sink.rows("sample")) == 1
    assert sink.closed

    dead = Recorder(*[StoreBusy("never")] * 9)
    funnel = Funnel(dead)
    funnel.put(samples(1.0))
    funnel.flush()
    funnel.put(samples(2.0, 3.0))
    funnel.close()
    assert funnel.lost == {"sample": 3}


def test_a_mistake_of_ours_costs_its_rows_only() -> None:
    """An error that nobody expected: these rows are counted as lost, the next ones are written."""
    sink = Recorder(ZeroDivisionError("oops"))
    funnel = Funnel(sink, clock=lambda: NOW)
    funnel.put(samples(1.0))
    assert funnel.flush()
    funnel.put(samples(2.0))
    assert funnel.flush()
    assert [row["value"] for row in sink.rows("sample")] == [2.0]
    assert funnel.lost == {"sample": 1}
    assert [row["mark"] for row in sink.rows("mark")] == ["gap"]
