"""An example message: what templates are tried on, and what a receiver gets when somebody asks whether it works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from alerts.notify import Message
from store.alert_rows import Alert, AlertState, Delivery

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


def unlike(group_by: Sequence[str]) -> Message:
    """A message of two alerts, one of them over, that share the labels `alertname` and `worker` where those group them, and no other word."""
    (one,) = EXAMPLE.alerts
    shared = {
        name: value for name, value in {"alertname": "KvscopeExample", "worker": "w1"}.items() if name in group_by
    }
    alerts = tuple(
        replace(
            one,
            alert_id=f"example-{number}",
            state=state,
            labels={"alertname": f"KvscopeExample{number}", "severity": severity, **shared},
            annotations={"summary": f"an example, number {number}", "description": f"example {number}"},
            ends_ns=one.starts_ns if state == "resolved" else None,
        )
        for number, state, severity in _UNLIKE
    )
    return replace(EXAMPLE, group_labels=shared, alerts=alerts)


_UNLIKE: Final[tuple[tuple[int, AlertState, str], ...]] = ((1, "firing", "critical"), (2, "resolved", "warning"))


def example_delivery(receiver: Receiver, now_ns: int) -> Delivery:
    """The example for one receiver."""
    from alerts.courier import deliveries_of
    from alerts.payloads import render

    message = replace(EXAMPLE, delivery_id=f"msg_example_{now_ns:x}", receiver=receiver.name)
    return deliveries_of(
        receiver, render(receiver, message, "http://127.0.0.1:8321"), message.delivery_id, "{}", now_ns
    )[0]
