"""The store among processes: who holds the file, what survives a kill, what a full disk does, who reads Parquet."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from engine_probe.errors import StoreBusy
from store.interface import Batch, BatchId
from store.open import open_store
from store.upkeep.backup import backup
from store.upkeep.seal import seal
from tests.store_rows import Clock, batch, numbers, step, steps

ROOT = Path(__file__).parents[2]


def python(code, *words, **options):
    """A child that runs `code` with the project on its path; its stdin ends it."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


HOLDER = """
import sys
from store.open import open_store
store = open_store(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
store.close()
"""


@pytest.mark.parametrize("read_only", [True, False])
def test_a_file_held_by_another_process_names_it(tmp_path, read_only):
    """StoreBusy with the holder's pid and command line, and what to do; when it lets go, the file opens."""
    path = str(tmp_path / "k.duckdb")
    with python(HOLDER, path, stdin=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(StoreBusy, match=r"held by process \d+ .*Ask that process over HTTP") as busy:
            open_store(path, read_only=read_only)
        assert busy.value.pid == holder.pid
        assert path in busy.value.message
        assert "-c" in busy.value.message
        holder.stdin.close()
        assert holder.wait(30) == 0
    open_store(path).close()


APPENDER = """
import sys
from store.interface import Batch, BatchId
from store.open import open_store
from tests.store_rows import steps
store = open_store(sys.argv[1])
for seq in range(int(sys.argv[2]), 1_000_000):
    receipt = store.append(Batch({"step": steps(10 * seq, 10)}, BatchId("probe", "e", seq)))
    print(seq, int(receipt.duplicate), flush=True)
"""


def test_a_killed_process_loses_no_acknowledged_batch(tmp_path):
    """Killed with SIGKILL while it appends, three times: what was acknowledged is there, whole and once."""
    path = str(tmp_path / "k.duckdb")
    acknowledged = 0
    for _ in range(3):
        with python(APPENDER, path, max(0, acknowledged - 2)) as child:
            for _ in range(25):
                seq, duplicate = map(int, child.stdout.readline().split())
                assert bool(duplicate) is (seq < acknowledged)
                acknowledged = max(acknowledged, seq + 1)
            child.send_signal(signal.SIGKILL)
            rest = child.stdout.read().splitlines()
        whole = [line for line in rest if len(line.split()) == 2]
        acknowledged = max([acknowledged, *(int(line.split()[0]) + 1 for line in whole)])
        with open_store(path) as store:
            found = numbers(store)
            last = store.sources()[0].last_seq
            assert last >= acknowledged - 1
            assert found == list(range(10 * (last + 1)))
            assert list(store.verify()) == []
        acknowledged = last + 1


FULL_DISK = """
import json, resource, sys
from engine_probe.errors import DiskFull
from store import database
from store.interface import Batch, BatchId
from store.open import open_store
from tests.store_rows import steps

database.CHECKPOINT_THRESHOLD = sys.argv[2]
store = open_store(sys.argv[1])

def append(seq):
    return store.append(Batch({"step": steps(500 * seq, 500)}, BatchId("probe", "e", seq)))

append(0)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
seq, refused, read = 1, 0, None
while refused < 3:
    try:
        append(seq)
        seq += 1
    except DiskFull as error:
        refused += 1
        read = store.query("SELECT count(*) AS n FROM step").column("n")[0].as_py()
        said = error.message
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
again = append(seq).duplicate
print(json.dumps({"stored": seq, "read": read, "said": said, "again": again, "problems": len(store.verify())}))
store.close()
"""


@pytest.mark.parametrize(("threshold", "limit"), [("256MB", 2_500_000), ("500KB", 4_500_000)])
def test_a_full_disk_refuses_batches_and_still_reads(tmp_path, threshold, limit):
    """The system refuses to write, to the log or to the database in a checkpoint (which takes DuckDB's instance down):

    batches get DiskFull, reads go on, nothing is half stored, and once there is room the same batch is taken.
    """
    path = str(tmp_path / "k.duckdb")
    with python(FULL_DISK, path, threshold, limit) as child:
        told = json.loads(child.stdout.readline())
    assert child.returncode == 0
    assert told["read"] == 500 * told["stored"]
    assert "No space is left" in told["said"]
    assert told["again"] is False
    assert told["problems"] == 0
    with open_store(path) as store:
        assert numbers(store) == list(range(500 * (told["stored"] + 1)))
        assert list(store.verify()) == []


def test_sealed_files_are_read_by_another_process_meanwhile(tmp_path):
    """Parquet is the public face: a plain DuckDB elsewhere reads it while this process holds the database."""
    clock = Clock()
    with open_store(str(tmp_path / "k.duckdb"), clock=clock) as store:
        store.append(batch({"step": [step(n) for n in range(7)]}, seq=0))
        clock.advance(400)
        seal(store)
        sql = f"SELECT count(*), sum(step), min(hour) FROM read_parquet('{store.parquet_dir}/kind=step/**/*.parquet')"
        code = "import duckdb, sys; print(*duckdb.execute(sys.argv[1]).fetchone())"
        with python(code, sql) as reader:
            assert reader.stdout.read().split() == ["7", "21", "16"]


def test_readers_and_writers_together_see_whole_batches(tmp_path):
    """While three senders append batches of 10 rows, every read counts a multiple of 10, and never fewer than before."""
    with open_store(str(tmp_path / "k.duckdb")) as store:
        done = threading.Event()
        counts: list[list[int]] = [[], []]

        def send(sender):
            for seq in range(20):
                store.append(Batch({"step": steps(10 * seq, 10)}, BatchId(f"s{sender}", "e", seq)))

        def read(seen):
            while not done.is_set():
                seen.append(store.query("SELECT count(*) AS n FROM step").column("n")[0].as_py())

        readers = [threading.Thread(target=read, args=(seen,)) for seen in counts]
        writers = [threading.Thread(target=send, args=(sender,)) for sender in range(3)]
        for thread in [*readers, *writers]:
            thread.start()
        for thread in writers:
            thread.join()
        done.set()
        for thread in readers:
            thread.join()
        assert store.query("SELECT count(*) AS n FROM step").to_pylist() == [{"n": 600}]
        assert list(store.verify()) == []
    for seen in counts:
        assert seen == sorted(seen)
        assert all(count % 10 == 0 for count in seen)


def test_sealing_and_backups_while_batches_come_in(tmp_path):
    """Three senders append while passes seal and copies are made: each row once in the end, and every copy is sound."""
    with open_store(str(tmp_path / "k.duckdb")) as store:

        def send(sender):
            for seq in range(25):
                store.append(Batch({"step": steps(100 * seq + sender, 1)}, BatchId(f"s{sender}", "e", seq)))

        writers = [threading.Thread(target=send, args=(sender,)) for sender in range(3)]
        for thread in writers:
            thread.start()
        copies = []
        while any(thread.is_alive() for thread in writers):
            seal(store, older_than_s=0.0)
            copies.append(tmp_path / f"copy{len(copies)}.duckdb")
            backup(store, copies[-1])
        for thread in writers:
            thread.join()
        seal(store, older_than_s=0.0)
        expected = sorted(100 * seq + sender for seq in range(25) for sender in range(3))
        sealed = [n for path in store.sql_data().files["step"] for n in pq.read_table(path).column("step").to_pylist()]
        assert sorted(sealed) == sorted(numbers(store)) == expected
        assert list(store.verify()) == []
    for path in copies:
        with open_store(str(path), read_only=True) as copy:
            assert list(copy.verify()) == []
