"""The life of an alert: pending, firing, resolved - or dismissed, where a second window did not show it. Pure: time is an argument.

Evaluators that look again and again find something by chance, sooner or later. So a claim is never confirmed by the data that made
it: an alert fires only when a window that begins where the first one ended shows the same thing. Invariant: windows used to
claim and to confirm share no time; a dismissed claim is not made again of data that it was made of before.

A confirming window in which too little was seen neither confirms nor dismisses; it grows to twice its length, a few times at most
(each look is a chance to be wrong).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from alerts.condition import Condition, Look
from store.alert_rows import Alert
from store.interface import Window

MOST_LOOKS: Final = 3
"""Confirming windows of one claim: hold, 2 hold, 4 hold."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Durations, ns.

    hold       length of the window that confirms
    cool_down  quiet for so long before an alert is resolved: one that flaps fires once
    lost       resolved when for so long nothing could tell whether it goes on
    """

    hold: int
    cool_down: int
    lost: int


def claim(condition: Condition, window: Window, baseline: str | None, last: Alert | None, now_ns: int) -> Alert | None:
    """A new pending episode; None where an earlier claim that came to nothing used data of this window.

    last   the newest episode of the same fingerprint, which has ended
    """
    start, end = _ends(window)
    if (
        last is not None and last.state == "dismissed" and start < last.claimed_until_ns <= end
    ):  # later: of a clock set back
        return None
    return Alert(
        alert_id=f"{condition.fingerprint}-{end}",
        fingerprint=condition.fingerprint,
        origin="evaluator",
        state="pending",
        labels=dict(condition.labels),
        annotations=dict(condition.annotations),
        starts_ns=condition.starts_ns,
        claimed_until_ns=end,
        last_seen_ns=end,
        updated_ns=now_ns,
        baseline=baseline,
    )


def rebased(alert: Alert, end_ns: int) -> Alert:
    """The alert as it would be had its windows ended by now: where they ended later, the clock was set back, and it waits no longer for that."""
    if max(alert.claimed_until_ns, alert.last_seen_ns) <= end_ns:
        return alert
    claimed, seen = min(alert.claimed_until_ns, end_ns), min(alert.last_seen_ns, end_ns)
    return replace(alert, claimed_until_ns=claimed, last_seen_ns=seen)


def confirming_window(alert: Alert, pace: Pace, end_ns: int) -> Window | None:
    """The window that may confirm a pending alert, once it is long enough; None before. `end_ns`: until when rows are complete."""
    if end_ns - alert.claimed_until_ns < pace.hold << alert.looks:
        return None
    return Window(alert.claimed_until_ns, end_ns)


def confirmed(alert: Alert, look: Look, window: Window, now_ns: int) -> Alert:
    """A pending alert after its confirming window was looked at: firing, dismissed, or still pending."""
    _, end = _ends(window)
    seen = next((found for found in look.conditions if found.fingerprint == alert.fingerprint), None)
    if seen is not None:
        return replace(
            alert,
            state="firing",
            labels=dict(seen.labels),
            annotations=dict(seen.annotations),
            fired_ns=now_ns,
            claimed_until_ns=end,
            last_seen_ns=end,
            updated_ns=now_ns,
        )
    if not look.can_tell and alert.looks + 1 < MOST_LOOKS:
        return replace(alert, looks=alert.looks + 1, updated_ns=now_ns)
    why = look.because if not look.can_tell and look.because else "a second window did not show it"
    return replace(
        alert,
        state="dismissed",
        annotations={**alert.annotations, "dismissed": why},
        claimed_until_ns=end,
        ends_ns=now_ns,
        updated_ns=now_ns,
    )


def carried_on(alert: Alert, looks: Iterable[Look], window: Window, pace: Pace, now_ns: int) -> Alert:
    """A firing alert after new looks at `window`: seen again, resolved after the cool-down, or as it was."""
    _, end = _ends(window)
    could_tell = False
    for look in looks:
        could_tell = could_tell or look.can_tell
        seen = next((found for found in look.conditions if found.fingerprint == alert.fingerprint), None)
        if seen is not None:
            return replace(
                alert,
                labels=dict(seen.labels),
                annotations=_kept(alert, seen.annotations),
                last_seen_ns=end,
                claimed_until_ns=end,
                updated_ns=now_ns,
            )
    quiet = end - alert.last_seen_ns
    if (could_tell and quiet >= pace.cool_down) or quiet >= pace.lost:
        return replace(alert, state="resolved", ends_ns=now_ns, updated_ns=now_ns)
    return alert


def _kept(alert: Alert, annotations: Mapping[str, str]) -> dict[str, str]:
    """The newest words, but the report of the window that was first reported: links that were sent stay true."""
    return {
        **annotations,
        **{name: alert.annotations[name] for name in ("report", "finding", "window") if name in alert.annotations},
    }


def _ends(window: Window) -> tuple[int, int]:
    assert window.start_ns is not None
    assert window.end_ns is not None
    return window.start_ns, window.end_ns
