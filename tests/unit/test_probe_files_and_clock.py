"""The file and memory sinks, the anchored clock, the waits between tries."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine_probe.clock import Clock
from engine_probe.errors import DiskFull, ProbeError
from engine_probe.schema import arrow_schema, table_from_rows
from engine_probe.sending.backoff import Backoff
from engine_probe.sending.sink import FileSink, MemorySink
from engine_probe.wire.codec import decode_ndjson

NOW = 1_764_000_000 * 10**9


def samples(*values: float) -> dict[str, pa.Table]:
    """A batch of samples."""
    rows = [{"at_ns": NOW, "name": "x", "value": float(v), "labels": {"a": "b"}} for v in values]
    return {"sample": table_from_rows("sample", rows)}


def parts(folder: Path, kind: str = "sample") -> list[Path]:
    """Finished Parquet parts of a kind, oldest first."""
    return sorted((folder / f"kind={kind}").glob("part-*.parquet"))


def test_a_parquet_part_appears_when_it_has_enough_rows(tmp_path: Path) -> None:
    """Three rows a part: two writes of two rows make one part of four, the fifth row waits for close."""
    sink = FileSink(tmp_path, part_rows=3, part_age_s=1e9)
    sink.write(samples(1, 2))
    assert parts(tmp_path) == []
    sink.write(samples(3, 4))
    assert [pq.read_table(path).num_rows for path in parts(tmp_path)] == [4]
    sink.write(samples(5))
    sink.close()
    tables = [pq.ParquetFile(path).read() for path in parts(tmp_path)]
    assert pa.concat_tables(tables).column("value").to_pylist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert tables[0].schema.equals(arrow_schema("sample"))
    assert tables[0].schema.metadata[b"kvscope.kind"] == b"sample"


def test_a_parquet_part_appears_when_it_is_old(tmp_path: Path) -> None:
    """Rows wait ten seconds at most, as long as somebody writes."""
    now = [0.0]
    sink = FileSink(tmp_path, part_age_s=10.0, monotonic_s=lambda: now[0])
    sink.write(samples(1))
    now[0] = 9.0
    sink.write({"mark": table_from_rows("mark", [{"at_ns": NOW, "mark": "gap"}])})
    assert parts(tmp_path) == []
    now[0] = 10.0
    sink.write({})
    assert len(parts(tmp_path)) == 1
    assert parts(tmp_path, "mark") == []
    sink.close()
    assert len(parts(tmp_path, "mark")) == 1


def test_a_part_that_cannot_be_written_is_held_and_then_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk holds the part back; more rows than a part are refused; with space again nothing is missing."""
    sink = FileSink(tmp_path, part_rows=2)
    real = pq.write_table

    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    sink.write(samples(1, 2))
    with pytest.raises(DiskFull, match="no space is left"):
        sink.write(samples(3))
    assert list(tmp_path.rglob("*.tmp")) == []
    monkeypatch.setattr(pq, "write_table", real)
    sink.write(samples(4))
    sink.close()
    assert pq.read_table(tmp_path / "kind=sample").column("value").to_pylist() == [1.0, 2.0, 4.0]


def test_lines_are_whole_and_can_be_followed(tmp_path: Path) -> None:
    """Every write is in the file when it returns, and the codec takes the file back."""
    sink = FileSink(tmp_path / "events.ndjson", "ndjson")
    sink.write(samples(1))
    content = (tmp_path / "events.ndjson").read_bytes()
    assert content == b'{"kind":"sample","at_ns":1764000000000000000,"name":"x","labels":{"a":"b"},"value":1.0}\n'
    sink.write(samples(2))
    sink.close()
    decoded = decode_ndjson((tmp_path / "events.ndjson").read_bytes())
    assert decoded.tables["sample"].column("value").to_pylist() == [1.0, 2.0]


def test_half_a_line_of_a_killed_process_is_cut_off(tmp_path: Path) -> None:
    """The next process goes on after the last whole line."""
    path = tmp_path / "events.ndjson"
    FileSink(path, "ndjson").write(samples(1))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind":"sam')
    FileSink(path, "ndjson").write(samples(2))
    assert path.read_bytes().startswith(whole + b'{"kind":"sample"')
    assert decode_ndjson(path.read_bytes()).num_rows == 2


def test_a_folder_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    """A file where the folder should be: the sink says so when it is made, not at the first row."""
    (tmp_path / "taken").write_text("x")
    with pytest.raises(ProbeError, match="cannot be written"):
        FileSink(tmp_path / "taken" / "below")
    with pytest.raises(ProbeError, match="parquet or ndjson, not 'csv'"):
        FileSink(tmp_path, "csv")  # type: ignore[arg-type]


def test_a_closed_file_sink_takes_no_rows(tmp_path: Path) -> None:
    """Rows that would wait for ever are not taken."""
    sink = FileSink(tmp_path)
    sink.close()
    sink.close()
    with pytest.raises(ProbeError, match="is closed"):
        sink.write(samples(1))


