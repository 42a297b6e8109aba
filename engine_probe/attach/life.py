"""Follows one engine through its lives: up, down, restarted; what its counters add up to; what nobody saw.

An engine is down when it refuses a scrape (or lets several time out), and restarted when its process start time moves
or its counters fall. Counters begin again at 0 then: the total is the last sight of each former life plus the present
one. Invariant: whatever happened between the last sight of a life and its end is never guessed; it is said, with its
length, as a `gap` mark. Pure: instants (UTC ns) come in, mark rows come out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

TIMEOUTS_MEAN_DOWN: Final = 3
START_TOLERANCE_S: Final = 1.0

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Unseen:
    """The stretch between the last scrape of a life and its end, as far as that is known (UTC ns)."""

    first_ns: int
    last_ns: int
    reason: str


class Lives:
    """One engine instance. `seen` after each good scrape, `failed` after each bad one; both return `mark` rows."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._past: dict[str, float] = {}
        self._present: dict[str, float] = {}
        self._baseline: dict[str, float] = {}
        self._start_s: float | None = None
        self._seen_ns: int | None = None
        self._down_ns: int | None = None
        self._timeouts = 0
        self.plugin_delay_s: float | None = None
        """How long a probe inside the engine may hold rows before it sends them; None: there is none."""
        self.restarts = 0
        self.unseen: list[Unseen] = []

    @property
    def is_up(self) -> bool:
        """The last scrape was answered, or its failure does not mean that the engine is down yet."""
        return self._seen_ns is not None and self._down_ns is None

    @property
    def start_s(self) -> float | None:
        """When the present process started (Unix s), where it says so."""
        return self._start_s

    @property
    def totals(self) -> dict[str, float]:
        """What each counter counted in all lives, as far as the last scrape of each."""
        return {name: self._past.get(name, 0.0) + self._present.get(name, 0.0) for name in self._past | self._present}

    @property
    def gains(self) -> dict[str, float]:
        """The part of `totals` since the first scrape."""
        return {name: value - self._baseline.get(name, 0.0) for name, value in self.totals.items()}

    def seen(self, counters: Mapping[str, float], start_s: float | None, at_ns: int) -> Rows:
        """A scrape was answered.

        counters  value of each counter, summed over its labels
        start_s   process_start_time_seconds, None where the page has none
        """
        self._timeouts = 0
        before, self._seen_ns = self._seen_ns, at_ns
        if before is None:
            self._present, self._baseline, self._start_s = dict(counters), dict(counters), start_s
            return [] if start_s is None else [self._first(round(start_s * 1e9), at_ns)]
        down_ns, self._down_ns = self._down_ns, None
        why = self._restarted(counters, start_s)
        rows: Rows = []
        if why is not None:
            self.restarts += 1
            for name, value in self._present.items():
                self._past[name] = self._past.get(name, 0.0) + value
            end_ns = down_ns or at_ns
            self.unseen.append(Unseen(before, end_ns, why))
            if down_ns is None:
                rows.append(self._mark("worker_down", before, f"The engine restarted between two scrapes ({why}).", {}))
            rows += self._lost(before, end_ns, why)
            rows.append(self._up(at_ns, down_ns, start_s, "The engine restarted: its counters count from 0 again."))
        elif down_ns is not None:
            rows.append(self._up(at_ns, down_ns, start_s, "The engine answers again; it did not restart."))
        self._present = dict(counters)
        self._start_s = start_s
        return rows

    def failed(self, reason: str, at_ns: int, *, is_timeout: bool = False) -> Rows:
        """A scrape was not answered. One refusal means down; a time-out may be a busy engine, several mean down."""
        if self._seen_ns is None or self._down_ns is not None:
            return []
        if is_timeout:
            self._timeouts += 1
            if self._timeouts < TIMEOUTS_MEAN_DOWN:
                return []
        self._down_ns = at_ns
        return [
            self._mark(
                "worker_down", at_ns, f"The engine does not answer: {reason}", {"last_seen_ns": str(self._seen_ns)}
            )
        ]

    def end(self, at_ns: int) -> Rows:
        """Watching ends. If the engine is down now, what it did after its last scrape was not seen either."""
        if self._seen_ns is None or self._down_ns is None:
            return []
        self.unseen.append(Unseen(self._seen_ns, self._down_ns, "the engine ended"))
        return self._lost(self._seen_ns, self._down_ns, "the engine ended")

    def _restarted(self, counters: Mapping[str, float], start_s: float | None) -> str | None:
        if start_s is not None and self._start_s is not None and abs(start_s - self._start_s) > START_TOLERANCE_S:
            return "its process start time moved"
        fell = sorted(name for name, value in counters.items() if value < self._present.get(name, 0.0))
        if not fell:
            return None
        return f"{fell[0]} fell from {self._present[fell[0]]:.0f} to {counters[fell[0]]:.0f}"

    def _first(self, start_ns: int, at_ns: int) -> dict[str, Any]:
        attrs = {"attached_ns": str(at_ns), "process_start_ns": str(start_ns)}
        return self._mark("worker_up", start_ns, "The engine's process started; kvscope attached later.", attrs)

    def _up(self, at_ns: int, down_ns: int | None, start_s: float | None, text: str) -> dict[str, Any]:
        attrs = {} if down_ns is None else {"down_s": f"{(at_ns - down_ns) / 1e9:.3f}"}
        if start_s is not None:
            attrs["process_start_ns"] = str(round(start_s * 1e9))
        return self._mark("worker_up", at_ns, text, attrs)

    def _lost(self, first_ns: int, last_ns: int, why: str) -> Rows:
        seconds = max(last_ns - first_ns, 0) / 1e9
        text = f"Counters of the engine's last {seconds:.1f} s (at most) before it ended were not seen ({why})."
        attrs = {"source": "metrics", "first_ns": str(first_ns), "last_ns": str(last_ns)}
        attrs |= {f"last_{name}": f"{value:.0f}" for name, value in sorted(self._present.items())}
        rows = [self._mark("gap", last_ns, text, attrs)]
        if self.plugin_delay_s is not None:
            text = "Steps and requests that the plugin had not sent when the engine ended were lost with it."
            held_ns = first_ns - round(self.plugin_delay_s * 1e9)
            attrs = {"source": "plugin", "first_ns": str(held_ns), "last_ns": str(last_ns)}
            rows.append(self._mark("gap", last_ns, text, attrs))
        return rows

    def _mark(self, mark: str, at_ns: int, text: str, attrs: dict[str, str]) -> dict[str, Any]:
        row: dict[str, Any] = {
            "mark": mark,
            "worker": self._worker,
            "subject": self._worker,
            "at_ns": at_ns,
            "text": text,
        }
        return row | {"attrs": {"seen_by": "attach"} | attrs}
