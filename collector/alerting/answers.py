"""What is asked of alerting, answered from its book: the API and the command line say the same."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from alerts.matchers import parse_matchers
from alerts.muting import Muted, muting
from engine_probe.errors import AlertMisuse, NotFound
from store.alert_book import AlertBook
from store.alert_rows import OPEN_STATES, Alert, Changes, Delivery, Silence

STATES: Final = ("open", "pending", "firing", "resolved", "dismissed", "all")
_INSIDE: Final = ("claimed_until_ns", "looks")
_DELIVERY: Final = ("delivery_id", "receiver", "state", "created_ns", "attempts", "next_ns", "ended_ns", "message")


def alert_rows(
    book: AlertBook,
    state: str,
    origin: str | None,
    limit: int,
    now_ns: int,
    narrowed: Callable[[list[Alert]], list[Alert]] = lambda alerts: alerts,
) -> dict[str, Any]:
    """Alerts, most recently changed first, each with why nobody is told where that is so. narrowed: those of them that are asked for."""
    states = {"all": None, "open": OPEN_STATES}.get(state, (state,))
    found = narrowed([alert for alert in book.alerts(states) if origin is None or alert.origin == origin])[:limit]
    held = {alert.alert_id: alert for alert in [*book.open_alerts(), *found]}
    muted = muting(list(held.values()), book.silences(now_ns), now_ns)
    return {"alerts": [_shown(alert, muted) for alert in found]}


def question_of(document: Mapping[str, Any], alert_id: str) -> dict[str, str]:
    """What the report of an alert asks: `suspect`, and `baseline` and `metric` where the alert has them. By its id or fingerprint.

    document   an answer of `alert_rows`
    Raises NotFound, and AlertMisuse for an alert that has no report yet.
    """
    found = [row for row in document["alerts"] if alert_id in (row["alert_id"], row["fingerprint"])]
    if not found:
        raise NotFound(f"there is no alert {alert_id[:200]}; `kvscope alerts list --state all --json` names them")
    link = found[0]["annotations"].get("report")
    if link is None:
        raise AlertMisuse(
            f"the alert {alert_id[:200]} is {found[0]['state']} and has no report; it gets one when it fires"
        )
    asked = dict(parse_qsl(urlsplit(link).query))
    named = {name: asked[name] for name in ("baseline", "suspect", "metric") if name in asked}
    return named if "suspect" in named else {"suspect": asked["window"]}


def silence_rows(book: AlertBook, now_ns: int) -> dict[str, Any]:
    """Silences that have not ended."""
    return {"silences": [_silence(found, now_ns) for found in book.silences(now_ns)]}


def delivery_rows(book: AlertBook, state: Any, limit: int) -> dict[str, Any]:
    """Messages, newest first."""
    found = book.deliveries(state, limit=limit, newest_first=True)
    return {"deliveries": [{name: getattr(delivery, name) for name in _DELIVERY} for delivery in found]}


def silence(
    book: AlertBook, matchers: Sequence[str], starts_ns: int, duration_s: float, *, created_by: str, comment: str
) -> dict[str, Any]:
    """Make a silence. Raises AlertMisuse for a matcher that is none."""
    texts = tuple(str(matcher) for matcher in parse_matchers(matchers))
    made = Silence(uuid.uuid4().hex, texts, starts_ns, starts_ns + round(duration_s * 1e9), created_by, comment)
    book.save(Changes(silences=(made,)))
    return _silence(made, starts_ns)


def end_silence(book: AlertBook, silence_id: str, now_ns: int) -> dict[str, Any]:
    """End a silence now. Raises NotFound."""
    found = next((kept for kept in book.silences(now_ns) if kept.silence_id == silence_id), None)
    if found is None:
        raise NotFound(
            f"there is no silence {silence_id[:200]} that could end; `kvscope alerts list --silences` names them"
        )
    ended = replace(found, starts_ns=min(found.starts_ns, now_ns), ends_ns=now_ns)
    book.save(Changes(silences=(ended,)))
    return _silence(ended, now_ns)


def replay(book: AlertBook, ids: Sequence[str], *, every: bool, now_ns: int) -> list[str]:
    """Put dead letters back into the queue, with as much time as a new message has. Raises AlertMisuse, NotFound.

    One that was never written, because its template failed, is none that could be sent: it is forgotten, and not among the answers.
    """
    dead = _dead_letters(book, ids, every)
    again = tuple(
        replace(delivery, state="waiting", attempts=0, created_ns=now_ns, next_ns=now_ns, ended_ns=None)
        for delivery in dead
        if delivery.body
    )
    unwritten = tuple(delivery.delivery_id for delivery in dead if not delivery.body)
    book.save(Changes(deliveries=again, discarded=unwritten))
    return [delivery.delivery_id for delivery in again]


def discard(book: AlertBook, ids: Sequence[str], *, every: bool) -> list[str]:
    """Forget dead letters that nobody wants any more: a receiver that is gone, news that is old. Raises AlertMisuse, NotFound."""
    forgotten = tuple(delivery.delivery_id for delivery in _dead_letters(book, ids, every))
    book.save(Changes(discarded=forgotten))
    return list(forgotten)


def _dead_letters(book: AlertBook, ids: Sequence[str], every: bool) -> list[Delivery]:
    if bool(ids) == every:
        raise AlertMisuse("say which dead letters: their ids, or all of them (and not both)")
    dead = book.deliveries("dead", ids=None if every else list(ids), limit=10_000)
    if missing := sorted(set(ids) - {delivery.delivery_id for delivery in dead}):
        raise NotFound(
            f"there is no dead letter {missing[0][:200]}; `kvscope alerts list --deliveries dead` names them"
        )
    return dead


def _shown(alert: Alert, muted: Mapping[str, Muted]) -> dict[str, Any]:
    why = muted[alert.alert_id]
    return {name: value for name, value in asdict(alert).items() if name not in _INSIDE} | {
        "silenced_by": list(why.silenced_by),
        "inhibited_by": list(why.inhibited_by),
        "why_muted": "it is silenced" if why.silenced_by else why.why,
    }


def _silence(found: Silence, now_ns: int) -> dict[str, Any]:
    return {**asdict(found), "is_active": found.is_active(now_ns)}
