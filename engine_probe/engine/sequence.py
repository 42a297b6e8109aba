"""One request inside the engine: what it is, how far its KV is computed, which blocks it holds.

Invariant: the KV of tokens [0, num_computed) lies in `blocks`; `num_known` tokens exist (prompt and output so far); the
next token is chosen in the step that brings num_computed up to num_known. So prefill, a chunk of it, decode and the
recomputation after a preemption are one thing: compute [num_computed, num_computed + n).
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from engine_probe.engine.name_book import Numbers
from engine_probe.engine.sampling_params import SamplingParams
from engine_probe.recording.recorder import NO_SLOT

NO_NAMES: Numbers = np.empty(0, dtype=np.int64)


class State(Enum):
    """Where a sequence is.

    WAITING for the first time; PREEMPTED and SWAPPED to go on; FORKING for a sibling to compute the prompt they share.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    FORKING = "forking"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence of tokens under way.

    token_ids      prompt and output so far; empty where tokens are only counted (virtual time)
    prompt_hashes  [num_prompt // block_size] chain hashes of the full prompt blocks; made from token_ids where those exist
    root           parent hash of its first block (model, dtype, LoRA, ...: `kv_identity.py`)
    cache_salt     what of the request entered `root`: another value shares no block; None: nothing
    columns        of its `request` row that are known from outside
    early_spans    (phase, start_ns, end_ns) before it began to wait: frontend, tokenize
    blocks         block table: physical block of logical block i
    forks          siblings of the same prompt that will begin from its blocks; forked_from: the other way round
    is_forked      it shares the block that it writes next
    num_cached     prompt tokens whose KV it found in the cache when it was first scheduled, at `scheduled_ns`
    num_ever_computed   tokens whose KV it had before it gave way
    names          numbers of the names of its blocks, as far as they were asked for (`name_book.py`)
    num_sealed     leading blocks that have their hash and may be found by others
    slot           of the recorder
    """

    request_id: str
    num_prompt: int
    params: SamplingParams
    arrival_ns: int
    token_ids: list[int] = field(default_factory=list)
    prompt_hashes: Items[int] = ()
    root: int = 0
    cache_salt: str | None = None
    priority: int = 0
    tenant: str | None = None
    deadline_ns: int | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    early_spans: Items[tuple[str, int, int]] = ()

    state: State = State.WAITING
    number: int = 0
    num_computed: int = 0
    num_output: int = 0
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    names: Numbers = field(default_factory=lambda: NO_NAMES)
    num_sealed: int = 0
    num_preemptions: int = 0
    num_ever_computed: int = 0
    num_cached: int = 0
    scheduled_ns: int | None = None
    waits_since_ns: int = 0
    is_decoding: bool = False
    is_forked: bool = False
    forks: list[Sequence] = field(default_factory=list)
    forked_from: Sequence | None = None
    slot: int = NO_SLOT
    finish_reason: str | None = None

    @property
    def num_known(self) -> int:
        """Tokens that exist: prompt and output so far."""
        return self.num_prompt + self.num_output

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is missing; 1 while it decodes."""
        return self.num_prompt + self.num_output - self.num_computed

    @property
    def is_in_prompt(self) -> bool:
        """What it computes next is a prompt's (or a preemption's) tokens, be it the last one alone, and no decode.

        Not so where siblings are about to part: each computes the last token when it has a block of its own to write.
        """
        computed = self.num_computed
        return self.num_prompt + self.num_output - computed > 1 or (computed < self.num_prompt and not self.is_forked)

    @property
    def num_left(self) -> int:
        """Output tokens still allowed."""
        return self.params.max_tokens - self.num_output
