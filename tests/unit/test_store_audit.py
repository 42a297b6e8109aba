"""The audit of SQL for people."""

from __future__ import annotations

import pytest

from engine_probe.errors import DiskFull, QueryKilled, QueryRefused, StoreError
from store import audit
from store.audit import AuditEntry, audited, recent, record
from store.open import open_store


@pytest.fixture
def store():
    """A store in memory."""
    with open_store(":memory:") as opened:
        yield opened


def entry(at_ns, outcome="ok", **facts):
    """One statement that ended at `at_ns`."""
    return AuditEntry(at_ns, "127.0.0.1", f"SELECT {at_ns} -- it's \" : ?", outcome, 1, 0.5, **facts)


def test_entries_come_back_newest_first(store):
    """Text with quotes, colons and question marks, and unknown values, are kept as they are."""
    refused = AuditEntry(7, None, "COPY request TO 'x'", "refused", None, 0.0, "not allowed")
    for one in (entry(5), refused, entry(6)):
        assert record(store, one)
    assert recent(store) == [refused, entry(6), entry(5)]
    assert recent(store, 1) == [refused]


def test_only_the_newest_are_kept(store, monkeypatch):
    """With ten kept, the twelfth entry makes the oldest go."""
    monkeypatch.setattr(audit, "KEPT", 10)
    for at_ns in range(12):
        record(store, entry(at_ns))
    assert [one.at_ns for one in recent(store)] == list(range(11, 1, -1))


def test_an_endless_statement_is_cut(store):
    """The text is kept up to 20,000 characters."""
    record(store, AuditEntry(1, None, "x" * 50_000, "killed", None, 1.0, "y" * 50_000))
    (kept,) = recent(store)
    assert (len(kept.sql), len(kept.message)) == (20_000, 20_000)


def test_a_store_that_cannot_write_does_not_fail_the_statement(store, monkeypatch):
    """The entry is lost, which is logged, and the caller goes on."""

    def full(_):
        raise DiskFull("no space")

    monkeypatch.setattr(store, "call", full)
    assert record(store, entry(1)) is False


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(QueryRefused("no"), "refused"), (QueryKilled("late"), "killed"), (StoreError("odd"), "failed")],
)
def test_how_a_statement_ended_is_recorded_and_its_error_passes_on(store, error, outcome):
    """Refused, killed and failed are told apart, with the message."""
    with pytest.raises(type(error)), audited(store, "SELECT 1", "me"):
        raise error
    (kept,) = recent(store)
    assert (kept.who, kept.sql, kept.outcome, kept.message) == ("me", "SELECT 1", outcome, error.message)


def test_a_statement_that_ends_well_is_recorded(store):
    """Outcome ok, no message, how long it took."""
    with audited(store, "SELECT 1"):
        pass
    (kept,) = recent(store)
    assert (kept.outcome, kept.message) == ("ok", None)
    assert kept.duration_s >= 0
