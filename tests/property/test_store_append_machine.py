"""Whatever is sent, in whatever order, again and again, with reopening, sealing and pruning in between: rows exactly once.

The model is a dictionary of applied batches. The store is a real file; reopening sometimes follows no proper close, as
after a crash. Invariant after every step: the rows are those of the applied batches, each once, and the recorded ranges
are exactly the set of applied numbers.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path

import pyarrow.parquet as pq
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_probe.errors import BatchRejected
from store.interface import Batch, BatchId
from store.open import open_store
from store.upkeep.retention import RetentionPolicy, prune
from store.upkeep.seal import seal
from tests.store_rows import Clock, steps

SENDERS = [("a", "e1"), ("a", "e2"), ("b", "e1")]
senders = st.sampled_from(SENDERS)
numbers = st.integers(0, 12)


class AppendMachine(RuleBasedStateMachine):
    """Senders that repeat, reorder and skip; a collector that stops and starts."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.clock = Clock()
        self.applied: dict[tuple[str, str], set[int]] = {sender: set() for sender in SENDERS}
        self.rows: list[int] = []
        self.pruned: set[int] = set()
        self.next_row = 0

    @initialize()
    def open(self):
        """Open the store."""
        self.store = open_store(str(self.folder / "k.duckdb"), clock=self.clock)

    @rule(sender=senders, seq=numbers, count=st.integers(0, 3), repeat=st.booleans())
    def append(self, sender, seq, count, repeat):
        """A batch, maybe sent twice; only its first arrival counts."""
        for _ in range(1 + repeat):
            self.clock.advance(1)
            fresh = seq not in self.applied[sender]
            first = self.next_row
            receipt = self.store.append(Batch({"step": steps(first, count)}, BatchId(*sender, seq)))
            assert receipt.duplicate is not fresh
            assert dict(receipt.accepted) == ({"step": count} if fresh else {})
            if fresh:
                self.applied[sender].add(seq)
                self.rows += range(first, first + count)
                self.next_row += count

    @rule(sender=senders, seq=numbers)
    def append_bad(self, sender, seq):
        """A batch with a null where none may be: refused, and its number stays free (a known one is a duplicate)."""
        table = steps(self.next_row, 1)
        bad = table.set_column(1, "at_ns", [[None]]).cast(table.schema)
        if seq in self.applied[sender]:
            assert self.store.append(Batch({"step": bad}, BatchId(*sender, seq))).duplicate
            return
        try:
            self.store.append(Batch({"step": bad}, BatchId(*sender, seq)))
        except BatchRejected:
            return
        raise AssertionError("a null in at_ns was stored")

    @rule()
    def append_without_identity(self):
        """At least once: stored each time."""
        self.store.append(Batch({"step": steps(self.next_row, 1)}))
        self.rows.append(self.next_row)
        self.next_row += 1

    @rule()
    def reopen(self):
        """Stop properly and start again."""
        self.store.close()
        self.open()

    @rule()
    def crash(self):
        """Start from a copy of the files as they lie there, as after the process was killed."""
        twin = Path(tempfile.mkdtemp())
        shutil.copytree(self.folder, twin, dirs_exist_ok=True)
        self.store.close()
        shutil.rmtree(self.folder)
        self.folder = twin
        self.open()

    @rule(older_than_s=st.sampled_from([0.0, 2.0, 5.0]))
    def seal(self, older_than_s):
        """Write Parquet."""
        seal(self.store, older_than_s=older_than_s)

    @precondition(lambda self: len(self.rows) > 6)
    @rule()
    def prune_all(self):
        """Seal and delete everything: the rows are in Parquet only."""
        self.clock.advance(1)
        policy = RetentionPolicy(seal_after_s=0.0, max_age_s=0.0, max_bytes=None, parquet_max_age_s=None)
        prune(self.store, policy)
        self.pruned |= set(self.rows)

    @invariant()
    def rows_are_there_once(self):
        """The database holds what was applied and not pruned, in the order of arrival."""
        found = self.store.query("SELECT step FROM step").column(0).to_pylist()
        assert found == [row for row in self.rows if row not in self.pruned]

    @invariant()
    def ranges_are_the_applied_numbers(self):
        """On disk and in memory, merged and disjoint."""
        for sender in SENDERS:
            ranges = list(self.store.books.ranges.get(sender, ()))
            assert {seq for first, last in ranges for seq in range(first, last + 1)} == self.applied[sender]
            assert all(later[0] > earlier[1] + 1 for earlier, later in itertools.pairwise(ranges))

    @invariant()
    def everything_is_sound(self):
        """`verify` has nothing to say."""
        assert list(self.store.verify()) == []

    @invariant()
    def sql_sees_each_row_once(self):
        """Sealed files and hot rows together are all rows ever applied, each once."""
        data = self.store.sql_data()
        sealed = [n for path in data.files["step"] for n in pq.read_table(path).column("step").to_pylist()]
        assert sorted(sealed + data.hot["step"].column("step").to_pylist()) == sorted(self.rows)

    def teardown(self):
        """Let go of the file."""
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.folder, ignore_errors=True)


TestAppend = AppendMachine.TestCase
TestAppend.settings = settings(
    max_examples=8, stateful_step_count=14, deadline=None, suppress_health_check=list(HealthCheck)
)
