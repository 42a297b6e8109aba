"""The rows of alerting as data: episodes of alerts, silences, what a receiver was told, messages to receivers.

An **episode** is one alert from its first sight to its end; the same fingerprint may have many, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

AlertState = Literal["pending", "firing", "resolved", "dismissed"]
Origin = Literal["evaluator", "alertmanager"]
DeliveryState = Literal["waiting", "delivered", "dead"]

OPEN_STATES: tuple[AlertState, ...] = ("pending", "firing")


@dataclass(frozen=True, slots=True)
class Alert:
    """One episode. Instants are ns UTC; unknown is None.

    starts_ns         when the trouble began, as far as the finding tells
    claimed_until_ns  end of the newest window that was used to claim or to confirm it: later claims need later data
    looks             windows looked at to confirm it
    baseline          the window that it was first judged against, as text; kept for as long as the episode is open
    last_seen_ns      end of the newest window that showed it
    """

    alert_id: str
    fingerprint: str
    origin: Origin
    state: AlertState
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    starts_ns: int
    claimed_until_ns: int
    last_seen_ns: int
    updated_ns: int
    looks: int = 0
    baseline: str | None = None
    fired_ns: int | None = None
    ends_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Silence:
    """Alerts that match all `matchers` are not told to anybody from `starts_ns` until `ends_ns`."""

    silence_id: str
    matchers: tuple[str, ...]
    starts_ns: int
    ends_ns: int
    created_by: str
    comment: str

    def is_active(self, now_ns: int) -> bool:
        """It holds at this instant."""
        return self.starts_ns <= now_ns < self.ends_ns


@dataclass(frozen=True, slots=True)
class Group:
    """A group of alerts as a receiver knows it. `told`: alert_id -> state that it was last told; `told_ns` None: nothing yet."""

    receiver: str
    group_key: str
    labels: Mapping[str, str]
    first_ns: int
    told_ns: int | None = None
    told: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message to a receiver. `delivery_id` stays the same over retries, restarts and replays; `seq` is its place in the queue."""

    delivery_id: str
    receiver: str
    group_key: str
    state: DeliveryState
    content_type: str
    body: str
    created_ns: int
    next_ns: int
    attempts: int = 0
    ended_ns: int | None = None
    message: str | None = None
    seq: int = 0


@dataclass(frozen=True, slots=True)
class Changes:
    """What becomes true together: rows written by their key, groups and messages forgotten by theirs."""

    alerts: tuple[Alert, ...] = ()
    groups: tuple[Group, ...] = ()
    forgotten: tuple[tuple[str, str], ...] = ()
    deliveries: tuple[Delivery, ...] = ()
    silences: tuple[Silence, ...] = ()
    discarded: tuple[str, ...] = ()
