"""Looks at the newest window again and again, and moves alerts through their life. State is in the book, not here.

One `tick` asks every check about one window that ends a little before now: rows come when requests end, and a window that
reaches to the present holds the short ones alone. A check that fails is told and leaves its alerts as they are; the others go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from alerts.condition import RUNBOOKS, Check, Look, text_of
from alerts.lifecycle import Pace, carried_on, claim, confirmed, confirming_window, rebased
from engine_probe.errors import KvscopeError, NotReady
from store.alert_book import AlertBook
from store.alert_rows import Alert, Changes
from store.interface import Window

log = logging.getLogger(__name__)

Judge = Callable[[str, Callable[[], Look]], Look]
"""Runs one look where judgements are made, under the limit that all of them share."""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """window: length of what is looked at; settle: how long rows of a request may take to come, ns."""

    window_ns: int
    settle_ns: int
    pace: Pace


class Evaluator:
    """Checks on one side, the book on the other.

    keep_finding   keeps a verdict in short and answers with its number
    base_url       under which people reach the API, without a slash at the end
    is_empty       no request arrived in the window: nobody need judge it
    is_old         no request arrived in this part of the window, which no tick has looked at, and no row came since the last call
    on_end         a tick is over: what its checks share may be forgotten
    """

    def __init__(
        self,
        book: AlertBook,
        checks: Sequence[Check],
        rhythm: Rhythm,
        *,
        keep_finding: Callable[[dict[str, Any]], int],
        base_url: str,
        judge: Judge = lambda _, look: look(),
        is_empty: Callable[[Window], bool] = lambda _: False,
        is_old: Callable[[Window], bool] = lambda _: False,
        on_look: Callable[[str, float, bool], None] = lambda *_: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._book, self._checks, self._rhythm = book, checks, rhythm
        self._keep_finding, self._base_url = keep_finding, base_url
        self._judge, self._is_empty, self._is_old = judge, is_empty, is_old
        self._on_look, self._on_end = on_look, on_end
        self._seen_until_ns: int | None = None

    def tick(self, now_ns: int) -> list[Alert]:
        """Look once; answers with the alerts that changed, which are on disk by then. Raises NotReady where the collector stops."""
        end_ns = now_ns - self._rhythm.settle_ns
        window = Window(end_ns - self._rhythm.window_ns, end_ns)
        held = self._held(end_ns)
        if not held and (self._is_empty(window) or self._is_as_before(end_ns)):
            return []
        changed: list[Alert] = []
        self._seen_until_ns = None
        try:
            ended_well = [self._tried(check, held, window, now_ns, changed) for check in self._checks]
        finally:
            self._on_end()
        if all(ended_well) and not changed:
            self._seen_until_ns = end_ns
        if changed:
            self._book.save(Changes(alerts=tuple(changed)))
            for alert in changed:
                log.info("alert changed", extra={"alert_id": alert.alert_id, "state": alert.state, **_named(alert)})
        return changed

    def _held(self, end_ns: int) -> list[Alert]:
        """Open alerts of ours; those that a clock which was set back since would hold up are written as of now."""
        found = [alert for alert in self._book.open_alerts() if alert.origin == "evaluator"]
        held = [rebased(alert, end_ns) for alert in found]
        moved = tuple(now for before, now in zip(found, held, strict=True) if now is not before)
        if moved:
            self._book.save(Changes(alerts=moved))
        return held

    def _is_as_before(self, end_ns: int) -> bool:
        """Every check saw all that the window holds, and found nothing."""
        if self._seen_until_ns is None or self._seen_until_ns > end_ns:  # the clock was set back
            return False
        return self._is_old(Window(self._seen_until_ns, end_ns))

    def _tried(self, check: Check, held: list[Alert], window: Window, now_ns: int, changed: list[Alert]) -> bool:
        """Add what one check changes; False where it failed, which it tells. Raises NotReady."""
        own = [alert for alert in held if check.owns(alert.labels)]
        try:
            changed += self._evaluate(check, own, window, now_ns)
            return True
        except NotReady:
            raise  # the collector stops: no check failed
        except KvscopeError as error:
            log.warning("check failed", extra={"check": check.name, "reason": error.message})
        except Exception:  # a defect in one judgement is no reason to tell nobody of what the others find
            log.exception("check failed", extra={"check": check.name})
        return False

    def _evaluate(self, check: Check, own: list[Alert], window: Window, now_ns: int) -> list[Alert]:
        main = self._look(check, window, None)
        changed = list(self._claims(check, main, own, window, now_ns))
        pending = [alert for alert in own if alert.state == "pending"]
        changed += self._confirmations(check, pending, window.end_ns or 0, now_ns)
        firing = [alert for alert in own if alert.state == "firing"]
        changed += self._still_firing(check, firing, main, window, now_ns)
        return changed

    def _claims(self, check: Check, look: Look, own: list[Alert], window: Window, now_ns: int) -> Iterable[Alert]:
        held = {alert.fingerprint for alert in own}
        new = [found for found in look.conditions if found.fingerprint not in held]
        last = self._book.latest_of([found.fingerprint for found in new])
        for found in new:
            made = claim(found, window, look.baseline, last.get(found.fingerprint), now_ns)
            if made is not None:
                yield replace(made, annotations={**self._linked(made.annotations), "window": text_of(window)})

    def _confirmations(self, check: Check, pending: list[Alert], end_ns: int, now_ns: int) -> list[Alert]:
        """Each pending alert whose confirming window is long enough; alerts of one claim share a look."""
        looks: dict[tuple[str, str | None], Look] = {}
        numbers: dict[tuple[str, str | None], str] = {}
        changed = []
        for alert in pending:
            window = confirming_window(alert, self._rhythm.pace, end_ns)
            if window is None:
                continue
            key = (text_of(window), alert.baseline)
            if key not in looks:
                looks[key] = self._look(check, window, alert.baseline)
            after = confirmed(alert, looks[key], window, now_ns)
            if after.state == "firing":
                finding = looks[key].finding
                if key not in numbers and finding is not None:
                    kept = {"made_ns": now_ns, **finding, "alert_id": alert.alert_id}
                    numbers[key] = str(self._keep_finding(kept))
                after = self._reported(check, after, alert, numbers.get(key))
            changed.append(after)
        return changed

    def _still_firing(self, check: Check, firing: list[Alert], main: Look, window: Window, now_ns: int) -> list[Alert]:
        """Against the chosen baseline, and against the alert's own where that differs: the chosen one may hold the incident by now."""
        again: dict[str, Look] = {}
        changed = []
        shown = {found.fingerprint for found in main.conditions}
        for alert in firing:
            looks = [main]
            if alert.fingerprint not in shown and alert.baseline not in (None, main.baseline):
                if alert.baseline not in again:
                    again[alert.baseline] = self._look(check, window, alert.baseline)
                looks.append(again[alert.baseline])
            after = carried_on(alert, looks, window, self._rhythm.pace, now_ns)
            if after is not alert:
                changed.append(replace(after, annotations=self._linked(after.annotations)))
        return changed

    def _reported(self, check: Check, alert: Alert, claimed: Alert, finding: str | None) -> Alert:
        """With the number of its finding, and a link to the report over both windows."""
        start = claimed.annotations["window"].partition("/")[0]
        whole = f"{start}/{alert.claimed_until_ns}"
        told = {"window": whole, "report": self._base_url + check.report(whole, alert.baseline)}
        if finding is not None:
            told["finding"] = finding
        return replace(alert, annotations={**self._linked(alert.annotations), **told})

    def _linked(self, annotations: Mapping[str, str]) -> dict[str, str]:
        """With the URL of the runbook that a check names."""
        name = annotations.get("runbook_url", "")
        return dict(annotations) | (
            {"runbook_url": self._base_url + RUNBOOKS + name} if name and "/" not in name else {}
        )

    def _look(self, check: Check, window: Window, baseline: str | None) -> Look:
        started = time.perf_counter()
        ended_well = False
        try:
            look = self._judge(check.name, lambda: check.look(window, baseline))
            ended_well = True
            return look
        finally:
            self._on_look(check.name, time.perf_counter() - started, ended_well)


def _named(alert: Alert) -> dict[str, str]:
    return {name: alert.labels[name] for name in ("alertname", "cause", "worker", "metric") if name in alert.labels}
