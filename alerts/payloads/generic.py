"""A body of one's own: a Jinja2 template over `message`, which is Alertmanager's document. `{{ x | tojson }}` writes a JSON value.

The template is its operator's, what it is filled with is not: it runs in Jinja's sandbox, and a name that does not exist is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import jinja2
import jinja2.sandbox

from alerts.example import EXAMPLE, unlike
from alerts.notify import Message
from alerts.payloads.alertmanager import document
from engine_probe.errors import AlertMisuse


def render(name: str, template: str, message: Message, base_url: str) -> str:
    """The template filled in. Raises AlertMisuse."""
    try:
        return _compiled(template).render(message=document(message, base_url), delivery_id=message.delivery_id)
    except Exception as error:  # a template is somebody's program, and fails as programs do
        raise AlertMisuse(f"the template of the receiver {name!r} failed: {error}", receiver=name) from error


def check_template(name: str, template: str, group_by: Sequence[str]) -> None:
    """Try it on one alert, and on two that have no more in common than a group has to. Raises AlertMisuse.

    A template that takes what only most messages have (`commonLabels.severity`) fails when a group has both, at night.
    """
    for message in (EXAMPLE, unlike(group_by)):
        try:
            render(name, template, message, "http://127.0.0.1:8321")
        except AlertMisuse as error:
            if message is EXAMPLE:
                raise
            raise AlertMisuse(
                f"{error.message}, on a message of two alerts that have only group_by ({', '.join(group_by) or 'nothing'}) in "
                "common; go through message.alerts, or write message.commonLabels.get('severity', '')",
                receiver=name,
            ) from error


@lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, autoescape=False)
    return environment.from_string(template)
