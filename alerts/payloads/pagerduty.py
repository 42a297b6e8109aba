"""PagerDuty Events API v2: one event an alert, opened and closed under its `dedup_key`. Source: PagerDuty's Events API v2 reference."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from alerts.notify import Message
from alerts.payloads.alertmanager import instant, report_of
from store.alert_rows import Alert

SEVERITIES: Final = {"critical": "critical", "warning": "warning", "info": "info"}
MOST_SUMMARY: Final = 1024


def render(message: Message, routing_key: str, base_url: str) -> list[str]:
    """A JSON document for each alert."""
    return [msgspec.json.encode(_event(alert, routing_key, base_url)).decode() for alert in message.alerts]


def _event(alert: Alert, routing_key: str, base_url: str) -> dict[str, Any]:
    event: dict[str, Any] = {"routing_key": routing_key, "dedup_key": alert.alert_id}
    if alert.state != "firing":
        return {**event, "event_action": "resolve"}
    said = alert.annotations
    payload = {
        "summary": said.get("summary", alert.labels.get("alertname", "kvscope alert"))[:MOST_SUMMARY],
        "source": alert.labels.get("worker") or "kvscope",
        "severity": SEVERITIES.get(alert.labels.get("severity", ""), "warning"),
        "timestamp": instant(alert.starts_ns),
        "component": alert.labels.get("worker", "fleet"),
        "group": alert.labels.get("metric", "kvscope"),
        "class": alert.labels.get("cause") or alert.labels.get("alertname", "alert"),
        "custom_details": {**dict(alert.labels), **dict(said)},
    }
    links = [{"href": report_of(alert, base_url), "text": "report"}]
    return {
        **event,
        "event_action": "trigger",
        "payload": payload,
        "links": links,
        "client": "kvscope",
        "client_url": base_url,
    }
