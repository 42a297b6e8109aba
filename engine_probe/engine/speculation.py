"""Drafts that were accepted become tokens of their sequences, before the step's own token is taken in.

Invariant: a sequence never gets more than its answer has left, or than blocks hold; what finds no room is drafted again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine_probe.engine.executor import StepPlan, StepResult

if TYPE_CHECKING:
    from engine_probe.engine.engine import Engine


def keep_accepted(engine: Engine, plan: StepPlan, result: StepResult) -> StepResult:
    """The result with what was kept of `result.accepted` [len(plan.decodes)]; sequences, blocks and the recorder know of it."""
    now_ns, kept, size, wasted = engine.clock.monotonic_ns(), [], engine.kv.block_size, result.wasted_slots
    for sequence, accepted in zip(plan.decodes, result.accepted, strict=True):
        more = min(accepted, sequence.num_left - 1, engine.max_context - sequence.num_known - 1)
        while more > 0 and engine.kv.grow(sequence, sequence.num_computed + 1 + more, now_ns) is None:
            more -= 1
        more = max(more, 0)
        if more:
            if wasted is not None:  # told as of one token a sequence
                context = sequence.num_computed + 1
                wasted += -(context + more) % size - -context % size
            sequence.num_computed += more
            sequence.num_output += more
            engine.kv.seal(sequence, now_ns)
        told = sequence.columns
        told["draft_tokens"] = told.get("draft_tokens", 0) + result.num_drafted
        told["accepted_tokens"] = told.get("accepted_tokens", 0) + more
        recorder = engine.flight.recorder
        recorder.decode(sequence.slot, 1 + more)
        recorder.note(sequence.slot, draft_tokens=told["draft_tokens"], accepted_tokens=told["accepted_tokens"])
        kept.append(more)
    engine.flight.drafted(len(kept) * result.num_drafted, sum(kept))
    return replace(result, accepted=kept, wasted_slots=wasted)
