"""The tensors of one step: all its tokens in one row, and what keeps its sequences apart.

Invariant: decodes come first, one token each, then the prefill chunks; the token at row r of sequence s has position
context_lens[s] - query_lens[s] + (r - query_starts[s]), is written to its own slot, and sees the positions up to its own
of s alone. `checks.py` proves it for a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine_probe.engine.executor import StepPlan
from engine_probe.engine.sequence import Sequence

NO_BLOCK = -1


@dataclass(slots=True)
class PackedBatch:
    """One step, packed. N tokens of S sequences, E of which emit.

    token_ids, positions, slots  [N] int64; slot = block * block_size + offset of where the token's KV goes
    query_starts   [S + 1] int32, first row of each sequence; its last entry is N
    context_lens   [S] int32, tokens of the sequence whose KV exists after the step
    block_tables   [S, max_blocks] int32, NO_BLOCK past the last block
    emit_rows      [E] int64, rows whose next token is chosen
    query_lens, contexts, num_decodes: the same on the host
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    emit_rows: torch.Tensor
    query_lens: list[int]
    contexts: list[int]
    num_decodes: int
    block_size: int

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])


def segments(plan: StepPlan) -> list[tuple[Sequence, int, int]]:
    """(sequence, first position, number of tokens) in the order in which they are packed."""
    decodes = [(sequence, sequence.num_computed, 1) for sequence in plan.decodes]
    return [*decodes, *((chunk.sequence, chunk.start, chunk.num_tokens) for chunk in plan.prefills)]


def pack(plan: StepPlan, block_size: int, device: torch.device) -> PackedBatch:
    """Pack the plan's decodes and chunks; there is at least one."""
    parts = segments(plan)
    query_lens = [count for _, _, count in parts]
    contexts = [start + count for _, start, count in parts]
    starts = np.cumsum([0, *query_lens], dtype=np.int32)
    widths = [-(-context // block_size) for context in contexts]
    tables = np.full((len(parts), max(widths)), NO_BLOCK, dtype=np.int32)
    token_ids = np.empty(starts[-1], dtype=np.int64)
    positions = np.empty(starts[-1], dtype=np.int64)
    slots = np.empty(starts[-1], dtype=np.int64)
    for index, (sequence, start, count) in enumerate(parts):
        assert widths[index] <= len(sequence.blocks), f"{sequence.request_id} computes past its blocks"
        assert start + count <= len(sequence.token_ids), f"{sequence.request_id} computes tokens that do not exist"
        tables[index, : widths[index]] = sequence.blocks[: widths[index]]
        rows = slice(starts[index], starts[index + 1])
        token_ids[rows] = sequence.token_ids[start : start + count]
        own = np.arange(start, start + count)
        positions[rows] = own
        slots[rows] = tables[index, own // block_size].astype(np.int64) * block_size + own % block_size
    emits = [True] * len(plan.decodes) + [chunk.emits for chunk in plan.prefills]
    emit_rows = starts[1:][np.array(emits, dtype=bool)].astype(np.int64) - 1

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return PackedBatch(
        token_ids=tensor(token_ids),
        positions=tensor(positions),
        slots=tensor(slots),
        query_starts=tensor(starts),
        context_lens=tensor(np.array(contexts, dtype=np.int32)),
        block_tables=tensor(tables),
        emit_rows=tensor(emit_rows),
        query_lens=query_lens,
        contexts=contexts,
        num_decodes=len(plan.decodes),
        block_size=block_size,
    )
