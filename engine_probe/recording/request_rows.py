"""Ended requests -> rows: runs of steps unfolded into token instants, spans and phases that sum.

A run of steps takes the time from the end of the step before it to the end of its last step, so the time between two
steps belongs to the step that it leads to, and runs tile the request's life without gaps. Inside a prompt chunk's step the
time of allocation and of sampling (which the whole batch waits for) are phases of their own.
Work after the first token that gives none (a prompt computed again, KV loaded again) is a stall: the phases of the prompt
are those before the first token. Invariant: up to the first token, phases and `unexplained` sum to its latency.
Source: design section 3, recorder economy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine_probe.recording.phases import INDEX, Span, disjoint, seconds_by_phase
from engine_probe.recording.request_log import DECODE, PREFILL, OpenRequest
from engine_probe.recording.step_times import StepTimes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(slots=True)
class RequestRow:
    """One row before it becomes Arrow: scalars by column name, lists of instants as arrays (monotonic, ns)."""

    columns: dict[str, Any]
    token_ns: npt.NDArray[np.int64] | None = None
    token_counts: npt.NDArray[np.int64] | None = None
    spans: list[Span] = field(default_factory=list)


def request_row(request: OpenRequest, times: StepTimes) -> RequestRow:
    """Everything that the notes and the steps' instants tell; what they do not tell is absent.

    Where instants of its steps were lost, tokens and phases are unknown; what the engine told itself stays.
    """
    runs = [] if request.is_cut else request.runs()
    told = request.columns
    columns: dict[str, Any] = {
        "request_id": request.request_id,
        "arrival_ns": request.arrival_ns,
        "state": request.state,
        "num_preemptions": request.num_preemptions,
        "prefill_chunks": request.prefill_chunks,
        "recomputed_tokens": request.recomputed_tokens,
    }
    row = RequestRow(columns)
    first_step = runs[0][1] if runs else None
    scheduled = times.start(first_step) if first_step is not None else None
    if scheduled is not None:
        scheduled = max(scheduled, request.arrival_ns)
        columns["first_scheduled_ns"] = scheduled
    if not request.is_cut:
        giving = _giving_runs(request, runs)
        columns["output_tokens"] = sum(given * (stop - first) for first, stop, given in giving)
        row.token_ns, row.token_counts = _token_lists(giving, times)
        if giving:
            first, last = times.end(giving[0][0]), times.end(giving[-1][1] - 1)
            columns.update((k, v) for k, v in (("first_token_ns", first), ("last_token_ns", last)) if v is not None)
    columns["end_ns"] = max(request.end_ns, columns.get("last_token_ns", request.end_ns), request.arrival_ns)
    columns.update((name, value) for name, value in told.items() if value is not None)
    seen = {"queue", "prefill", "decode", "stalled", "unexplained"}
    work = None if request.is_cut else _work_spans(request, runs, times, scheduled, seen)
    if work is not None:
        _add_phases(row, request, work, seen)
    return row


def _giving_runs(request: OpenRequest, runs: Sequence[tuple[int, int, int, int]]) -> list[tuple[int, int, int]]:
    """(first step, stop step, tokens a step) of the runs that gave tokens."""
    found = []
    emits = request.emits or {}
    for kind, first, stop, tokens in runs:
        given = tokens if kind == DECODE else emits.get(first, 0) if kind == PREFILL else 0
        if given > 0:
            found.append((first, stop, given))
    return found


def _token_lists(
    giving: Sequence[tuple[int, int, int]], times: StepTimes
) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.int64] | None]:
    """(instants, tokens in each), one entry a step that gave tokens; None where an instant is not known."""
    import numpy as np

    if not giving:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    instants: list[npt.NDArray[np.int64]] = []
    for first, stop, _ in giving:
        ends = times.ends(first, stop)
        if ends is None:
            return None, None
        instants.append(ends)
    flat = instants[0].copy() if len(instants) == 1 else np.concatenate(instants)
    if all(given == 1 for _, _, given in giving):
        return flat, np.ones(len(flat), dtype=np.int64)
    return flat, np.repeat([given for _, _, given in giving], [len(ends) for ends in instants])


def _work_spans(
    request: OpenRequest,
    runs: Sequence[tuple[int, int, int, int]],
    times: StepTimes,
    scheduled: int | None,
    seen: set[str],
) -> list[Span] | None:
    """Queue and runs as spans that follow each other; None where an instant is not known.

    seen   phases that could be seen, so that their absence is zero and not unknown; more are added here
    """
    if not runs:
        return [Span("queue", request.queued_ns, max(request.end_ns, request.queued_ns))]
    if scheduled is None:
        return None
    spans = [Span("queue", request.queued_ns, scheduled)]
    begin = scheduled
    for kind, first, stop, tokens in runs:
        end = times.end(stop - 1)
        if end is None:
            return None
        if kind == PREFILL:
            alloc_ns, sample_ns = times.alloc_ns(first), times.sample_ns(first)
            seen.update(name for name, ns in (("alloc", alloc_ns), ("first_sample", sample_ns)) if ns is not None)
            sampling_ns = (sample_ns or 0) if request.emits and request.emits.get(first) else 0
            spans += _prefill_spans(begin, end, alloc_ns or 0, sampling_ns, tokens)
        elif kind == DECODE:
            spans.append(Span("decode", begin, end, tokens * (stop - first)))
        else:
            spans.append(Span("stalled", begin, end))
        begin = end
    return spans


def _prefill_spans(begin: int, end: int, alloc_ns: int, sample_ns: int, tokens: int) -> list[Span]:
    """One prompt chunk: allocation first, then the computation, then (where it gives a token) sampling."""
    sampled = max(end - sample_ns, begin)
    allocated = min(begin + alloc_ns, sampled)
    spans = [Span("prefill", allocated, sampled, tokens)]
    if allocated > begin:
        spans.insert(0, Span("alloc", begin, allocated))
    if end > sampled:
        spans.append(Span("first_sample", sampled, end))
    return spans


def _add_phases(row: RequestRow, request: OpenRequest, work: list[Span], seen: set[str]) -> None:
    columns = row.columns
    arrival, end = columns["arrival_ns"], columns["end_ns"]
    first = min(max(columns.get("first_token_ns", end), arrival), end)
    last = min(max(columns.get("last_token_ns", end), first), end)
    spans = work + [Span(*span) for span in request.spans or ()]
    if "first_token_ns" in columns:
        seen.add("tail")
        spans.append(Span("tail", last, end))
    pieces = disjoint(spans, arrival, first)
    for piece in disjoint(spans, first, end):
        if INDEX[piece.phase] < INDEX["decode"]:
            pieces.append(piece._replace(phase="stalled"))
        elif piece.phase != "unexplained":
            pieces.append(piece)
    columns.update({f"{phase}_s": 0.0 for phase in seen})
    columns.update({f"{phase}_s": seconds for phase, seconds in seconds_by_phase(pieces).items()})
    row.spans = [piece for piece in pieces if piece.phase != "unexplained"]
