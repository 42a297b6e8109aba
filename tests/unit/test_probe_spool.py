"""The spool on disk: what survives which end, and how losses are remembered and told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine_probe.errors import ProbeError
from engine_probe.schema import table_from_rows
from engine_probe.sending import spool_disk
from engine_probe.sending.parcels import Parcel, Segment, halve, pack, segment_of
from engine_probe.sending.spool import Spool
from engine_probe.sending.spool_disk import DiskFiles
from engine_probe.sending.spool_files import MemoryFiles
from engine_probe.wire.codec import decode_arrow

NOW = 1_764_000_000 * 10**9


def samples(*values: int) -> list[Segment]:
    """A batch of samples; `at_ns` tells them apart."""
    rows = [{"at_ns": NOW + v, "name": "x", "value": float(v)} for v in values]
    return [segment_of("sample", table_from_rows("sample", rows))]


def blocks(*values: int) -> Segment:
    """A segment of block events."""
    rows = [{"at_ns": NOW + v, "change": "hit"} for v in values]
    return segment_of("block", table_from_rows("block", rows))


def open_spool(folder: Path, max_bytes: int = 1 << 20) -> Spool:
    """A spool on a folder, as a process would open it."""
    return Spool(DiskFiles(folder), max_bytes=max_bytes, source="test", now_ns=lambda: NOW)


def kill(spool: Spool) -> None:
    """End the process that holds the spool: nothing is written, the folder is free."""
    spool._files.close()


def take_all(spool: Spool) -> list[Parcel]:
    """Everything pending, now in flight."""
    parcels = []
    while (parcel := spool.take()) is not None:
        parcels.append(parcel)
    return parcels


def deliver_all(spool: Spool) -> list[Parcel]:
    """Everything pending, and what follows from it, acknowledged one after another."""
    parcels = []
    while (parcel := spool.take()) is not None:
        spool.ack(parcel)
        parcels.append(parcel)
    return parcels


def values(parcel: Parcel, kind: str = "sample") -> list[int]:
    """The rows of one kind."""
    table = decode_arrow(parcel.body).tables.get(kind)
    return [] if table is None else [at - NOW for at in table.column("at_ns").to_pylist()]


def attrs(parcel: Parcel) -> list[dict[str, str]]:
    """The attributes of its `gap` marks."""
    return [dict(row["attrs"]) for row in decode_arrow(parcel.body).tables["mark"].to_pylist()]


def test_batches_survive_the_process_with_their_numbers(tmp_path: Path) -> None:
    """Two batches, one delivered; after the kill the other is there under its number, and the next number is new."""
    first = open_spool(tmp_path)
    first.append([samples(1), samples(2)])
    one = first.take()
    assert one is not None
    first.ack(one)
    kill(first)
    second = open_spool(tmp_path)
    second.append([samples(3)])
    again = take_all(second)
    assert [(p.key.epoch, p.key.seq, values(p)) for p in again] == [(one.key.epoch, 1, [2]), (one.key.epoch, 2, [3])]


def test_a_number_is_not_used_again_when_everything_was_delivered(tmp_path: Path) -> None:
    """An empty spool still knows the last number: a new batch must not look like a repeat of an old one."""
    first = open_spool(tmp_path)
    first.append([samples(1), samples(2)])
    for parcel in take_all(first):
        first.ack(parcel)
    assert list(tmp_path.glob("*.batch")) == []
    kill(first)
    second = open_spool(tmp_path)
    second.append([samples(3)])
    (parcel,) = take_all(second)
    assert parcel.key.seq == 2
    assert len(list(tmp_path.glob("*.done"))) == 0, "the marker goes when a higher number is on disk"


def test_a_spool_whose_files_are_gone_begins_a_new_epoch(tmp_path: Path) -> None:
    """Somebody emptied the folder: the last number is unknown, so the old epoch is not used any more."""
    first = open_spool(tmp_path)
    first.append([samples(1)])
    epoch = first._files.epoch
    kill(first)
    for path in tmp_path.glob("*.batch"):
        path.unlink()
    assert open_spool(tmp_path)._files.epoch != epoch


def test_a_reboot_begins_a_new_epoch_and_keeps_the_old_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut the newest files may be missing: new batches get a new epoch, old ones keep theirs."""
    first = open_spool(tmp_path)
    first.append([samples(1)])
    old = first._files.epoch
    kill(first)
    monkeypatch.setattr(spool_disk, "_boot_id", lambda: "another boot")
    second = open_spool(tmp_path)
    second.append([samples(2)])
    keys = [parcel.key for parcel in take_all(second)]
    assert [(key.epoch == old, key.seq) for key in keys] == [(True, 0), (False, 0)]


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "junk"])
def test_a_damaged_file_is_set_aside_and_told(tmp_path: Path, damage: str) -> None:
    """A torn batch is not sent; the others are, and a `gap` mark names the number that is missing."""
    first = open_spool(tmp_path)
    first.append([samples(1), samples(2), samples(3)])
    kill(first)
    path = sorted(tmp_path.glob("*.batch"))[1]
    content = path.read_bytes()
    flipped = content[:-20] + bytes([content[-20] ^ 1]) + content[-19:]
    path.write_bytes({"cut": content[:-10], "flip": flipped, "empty": b"", "junk": b"junk"}[damage])
    second = open_spool(tmp_path)
    parcels = deliver_all(second)
    told = [parcel for parcel in parcels if not values(parcel)]
    assert [values(parcel) for parcel in parcels if values(parcel)] == [[1], [3]]
    (gap,) = attrs(told[0])
    assert (gap["reason"], gap["first_seq"], gap["last_seq"]) == ("spool_damaged", "1", "1")
    assert gap["dropped_rows"] == ("1" if damage in ("cut", "flip") else "0"), "an unreadable header tells no rows"
    assert len(list((tmp_path / "aside").glob("*.batch"))) == 1


