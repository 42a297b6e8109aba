"""The book of alerts: rows come back as they were written, by their key, whole or not at all, and after a restart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine_probe.errors import StoreError
from store import alert_book
from store.alert_book import AlertBook
from store.alert_rows import Alert, Changes, Delivery, Group, Silence
from store.open import open_store

ALERT = Alert(
    "a1",
    "f1",
    "evaluator",
    "pending",
    {"alertname": "KvscopeCause", "tenant": 'Ä "quoted"\n'},
    {"summary": "x"},
    starts_ns=10,
    claimed_until_ns=20,
    last_seen_ns=20,
    updated_ns=21,
    baseline="0/10",
)
SILENCE = Silence("s1", ('worker="w1"', "cause=~hot.*"), 5, 50, "ann", "known")
GROUP = Group("pager", "{}", {"model": "m"}, 21, None, {"a1": "firing"})
DELIVERY = Delivery("d1", "pager", "{}", "waiting", "application/json", '{"ü": 1}', 21, 21)


def test_rows_come_back_as_they_were_written_after_a_restart(tmp_path: Path) -> None:
    """Every field of every kind of row, from a store that was closed and opened again."""
    path = str(tmp_path / "k.duckdb")
    with open_store(path) as store:
        AlertBook(store).save(Changes((ALERT,), (GROUP,), (), (DELIVERY,), (SILENCE,)))
        assert AlertBook(store).keep_finding({"made_ns": 7, "verdict": "slow"}, 10) == 1
    with open_store(path) as store:
        book = AlertBook(store)
        assert book.open_alerts() == book.alerts() == [ALERT]
        assert book.groups() == [GROUP]
        assert book.silences() == [SILENCE]
        assert book.deliveries() == [replace(DELIVERY, seq=1)]
        assert book.findings() == [{"id": 1, "made_ns": 7, "verdict": "slow"}]
        assert book.keep_finding({"made_ns": 8}, 10) == 2


def test_a_row_replaces_the_one_of_its_key() -> None:
    """One row a key: a changed alert is not there twice, an ended one is not open, a forgotten group is gone."""
    with open_store(":memory:") as store:
        book = AlertBook(store)
        book.save(Changes(alerts=(ALERT,), groups=(GROUP,), deliveries=(DELIVERY,)))
        ended = replace(ALERT, state="resolved", ends_ns=30, updated_ns=31)
        told = replace(GROUP, told_ns=31)
        sent = replace(book.deliveries()[0], state="delivered", attempts=1)
        book.save(Changes(alerts=(ended,), groups=(told,), deliveries=(sent,)))
        assert book.open_alerts() == []
        assert book.alerts() == [ended]
        assert book.groups() == [told]
        assert book.deliveries() == [sent]
        book.save(Changes(forgotten=(("pager", "{}"),)))
        assert book.groups() == []


def test_changes_are_made_together_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the message cannot be written, the state that it tells is not changed either, and the store goes on."""
    with open_store(":memory:") as store:
        book = AlertBook(store)
        with monkeypatch.context() as broken:
            broken.setattr(alert_book, "_next", lambda *_: "no number")
            with pytest.raises(StoreError):
                book.save(Changes(alerts=(ALERT,), deliveries=(DELIVERY,)))
        assert book.alerts() == []
        book.save(Changes(alerts=(ALERT,)))
        assert book.alerts() == [ALERT]


def test_messages_keep_the_order_in_which_they_were_put_in() -> None:
    """The queue's numbers rise, also over what was written together, and a retry keeps its place."""
    with open_store(":memory:") as store:
        book = AlertBook(store)
        book.save(Changes(deliveries=(DELIVERY, replace(DELIVERY, delivery_id="d2"))))
        book.save(Changes(deliveries=(replace(DELIVERY, delivery_id="d0"),)))
        first = book.deliveries()[0]
        book.save(Changes(deliveries=(replace(first, attempts=1, next_ns=99),)))
        assert [d.delivery_id for d in book.deliveries("waiting")] == ["d1", "d2", "d0"]
        assert [d.delivery_id for d in book.deliveries(newest_first=True, limit=1)] == ["d0"]
        assert book.counts() == {("pager", "waiting"): 3}


def test_the_oldest_of_what_has_ended_is_forgotten_and_nothing_that_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 ended episodes, 8 delivered and 8 dead messages the newest 4 stay; a waiting one and an open alert, older than all, too."""
    monkeypatch.setattr(alert_book, "KEPT_ALERTS", 4)
    monkeypatch.setattr(alert_book, "KEPT_DELIVERIES", 4)
    old = replace(DELIVERY, delivery_id="old")
    dead = tuple(replace(DELIVERY, delivery_id=f"d{n}", state="dead") for n in range(8))
    ended = tuple(replace(ALERT, alert_id=f"e{n}", state="resolved", updated_ns=100 + n) for n in range(8))
    sent = tuple(replace(DELIVERY, delivery_id=f"s{n}", state="delivered") for n in range(8))
    with open_store(":memory:") as store:
        book = AlertBook(store)
        book.save(Changes(alerts=(ALERT, *ended), deliveries=(old, *dead, *sent)))
        assert [a.alert_id for a in book.alerts()] == ["e7", "e6", "e5", "e4", "a1"]
        assert [d.delivery_id for d in book.deliveries()] == ["old", "d4", "d5", "d6", "d7", "s4", "s5", "s6", "s7"]


def test_the_newest_findings_are_kept_under_rising_numbers() -> None:
    """Of three findings two are kept; numbers are not used again."""
    with open_store(":memory:") as store:
        book = AlertBook(store)
        for made in range(3):
            book.keep_finding({"made_ns": made}, 2)
        assert [finding["id"] for finding in book.findings()] == [3, 2]
        assert [finding["made_ns"] for finding in book.findings(limit=1)] == [2]


def test_the_newest_episode_of_a_fingerprint_is_found() -> None:
    """Of two episodes the one that changed last; a fingerprint without one is absent."""
    with open_store(":memory:") as store:
        book = AlertBook(store)
        newer = replace(ALERT, alert_id="a2", updated_ns=50)
        book.save(Changes(alerts=(newer, ALERT)))
        assert book.latest_of(["f1", "f2"]) == {"f1": newer}
        assert book.latest_of([]) == {}
