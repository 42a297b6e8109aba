"""The decoder: embedding, layers of attention and SwiGLU with RMSNorm before each, final norm, head.

All tokens of a step are one batch for the linears; attention alone knows which belong together. Source: Touvron et al.
2023 (Llama); names and order of operations as in Hugging Face `modeling_llama.py`, `modeling_qwen2.py`, `modeling_qwen3.py`.
"""

from __future__ import annotations

import torch
from torch.nn.functional import rms_norm, silu

from engine_probe.engine.torch_executor.attention import Attend, Attention
from engine_probe.engine.torch_executor.batch import PackedBatch
from engine_probe.engine.torch_executor.kv_cache import KvCache
from engine_probe.engine.torch_executor.model_config import ModelConfig
from engine_probe.engine.torch_executor.rope import rotate, rotation_table
from engine_probe.engine.torch_executor.weights import LayerWeights, Weights


class Decoder:
    """One model on one device."""

    def __init__(self, config: ModelConfig, weights: Weights, attention: Attention, num_positions: int) -> None:
        """num_positions: longest sequence it will see."""
        self.config = config
        self._weights = weights
        self._attention = attention
        self._turns = rotation_table(config.rope, config.head_dim, num_positions, weights.embedding.device)

    def hidden_states(self, batch: PackedBatch, cache: KvCache) -> torch.Tensor:
        """Compute every token of the batch, writing its KV; [E, hidden_size] of the rows that emit, after the last norm."""
        attend = self._attention.prepare(batch)
        turn = self._turns[batch.positions]
        hidden = self._weights.embedding[batch.token_ids]
        for index, layer in enumerate(self._weights.layers):
            hidden = hidden + self._attended(hidden, layer, turn, attend, cache.layer(index), batch.slots)
            hidden = hidden + self._fed_forward(hidden, layer)
        return self._norm(hidden[batch.emit_rows], self._weights.norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[E, vocab_size] float32."""
        return self._weights.head(hidden).float()

    # Two functions, so that what one part of a layer held is free while the other computes.

    def _attended(
        self,
        hidden: torch.Tensor,
        layer: LayerWeights,
        turn: torch.Tensor,
        attend: Attend,
        caches: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
    ) -> torch.Tensor:
        queries, keys, values = self._heads(self._norm(hidden, layer.input_norm), layer, turn)
        self._attention.write(keys, values, caches, slots)
        del keys, values
        return layer.output(attend(queries, *caches).view(-1, self.config.query_size))

    def _fed_forward(self, hidden: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        gate, up = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, dim=-1)
        return layer.down(silu(gate) * up)

    def _heads(
        self, normed: torch.Tensor, layer: LayerWeights, turn: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [N, num_heads, head_dim], keys and values [N, num_kv_heads, head_dim]; positions turned in."""
        config = self.config
        heads = layer.qkv(normed).view(normed.shape[0], -1, config.head_dim)
        split = config.num_heads + config.num_kv_heads
        turned, values = heads[:, :split], heads[:, split:]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries = self._norm(turned[:, : config.num_heads], layer.query_norm)
            keys = self._norm(turned[:, config.num_heads :], layer.key_norm)
            turned = torch.cat([queries, keys], dim=1)
        turned = rotate(turned, turn)
        return turned[:, : config.num_heads], turned[:, config.num_heads :], values

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight.shape, weight, self.config.rms_eps)