def test_a_half_written_file_is_as_if_it_had_not_been(tmp_path: Path) -> None:
    """kill -9 in the middle of a write leaves a .tmp, which the next process removes."""
    first = open_spool(tmp_path)
    first.append([samples(1)])
    kill(first)
    (tmp_path / "0000-000000000009.batch.tmp").write_bytes(b"half")
    second = open_spool(tmp_path)
    assert [values(parcel) for parcel in take_all(second)] == [[1]]
    assert list(tmp_path.glob("*.tmp")) == []


def test_kill_in_the_middle_of_a_split_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second half is on disk, the first not yet cut: the next process finds the whole batch and no half."""
    first = open_spool(tmp_path)
    first.append([samples(1, 2, 3, 4)])
    parcel = first.take()
    assert parcel is not None
    real, calls = DiskFiles.put, []

    def put(self: DiskFiles, *args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(self, *args)

    monkeypatch.setattr(DiskFiles, "put", put)
    with pytest.raises(KeyboardInterrupt):
        first.split(parcel)
    monkeypatch.undo()
    assert len(list(tmp_path.glob("*.batch"))) == 2
    kill(first)
    second = open_spool(tmp_path)
    assert [values(parcel) for parcel in take_all(second)] == [[1, 2, 3, 4]]


def test_a_split_batch_survives_in_halves(tmp_path: Path) -> None:
    """Both halves are on disk under their own numbers; the first keeps the old one."""
    first = open_spool(tmp_path)
    first.append([samples(1, 2, 3)])
    parcel = first.take()
    assert parcel is not None
    assert first.split(parcel)
    kill(first)
    second = open_spool(tmp_path)
    assert [(parcel.key.seq, values(parcel)) for parcel in take_all(second)] == [(0, [1]), (1, [2, 3])]


def test_overflow_drops_block_events_first_and_requests_last() -> None:
    """A batch of samples and blocks in a spool that holds half of it: the blocks go, the samples stay."""
    segments = [*samples(1, 2), blocks(3, 4, 5)]
    total = sum(segment.info.num_bytes for segment in segments) + 256
    spool = Spool(MemoryFiles(), max_bytes=total - 1, source="test", now_ns=lambda: NOW)
    spool.append([segments])
    assert dict(spool.dropped) == {"block": 3}
    parcel = spool.take()
    assert parcel is not None
    assert (values(parcel), values(parcel, "block")) == ([1, 2], [])
    spool.ack(parcel)
    told = spool.take()
    assert told is not None
    (gap,) = attrs(told)
    assert gap == {
        "reason": "spool_overflow",
        "dropped_rows": "3",
        "dropped_block": "3",
        "epoch": parcel.key.epoch,
        "first_seq": "0",
        "last_seq": "0",
        "from_ns": str(NOW + 3),
        "to_ns": str(NOW + 5),
    }


def test_overflow_drops_the_oldest_of_a_kind_and_leaves_those_in_flight() -> None:
    """Batch 0 is with a worker, so 1 goes first; what the collector may already have is not called lost."""
    size = samples(0)[0].info.num_bytes + 256
    spool = Spool(MemoryFiles(), max_bytes=3 * size, source="test", now_ns=lambda: NOW)
    spool.append([samples(0), samples(1), samples(2)])
    in_flight = spool.take()
    spool.append([samples(3)])
    assert spool.dropped["sample"] >= 1
    left = [values(parcel)[0] for parcel in take_all(spool)]
    assert in_flight is not None
    assert values(in_flight) == [0]
    assert 1 not in left
    assert left[-1] == 3


def test_losses_are_remembered_over_a_restart(tmp_path: Path) -> None:
    """The process died before it could tell: the next one tells it with the first answer, and once."""
    size = samples(0)[0].info.num_bytes + 256
    first = open_spool(tmp_path, max_bytes=2 * size)
    first.append([samples(0), samples(1), samples(2), samples(3)])
    lost = first.dropped["sample"]
    assert lost >= 2
    kill(first)
    second = open_spool(tmp_path)
    kill(second)
    third = open_spool(tmp_path)
    parcels = deliver_all(third)
    assert len(parcels) == 4 - lost + 1, "what was kept, and one tale"
    gap = attrs(parcels[-1])[0]
    assert (gap["dropped_rows"], gap["first_seq"]) == (str(lost), "0")
    kill(third)
    assert deliver_all(open_spool(tmp_path)) == []


def test_tales_of_losses_are_not_dropped_to_make_room(tmp_path: Path) -> None:
    """A loss that was told to the spool outlives the next overflow, else the second loss would hide the first."""
    size = samples(0)[0].info.num_bytes + 256
    spool = open_spool(tmp_path, max_bytes=2 * size)
    spool.append([samples(0), samples(1), samples(2)])
    first = spool.take()
    assert first is not None
    spool.ack(first)
    spool.append([samples(value) for value in range(3, 9)])
    told = [attrs(parcel)[0]["dropped_rows"] for parcel in deliver_all(spool) if not values(parcel)]
    assert sum(map(int, told)) == spool.dropped["sample"] >= 6


def test_a_refused_tale_of_a_loss_is_not_told_again() -> None:
    """A collector that refuses even the mark does not make the spool talk for ever."""
    spool = Spool(MemoryFiles(), max_bytes=1 << 20, source="test", now_ns=lambda: NOW)
    spool.append([samples(1)])
    for _ in range(5):
        parcel = spool.take()
        if parcel is not None:
            spool.refuse(parcel, "refused", "no")
    assert spool.num_pending == 0
    assert dict(spool.dropped) == {"sample": 1, "mark": 1}


def test_a_disk_that_is_full_counts_what_it_could_not_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller is not bothered with an OSError; the rows are counted and told when there is room again."""
    spool = open_spool(tmp_path)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DiskFiles, "_write", full)
    spool.append([samples(1, 2)])
    assert dict(spool.dropped) == {"sample": 2}
    assert spool.num_bytes == 0
    monkeypatch.undo()
    spool.append([samples(3)])
    parcel = spool.take()
    assert parcel is not None
    spool.ack(parcel)
    told = spool.take()
    assert told is not None
    assert attrs(told)[0]["reason"] == "spool_not_writable"


