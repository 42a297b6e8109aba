"""A body of one's own: a Jinja2 template over `message`, which is Alertmanager's document. `{{ x | tojson }}` writes a JSON value.

The template is its operator's, what it is filled with is not: it runs in Jinja's sandbox, and a name that does not exist is an error.
"""

from __future__ import annotations

from functools import lru_cache

import jinja2
import jinja2.sandbox

from alerts.example import EXAMPLE
from alerts.notify import Message
from alerts.payloads.alertmanager import document
from engine_probe.errors import AlertMisuse


def render(name: str, template: str, message: Message, base_url: str) -> str:
    """The template filled in. Raises AlertMisuse."""
    try:
        return _compiled(template).render(message=document(message, base_url), delivery_id=message.delivery_id)
    except Exception as error:  # a template is somebody's program, and fails as programs do
        raise AlertMisuse(f"the template of the receiver {name!r} failed: {error}", receiver=name) from error


def check_template(name: str, template: str) -> None:
    """Try it on an example. Raises AlertMisuse."""
    render(name, template, EXAMPLE, "http://127.0.0.1:8321")


@lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, autoescape=False)
    return environment.from_string(template)
