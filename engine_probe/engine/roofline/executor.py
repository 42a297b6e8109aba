"""An executor that computes nothing and takes the time that the computation would: the clock moves, tokens are counted.

Invariant: `max_steps` equal decode steps at once move the clock as far as the same steps one by one (to a nanosecond a step):
each sequence's context grows by one a step, so step k takes first + k * growth, and the sum has a closed form.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

import numpy as np

from engine_probe.engine.executor import StepPlan, StepResult
from engine_probe.engine.roofline.hardware import Hardware
from engine_probe.engine.roofline.memory import activation_bytes, block_bytes_on_rank, plan_memory
from engine_probe.engine.roofline.model_shape import ModelShape
from engine_probe.engine.roofline.step_time import StepTime, causal_pairs, steps_until, total_of_steps
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

    def execute(self, plan: StepPlan, *, max_steps: int = 1, until_ns: int | None = None) -> StepResult:
        """Move the clock by the step's time; a plan of decodes alone by that of up to `max_steps` steps.

        A further step is done where it begins before `until_ns`. forward_s is of all steps done, the host's part left out.
        """
        moved = len(plan.swap_out) + len(plan.swap_in)
        before_s = moved * self._move_s + len(plan.copies) * self._copy_s
        decodes = plan.decodes
        batch = len(decodes)
        steps = 1
        if plan.prefills:
            step_s = self._mixed_s(plan)
        elif not batch:
            step_s = self.times.hardware.host_overhead_s
        elif self._has_windows:
            steps, step_s = self._windowed_steps(decodes, max_steps, self._left_s(until_ns, before_s))
        else:
            fixed_s = self._fixed_of_batch.get(batch)
            if fixed_s is None:
                fixed_s = self._fixed_of_batch[batch] = self.times.parts(batch, batch).total_s
            key_s = self.times.decode_key_s
            first_s = fixed_s + (sum([sequence.num_computed for sequence in decodes]) + batch) * key_s
            if max_steps > 1:
                growth_s = batch * key_s
                steps = max_steps
                if until_ns is not None:
                    steps = steps_until(self._left_s(until_ns, before_s), first_s, growth_s, max_steps)
                step_s = total_of_steps(steps, first_s, growth_s)
            else:
                step_s = first_s
        slow = self.slow_factor
        self.clock.advance((before_s + step_s) * slow)
        forward_s = (step_s - steps * self.times.hardware.host_overhead_s) * slow
        return StepResult(None, forward_s=forward_s, load_s=moved * self._move_s * slow, steps=steps)

    def _left_s(self, until_ns: int | None, before_s: float) -> float:
        """Time for steps before `until_ns`, at the pace of a device that is not slow."""
        if until_ns is None:
            return float("inf")
        return (until_ns - self.clock.monotonic_ns()) / 1e9 / self.slow_factor - before_s

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
        decode_keys = float(self._decode_keys(plan.decodes, 1)[0]) if plan.decodes else 0.0
        return self.times.parts(
            tokens, emitted, decode_keys=decode_keys, prefill_pairs=pairs, prefill_keys=keys
        ).total_s

    def _decode_keys(self, decodes: Items[Sequence], steps: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """[steps] tokens attended to in each of the next steps, summed over sequences, averaged over layers."""
        if not self._has_windows:
            first = sum([sequence.num_computed for sequence in decodes]) + len(decodes)
            return first + len(decodes) * np.arange(steps, dtype=np.float64)
        seen = np.array([sequence.num_computed for sequence in decodes])[:, None] + 1 + np.arange(steps)[None, :]
        keys = np.zeros(steps)
        for share, window in self._windows:
            keys += share * (seen if window is None else np.minimum(seen, window)).sum(axis=0)
        return keys

    def _windowed_steps(self, decodes: Items[Sequence], max_steps: int, left_s: float) -> tuple[int, float]:
        """(steps, their seconds) of a model with windows: a context stops to grow at its window."""
        batch = len(decodes)
        fixed_s = self.times.parts(batch, batch).total_s
        ends = np.cumsum(fixed_s + self._decode_keys(decodes, max(max_steps, 1)) * self.times.decode_key_s)
        steps = min(1 + int(np.searchsorted(ends[:-1], left_s)), len(ends))
        return steps, float(ends[steps - 1])
