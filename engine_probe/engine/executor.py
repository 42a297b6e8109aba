"""What the engine asks of an executor: compute one step's tokens, say how long it took.

Two follow this protocol: `torch_executor` (real tensors) and `roofline` (virtual time). The engine never looks inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine_probe.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute the KV of tokens [start, start + num_tokens) of `sequence`.

    emits            its last token is the last that is known: choose the next
    num_recomputed   of num_tokens, those that were computed before and lost
    """

    sequence: Sequence
    start: int
    num_tokens: int
    emits: bool
    num_recomputed: int = 0


@dataclass(slots=True)
class StepPlan:
    """The work of one step. Blocks of every chunk and decode are allocated already.

    decodes    each computes its one pending token at position num_computed and emits the next
    prefills   chunks of prompts (and of what preemption threw away)
    copies     (from, to): device blocks to copy before anything is written (copy-on-write)
    swap_out, swap_in   (device block, host block) to move before anything is written, all swap_out first
    """

    decodes: list[Sequence] = field(default_factory=list)
    prefills: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.decodes or self.prefills or self.swap_out or self.swap_in)

    @property
    def emitting(self) -> list[Sequence]:
        """Sequences that get a token: first the decodes, then the prefills that reach their end, in the plan's order."""
        return [*self.decodes, *(chunk.sequence for chunk in self.prefills if chunk.emits)]


@dataclass(frozen=True, slots=True)
class StepResult:
    """tokens [len(plan.emitting)] chosen token ids, in that order; None where tokens are only counted.

    forward_s, sample_s   s; NaN where not measured apart
    load_s                moving KV between host and device, s
    checks                columns of `check` rows, where the packed batch of this step was checked
    num_drafted, accepted   drafts of each decode that this step verified; [len(plan.decodes)] of them, accepted. Nothing: it did not speculate
    max_seq_len, wasted_slots   longest context of the batch, tokens; slots of its last blocks that hold no token; None: not told
    """

    tokens: Items[int] | None
    forward_s: float = float("nan")
    sample_s: float = float("nan")
    load_s: float = 0.0
    checks: Items[Mapping[str, Any]] = ()
    max_seq_len: int | None = None
    wasted_slots: int | None = None
    num_drafted: int = 0
    accepted: Items[int] = ()


class Executor(Protocol):
    """Computes steps. Not thread-safe: one engine loop owns it."""

    @property
    def num_blocks(self) -> int:
        """Usable KV blocks."""

    @property
    def max_context(self) -> int:
        """Longest sequence, tokens."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens with which the model ends its text; empty where tokens are only counted."""

    @property
    def worker_facts(self) -> Mapping[str, object]:
        """Columns of a `worker` row that it knows: model, dtype, kv_bytes_per_block, weights_bytes, tp, ..."""

    def refusal(self, num_tokens: int, context: int) -> str | None:
        """Why a prompt of `context` tokens, computed `num_tokens` at a time, can never run here; None where it can."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Do the step."""

    def foresee(self, decodes: Items[Sequence], most: int) -> tuple[list[int], list[float]] | None:
        """ns and forward_s of each of the next `most` steps, should they decode these and nothing else.

        None where that is not known before they are done.
        """

    def close(self) -> None:
        """Give memory back."""