def test_only_the_newest_set_aside_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder for people to look at is bounded."""
    monkeypatch.setattr(spool_disk, "MAX_ASIDE", 2)
    spool = open_spool(tmp_path)
    spool.append([samples(value) for value in range(5)])
    for _ in range(5):
        parcel = spool.take()
        assert parcel is not None
        spool.refuse(parcel, "refused", "no")
    assert [path.stem[-1] for path in sorted((tmp_path / "aside").glob("*.batch"))] == ["3", "4"]
    assert len(list((tmp_path / "aside").glob("*.txt"))) == 2


def test_a_folder_that_cannot_be_a_spool_is_refused_in_words(tmp_path: Path) -> None:
    """A file in its place is told at once."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(ProbeError, match="cannot be used"):
        DiskFiles(tmp_path / "file")


def test_answers_after_close_change_nothing(tmp_path: Path) -> None:
    """A worker that comes back after close must not touch a folder that another process may hold by now."""
    spool = open_spool(tmp_path)
    spool.append([samples(1)])
    parcel = spool.take()
    assert parcel is not None
    spool.close()
    spool.ack(parcel)
    spool.refuse(parcel, "refused", "no")
    assert len(list(tmp_path.glob("*.batch"))) == 1


def test_large_tables_are_cut_and_small_ones_travel_together() -> None:
    """Ten thousand samples in batches of 20 kB; three small kinds in one."""
    rows = [{"at_ns": NOW + i * 7919, "name": f"x{i}", "value": i / 7} for i in range(10_000)]
    batches = pack({"sample": table_from_rows("sample", rows)}, 20_000, None)
    assert len(batches) > 10
    assert all(sum(segment.info.num_bytes for segment in batch) < 25_000 for batch in batches)
    assert sum(segment.info.num_rows for batch in batches for segment in batch) == 10_000
    marks = table_from_rows("mark", [{"at_ns": NOW, "mark": "gap"}])
    small = {"sample": table_from_rows("sample", rows[:1]), "mark": marks, "block": table_from_rows("block", [])}
    (batch,) = pack(small, 20_000, "lz4")
    assert [segment.info.kind for segment in batch] == ["sample", "mark"]


