"""Chrome trace-event JSON, the part of it that a flight recorder needs: processes, tracks, slices, instants, counters, arrows.

Invariant: slices of one track nest or lie apart, never cross, which is what the format asks of `X` events of a thread.
Source: "Trace Event Format" (the Chromium project's document), read by ui.perfetto.dev and chrome://tracing.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any, Final

Event = dict[str, Any]

US_NS: Final = 1_000


class Track:
    """One line of a process, on which slices and instants lie."""

    def __init__(self, trace: ChromeTrace, pid: int, tid: int) -> None:
        self._trace, self._pid, self._tid = trace, pid, tid

    def slice(self, name: str, start_ns: int, end_ns: int, args: Mapping[str, Any], category: str = "") -> None:
        """A stretch of time. Slices of a track must nest or lie apart."""
        self._trace.add("X", name, start_ns, self._pid, self._tid, args, category, dur=max(end_ns, start_ns))

    def instant(self, name: str, at_ns: int, args: Mapping[str, Any]) -> None:
        """A moment on this track."""
        self._trace.add("i", name, at_ns, self._pid, self._tid, args, s="t")

    def arrow_from(self, at_ns: int, number: int) -> None:
        """An arrow leaves the slice that lies here at this moment."""
        self._trace.add("s", "served", at_ns, self._pid, self._tid, {}, "flow", id=number)

    def arrow_to(self, at_ns: int, number: int) -> None:
        """The arrow of this number ends at the slice that lies here at this moment."""
        self._trace.add("f", "served", at_ns, self._pid, self._tid, {}, "flow", id=number, bp="e")


class Lanes:
    """As many tracks as things go on at once: each thing gets the first that is free.

    Give them in order of their start.
    """

    def __init__(self, trace: ChromeTrace, process: str, name: str) -> None:
        self._trace, self._process, self._name = trace, process, name
        self._busy: list[tuple[int, int]] = []
        self._free: list[int] = []
        self._tracks: list[Track] = []

    def lane(self, start_ns: int, end_ns: int) -> Track:
        """The track for something that lasts from start to end."""
        while self._busy and self._busy[0][0] <= start_ns:
            heapq.heappush(self._free, heapq.heappop(self._busy)[1])
        if self._free:
            number = heapq.heappop(self._free)
        else:
            number = len(self._tracks)
            self._tracks.append(self._trace.track(self._process, f"{self._name} {number + 1}"))
        heapq.heappush(self._busy, (max(end_ns, start_ns + 1), number))
        return self._tracks[number]


class ChromeTrace:
    """A trace that grows; `document()` is what is written."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._processes: dict[str, int] = {}
        self._tracks: dict[tuple[str, str], Track] = {}

    def track(self, process: str, name: str) -> Track:
        """The track of this name, made where there is none; tracks stand in the order in which they were first asked for."""
        found = self._tracks.get((process, name))
        if found is None:
            pid, tid = self._pid(process), len(self._tracks) + 1
            found = self._tracks[process, name] = Track(self, pid, tid)
            self._meta("thread_name", pid, tid, {"name": name})
            self._meta("thread_sort_index", pid, tid, {"sort_index": tid})
        return found

    def counter(self, process: str, name: str, at_ns: int, values: Mapping[str, float | None]) -> None:
        """Numbers that hold from this moment on; unknown ones are left out."""
        known = {key: value for key, value in values.items() if value is not None}
        if known:
            self.add("C", name, at_ns, self._pid(process), 0, known)

    def everywhere(self, name: str, at_ns: int, args: Mapping[str, Any]) -> None:
        """A moment that is drawn across all tracks, and named on one of its own."""
        track = self.track("marks", "marks")
        track.slice(name, at_ns, at_ns, args)
        self.add("i", name, at_ns, self._pid("marks"), 0, args, s="g")

    def add(
        self,
        phase: str,
        name: str,
        at_ns: int,
        pid: int,
        tid: int,
        args: Mapping[str, Any],
        category: str = "",
        **more: Any,
    ) -> None:
        """One event of the format. `phase` is its letter there."""
        event: Event = {
            "ph": phase,
            "name": name,
            "ts": at_ns,
            "pid": pid,
            "tid": tid,
            **more,
        }
        if category:
            event["cat"] = category
        if known := {key: value for key, value in args.items() if value is not None}:
            event["args"] = known
        self._events.append(event)

    def document(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """The whole trace as JSON: times in whole microseconds after its first moment, `origin_ns`. `facts` says what it is of.

        Whole ones, because slices that touch must still do so after a reader has turned decimals into nanoseconds.
        """
        origin_ns = min((event["ts"] for event in self._events if "ts" in event), default=0)
        events = [_in_us(event, origin_ns) for event in self._events]
        return {
            "displayTimeUnit": "ms",
            "otherData": {"origin_ns": str(origin_ns), **facts},
            "traceEvents": events,
        }

    def _pid(self, process: str) -> int:
        pid = self._processes.get(process)
        if pid is None:
            pid = self._processes[process] = len(self._processes) + 1
            self._meta("process_name", pid, 0, {"name": process})
            self._meta("process_sort_index", pid, 0, {"sort_index": pid})
        return pid

    def _meta(self, name: str, pid: int, tid: int, args: Mapping[str, Any]) -> None:
        self._events.append({"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args})


def _in_us(event: Event, origin_ns: int) -> Event:
    """The event with its start (and its end, kept under `dur` until now) as microseconds after the origin."""
    if "ts" not in event:
        return event
    start = (event["ts"] - origin_ns) // US_NS
    timed = {**event, "ts": start}
    if "dur" in event:
        timed["dur"] = (event["dur"] - origin_ns) // US_NS - start
    return timed
