"""Alertmanager says that something is wrong; kvscope says why: the window of its alerts is diagnosed, and the verdict attached.

One message is one diagnosis: Alertmanager groups what belongs together. Of alerts that are told only once they are over (the collector
was away while they fired) the window until their end is diagnosed. What comes again (repeat_interval, a retry) gets the finding
that it has, unless so much time passed that there is more to see. That a verdict cannot be made is an answer, not an error: Alertmanager
would send the same again and again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from alerts.condition import text_of
from alerts.finding import short
from alerts.matchers import fingerprint
from engine_probe.errors import BadWindow, DiagnosisError
from store.alert_rows import Alert, Changes
from store.interface import Window

if TYPE_CHECKING:
    from collector.alerting.alerting import Alerting
    from collector.services import Services
    from store.alert_book import AlertBook

NS: Final = 1_000_000_000
LAST_NS: Final = (1 << 63) - 1
LONGEST_NS: Final = 3_600 * NS
"""Of an alert that fires for long the newest hour is diagnosed."""
AGAIN_NS: Final = 900 * NS
"""A finding that is older is made anew when the alert comes again."""
UNHEARD_NS: Final = 26 * 3_600 * NS
"""Alertmanager repeats what fires every repeat_interval (hours, a day at most in practice); unheard of for longer, nobody knows that it goes on."""
MOST_ALERTS: Final = 1_000

Text = Annotated[str, Field(max_length=10_000)]


class OneAlert(BaseModel):
    """One alert of Alertmanager's message; what else it holds is left alone."""

    status: Literal["firing", "resolved"]
    labels: dict[Text, Text]
    annotations: dict[Text, Text] = Field(default_factory=dict)
    startsAt: AwareDatetime
    endsAt: AwareDatetime | None = None
    generatorURL: Text = ""
    fingerprint: Text | None = None


