"""From the state of alerts to messages in the outbox: reads the book, plans, renders, writes all of it at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from alerts.courier import deliveries_of
from alerts.muting import muting
from alerts.notify import plan
from alerts.payloads import render
from alerts.receivers import Receiver
from engine_probe.errors import AlertMisuse
from store.alert_book import AlertBook
from store.alert_rows import Changes, Delivery

log = logging.getLogger(__name__)


class Notifier:
    """`tell` is called after every look, and when an alert came from outside."""

    def __init__(self, book: AlertBook, receivers: Sequence[Receiver], base_url: str) -> None:
        self._book, self._receivers, self._base_url = book, tuple(receivers), base_url

    def tell(self, now_ns: int) -> int:
        """Put what is to be told now into the outbox; how many messages that are."""
        groups = self._book.groups()
        if not self._receivers and not groups:
            return 0
        alerts = {alert.alert_id: alert for alert in self._book.open_alerts() if alert.state == "firing"}
        told = sorted({alert_id for group in groups for alert_id in group.told} - alerts.keys())
        if told:
            alerts |= {alert.alert_id: alert for alert in self._book.alerts(ids=told, limit=len(told))}
        muted = muting(list(alerts.values()), self._book.silences(now_ns), now_ns)
        planned = plan(self._receivers, alerts.values(), muted, groups, now_ns)
        deliveries: list[Delivery] = []
        known = {receiver.name: receiver for receiver in self._receivers}
        for message in planned.messages:
            receiver = known[message.receiver]
            try:
                bodies = render(receiver, message, self._base_url)
            except AlertMisuse as error:
                # Told as a message that could not be written, so that it is seen among the dead letters.
                log.error("message not written", extra={"receiver": receiver.name, "reason": error.message})
                made = deliveries_of(receiver, [""], message.delivery_id, message.group_key, now_ns)[0]
                deliveries.append(replace(made, state="dead", ended_ns=now_ns, message=error.message))
                continue
            deliveries += deliveries_of(receiver, bodies, message.delivery_id, message.group_key, now_ns)
        if planned.groups or planned.forgotten or deliveries:
            self._book.save(Changes(groups=planned.groups, forgotten=planned.forgotten, deliveries=tuple(deliveries)))
        return len(deliveries)
