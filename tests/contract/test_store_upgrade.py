"""Databases of every release open in this one: brought to today's schema, with nothing lost."""

from __future__ import annotations

import gzip
import json
from importlib.metadata import version
from pathlib import Path

import pytest

from engine_probe.events import KINDS
from store.interface import Window
from store.migrate import load
from store.open import open_store
from tests.store_rows import batch, step

FOLDER = Path(__file__).parents[1] / "data" / "databases"
RELEASES = sorted(path.name.removesuffix(".db.gz") for path in FOLDER.glob("*.db.gz"))


@pytest.fixture(params=RELEASES)
def old(request, tmp_path):
    """Path of a copy of a release's database, and what it holds."""
    path = tmp_path / "k.duckdb"
    path.write_bytes(gzip.decompress((FOLDER / f"{request.param}.db.gz").read_bytes()))
    return str(path), json.loads((FOLDER / f"{request.param}.json").read_text())


def test_there_is_a_database_of_this_release():
    """A release is not made without its database."""
    assert version("kvscope") in RELEASES


def test_an_old_database_is_brought_to_today(old):
    """Today's schema and views, every row and identity still there, sound, and ready for new batches."""
    path, held = old
    with open_store(path) as store:
        applied = store.query("SELECT max(number) AS n FROM schema_migration").to_pylist()
        assert applied == [{"n": load()[-1].number}]
        assert list(store.verify()) == []
        assert {kind: store.stats().rows[kind] for kind in held["rows"]} == held["rows"]
        (sender,) = store.sources()
        assert (sender.last_seq, [list(gap) for gap in sender.missing]) == (held["last_seq"], held["missing"])
        assert list(store.runs()) == held["runs"]
        assert store.append(batch({"step": [step(1)]}, seq=0)).duplicate
        assert not store.append(batch({"step": [step(1)]}, seq=1)).duplicate
        assert store.query("SELECT count(*) AS n FROM evidence_batch").to_pylist() == [{"n": held["rows"]["step"] + 1}]


@pytest.mark.parametrize("kind", list(KINDS))
def test_old_rows_read_as_they_were_written(old, kind):
    """Every value of every column the release had; columns that came later are unknown."""
    path, held = old
    if kind not in held["live"]:
        pytest.skip("the release did not have this kind")
    with open_store(path) as store:
        found = store.rows(kind, Window()).to_pylist()
    assert len(found) == len(held["live"][kind])
    for stored, written in zip(found, held["live"][kind], strict=True):
        for name, value in stored.items():
            expected = written.get(name)
            assert (dict(value) if isinstance(expected, dict) and isinstance(value, list) else value) == expected, name
