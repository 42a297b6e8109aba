"""Disjoint phases of a request: what it spent each moment on, every moment counted once.

Where spans overlap, the moment belongs to the phase that comes first in `events.PHASES`; what no span covers is
`unexplained`. Invariant: the phases of an interval sum to its length (integer nanoseconds inside, so to 1e-9 s outside).
Source: design section 3.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter, itemgetter
from typing import Final, NamedTuple

from engine_probe.events import PHASES

INDEX: Final = {phase: position for position, phase in enumerate(PHASES)}
_UNEXPLAINED: Final = INDEX["unexplained"]


class Span(NamedTuple):
    """A stretch of one phase, [start_ns, end_ns). tokens: computed or generated in it; None where that means nothing."""

    phase: str
    start_ns: int
    end_ns: int
    tokens: int | None = None


def disjoint(spans: Iterable[Span], start_ns: int, end_ns: int) -> list[Span]:
    """Spans that tile [start_ns, end_ns) exactly, in order of time, the residue as `unexplained`.

    Neighbours that come from the same span are one piece; tokens stay with a span's first piece. Raises KeyError for a
    phase that the contract does not know.
    """
    whole = sorted(spans, key=_start)
    apart = _apart(whole, start_ns, end_ns)
    return tiled(whole, start_ns, end_ns) if apart is None else apart


def _apart(whole: list[Span], start_ns: int, end_ns: int) -> list[Span] | None:
    """As `disjoint`, of spans that do not overlap, as most do not; None where two do."""
    pieces: list[Span] = []
    cursor = start_ns
    for phase, start, end, tokens in whole:
        start, end = max(start, start_ns), min(end, end_ns)
        if start >= end:
            continue
        if start < cursor:
            return None
        if start > cursor:
            pieces.append(Span("unexplained", cursor, start))
        pieces.append(Span(PHASES[INDEX[phase]], start, end, tokens))
        cursor = end
    if cursor < end_ns:
        pieces.append(Span("unexplained", cursor, end_ns))
    return pieces


def tiled(whole: list[Span], start_ns: int, end_ns: int) -> list[Span]:
    """As `disjoint`, of any spans: what begins and ends is walked through in order of time."""
    edges: list[tuple[int, int, int]] = []
    for number, (phase, start, end, _) in enumerate(whole):
        start, end = max(start, start_ns), min(end, end_ns)
        if start < end:
            edges += ((start, INDEX[phase], number), (end, INDEX[phase], -1 - number))
    edges.sort(key=_instant)
    open_spans: list[tuple[int, int]] = []
    pieces: list[Span] = []
    tokens_told: set[int] = set()
    last_number = -2
    position, cursor = 0, start_ns
    while cursor < end_ns:
        while position < len(edges) and edges[position][0] <= cursor:
            _, phase_index, number = edges[position]
            if number >= 0:
                open_spans.append((phase_index, number))
            else:
                open_spans.remove((phase_index, -1 - number))
            position += 1
        until = edges[position][0] if position < len(edges) else end_ns
        # The phase that comes first; of one phase the span that began first.
        owner, number = min(open_spans) if open_spans else (_UNEXPLAINED, -1)
        if pieces and number == last_number:
            pieces[-1] = pieces[-1]._replace(end_ns=until)
        else:
            tokens = whole[number].tokens if number >= 0 and number not in tokens_told else None
            tokens_told.add(number)
            pieces.append(Span(PHASES[owner], cursor, until, tokens))
            last_number = number
        cursor = until
    return pieces


_instant = itemgetter(0)
_start = attrgetter("start_ns")


def seconds_by_phase(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds of each phase that occurs, summed over its spans (which are taken as disjoint)."""
    nanoseconds: dict[str, int] = {}
    for phase, start, end, _ in spans:
        nanoseconds[phase] = nanoseconds.get(phase, 0) + end - start
    return {phase: total / 1e9 for phase, total in nanoseconds.items()}


def phases_to_first_token(spans: Iterable[Span], arrival_ns: int, first_token_ns: int) -> dict[str, float]:
    """Seconds by phase from arrival to first token, `unexplained` included; they sum to the time to first token."""
    return seconds_by_phase(disjoint(spans, arrival_ns, first_token_ns))
