"""What the engine's thread notes of one request while it lives: where a run of steps began, and of what kind.

Idea: while a request decodes one token a step, nothing is noted at all. Only changes are: (step, kind, tokens). The flush
thread unfolds them with the steps' instants. A prompt chunk holds for its own step; decode and stall hold until the
next change.
"""

from __future__ import annotations

from typing import Any, Final

PREFILL: Final = 0
DECODE: Final = 1
STALL: Final = 2

MAX_CHANGES: Final = 3 * 8192
"""Numbers noted of one request at most, three a change (about 0.4 MB). One that changes more often loses its tokens."""


class OpenRequest:
    """A request that has not ended. Written by the engine's thread; others may look, and see it a moment old.

    changes     flat: step, kind, tokens, step, kind, tokens, ...
    spans       (phase, start_ns, end_ns, tokens) that the engine measured itself, monotonic
    columns     columns of the contract that the engine told
    emits       steps (of prompt chunks) that also gave tokens: step -> tokens
    is_cut      it changed more often than is noted: where its tokens went is unknown
    """

    __slots__ = (
        "arrival_ns",
        "changes",
        "columns",
        "emits",
        "end_ns",
        "is_cut",
        "is_kept",
        "num_preemptions",
        "prefill_chunks",
        "queued_ns",
        "recomputed_tokens",
        "request_id",
        "spans",
        "state",
        "stop_step",
        "waiting_since_ns",
    )

    def __init__(
        self, request_id: str, arrival_ns: int, queued_ns: int, columns: dict[str, Any], is_kept: bool
    ) -> None:
        self.request_id = request_id
        self.arrival_ns = arrival_ns
        self.queued_ns = queued_ns
        self.waiting_since_ns: int | None = queued_ns
        self.columns = columns
        self.is_kept = is_kept
        self.is_cut = False
        self.changes: list[int] = []
        self.emits: dict[int, int] | None = None
        self.spans: list[tuple[str, int, int, int | None]] | None = None
        self.num_preemptions = 0
        self.prefill_chunks = 0
        self.recomputed_tokens = 0
        self.state = "queued"
        self.stop_step = 0
        self.end_ns = 0

    @property
    def first_step(self) -> int | None:
        """The first step that worked on it."""
        return self.changes[0] if self.changes else None

    def runs(self) -> list[tuple[int, int, int, int]]:
        """(kind, first step, stop step, tokens a step) in order, gaps after prompt chunks as stalls, empty runs left out."""
        changes = self.changes
        found: list[tuple[int, int, int, int]] = []
        for at in range(0, len(changes), 3):
            step, kind, tokens = changes[at : at + 3]
            until = changes[at + 3] if at + 3 < len(changes) else self.stop_step
            if kind == PREFILL:
                stop = min(step + 1, self.stop_step)
                if stop > step:
                    found.append((PREFILL, step, stop, tokens))
                if until > stop:
                    found.append((STALL, stop, until, 0))
                continue
            if found and step < found[-1][2]:
                # A decode that was told in the step of the last prompt chunk begins after it.
                step = found[-1][2]
            if until > step:
                found.append((kind, step, until, tokens))
        return found
