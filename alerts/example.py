"""An example message: what templates are tried on, and what a receiver gets when somebody asks whether it works."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from alerts.notify import Message
from store.alert_rows import Alert, Delivery

if TYPE_CHECKING:
    from alerts.receivers import Receiver

EXAMPLE: Final = Message(
    "msg_example",
    "example",
    "{}",
    {"alertname": "KvscopeExample"},
    (
        Alert(
            "example",
            "0" * 16,
            "evaluator",
            "firing",
            {"alertname": "KvscopeExample", "severity": "info"},
            {
                "summary": "an example: this receiver works",
                "description": "Somebody ran `kvscope alerts test --send`. Nothing is wrong.",
                "report": "http://127.0.0.1:8321/",
            },
            starts_ns=1_764_403_200_000_000_000,
            claimed_until_ns=0,
            last_seen_ns=0,
            updated_ns=0,
        ),
    ),
)


def example_delivery(receiver: Receiver, now_ns: int) -> Delivery:
    """The example for one receiver."""
    from alerts.courier import deliveries_of
    from alerts.payloads import render

    message = replace(EXAMPLE, delivery_id=f"msg_example_{now_ns:x}", receiver=receiver.name)
    return deliveries_of(
        receiver, render(receiver, message, "http://127.0.0.1:8321"), message.delivery_id, "{}", now_ns
    )[0]
