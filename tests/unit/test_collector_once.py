"""Spans are stored once, whoever sends them again, at once or after a restart."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collector.intake.once import Key, SpanLedger


class Stored:
    """A store of keys that counts how often each was committed."""

    def __init__(self) -> None:
        self.commits: list[Key] = []
        self.lookups = 0
        self.fails = False

    def put(self, ledger: SpanLedger, keys: Sequence[Key], end_ns: int = 100) -> int:
        def lookup(positions: Sequence[int]) -> set[Key]:
            self.lookups += 1
            return {keys[position] for position in positions} & set(self.commits)

        def commit(positions: Sequence[int]) -> None:
            if self.fails:
                raise OSError("disk on fire")
            self.commits += [keys[position] for position in positions]

        return ledger.apply(keys, [end_ns] * len(keys), lookup, commit)


def test_span_is_committed_once_within_and_across_batches() -> None:
    """Twice in one batch and again in the next: one commit."""
    stored, ledger = Stored(), SpanLedger(0)
    assert stored.put(ledger, [b"a", b"a", b"b"]) == 2
    assert stored.put(ledger, [b"b", b"c"]) == 1
    assert stored.put(ledger, [b"a", b"b", b"c"]) == 0
    assert stored.commits == [b"a", b"b", b"c"]


def test_store_is_asked_only_for_spans_that_an_earlier_process_may_have_stored() -> None:
    """Spans that ended after the newest stored one cannot be stored yet."""
    stored = Stored()
    stored.put(SpanLedger(0), [b"old"], end_ns=50)
    after_restart = SpanLedger(50)
    assert stored.put(after_restart, [b"new"], end_ns=51) == 1
    assert stored.lookups == 0
    assert stored.put(after_restart, [b"old"], end_ns=50) == 0
    assert stored.lookups == 1
    assert stored.commits == [b"old", b"new"]


def test_failed_commit_frees_its_spans() -> None:
    """The exporter sends again, and then they are new."""
    stored, ledger = Stored(), SpanLedger(0)
    stored.fails = True
    with pytest.raises(OSError, match="fire"):
        stored.put(ledger, [b"a"])
    stored.fails = False
    assert stored.put(ledger, [b"a"]) == 1


def test_dropped_keys_are_looked_up_in_the_store() -> None:
    """Memory is bounded; a span whose key was dropped is still recognised, by the store."""
    stored, ledger = Stored(), SpanLedger(0, max_keys=8)
    for number in range(40):
        stored.put(ledger, [number.to_bytes(2, "big")], end_ns=number + 1)
    assert ledger.floor_ns > 0
    assert stored.put(ledger, [(0).to_bytes(2, "big")], end_ns=1) == 0
    assert len(stored.commits) == 40


def test_batch_waits_for_another_that_holds_its_span() -> None:
    """While one batch commits a span, another that has it too answers only when the outcome is known."""
    ledger = SpanLedger(0)
    entered, leave = threading.Event(), threading.Event()
    committed: list[Key] = []

    def slow(_: Sequence[int]) -> None:
        entered.set()
        assert leave.wait(10)
        committed.append(b"shared")

    first = threading.Thread(target=ledger.apply, args=([b"shared"], [1], lambda _: set(), slow))
    first.start()
    assert entered.wait(10)
    counts: list[int] = []
    second = threading.Thread(
        target=lambda: counts.append(
            ledger.apply([b"own", b"shared"], [1, 1], lambda _: set(), lambda _: committed.append(b"own"))
        )
    )
    second.start()
    second.join(0.2)
    assert second.is_alive(), "it must not answer while the shared span may still fail"
    leave.set()
    first.join(10)
    second.join(10)
    assert counts == [1]
    assert sorted(committed) == [b"own", b"shared"]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6), min_size=2, max_size=6))
def test_batches_at_once_commit_every_span_exactly_once(batches: list[list[int]]) -> None:
    """Whatever the batches share, in whatever order their threads run, each span is committed once."""
    stored, ledger = Stored(), SpanLedger(0)
    counts: list[int] = []
    threads = [
        threading.Thread(target=lambda keys=batch: counts.append(stored.put(ledger, [bytes([k]) for k in keys])))  # type: ignore[misc]
        for batch in batches
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    distinct = {bytes([key]) for batch in batches for key in batch}
    assert sorted(stored.commits) == sorted(distinct)
    assert sum(counts) == len(distinct)
