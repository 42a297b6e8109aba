"""An executor that computes nothing and takes the time that the computation would: the clock moves, tokens are counted.

Invariant: `foresee` tells of steps that only decode what `execute` will take, to the nanosecond: each sequence's context grows by
one a step, and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt

from engine_probe.engine.executor import StepPlan, StepResult
from engine_probe.engine.roofline.hardware import Hardware
from engine_probe.engine.roofline.memory import activation_bytes, block_bytes_on_rank, plan_memory
from engine_probe.engine.roofline.model_shape import ModelShape
from engine_probe.engine.roofline.step_time import StepTime, causal_pairs
from engine_probe.engine.sequence import Sequence
from engine_probe.engine.virtual_clock import VirtualClock
from engine_probe.errors import UsageError

NO_TOKENS: frozenset[int] = frozenset()


class RooflineExecutor:
    """One engine's device (or tensor-parallel group) in virtual time.

    num_blocks   None: as many as the memory holds (`memory.py`)
    max_context  None: what the config allows and the blocks hold
    slow_factor  every step takes so many times as long; may be set while it runs (a straggler)
    """

    def __init__(
        self,
        shape: ModelShape,
        hardware: Hardware,
        clock: VirtualClock,
        *,
        tp: int = 1,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_context: int | None = None,
        gpu_memory_utilization: float = 0.9,
        max_batch_tokens: int = 8192,
        max_seqs: int = 256,
        slow_factor: float = 1.0,
    ) -> None:
        self.times = StepTime(shape, hardware, tp=tp)
        self.clock = clock
        self.slow_factor = slow_factor
        self.block_bytes = block_bytes_on_rank(shape, block_size, tp)
        if num_blocks is None:
            num_blocks = plan_memory(
                shape,
                hardware,
                tp=tp,
                block_size=block_size,
                gpu_memory_utilization=gpu_memory_utilization,
                max_batch_tokens=max_batch_tokens,
                max_seqs=max_seqs,
            ).num_blocks
        if num_blocks < 1:
            raise UsageError(f"an engine of {num_blocks} KV blocks can hold no token", num_blocks=num_blocks)
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_context = min(max_context or shape.max_context or num_blocks * block_size, num_blocks * block_size)
        self._windows = [(layers / shape.layers, window) for layers, window in shape.windows]
        self._has_windows = any(window is not None for _, window in self._windows)
        self._move_s = self.block_bytes / hardware.host_bytes_per_s
        self._copy_s = 2 * self.block_bytes / hardware.bytes_per_s
        self._activation_bytes = activation_bytes(shape, max_batch_tokens, max_seqs, tp=tp)
        self._fixed_of_batch: dict[int, float] = {}

    @property
    def num_blocks(self) -> int:
        """Usable KV blocks."""
        return self._num_blocks

    @property
    def max_context(self) -> int:
        """Longest sequence, tokens."""
        return self._max_context

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """None: tokens are only counted."""
        return NO_TOKENS

    @property
    def worker_facts(self) -> Mapping[str, object]:
        """Columns of a `worker` row; bytes are of one rank, gpu_id names the hardware that is modelled."""
        shape = self.times.shape
        return {
            "model": shape.name,
            "dtype": shape.dtype,
            "kv_dtype": shape.kv_dtype,
            "kv_bytes_per_block": self.block_bytes,
            "weights_bytes": -(-shape.weights_bytes // self.times.tp),
            "activation_peak_bytes": self._activation_bytes,
            "gpu_id": f"virtual-{self.times.hardware.name}",
            "tp": self.times.tp,
            "pp": 1,
            "dp": 1,
        }

    def refusal(self, num_tokens: int, context: int) -> str | None:
        """None: what does not fit into memory at a time is refused by its number of blocks alone."""
        return None

    def close(self) -> None:
        """Nothing is held."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Move the clock by the step's time. forward_s is of it, the host's part left out."""
        moved = len(plan.swap_out) + len(plan.swap_in)
        before_s = moved * self._move_s + len(plan.copies) * self._copy_s
        decodes = plan.decodes
        if plan.prefills:
            step_s = self._mixed_s(plan)
        elif not decodes:
            step_s = self.times.hardware.host_overhead_s
        else:
            step_s = self._fixed_s(len(decodes)) + self._decode_keys(decodes) * self.times.decode_key_s
        slow = self.slow_factor
        self.clock.advance((before_s + step_s) * slow)
        forward_s = (step_s - self.times.hardware.host_overhead_s) * slow
        return StepResult(
            None, forward_s=forward_s, load_s=moved * self._move_s * slow, wasted_slots=self._wasted_slots(plan)
        )

    def foresee(self, decodes: Items[Sequence], most: int) -> tuple[list[int], list[float]] | None:
        """ns and forward_s of each of the next `most` steps, should they decode these and nothing else."""
        # Every operation as in `execute` and `VirtualClock.advance`, in their order: to the nanosecond.
        steps_s = self._fixed_s(len(decodes)) + self._keys_ahead(decodes, most) * self.times.decode_key_s
        slow = self.slow_factor
        forward_s = (steps_s - self.times.hardware.host_overhead_s) * slow
        return np.rint(steps_s * slow * 1e9).astype(np.int64).tolist(), forward_s.tolist()

    def _fixed_s(self, batch: int) -> float:
        """Of a step with so many decodes, what does not grow with their contexts."""
        fixed_s = self._fixed_of_batch.get(batch)
        if fixed_s is None:
            fixed_s = self._fixed_of_batch[batch] = self.times.parts(batch, batch).total_s
        return fixed_s

    def _mixed_s(self, plan: StepPlan) -> float:
        tokens = emitted = len(plan.decodes)
        pairs = keys = 0.0
        for chunk in plan.prefills:
            tokens += chunk.num_tokens
            emitted += chunk.emits
            end = chunk.start + chunk.num_tokens
            if not self._has_windows:
                pairs += chunk.num_tokens * (chunk.start + end + 1) / 2
                keys += end
                continue
            for share, window in self._windows:
                pairs += share * causal_pairs(chunk.start, chunk.num_tokens, window)
                keys += share * (end if window is None else min(end, window + chunk.num_tokens))
        decode_keys = float(self._decode_keys(plan.decodes)) if plan.decodes else 0.0
        return self.times.parts(
            tokens, emitted, decode_keys=decode_keys, prefill_pairs=pairs, prefill_keys=keys
        ).total_s

    def _wasted_slots(self, plan: StepPlan) -> int:
        """Slots of each sequence's last block that hold no token when the step is over."""
        size = self._block_size
        wasted = sum([-(sequence.num_computed + 1) % size for sequence in plan.decodes])
        for chunk in plan.prefills:
            wasted += -(chunk.start + chunk.num_tokens) % size
        return wasted

    def _decode_keys(self, decodes: Items[Sequence]) -> float:
        """Tokens attended to in the next step, summed over sequences, averaged over layers."""
        if not self._has_windows:
            return sum([sequence.num_computed for sequence in decodes]) + len(decodes)
        return float(self._keys_ahead(decodes, 1)[0])

    def _keys_ahead(self, decodes: Items[Sequence], steps: int) -> npt.NDArray[np.float64]:
        """[steps] the same of each of the next steps."""
        if not self._has_windows:
            first = sum([sequence.num_computed for sequence in decodes]) + len(decodes)
            return first + len(decodes) * np.arange(steps, dtype=np.float64)
        seen = np.array([sequence.num_computed for sequence in decodes])[:, None] + 1 + np.arange(steps)[None, :]
        keys = np.zeros(steps)
        for share, window in self._windows:
            keys += share * (seen if window is None else np.minimum(seen, window)).sum(axis=0)
        return keys
