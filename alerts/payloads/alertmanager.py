"""Alertmanager's webhook JSON, version 4: whatever takes Alertmanager's takes ours. Source: Alertmanager 0.25, `template.Data`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from alerts.notify import Message
from store.alert_rows import Alert

NEVER: Final = "0001-01-01T00:00:00Z"
"""Go's zero time: how Alertmanager says that an alert has not ended."""
ALERTS_PAGE: Final = "/alerts"
"""Where the collector shows its alerts to people."""


def render(message: Message, base_url: str) -> str:
    """One JSON document."""
    return msgspec.json.encode(document(message, base_url)).decode()


def document(message: Message, base_url: str) -> dict[str, Any]:
    """The document of a message; `generatorURL` leads to the report."""
    return {
        "version": "4",
        "groupKey": message.group_key,
        "truncatedAlerts": message.truncated,
        "status": message.status,
        "receiver": message.receiver,
        "groupLabels": dict(message.group_labels),
        "commonLabels": common([alert.labels for alert in message.alerts]),
        "commonAnnotations": common([alert.annotations for alert in message.alerts]),
        "externalURL": base_url,
        "alerts": [_alert(alert, base_url) for alert in message.alerts],
    }


def common(found: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What all of them say alike."""
    if not found:
        return {}
    return {name: value for name, value in found[0].items() if all(other.get(name) == value for other in found[1:])}


def instant(at_ns: int) -> str:
    """RFC 3339 with milliseconds, UTC."""
    whole, rest = divmod(at_ns, 1_000_000_000)
    return f"{datetime.fromtimestamp(whole, UTC):%Y-%m-%dT%H:%M:%S}.{rest // 1_000_000:03d}Z"


def report_of(alert: Alert, base_url: str) -> str:
    """Where people read about it: its report; for one that has none, the page of alerts."""
    return alert.annotations.get("report", f"{base_url}{ALERTS_PAGE}")


def _alert(alert: Alert, base_url: str) -> dict[str, Any]:
    return {
        "status": "firing" if alert.state == "firing" else "resolved",
        "labels": dict(alert.labels),
        "annotations": dict(alert.annotations),
        "startsAt": instant(alert.starts_ns),
        "endsAt": NEVER if alert.ends_ns is None else instant(alert.ends_ns),
        "generatorURL": report_of(alert, base_url),
        "fingerprint": alert.fingerprint,
    }
