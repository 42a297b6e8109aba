"""Slack's incoming webhook: a text for notifications and Block Kit for the channel. What was recorded is escaped: it was said by others."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from alerts.notify import Message
from alerts.payloads.alertmanager import instant, report_of
from store.alert_rows import Alert

MOST_BLOCKS: Final = 45
"""Slack takes 50 blocks a message, and 3,000 characters a text."""
MOST_TEXT: Final = 2_900


def render(message: Message, base_url: str) -> str:
    """One JSON document."""
    firing = sum(alert.state == "firing" for alert in message.alerts)
    count = f"{firing} firing" if firing else "resolved"
    names = ", ".join(dict.fromkeys(alert.labels.get("alertname", "alert") for alert in message.alerts))
    head = f"[{count}] {names}"
    blocks: list[dict[str, Any]] = [{"type": "header", "text": {"type": "plain_text", "text": head[:150]}}]
    blocks += [_section(alert, base_url) for alert in message.alerts[:MOST_BLOCKS]]
    left = max(len(message.alerts) - MOST_BLOCKS, 0) + message.truncated
    if left:
        blocks.append({"type": "context", "elements": [{"type": "mrkdwn", "text": f"and {left} more"}]})
    return msgspec.json.encode({"text": escape(head), "blocks": blocks}).decode()


def escape(text: str) -> str:
    """Slack's three characters: nobody's tenant name pings a channel."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _section(alert: Alert, base_url: str) -> dict[str, Any]:
    said = alert.annotations
    ended = "" if alert.ends_ns is None else f", ended {instant(alert.ends_ns)}"
    lines = [
        f"*{'Firing' if alert.state == 'firing' else 'Resolved'}*: {escape(said.get('summary', alert.fingerprint))}",
        escape(said.get("description", "")),
        f"_{escape(', '.join(f'{k}={v}' for k, v in alert.labels.items() if k != 'alertname'))}_",
        f"since {instant(alert.starts_ns)}{ended}",
    ]
    if "remedy" in said:
        lines.insert(2, f"To do: {escape(said['remedy'])}")
    text = "\n".join(line for line in lines if line)[:MOST_TEXT]
    return {"type": "section", "text": {"type": "mrkdwn", "text": f"{text}\n<{report_of(alert, base_url)}|report>"}}
