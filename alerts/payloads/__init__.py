"""What messages look like on the wire: one file a kind of receiver. Each renders a message into bodies, of which most have one."""

from __future__ import annotations

from alerts.notify import Message
from alerts.payloads import alertmanager, generic, pagerduty, slack
from alerts.receivers import Receiver


def render(receiver: Receiver, message: Message, base_url: str) -> list[str]:
    """The bodies to send. Raises AlertMisuse where a template fails."""
    if receiver.kind == "slack":
        return [slack.render(message, base_url)]
    if receiver.kind == "pagerduty":
        return pagerduty.render(message, receiver.routing_key or "", base_url)
    if receiver.kind == "generic":
        return [generic.render(receiver.name, receiver.template or "", message, base_url)]
    return [alertmanager.render(message, base_url)]
