"""An evaluator whose clock is set back: what it holds is looked after from then on, not when the clock has caught up."""

from __future__ import annotations

from alerts.condition import Condition, Look
from alerts.evaluator import Evaluator, Rhythm
from alerts.lifecycle import Pace
from collector.alerting.answers import replay
from store.alert_book import AlertBook
from store.alert_rows import Changes, Delivery
from store.interface import Window
from store.open import open_store

S = 1_000_000_000
DAY = 86_400 * S


class Seen:
    """A check that says what a test wants it to."""

    name = "seen"
    look_is = Look((Condition({"alertname": "Slow"}, {}, 0),))

    def look(self, window: Window, baseline: str | None) -> Look:
        return self.look_is

    def owns(self, labels: object) -> bool:
        return True

    def report(self, window: str, baseline: str | None) -> str:
        return "/workers"


def test_an_alert_ends_though_the_clock_was_set_back_by_a_day() -> None:
    """It fired by a clock that was ahead; after it was set right the alert is resolved after its cool-down."""
    check = Seen()
    with open_store(":memory:") as store:
        book = AlertBook(store)
        rhythm = Rhythm(300 * S, 0, Pace(hold=300 * S, cool_down=300 * S, lost=3_600 * S))
        evaluator = Evaluator(book, [check], rhythm, keep_finding=lambda _: 1, base_url="http://c")
        evaluator.tick(2 * DAY)
        evaluator.tick(2 * DAY + 300 * S)
        assert [alert.state for alert in book.alerts()] == ["firing"]
        check.look_is = Look()
        evaluator.tick(DAY)
        evaluator.tick(DAY + 301 * S)
        assert [alert.state for alert in book.alerts()] == ["resolved"]


def test_a_message_that_was_never_written_is_not_sent_by_a_replay() -> None:
    """Its template failed: an empty body is no alert, and a receiver that takes it would end the matter."""
    with open_store(":memory:") as store:
        book = AlertBook(store)
        rows = [
            Delivery(name, "box", "{}", "dead", "text/plain", body, 0, 0) for name, body in (("m1", ""), ("m2", "{}"))
        ]
        book.save(Changes(deliveries=tuple(rows)))
        assert replay(book, (), every=True, now_ns=S) == ["m2"]
        assert [(row.delivery_id, row.state) for row in book.deliveries()] == [("m2", "waiting")]