def test_halves_hold_the_same_rows_in_order() -> None:
    """Kinds are cut apart first, then rows; one row is not cut."""
    first, second = halve([*samples(1, 2), blocks(3)]) or ([], [])
    assert [segment.info.kind for segment in first + second] == ["sample", "block"]
    assert halve(samples(1)) is None


KILLED = """
import os, sys
from engine_probe.sending.http_sink import HttpSink
from engine_probe.schema import table_from_rows
sink = HttpSink("http://127.0.0.1:9", "killed", spool_dir=sys.argv[1])
n = 0
while True:
    sink.write({"sample": table_from_rows("sample", [{"at_ns": %d + n, "name": "x", "value": 1.0}])})
    n += 1
    os.write(1, b"%%d\\n" %% n)
"""


def test_kill_9_loses_no_row_whose_write_returned(tmp_path: Path) -> None:
    """A real process writes until it is killed; every row it had reported as written is in the spool, once."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED % NOW, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(20)]
    process.kill()
    out, err = process.communicate(timeout=30)
    reported = int((out.split() or lines[-1].split())[-1])
    assert reported >= 20, err.decode()
    spool = open_spool(tmp_path)
    found = [value for parcel in take_all(spool) for value in values(parcel)]
    assert found[:reported] == list(range(reported))
    assert len(found) - reported in (0, 1), "one write may have been finished but not reported"
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["epoch"] == spool._files.epoch
