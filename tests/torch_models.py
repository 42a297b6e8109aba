"""Tiny models and a hand-kept block table, to drive the torch executor without the engine."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

import torch

from engine_probe.engine.executor import Chunk, StepPlan, StepResult
from engine_probe.engine.sampling_params import SamplingParams
from engine_probe.engine.sequence import Sequence
from engine_probe.engine.torch_executor.executor import TorchExecutor, TorchOptions
from engine_probe.engine.torch_executor.model_config import ModelConfig

# One thread: the tiny shapes gain nothing from more, and two cores are shared by everything that runs.
torch.set_num_threads(1)

TINY = ModelConfig(
    model_type="llama",
    num_layers=2,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=258,
    max_context=256,
)
"""Its answers differ from token to token; a step takes milliseconds."""

CONFIG_JSON: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 258,
    "max_position_embeddings": 256,
}


def tiny_executor(config: ModelConfig = TINY, seed: int = 0, **options: Any) -> TorchExecutor:
    """A seeded model on the CPU with 64 blocks of 4 tokens."""
    given = {"device": "cpu", "num_blocks": 64, "block_size": 4, "num_host_blocks": 64, **options}
    return TorchExecutor.seeded(config, seed, TorchOptions(**given))


class Tables:
    """Hands out blocks, and gives tokens back to their sequences: what the engine does, in a few lines. last: the result."""

    last: StepResult

    def __init__(self, executor: TorchExecutor) -> None:
        self.executor = executor
        self.free = list(range(executor.num_blocks))
        self.free_host = list(range(executor.num_host_blocks))

    def sequence(self, prompt: Items[int], name: str = "a", number: int = 0, **params: Any) -> Sequence:
        """A new sequence; it holds no block yet."""
        chosen = SamplingParams(**{"max_tokens": 1000, **params})
        return Sequence(name, len(prompt), chosen, 0, token_ids=list(prompt), number=number)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Blocks for that many tokens."""
        size = self.executor.block_size
        while len(sequence.blocks) * size < num_tokens:
            sequence.blocks.append(self.free.pop())

    def drop(self, sequence: Sequence) -> None:
        """Preempt: its blocks are free, its KV is gone, its tokens stay."""
        self.free += sequence.blocks
        sequence.blocks = []
        sequence.num_computed = 0

    def step(
        self, decodes: Items[Sequence] = (), chunks: Items[tuple[Sequence, int]] = (), **moves: Any
    ) -> dict[str, int]:
        """Compute pending tokens: one of each decode, so many of each chunk. The tokens that came out, by request id."""
        plan = StepPlan(decodes=list(decodes), **moves)
        for sequence in decodes:
            self.grow(sequence, sequence.num_computed + 1)
        for sequence, count in chunks:
            self.grow(sequence, sequence.num_computed + count)
            plan.prefills.append(Chunk(sequence, sequence.num_computed, count, emits=sequence.num_pending == count))
        result = self.last = self.executor.execute(plan)
        for sequence, count in [*((one, 1) for one in decodes), *chunks]:
            sequence.num_computed += count
        assert result.tokens is not None
        for sequence, token in zip(plan.emitting, result.tokens, strict=True):
            sequence.token_ids.append(token)
            sequence.num_output += 1
        return {sequence.request_id: token for sequence, token in zip(plan.emitting, result.tokens, strict=True)}

    def finish(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Run it alone until it has put out that many tokens; those tokens."""
        while sequence.num_output < num_tokens:
            if sequence.num_pending == 1:
                self.step([sequence])
            else:
                self.step(chunks=[(sequence, sequence.num_pending)])
        return sequence.token_ids[sequence.num_prompt :]


def alone(executor: TorchExecutor, prompt: Items[int], num_tokens: int, **params: Any) -> list[int]:
    """What the model answers when nothing else runs and the prompt is computed at once."""
    tables = Tables(executor)
    return tables.finish(tables.sequence(prompt, **params), num_tokens)


def with_heads(num_heads: int, num_kv_heads: int, **more: Any) -> ModelConfig:
    """TINY with another head layout."""
    return replace(TINY, num_heads=num_heads, num_kv_heads=num_kv_heads, **more)
