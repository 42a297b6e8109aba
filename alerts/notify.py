"""Who is to be told what, now: grouping, waiting, deduplication. Pure; `plan` answers with messages and what receivers know then.

As in Alertmanager: alerts with the same values in `group_by` are one group and one message; the first message waits `group_wait_s`
for company, later ones `group_interval_s`; the same thing is told again after `repeat_interval_s`. Unlike there, the end of an alert
that was told is told even if it was silenced meanwhile, or its labels moved (a severity that fell, another worker): else an
incident stays open in the receiver's books for ever. An alert stays in the group in which it was told.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from alerts.matchers import match_all
from alerts.muting import Muted
from alerts.receivers import Receiver
from store.alert_rows import Alert, Group

NS: Final = 1_000_000_000
MOST_ALERTS: Final = 100
"""Alerts of one message, new ones first; further ones are counted (`truncated`), and are news for the next."""
MOST_EVENTS: Final = 1_000
"""As MOST_ALERTS, of a receiver that gets a message an alert."""


@dataclass(frozen=True, slots=True)
class Message:
    """One notification: the alerts of a group that fire, and those that ended since the last."""

    delivery_id: str
    receiver: str
    group_key: str
    group_labels: Mapping[str, str]
    alerts: tuple[Alert, ...]
    truncated: int = 0

    @property
    def status(self) -> str:
        """firing where one of them fires, else resolved."""
        return "firing" if any(alert.state == "firing" for alert in self.alerts) else "resolved"


@dataclass(frozen=True, slots=True)
class Plan:
    """Messages, groups that changed, and groups of which nothing is left to tell."""

    messages: tuple[Message, ...]
    groups: tuple[Group, ...]
    forgotten: tuple[tuple[str, str], ...]


def plan(
    receivers: Sequence[Receiver],
    alerts: Iterable[Alert],
    muted: Mapping[str, Muted],
    groups: Iterable[Group],
    now_ns: int,
) -> Plan:
    """`alerts`: all that fire, and the ended ones that some group was told of."""
    known = {(group.receiver, group.group_key): group for group in groups}
    messages: list[Message] = []
    changed: list[Group] = []
    forgotten: list[tuple[str, str]] = []
    alerts = sorted(alerts, key=lambda alert: (alert.starts_ns, alert.alert_id))
    for receiver in receivers:
        of_mine = [group for group in known.values() if group.receiver == receiver.name]
        matchers = receiver.matchers
        asked = {a.alert_id for a in alerts if a.origin in receiver.origins and match_all(matchers, a.labels)}
        mine = _grouped(receiver, alerts, asked, of_mine)
        for key in dict.fromkeys([*mine, *(group.group_key for group in of_mine)]):
            before = known.get((receiver.name, key))
            labels, members = mine.get(key, (before.labels if before else {}, []))
            hearable = {a.alert_id for a in members if a.alert_id in asked and not muted[a.alert_id].is_muted}
            after, message = _of_group(receiver, key, labels, members, hearable, before, now_ns)
            if message is not None:
                messages.append(message)
            if after is None and before is not None:
                forgotten.append((receiver.name, key))
            elif after is not None and after != before:
                changed.append(after)
    names = {receiver.name for receiver in receivers}
    forgotten += [key for key in known if key[0] not in names]
    messages.sort(key=lambda message: message.delivery_id)
    return Plan(tuple(messages), tuple(changed), tuple(forgotten))


def _grouped(
    receiver: Receiver, alerts: Iterable[Alert], asked: set[str], known: Sequence[Group]
) -> dict[str, tuple[Mapping[str, str], list[Alert]]]:
    """Group key -> labels and members: what the receiver asks for, and what it was told of before, where it was told of it."""
    groups: dict[str, tuple[Mapping[str, str], list[Alert]]] = {}
    told_in = {alert_id: group for group in known for alert_id in group.told}
    for alert in alerts:
        if (group := told_in.get(alert.alert_id)) is not None:
            key, labels = group.group_key, group.labels
        elif alert.alert_id in asked:
            labels = {name: alert.labels[name] for name in receiver.group_by if name in alert.labels}
            key = json.dumps(labels, sort_keys=True)
        else:
            continue
        groups.setdefault(key, (labels, []))[1].append(alert)
    return groups


def _of_group(
    receiver: Receiver,
    key: str,
    labels: Mapping[str, str],
    members: Sequence[Alert],
    hearable: set[str],
    before: Group | None,
    now_ns: int,
) -> tuple[Group | None, Message | None]:
    """`hearable`: alerts that the receiver asks for and that nothing mutes."""
    told = {} if before is None else dict(before.told)
    firing = [a for a in members if a.state == "firing"]
    heard = [a for a in firing if a.alert_id in hearable]
    ended = [a for a in members if receiver.send_resolved and a.state == "resolved" and a.alert_id in told]
    # What was told once stays told while it fires, muted or not; what is gone from the books is forgotten.
    kept = {a.alert_id: told[a.alert_id] for a in firing if a.alert_id in told}
    if not heard and not ended and not kept:
        return None, None
    group = before or Group(receiver.name, key, labels, now_ns)
    news = [a for a in heard if told.get(a.alert_id) != _word(a)]
    if not _is_due(receiver, group, bool(news or ended), bool(heard), now_ns):
        return group, None
    shown = _chosen(receiver, [*heard, *ended], {a.alert_id for a in [*news, *ended]})
    said = {a.alert_id for a in shown}
    untold = {a.alert_id: told[a.alert_id] for a in ended if a.alert_id not in said}
    fires = {a.alert_id: _word(a) for a in shown if a.state == "firing"}
    after = replace(group, told_ns=now_ns, told=kept | untold | fires)
    if not shown:
        return (after if after.told else None), None
    message = Message(
        _delivery_id(receiver.name, key, now_ns, shown),
        receiver.name,
        key,
        labels,
        tuple(shown),
        len(heard) + len(ended) - len(shown),
    )
    return (after if after.told else None), message


def _chosen(receiver: Receiver, alerts: Sequence[Alert], news: set[str]) -> list[Alert]:
    """As many as fit into a message, in their order: news before what is told again."""
    most = MOST_EVENTS if receiver.kind == "pagerduty" else MOST_ALERTS
    chosen = {alert.alert_id for alert in sorted(alerts, key=lambda alert: alert.alert_id not in news)[:most]}
    return [alert for alert in alerts if alert.alert_id in chosen]


def _is_due(receiver: Receiver, group: Group, has_news: bool, fires: bool, now_ns: int) -> bool:
    """Whether it is time for a message. An instant that lies in the future is no reason to wait: the clock was set back."""
    since = now_ns - (group.first_ns if group.told_ns is None else group.told_ns)
    if group.told_ns is None:
        return since < 0 or since >= receiver.group_wait_s * NS
    if has_news:
        return since < 0 or since >= receiver.group_interval_s * NS
    return fires and (since < 0 or since >= receiver.repeat_interval_s * NS)


def _word(alert: Alert) -> str:
    """What a receiver was told of an alert: that it fires, and how bad it is."""
    return f"firing {alert.labels.get('severity', '')}".strip()


def _delivery_id(receiver: str, key: str, now_ns: int, shown: Sequence[Alert]) -> str:
    """The same for the same notification, and for no other."""
    said = json.dumps([receiver, key, now_ns, [[alert.alert_id, alert.state] for alert in shown]])
    return f"msg_{now_ns:x}_{hashlib.blake2b(said.encode(), digest_size=8).hexdigest()}"
