"""What is not told: alerts that somebody silenced, and symptoms whose cause is told already (inhibition).

Inhibition rules are data, the same for this evaluator and for Alertmanager's configuration (`alerts/files.py`). A rule says: while
an alert that matches `source` fires, those that match `target` and have the same value in every label of `equal` are
not told. An alert never silences itself. Rules match annotations too (how much a cause explains changes from look to look, and
must not make it another alert); silences match labels alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from alerts.matchers import match_all, parse_matchers
from store.alert_rows import Alert, Silence


@dataclass(frozen=True, slots=True)
class Inhibition:
    """`why` in words, for people who ask why they were not told; by_labels: Alertmanager, which sees labels alone, can apply it."""

    source: tuple[str, ...]
    target: tuple[str, ...]
    equal: tuple[str, ...]
    why: str
    by_labels: bool = True


INHIBITIONS: Final = (
    Inhibition(
        ('role="hotspot"',),
        ('role="symptom"',),
        ("worker",),
        "the hotspot at this worker is told already; its slow requests are a symptom of it",
    ),
    Inhibition(
        ('role="cause"', 'explains="most"'),
        ('role="symptom"',),
        ("metric",),
        "the cause that owns most of this change is told already",
        by_labels=False,
    ),
    Inhibition(
        ('role="hotspot"',),
        ('role="cause"', 'worker!=""'),
        ("worker",),
        "the hotspot at this worker is told already; what its queue does to requests is a part of it",
    ),
    Inhibition(
        ('role="hotspot"',),
        ('role="cause"',),
        ("cause", "worker"),
        "the hotspot itself is told already",
    ),
    Inhibition(
        ('severity="critical"',),
        ('severity="warning"',),
        ("alertname", "slo", "metric", "cause", "worker", "model", "source", "check", "receiver"),
        "the same is told as critical already",
    ),
)


@dataclass(frozen=True, slots=True)
class Muted:
    """Why an alert is not told: ids of silences, ids of alerts with the reason."""

    silenced_by: tuple[str, ...] = ()
    inhibited_by: tuple[str, ...] = ()
    why: str | None = None

    @property
    def is_muted(self) -> bool:
        """Nobody is told."""
        return bool(self.silenced_by or self.inhibited_by)


def muting(
    alerts: Sequence[Alert],
    silences: Iterable[Silence],
    now_ns: int,
    inhibitions: Sequence[Inhibition] = INHIBITIONS,
) -> Mapping[str, Muted]:
    """alert_id -> why it is not told, for every alert."""
    active = [(silence, parse_matchers(silence.matchers)) for silence in silences if silence.is_active(now_ns)]
    rules = [(rule, parse_matchers(rule.source), parse_matchers(rule.target)) for rule in inhibitions]
    facts = {alert.alert_id: {**alert.annotations, **alert.labels} for alert in alerts}
    firing = [alert for alert in alerts if alert.state == "firing"]
    found = {}
    for alert in alerts:
        silenced = tuple(silence.silence_id for silence, matchers in active if match_all(matchers, alert.labels))
        inhibited: list[str] = []
        why = None
        for rule, source, target in rules:
            own = facts[alert.alert_id]
            if not match_all(target, own):
                continue
            for other in firing:
                theirs = facts[other.alert_id]
                # As in Alertmanager: what is a source and a target of one rule does not silence its like.
                if (
                    other.alert_id != alert.alert_id
                    and match_all(source, theirs)
                    and not (match_all(target, theirs) and match_all(source, own))
                    and all(theirs.get(name, "") == own.get(name, "") for name in rule.equal)
                ):
                    inhibited.append(other.alert_id)
                    why = why or rule.why
        found[alert.alert_id] = Muted(silenced, tuple(dict.fromkeys(inhibited)), why)
    return found
