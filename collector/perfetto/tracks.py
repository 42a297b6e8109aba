"""A scene as tracks: per worker its steps, counters, blocks and requests; routers and clients beside them; marks across all.

A request is a slice from arrival to end, its phases are slices within it, its tokens moments; an arrow leads from the
routing decision to the request at the worker that was chosen. Where no spans were told, the stretches before and after
the first token are drawn, and no phase is invented.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from itertools import compress, pairwise
from operator import not_
from typing import Any

from collector.perfetto.chrome_trace import ChromeTrace, Lanes, Track
from collector.perfetto.surroundings import Row, Scene, end_of
from engine_probe.recording.phases import Span, disjoint

_INSTANTS = frozenset({"at_ns", "arrival_ns", "first_scheduled_ns", "first_token_ns", "last_token_ns", "end_ns"})
_NOT_SHOWN = _INSTANTS | {"received_ns", "spans", "token_ns", "token_counts", "prompt_blocks"}


def draw(scene: Scene) -> ChromeTrace:
    """The trace of a scene."""
    trace = ChromeTrace()
    _steps(trace, scene.steps)
    arrows = _routes(trace, scene.routes)
    asked = [row["request_id"] in scene.subjects for row in scene.requests]
    _requests(trace, "requests", compress(scene.requests, asked), arrows)
    _blocks(trace, scene.blocks)
    _requests(trace, "other requests", compress(scene.requests, map(not_, asked)), arrows)
    _transfers(trace, scene.transfers)
    for mark in scene.marks:
        text = mark["text"] or mark["subject"]
        trace.everywhere(f"{mark['mark']}: {text}" if text else mark["mark"], mark["at_ns"], _facts(mark))
    return trace


def worker_process(worker: str | None) -> str:
    """Name of a worker's group of tracks."""
    return f"worker {worker}" if worker is not None else "a worker that was not named"


def _steps(trace: ChromeTrace, steps: Iterable[Row]) -> None:
    ends: dict[str, int] = {}
    for step in steps:
        process = worker_process(step["worker"])
        start_ns = max(_step_start(step), ends.get(process, 0))  # clocks are rounded: steps of a worker never overlap
        ends[process] = max(step["at_ns"], start_ns)
        trace.track(process, "steps").slice(_step_name(step), start_ns, ends[process], _facts(step), "step")
        trace.counter(
            process,
            "requests",
            start_ns,
            _named(
                step, running="num_running", waiting_prefill="num_waiting_prefill", waiting_decode="num_waiting_decode"
            ),
        )
        trace.counter(process, "KV blocks", step["at_ns"], _named(step, used="blocks_used", cached="blocks_cached"))
        trace.counter(
            process, "tokens of the step", start_ns, _named(step, prefill="prefill_tokens", decode="decode_tokens")
        )


def _step_start(step: Mapping[str, Any]) -> int:
    return int(step["at_ns"] - round((step["duration_s"] or 0.0) * 1e9))


def _step_name(step: Mapping[str, Any]) -> str:
    prefill, decode = step["prefill_tokens"] or 0, step["decode_tokens"] or 0
    kinds = {(True, True): "prefill + decode", (True, False): "prefill", (False, True): "decode"}
    return kinds.get((prefill > 0, decode > 0), "step")


def _blocks(trace: ChromeTrace, blocks: Iterable[Row]) -> None:
    for row in blocks:
        count = row["blocks"]
        name = f"{count} {'block' if count == 1 else 'blocks'} {row['change']}"
        trace.track(worker_process(row["worker"]), f"blocks {row['change']}").instant(name, row["at_ns"], _facts(row))


Arrows = dict[tuple[str, str], deque[tuple[int, int]]]
"""(request, worker chosen) -> (number of its arrow, instant of the decision) of each decision, the earliest first."""


