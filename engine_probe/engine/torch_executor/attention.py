"""Attention of a packed batch over paged KV, in plain torch: what runs on a CPU.

Every row attends to the positions up to its own of its own sequence, read through the block table. Decodes of alike
length are gathered and padded together, a query group riding as rows so that shared KV heads are not repeated; a prefill
chunk is done in runs of queries, so that a mask is never larger than `QUERY_RUN` rows. The indices and masks of a step
are made once and used by all layers. Oracle: `kernels/reference.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine_probe.engine.torch_executor.batch import PackedBatch

QUERY_RUN = 256

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(queries [N, num_heads, head_dim], key cache, value cache of one layer) -> [N, num_heads, head_dim]"""


class Attention(Protocol):
    """A way to compute attention over paged KV."""

    name: str

    def prepare(self, batch: PackedBatch) -> Attend:
        """What one step does, for each layer to call."""

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor
    ) -> None:
        """Put keys and values [N, num_kv_heads, head_dim] into their slots [N] of one layer's caches."""


class TorchAttention:
    """Plain torch; any device."""

    name = "torch"

    def prepare(self, batch: PackedBatch) -> Attend:
        runs: list[_DecodeRun | _PrefillRun] = [*_decode_runs(batch), *_prefill_runs(batch)]

        def attend(queries: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> torch.Tensor:
            first = runs[0]
            if isinstance(first, _DecodeRun) and len(runs) == 1:
                return first.answers(queries, key_cache, value_cache)
            out = torch.empty_like(queries)
            for run in runs:
                run(out, queries, key_cache, value_cache)
            return out

        return attend

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor
    ) -> None:
        for new, held in zip((keys, values), caches, strict=True):
            held.view(-1, *held.shape[2:]).index_copy_(0, slots, new)


@dataclass(frozen=True, slots=True)
class _DecodeRun:
    """Decodes whose contexts need alike many blocks.

    rows [n] of the batch; blocks [n * width]; mask [n, 1, 1, width * block_size], None where every slot is seen
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    mask: torch.Tensor | None
    length: int

    def __call__(
        self, out: torch.Tensor, queries: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> None:
        out.index_copy_(0, self.rows, self.answers(queries.index_select(0, self.rows), key_cache, value_cache))

    def answers(self, queries: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> torch.Tensor:
        """For queries [n, num_heads, head_dim] of its rows."""
        keys, values = (self._gather(cache) for cache in (key_cache, value_cache))
        # [n, kv_heads, group, head_dim]: the heads of a group are rows over the same keys.
        grouped = queries.reshape(*keys.shape[:2], -1, queries.shape[-1])
        found = scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask)
        return found.reshape(queries.shape)

    def _gather(self, cache: torch.Tensor) -> torch.Tensor:
        """[n, num_kv_heads, length, head_dim]."""
        found = cache.view(cache.shape[0], -1).index_select(0, self.blocks)
        return found.view(self.rows.shape[0], -1, *cache.shape[2:])[:, : self.length].transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _PrefillRun:
    """Consecutive queries of one chunk.

    rows [first, last) of the batch; blocks [width]; length: positions seen by the last query
    mask [rows, length], None where the run is the whole context and the causal mask does
    """

    first: int
    last: int
    blocks: torch.Tensor
    length: int
    mask: torch.Tensor | None

    def __call__(
        self, out: torch.Tensor, queries: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> None:
        keys, values = (self._gather(cache) for cache in (key_cache, value_cache))
        asked = queries[self.first : self.last].transpose(0, 1).unsqueeze(0)
        found = scaled_dot_product_attention(
            asked, keys, values, attn_mask=self.mask, is_causal=self.mask is None, enable_gqa=True
        )
        out[self.first : self.last] = found[0].transpose(0, 1)

    def _gather(self, cache: torch.Tensor) -> torch.Tensor:
        """[1, num_kv_heads, length, head_dim]."""
        found = cache.view(cache.shape[0], -1).index_select(0, self.blocks)
        return found.view(-1, *cache.shape[2:])[: self.length].transpose(0, 1).unsqueeze(0)


def _decode_runs(batch: PackedBatch) -> Iterator[_DecodeRun]:
    """One run for each power of two of blocks, so that padding at most doubles what is read."""
    alike: defaultdict[int, list[int]] = defaultdict(list)
    widths = [-(-context // batch.block_size) for context in batch.contexts[: batch.num_decodes]]
    for row, width in enumerate(widths):
        alike[(width - 1).bit_length()].append(row)
    device = batch.block_tables.device
    for found in alike.values():
        rows = torch.tensor(found, device=device)
        width = max(widths[row] for row in found)
        blocks = batch.block_tables[rows, :width].clamp_min(0).flatten().long()
        length = max(batch.contexts[row] for row in found)
        mask = None
        if min(batch.contexts[row] for row in found) < length:
            seen = torch.arange(length, device=device) < batch.context_lens[rows].unsqueeze(1)
            mask = seen.view(len(found), 1, 1, length)
        yield _DecodeRun(rows, blocks, mask, length)


def _prefill_runs(batch: PackedBatch) -> Iterator[_PrefillRun]:
    first = batch.num_decodes
    longest = max(batch.contexts[batch.num_decodes :], default=0)
    most_rows = min(QUERY_RUN, max(batch.query_lens[batch.num_decodes :], default=0))
    causal = _causal(most_rows, longest, batch.block_tables.device)
    for index in range(batch.num_decodes, len(batch.query_lens)):
        count, context = batch.query_lens[index], batch.contexts[index]
        for at in range(0, count, QUERY_RUN):
            rows = min(QUERY_RUN, count - at)
            length = context - count + at + rows
            blocks = batch.block_tables[index, : -(-length // batch.block_size)].long()
            mask = None
            if rows < length:
                mask = causal[:rows, longest - (length - rows) :][:, :length]
            yield _PrefillRun(first + at, first + at + rows, blocks, length, mask)
        first += count


def _causal(most_rows: int, longest: int, device: torch.device) -> torch.Tensor:
    """[most_rows, longest + QUERY_RUN]: row r sees the columns up to r + longest. Masks of all runs are views of it."""
    rows = torch.arange(most_rows, device=device).unsqueeze(1)
    return torch.arange(longest + QUERY_RUN, device=device) <= rows + longest
