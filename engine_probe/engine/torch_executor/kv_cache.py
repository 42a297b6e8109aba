"""Keys and values in paged blocks, and the moves of whole blocks that a step may ask for before it computes.

Layout: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]; index 1 is 0 for keys, 1 for values. A block of
all layers moves in one indexed copy. Host blocks have the same layout and are pinned where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine_probe.engine.torch_executor.model_config import ModelConfig
from engine_probe.errors import DeviceMissing

Moves = Sequence[tuple[int, int]]


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """2 x layers x KV heads x head_dim x block_size x bytes of an element."""
    return 2 * config.num_layers * config.kv_size * block_size * dtype.itemsize


class KvCache:
    """Device blocks of all layers, and host blocks to swap to (made at the first swap)."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self._shape = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self._host: torch.Tensor | None = None
        try:
            self._blocks = torch.zeros(self._shape, dtype=dtype, device=device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            size = num_blocks * bytes_per_block(config, block_size, dtype)
            raise DeviceMissing(
                f"{device} has no room for {num_blocks} KV blocks ({size} bytes); ask for fewer", size_bytes=size
            ) from error
        self._layers = [(layer[0], layer[1]) for layer in self._blocks]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each [num_blocks, block_size, num_kv_heads, head_dim]."""
        return self._layers[index]

    def copy(self, moves: Moves) -> None:
        """Device block to device block, as if one after the other."""
        targets: set[int] = set()
        pending: list[tuple[int, int]] = []
        for source, target in moves:
            if source in targets:  # it reads what an earlier move of this step wrote
                self._copy_at_once(pending)
                pending, targets = [], set()
            pending.append((source, target))
            targets.add(target)
        self._copy_at_once(pending)

    def swap_out(self, moves: Moves) -> None:
        """(device block, host block): device to host."""
        if moves:
            device, host = self._split(moves)
            host_blocks = self._host_blocks()
            host_blocks[:, :, host] = self._blocks[:, :, device.to(self._blocks.device)].to(host_blocks.device)

    def swap_in(self, moves: Moves) -> None:
        """(device block, host block): host to device."""
        if moves:
            device, host = self._split(moves)
            found = self._host_blocks()[:, :, host]
            self._blocks[:, :, device.to(self._blocks.device)] = found.to(self._blocks.device)

    def _copy_at_once(self, moves: Moves) -> None:
        if moves:
            source, target = (part.to(self._blocks.device) for part in self._split(moves))
            self._blocks[:, :, target] = self._blocks[:, :, source]

    def _split(self, moves: Moves) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = torch.tensor(moves, dtype=torch.int64)
        return pairs[:, 0], pairs[:, 1]

    def _host_blocks(self) -> torch.Tensor:
        if self._host is None:
            shape = (*self._shape[:2], self.num_host_blocks, *self._shape[3:])
            pinned = self._blocks.device.type == "cuda"
            self._host = torch.zeros(shape, dtype=self._blocks.dtype, pin_memory=pinned)
        return self._host
