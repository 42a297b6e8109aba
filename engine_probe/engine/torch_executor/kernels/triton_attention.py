"""Attention of a packed batch with the Triton kernels: what runs on CUDA."""

from __future__ import annotations

import torch

from engine_probe.engine.torch_executor.attention import Attend
from engine_probe.engine.torch_executor.batch import PackedBatch
from engine_probe.engine.torch_executor.kernels.chunked_prefill import chunked_prefill, tiles
from engine_probe.engine.torch_executor.kernels.kv_write import write_kv
from engine_probe.engine.torch_executor.kernels.paged_decode import paged_decode


class TritonAttention:
    """Decodes by `paged_decode`, chunks by `chunked_prefill`; under TRITON_INTERPRET=1 on a CPU as well."""

    name = "triton"

    def prepare(self, batch: PackedBatch) -> Attend:
        num_decodes = batch.num_decodes
        longest = max(batch.contexts[:num_decodes], default=0)
        chunk_lens = batch.query_lens[num_decodes:]
        listed = tiles(chunk_lens, num_decodes, batch.token_ids.device) if chunk_lens else None

        def attend(queries: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> torch.Tensor:
            out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
            if num_decodes:
                out[:num_decodes] = paged_decode(
                    queries[:num_decodes],
                    key_cache,
                    value_cache,
                    batch.block_tables[:num_decodes],
                    batch.context_lens[:num_decodes],
                    longest,
                )
            if listed is not None:
                chunked_prefill(
                    queries,
                    key_cache,
                    value_cache,
                    batch.block_tables,
                    batch.query_starts,
                    batch.context_lens,
                    listed,
                    out,
                )
            return out

        return attend

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor
    ) -> None:
        write_kv(keys, values, *caches, slots)
