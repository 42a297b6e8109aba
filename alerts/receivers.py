"""Who is told: receivers from a YAML or JSON file. Secrets may stand in files of their own.

receivers:
  - name: oncall
    kind: pagerduty
    routing_key_file: /etc/kvscope/pagerduty
    match: ['severity="critical"']
  - name: chat
    kind: slack
    url_file: /etc/kvscope/slack-url
  - name: bot
    kind: webhook
    url: https://bot.example/hooks/kvscope
    secret_file: /etc/kvscope/bot-secret
    group_by: [alertname, worker]
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import msgspec

from alerts.address_guard import Networks, parse_networks
from alerts.matchers import Matcher, parse_matchers
from alerts.signature import key_of
from engine_probe.errors import AlertMisuse

PAGERDUTY_URL: Final = "https://events.pagerduty.com/v2/enqueue"
Kind = Literal["webhook", "slack", "pagerduty", "generic"]


class Receiver(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One receiver. Durations in seconds.

    kind            webhook: Alertmanager's JSON, version 4; slack; pagerduty: Events v2; generic: `template` makes the body
    template        generic: Jinja2 text over `message`; its answer is sent as `content_type`
    secret          signs every message (HMAC-SHA256, Standard Webhooks); bearer: sent as Authorization
    ca_file         certificates to trust in place of the system's
    allow_networks  private networks that it may lie in, such as 10.0.0.0/8; a metadata service only as its single address
    match           matchers that an alert must meet, such as severity="critical"
    origins         evaluator: what kvscope found; alertmanager: what Alertmanager sent, with the diagnosis attached
    """

    name: str
    kind: Kind
    url: str | None = None
    url_file: str | None = None
    secret: str | None = None
    secret_file: str | None = None
    bearer: str | None = None
    bearer_file: str | None = None
    routing_key: str | None = None
    routing_key_file: str | None = None
    template: str | None = None
    content_type: str = "application/json"
    ca_file: str | None = None
    allow_networks: tuple[str, ...] = ()
    match: tuple[str, ...] = ()
    origins: tuple[Literal["evaluator", "alertmanager"], ...] = ("evaluator",)
    group_by: tuple[str, ...] = ("alertname", "worker")
    group_wait_s: float = 10.0
    group_interval_s: float = 300.0
    repeat_interval_s: float = 14_400.0
    send_resolved: bool = True
    timeout_s: float = 10.0

    @property
    def matchers(self) -> tuple[Matcher, ...]:
        """Parsed."""
        return parse_matchers(self.match)

    @property
    def networks(self) -> Networks:
        """Parsed."""
        return parse_networks(self.allow_networks)

    @property
    def target(self) -> str:
        """The URL that messages go to; checked when the file was read."""
        assert self.url is not None
        return self.url


class _File(msgspec.Struct, forbid_unknown_fields=True):
    receivers: list[Receiver]


def read_receivers(path: Path) -> tuple[Receiver, ...]:
    """The receivers of a file, with their secrets read. Raises AlertMisuse for whatever could not work."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise AlertMisuse(f"the receivers' file {path} cannot be read: {error.strerror}", path=str(path)) from error
    try:
        found = msgspec.yaml.decode(text, type=_File).receivers
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AlertMisuse(f"the receivers' file {path} makes no sense: {error}", path=str(path)) from error
    names = [receiver.name for receiver in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise AlertMisuse(f"{path} names the receiver {twice[0]!r} more than once", path=str(path))
    return tuple(checked(receiver, path.parent) for receiver in found)


def checked(receiver: Receiver, folder: Path = Path()) -> Receiver:
    """The receiver with the secrets of its files, or AlertMisuse with its name and what is wrong."""
    read: dict[str, Any] = {}
    for name in ("url", "secret", "bearer", "routing_key"):
        value = getattr(receiver, name)
        file = getattr(receiver, f"{name}_file")
        if value is not None and file is not None:
            raise _wrong(receiver, f"it has both {name} and {name}_file; give one of them")
        if file is not None:
            read |= {name: _first_line(receiver, folder / file), f"{name}_file": None}
    if receiver.kind == "pagerduty" and receiver.url is None and "url" not in read:
        read["url"] = PAGERDUTY_URL
    if receiver.ca_file is not None:
        read["ca_file"] = str(folder / receiver.ca_file)
    made = msgspec.structs.replace(receiver, **read)
    _check(made)
    return made


def _check(receiver: Receiver) -> None:
    parts = urlsplit(receiver.url or "")
    try:
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not receiver.name.isprintable() or not 0 < len(receiver.name) <= 100:
        raise _wrong(receiver, "its name must be 1 to 100 printable characters")
    if not sound or parts.username is not None or "\\" in (receiver.url or ""):
        raise _wrong(receiver, "its url must be http(s)://HOST[:PORT]/PATH without a user; put passwords into bearer")
    if parts.scheme == "http" and (receiver.bearer or receiver.kind in ("slack", "pagerduty")):
        raise _wrong(receiver, "a secret would go over plain http; use https")
    if receiver.kind == "pagerduty" and not receiver.routing_key:
        raise _wrong(receiver, "pagerduty needs routing_key or routing_key_file")
    if (receiver.template is not None) != (receiver.kind == "generic"):
        raise _wrong(receiver, "template and kind: generic belong together")
    for text in (receiver.bearer or "", receiver.content_type):
        if not text.isascii() or not text.isprintable():
            raise _wrong(receiver, "bearer and content_type go into headers: printable ASCII alone")
    times = (receiver.group_wait_s, receiver.group_interval_s, receiver.repeat_interval_s)
    if min(times) < 0 or not 0 < receiver.timeout_s <= 120:
        raise _wrong(receiver, "its durations must not be negative, and timeout_s lies between 0 and 120")
    if receiver.ca_file is not None:
        try:
            ssl.create_default_context(cafile=receiver.ca_file)
        except (OSError, ValueError) as error:  # ssl's own errors are OSErrors
            raise _wrong(receiver, f"its ca_file {receiver.ca_file} holds no certificates: {error}") from error
    try:
        _ = receiver.matchers, receiver.networks, key_of(receiver.secret or "")
    except AlertMisuse as error:
        raise _wrong(receiver, error.message) from error
    if receiver.template is not None:
        from alerts.payloads.generic import check_template

        check_template(receiver.name, receiver.template, receiver.group_by)


def _first_line(receiver: Receiver, path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(receiver, f"{path} cannot be read: {error}") from error
    if not lines or not lines[0].strip():
        raise _wrong(receiver, f"the first line of {path} is empty")
    return lines[0].strip()


def _wrong(receiver: Receiver, why: str) -> AlertMisuse:
    return AlertMisuse(f"the receiver {receiver.name[:100]!r} cannot work: {why}", receiver=receiver.name[:100])