class AlertmanagerMessage(BaseModel):
    """Alertmanager's webhook message, version 4."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "version": "4",
                    "groupKey": '{}:{alertname="SlowFirstTokens"}',
                    "status": "firing",
                    "receiver": "kvscope",
                    "alerts": [
                        {
                            "status": "firing",
                            "labels": {"alertname": "SlowFirstTokens", "metric": "ttft"},
                            "startsAt": "2025-11-29T08:00:00Z",
                            "endsAt": "0001-01-01T00:00:00Z",
                        }
                    ],
                }
            ]
        }
    )

    version: Literal["4"]
    groupKey: Text
    status: Literal["firing", "resolved"]
    receiver: Text
    groupLabels: dict[Text, Text] = Field(default_factory=dict)
    commonLabels: dict[Text, Text] = Field(default_factory=dict)
    commonAnnotations: dict[Text, Text] = Field(default_factory=dict)
    externalURL: Text = ""
    alerts: list[OneAlert] = Field(min_length=1, max_length=MOST_ALERTS)


def take_in(services: Services, alerting: Alerting, message: AlertmanagerMessage) -> list[dict[str, Any]]:
    """Keep the alerts with the verdict on their window; answers with both."""
    now_ns = time.time_ns()
    known = {alert.alert_id: alert for alert in alerting.book.alerts(ids=[_id(a) for a in message.alerts])}
    fresh = [a for a in message.alerts if a.status == "firing" and not _has_finding(known.get(_id(a)), now_ns)]
    if not any(a.status == "firing" for a in message.alerts):
        fresh = [a for a in message.alerts if _id(a) not in known]
    attached = _judged(services, alerting, fresh, now_ns) if fresh else {}
    is_fresh = {_id(alert) for alert in fresh}
    kept = []
    for alert in message.alerts:
        told = attached if _id(alert) in is_fresh else {}
        kept.append(_episode(alert, known.get(_id(alert)), told, now_ns))
    alerting.book.save(Changes(alerts=tuple(kept)))
    alerting.tell()
    findings = {str(found["id"]): found for found in list(services.findings)}
    return [_told(alert, findings) for alert in kept]


def end_unheard(book: AlertBook, now_ns: int) -> None:
    """End alerts of an Alertmanager that does not tell of them any more: it is gone, or lost them."""
    unheard = [
        replace(alert, state="resolved", ends_ns=now_ns, updated_ns=now_ns)
        for alert in book.open_alerts()
        if alert.origin == "alertmanager" and now_ns - alert.updated_ns > UNHEARD_NS
    ]
    if unheard:
        book.save(Changes(alerts=tuple(unheard)))


def _judged(services: Services, alerting: Alerting, alerts: list[OneAlert], now_ns: int) -> dict[str, str]:
    """Annotations to attach: the verdict and where its report is, or why there is none."""
    from alerts.checks.latency import LatencyCheck
    from diagnosis.diagnose import METRICS, diagnose
    from diagnosis.windows import choose

    before_ns = round(alerting.settings.window_s * NS)  # a rule fires some time after the trouble began
    start_ns = min(_ns(alert.startsAt) for alert in alerts) - before_ns
    end_ns = min(max(_ended_ns(alert, now_ns) for alert in alerts), now_ns - round(alerting.settings.settle_s * NS))
    window = Window(max(start_ns, end_ns - LONGEST_NS), end_ns)
    metrics = [alert.labels.get("metric") for alert in alerts]
    metric = next((name for name in metrics if name in METRICS), "ttft")
    try:
        if start_ns >= end_ns:
            raise BadWindow("the alerts began only now; no request of their window has ended yet", window=str(window))
        chosen = choose(services.store, None, window, now_ns)
        verdict = diagnose(services.store, chosen.base, window, metric=metric, now_ns=now_ns, why=chosen.why).to_dict()
    except DiagnosisError as error:
        return {BECAUSE: error.message}
    baseline, suspect = text_of(chosen.base), text_of(window)
    number = services.keep_finding({"made_ns": now_ns, **short(verdict, baseline, suspect, _id(alerts[0]))})
    check = LatencyCheck(services.store, metric)
    attached = {
        "finding": str(number),
        "report": alerting.base_url + check.report(suspect, baseline),
        "window": suspect,
        "kvscope_verdict": verdict["verdict"],
        "kvscope_remedy": "; ".join(text for cause in verdict["causes"][:2] for text in cause["remedy"][:2]),
    }
    spots = _hotspots(services, window)
    return attached | ({"kvscope_hotspots": spots} if spots else {})


def _hotspots(services: Services, window: Window) -> str:
    from diagnosis.hotspots.judge import hotspots

    try:
        return "; ".join(spot.statement for spot in hotspots(services.store, window).hotspots[:3])
    except DiagnosisError:
        return ""


def _has_finding(alert: Alert | None, now_ns: int) -> bool:
    """It was diagnosed, and not long ago; what was resolved and fires again is another episode by its start."""
    return alert is not None and "finding" in alert.annotations and now_ns - alert.claimed_until_ns < AGAIN_NS


def _episode(alert: OneAlert, before: Alert | None, attached: dict[str, str], now_ns: int) -> Alert:
    kept: Mapping[str, str] = {}
    if before is not None:
        names = _ATTACHED - {BECAUSE} if attached else _ATTACHED
        kept = {name: before.annotations[name] for name in names if name in before.annotations}
    source = {"source": alert.generatorURL} if alert.generatorURL else {}
    made = Alert(
        alert_id=_id(alert),
        fingerprint=fingerprint(alert.labels),
        origin="alertmanager",
        state=alert.status,
        labels=alert.labels,
        annotations={**_theirs(alert.annotations), **source, **kept, **attached},
        starts_ns=_ns(alert.startsAt),
        claimed_until_ns=now_ns if attached or before is None else before.claimed_until_ns,
        last_seen_ns=now_ns,
        updated_ns=now_ns,
        fired_ns=before.fired_ns if before is not None else now_ns,
    )
    return made if alert.status == "firing" else replace(made, ends_ns=_ended_ns(alert, now_ns))


BECAUSE: Final = "kvscope_because"
_ATTACHED: Final = frozenset(
    {"finding", "report", "window", "kvscope_verdict", "kvscope_remedy", "kvscope_hotspots", BECAUSE}
)


def _theirs(annotations: Mapping[str, str]) -> dict[str, str]:
    """What the alert said itself; where that has a name that only a verdict of ours may have, under another name."""
    return {f"alertmanager_{name}" if name in _ATTACHED else name: text for name, text in annotations.items()}


def _told(alert: Alert, findings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    number = alert.annotations.get("finding")
    return {
        "alert_id": alert.alert_id,
        "fingerprint": alert.fingerprint,
        "status": alert.state,
        "finding": findings.get(number) if number is not None else None,
        "report": alert.annotations.get("report"),
        "because": alert.annotations.get(BECAUSE) if number is None else None,
    }


def _ended_ns(alert: OneAlert, now_ns: int) -> int:
    """When it ended; now where it fires, or does not say."""
    ends_ns = 0 if alert.status == "firing" or alert.endsAt is None else _ns(alert.endsAt)
    return ends_ns if ends_ns > 0 else now_ns


def _id(alert: OneAlert) -> str:
    """An episode: the same labels since the same instant."""
    return f"am-{fingerprint(alert.labels)}-{_ns(alert.startsAt)}"


def _ns(moment: datetime) -> int:
    """ns since 1970; what lies before or beyond what ns can say (Go's zero time) is the nearest that they can."""
    whole = moment.replace(microsecond=0)
    return min(max(int(whole.timestamp()) * NS + moment.microsecond * 1000, 0), LAST_NS)
