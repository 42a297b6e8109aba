"""`verify` finds what breaks a promise, and nothing in a sound store."""

from __future__ import annotations

import re

import pytest

from store.open import open_store
from store.upkeep.seal import seal
from tests.store_rows import Clock, batch, request, step


@pytest.fixture
def store(tmp_path):
    """A store with live rows, a run, several senders and two sealed passes."""
    clock = Clock()
    with open_store(str(tmp_path / "k.duckdb"), clock=clock) as opened:
        for seq in range(4):
            opened.append(
                batch({"step": [step(seq), step(seq + 100, run_id="exp")], "request": [request(f"{seq}")]}, seq)
            )
            clock.advance(400)
            if seq % 2:
                seal(opened)
        opened.append(batch({"step": [step(9)]}))
        yield opened


def wheres(store):
    """Places of the problems found."""
    return [problem.where for problem in store.verify()]


def behind_its_back(store, sql):
    """Change the database as no code of ours does."""
    store.call(lambda cursor: cursor.execute(sql))


def test_a_sound_store_has_no_problems(store):
    """Live rows, runs, gaps in the numbers and sealed files are all in order."""
    assert list(store.verify()) == []


@pytest.mark.parametrize(
    ("sql", "where", "says"),
    [
        ("DELETE FROM step WHERE step = 1", "step", "8 rows are stored, but 9 were acknowledged"),
        ("INSERT INTO request SELECT * FROM request LIMIT 1", "request", "5 rows are stored, but 4 were acknowledged"),
        ("UPDATE kind_state SET num_removed = 2 WHERE kind = 'step'", "step", "and 2 removed"),
        ("DELETE FROM kind_state WHERE kind = 'block'", "kind_state", "books of block are missing"),
        ("INSERT INTO batch_range VALUES ('probe', 'e', 2, 7)", "batch_range", r"recorded twice"),
        ("INSERT INTO batch_range VALUES ('other', 'e', 5, 4)", "batch_range", r"5\.\.4 of other"),
        ("INSERT INTO batch_range VALUES ('other', 'e', 5, 6)", "batch_range", "in memory differs"),
        ("ALTER TABLE step RENAME COLUMN policy TO polizei", "step", "policy, polizei"),
        ("DROP VIEW evidence_batch; ALTER TABLE mark DROP COLUMN text", "mark", "text"),
        ("DELETE FROM schema_migration WHERE number = 2", "schema_migration", "not those of this release"),
        (
            "ALTER TABLE mark ALTER COLUMN mark DROP NOT NULL; "
            "INSERT INTO mark (at_ns, source, received_ns) VALUES (1, 's', 1)",
            "mark.mark",
            "1 rows have no value",
        ),
        ("DELETE FROM run", "run", "exp has rows and is not listed"),
        ("INSERT INTO run VALUES ('ghost', 0)", "run", "ghost is listed and has no rows"),
        ("UPDATE seal_log SET num_rows = 7 WHERE kind = 'request'", "00000001", "has 2 rows, the log says 7"),
        ("DELETE FROM seal_log WHERE kind = 'request' AND seal_id = 1", "00000001", "not in the seal log"),
    ],
)
def test_each_broken_promise_is_found(store, sql, where, says):
    """Rows, ranges, books, columns, nulls and sealed files: each kind of damage is named with its place."""
    behind_its_back(store, sql)
    problems = [problem for problem in store.verify() if where in problem.where]
    assert problems, wheres(store)
    assert any(re.search(says, problem.statement) for problem in problems), problems


def test_missing_cut_and_foreign_files_are_found(store):
    """A sealed file that is gone, one that is no Parquet any more, and one that nobody sealed."""
    files = sorted(store.parquet_dir.glob("kind=request/**/*.parquet"))
    whole = files[0].read_bytes()
    files[0].unlink()
    files[1].write_bytes(b"not parquet")
    stranger = files[1].with_name("stranger.parquet")
    stranger.write_bytes(whole)
    found = {problem.where: problem.statement for problem in store.verify()}
    assert "missing" in found[str(files[0])]
    assert "cannot be read" in found[str(files[1])]
    assert "not in the seal log" in found[str(stranger)]
    assert len(found) == 3


def test_a_pass_that_left_rows_out_is_found(store):
    """More rows in the database than its files hold for the same time: rows would be missing from Parquet."""
    behind_its_back(store, "INSERT INTO step SELECT * FROM step WHERE step = 0")
    statements = {problem.where: problem.statement for problem in store.verify()}
    assert "sealed fewer rows" in statements["seal_log (step)"]