def test_memory_keeps_rows_in_order() -> None:
    """What was written is there, kind by kind; a kind never written is an empty table."""
    sink = MemorySink()
    sink.write(samples(1))
    sink.write(samples(2))
    sink.write({"mark": arrow_schema("mark").empty_table()})
    sink.close()
    assert sink.table("sample").column("value").to_pylist() == [1.0, 2.0]
    assert sink.table("mark").num_rows == 0
    assert sink.num_rows == {"sample": 2}
    assert sink.closed


class Hands:
    """Two clocks that a test turns: `mono` runs on, `wall` may be put back."""

    def __init__(self) -> None:
        self.mono = 5_000_000_000
        self.wall = NOW

    def clock(self) -> Clock:
        return Clock(lambda: self.mono, lambda: self.wall)

    def run(self, seconds: float) -> None:
        self.mono += int(seconds * 1e9)
        self.wall += int(seconds * 1e9)


def test_the_clock_follows_the_monotonic_one_between_anchors() -> None:
    """The wall clock is put back by an hour: instants run on until the next anchor, in order."""
    hands = Hands()
    clock = hands.clock()
    assert clock.now_ns() == NOW
    hands.run(10)
    hands.wall -= 3_600 * 10**9
    assert clock.now_ns() == NOW + 10 * 10**9
    assert clock.reanchor() is None, "ten seconds after the last anchor"
    assert clock.to_utc_ns(hands.mono) == NOW + 10 * 10**9


def test_a_move_is_told_at_the_next_anchor() -> None:
    """After 60 s the clock takes the wall's word, and a mark says by how much it moved."""
    hands = Hands()
    clock = hands.clock()
    hands.run(60)
    hands.wall += 250_000_000
    move = clock.reanchor()
    assert move is not None
    assert (move.offset_ns, move.at_ns) == (250_000_000, NOW + 60 * 10**9 + 250_000_000)
    assert clock.now_ns() == hands.wall
    mark = move.to_mark("w0")
    assert (mark["mark"], mark["subject"], mark["attrs"]) == ("clock", "w0", {"offset_s": "0.250000000"})
    assert "+0.250000 s" in mark["text"]


@pytest.mark.parametrize(
    ("offset_ns", "is_told"), [(0, False), (1_000_000, False), (1_000_001, True), (-2_000_000, True)]
)
def test_a_move_within_a_millisecond_is_taken_in_silence(offset_ns: int, is_told: bool) -> None:
    """NTP's slewing is no event; a step is, forward or back."""
    hands = Hands()
    clock = hands.clock()
    hands.run(60)
    hands.wall += offset_ns
    assert (clock.reanchor() is not None) is is_told
    assert clock.now_ns() == hands.wall


def test_the_anchor_is_the_least_disturbed_reading() -> None:
    """Of five readings the one with the shortest bracket counts: the process may be put to sleep in the others."""
    ticks = iter([0, 900, 1_000, 1_010, 2_000, 2_900, 3_000, 3_900, 4_000, 4_900, 5_000])
    walls = iter([10**18, 10**18 + 7, 10**18, 10**18, 10**18])
    clock = Clock(lambda: 0, lambda: 10**18)
    clock.monotonic_ns = lambda: next(ticks)
    clock._wall_ns = lambda: next(walls)
    assert clock._measure() == 10**18 + 7 - 1_005


def test_waits_double_up_to_the_limit() -> None:
    """1, 2, 4, then 5 and 5 again; an answer starts from the beginning."""
    backoff = Backoff(1.0, 5.0, jitter=lambda: 1.0)
    waits = []
    now = 0.0
    for _ in range(5):
        backoff.fail(now, now)
        waits.append(backoff.resume_at_s - now)
        now = backoff.resume_at_s
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.succeed()
    backoff.fail(now, now)
    assert backoff.resume_at_s - now == 1.0


def test_jitter_takes_up_to_half_of_a_wait() -> None:
    """Senders that failed together do not come back together."""
    low, high = Backoff(1.0, 5.0, jitter=lambda: 0.0), Backoff(1.0, 5.0, jitter=lambda: 1.0)
    low.fail(0.0, 0.0)
    high.fail(0.0, 0.0)
    assert (low.resume_at_s, high.resume_at_s) == (0.5, 1.0)


def test_failures_of_one_outage_are_counted_once() -> None:
    """Eight requests under way when the collector died are one failure, not eight doublings."""
    backoff = Backoff(1.0, 60.0, jitter=lambda: 1.0)
    for _ in range(8):
        backoff.fail(started_s=10.0, now_s=11.0)
    assert (backoff.failures, backoff.resume_at_s) == (1, 12.0)


def test_a_wish_of_the_collector_is_longer_than_the_own_wait() -> None:
    """Retry-After counts where it is longer, and only there."""
    backoff = Backoff(1.0, 60.0, jitter=lambda: 1.0)
    backoff.fail(0.0, 0.0, at_least_s=20.0)
    assert backoff.resume_at_s == 20.0
    backoff.succeed()
    backoff.fail(0.0, 0.0, at_least_s=0.1)
    assert backoff.resume_at_s == 1.0


def test_very_many_failures_do_not_overflow() -> None:
    """A weekend without a collector still waits the limit."""
    backoff = Backoff(0.25, 30.0, jitter=lambda: 1.0)
    for now in range(5_000):
        backoff.fail(float(now), float(now))
    assert backoff.resume_at_s == 4_999 + 30.0