def _routes(trace: ChromeTrace, routes: Iterable[Row]) -> Arrows:
    """Draws the decisions, and answers with the arrows that leave them."""
    lanes: dict[str, Lanes] = {}
    arrows: Arrows = defaultdict(deque)
    for number, (start_ns, route) in enumerate(_by_start(routes, "decision_s"), start=1):
        process = f"routing by {route['router']}" if route["router"] else "routing"
        track = lanes.setdefault(process, Lanes(trace, process, "decisions")).lane(start_ns, route["at_ns"])
        track.slice(f"{route['request_id']} to {route['chosen']}", start_ns, route["at_ns"], _facts(route), "route")
        if route["request_id"] is not None and route["chosen"] is not None:
            arrows[route["request_id"], route["chosen"]].append((number, route["at_ns"]))
            track.arrow_from(start_ns, number)
    return arrows


def _requests(trace: ChromeTrace, group: str, rows: Iterable[Row], arrows: Arrows) -> None:
    """Rows in order of arrival: the first attempt at a worker ends the arrow of the first decision for it, the next the next."""
    lanes: dict[str, Lanes] = {}
    for row in rows:
        process = worker_process(row["worker"]) if row["vantage"] == "engine" else f"{row['vantage']}s' view"
        start_ns, end_ns = row["arrival_ns"], end_of(row)
        track = lanes.setdefault(process, Lanes(trace, process, group)).lane(start_ns, end_ns)
        track.slice(str(row["request_id"]), start_ns, end_ns, _facts(row), row["state"] or "")
        _phases(track, row, end_ns)
        if group == "requests":
            _tokens(track, row)
        decisions = arrows.get((row["request_id"], row["worker"]))
        if decisions and row["vantage"] == "engine" and decisions[0][1] <= end_ns:
            number, decided_ns = decisions.popleft()
            track.arrow_to(max(start_ns, decided_ns), number)


def _phases(track: Track, row: Row, end_ns: int) -> None:
    told = [Span(**span) for span in row["spans"] or () if span["start_ns"] is not None and span["end_ns"] is not None]
    if told:
        for phase, start, end, tokens in disjoint(told, row["arrival_ns"], end_ns):
            track.slice(phase, start, end, {"tokens": tokens}, "phase")
        return
    instants = (
        (row["arrival_ns"], "to first token"),
        (row["first_token_ns"], "tokens"),
        (row["last_token_ns"], "after the last token"),
    )
    known = [(instant, name) for instant, name in instants if instant is not None]
    for (start, name), (end, _) in pairwise([*known, (end_ns, "")]):
        if start < end:
            track.slice(name, start, end, {}, "phase")


def _tokens(track: Track, row: Row) -> None:
    counts = row["token_counts"] or ()
    for position, instant in enumerate(row["token_ns"] or ()):
        count = counts[position] if position < len(counts) else None
        track.instant("token" if count in (None, 1) else f"{count} tokens", instant, {"position": position})


def _transfers(trace: ChromeTrace, transfers: Iterable[Row]) -> None:
    lanes = Lanes(trace, "transfers", "transfers")
    for start_ns, row in _by_start(transfers, "wait_s", "wire_s"):
        track = lanes.lane(start_ns, row["at_ns"])
        name = f"{row['source_worker'] or '?'} to {row['target_worker'] or '?'}: {row['outcome']}"
        track.slice(name, start_ns, row["at_ns"], _facts(row), "transfer")
        wire_ns = row["at_ns"] - round((row["wire_s"] or 0.0) * 1e9)
        for part, begin, end in (("wait", start_ns, wire_ns), ("wire", wire_ns, row["at_ns"])):
            if begin < end:
                track.slice(part, begin, end, {}, "phase")


def _by_start(rows: Iterable[Row], *lasted: str) -> list[tuple[int, Row]]:
    """(start in ns, row), the earliest start first. Rows tell their end, and in `lasted` the seconds they took."""
    started = ((row["at_ns"] - round(sum(row[column] or 0.0 for column in lasted) * 1e9), row) for row in rows)
    return sorted(started, key=lambda pair: pair[0])


def _named(row: Mapping[str, Any], **columns: str) -> dict[str, Any]:
    return {name: row[column] for name, column in columns.items()}


def _facts(row: Mapping[str, Any]) -> dict[str, Any]:
    """Columns that say something, for the panel of what was clicked; lists of every token or block stay in the store."""
    return {name: value for name, value in row.items() if name not in _NOT_SHOWN and value not in (None, [], {}, "")}
