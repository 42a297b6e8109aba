"""Backup opens as a store of its own; exports are read by others and imported again."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from engine_probe.errors import StoreError, StoreMisuse, UsageError
from engine_probe.schema import arrow_schema, conform, table_from_rows
from engine_probe.wire.codec import decode_ndjson
from store.interface import Batch, Window
from store.open import open_store
from store.upkeep import backup as backups
from store.upkeep.backup import backup
from store.upkeep.export import export
from store.upkeep.seal import seal
from tests.store_rows import START_NS, Clock, S, batch, numbers, request, step

FACTS = {
    "labels": {"a": "b"},
    "token_ns": [1, 2],
    "spans": [{"phase": "queue", "start_ns": 1, "end_ns": 2, "tokens": None}],
    "prompt_blocks": [2**64 - 1],
    "prefix_hash": 2**63,
}


@pytest.fixture
def store(tmp_path):
    """Two live requests, three steps of a run, one sealed pass, and something after it."""
    clock = Clock()
    with open_store(str(tmp_path / "k.duckdb"), clock=clock) as opened:
        rows = [request("a", 0, **FACTS), request("b", 60, error='said "no", twice\nand left')]
        opened.append(batch({"request": rows, "step": [step(n, run_id="it's") for n in range(3)]}, seq=0))
        clock.advance(400)
        seal(opened)
        opened.append(batch({"step": [step(7)]}, seq=2))
        yield opened


def test_a_backup_is_a_sound_store_of_its_own(store, tmp_path):
    """The copy holds rows, identities, views and sealed files, and goes its own way afterwards."""
    report = backup(store, tmp_path / "copy.duckdb")
    assert (dict(report.rows)["step"], report.num_files) == (4, 2)
    store.append(batch({"step": [step(8)]}, seq=3))
    with open_store(str(tmp_path / "copy.duckdb")) as copy:
        assert list(copy.verify()) == []
        assert numbers(copy) == [0, 1, 2, 7]
        assert copy.append(batch({"step": [step(7)]}, seq=2)).duplicate
        assert not copy.append(batch({"step": [step(9)]}, seq=1)).duplicate
        assert copy.query("SELECT count(*) AS n FROM evidence_batch").to_pylist() == [{"n": 5}]
        assert len(copy.sql_data().files["step"]) == 1
    assert numbers(store) == [0, 1, 2, 7, 8]


def test_a_backup_never_replaces_anything(store, tmp_path):
    """A path that is taken, also by the folder of sealed files, and a missing folder are refused; nothing is left."""
    taken = tmp_path / "taken.duckdb"
    taken.write_text("mine")
    (tmp_path / "other.parquet").mkdir()
    for path in (taken, tmp_path / "other.duckdb", tmp_path / "no" / "x.duckdb", tmp_path / "k.duckdb"):
        with pytest.raises(StoreError, match=r"exists already|does not exist"):
            backup(store, path)
    assert taken.read_text() == "mine"
    assert not (tmp_path / "other.duckdb").exists()


@pytest.mark.parametrize("target", ["", "."])
def test_a_backup_needs_the_name_of_a_file(store, target):
    """An empty path is told as such."""
    with pytest.raises(StoreMisuse, match=r"no path of a file to make"):
        backup(store, Path(target))


def test_what_fails_at_the_target_names_the_target(store):
    """A place where no file can be made: the message is about that place and not about the store that is sound."""
    with pytest.raises(StoreError, match=r"The store /proc/copy.duckdb failed"):
        backup(store, Path("/proc/copy.duckdb"))
    with pytest.raises(StoreError, match=r"/proc/step.csv failed"):
        export(store, Path("/proc"), Window(), kinds=["step"], file_format="csv")


def test_a_backup_that_fails_leaves_nothing(store, tmp_path, monkeypatch):
    """Counts that do not agree drop the copy; the store goes on."""
    counts = iter([{"step": 4}, {"step": 3}])
    monkeypatch.setattr(backups, "_counts", lambda *_: next(counts))
    with pytest.raises(StoreError, match="was dropped"):
        backup(store, tmp_path / "copy.duckdb")
    assert not list(tmp_path.glob("copy*"))
    monkeypatch.undo()
    assert backup(store, tmp_path / "copy.duckdb").num_bytes > 0


def test_parquet_export_is_the_contracts_table(store, tmp_path):
    """Live requests, all columns, with the contract's name and version in the file's metadata."""
    (written,) = export(store, tmp_path / "out", Window(), kinds=["request"])
    assert (written.kind, written.num_rows) == ("request", 2)
    table = pq.read_table(written.path)
    assert table.column_names == arrow_schema("request").names
    assert table.schema.metadata[b"kvscope.kind"] == b"request"
    assert conform("request", table).equals(store.rows("request", Window(), order_by="arrival_ns"))


def test_ndjson_export_is_read_by_the_decoder(store, tmp_path):
    """A row a line with its kind: what the ingest and `kvscope import` read, with nothing lost."""
    (written,) = export(store, tmp_path, Window(), kinds=["request"], file_format="ndjson")
    with open(written.path, "rb") as lines:
        tables = decode_ndjson(lines.read()).tables
    assert tables["request"].equals(store.rows("request", Window(), order_by="arrival_ns"))


def test_csv_export_has_json_in_nested_cells(store, tmp_path):
    """Quotes and line ends survive, lists are JSON, unknown is empty."""
    (written,) = export(store, tmp_path, Window(), kinds=["request"], file_format="csv")
    with open(written.path, newline="") as lines:
        first, second = csv.DictReader(lines)
    assert json.loads(first["prompt_blocks"]) == [2**64 - 1]
    assert json.loads(first["labels"]) == {"a": "b"}
    assert first["error"] == ""
    assert second["error"] == 'said "no", twice\nand left'


def test_export_keeps_to_its_window(store, tmp_path):
    """A run's rows by its name (whatever is in it), live rows by time; kinds without rows make no file."""
    files = export(store, tmp_path / "run", Window(run_id="it's"))
    assert [(file.kind, file.num_rows) for file in files] == [("step", 3)]
    files = export(store, tmp_path / "live", Window(START_NS + 30 * S, None))
    assert [(file.kind, file.num_rows) for file in files] == [("request", 1)]
    assert export(store, tmp_path / "none", Window(0, 1)) == []


def test_export_refuses_what_makes_no_sense(store, tmp_path):
    """An unknown format or kind, and a file that is there already."""
    with pytest.raises(UsageError, match="no format 'xlsx'"):
        export(store, tmp_path, Window(), file_format="xlsx")
    with pytest.raises(StoreError, match="no kind 'steps'"):
        export(store, tmp_path, Window(), kinds=["steps"])
    export(store, tmp_path / "out", Window())
    with pytest.raises(StoreError, match="exists already"):
        export(store, tmp_path / "out", Window())


def test_rows_survive_export_and_import(store, tmp_path):
    """What is exported as Parquet and appended elsewhere is the same."""
    (written,) = export(store, tmp_path, Window(run_id="it's"), kinds=["step"])
    with open_store(":memory:") as other:
        other.append(Batch({"step": conform("step", pq.read_table(written.path))}))
        again = other.rows("step", Window(run_id="it's"))
    assert again.equals(table_from_rows("step", [step(n, run_id="it's") for n in range(3)]))
