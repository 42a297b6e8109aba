"""Proof, for one packed batch, that its sequences do not see each other: the `check` rows of the event contract.

Nothing here trusts the packed tensors: what must be true is computed anew from the step's plan. Positions and slots are
compared number by number. What each row really attends to is asked of the attention itself, with keys of zero: then every
visible slot has the same weight, a row's answer is the mean of the values it saw, and values chosen for the purpose give
that set away. Two choices: random values (the mean tells the exact set), and owners' marks (a foreign slot leaves a trace
in a row where exact zero is right). Both go through the kernel, block tables and masks that compute tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import torch

from engine_probe.engine.executor import StepPlan
from engine_probe.engine.torch_executor.attention import Attention
from engine_probe.engine.torch_executor.batch import NO_BLOCK, PackedBatch, segments
from engine_probe.engine.torch_executor.model_config import ModelConfig

PACKING_VERSION = "1"
_SEED = 20_211


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. columns: of a `check` row beside worker, at_ns and batch_id. why: what is wrong, None where it passed."""

    columns: dict[str, Any]
    why: str | None = None

    @property
    def passed(self) -> bool:
        return self.why is None


def check_batch(batch: PackedBatch, plan: StepPlan, attention: Attention, config: ModelConfig) -> list[Check]:
    """Four findings: sample_boundary, position, mask, leakage."""
    places = _Places(batch, plan)
    probe = _Probe(places, attention, config)
    leak = probe.leak()
    return [
        _finding(
            "sample_boundary",
            places.wrong_boundary(),
            sample_ids=places.request_ids,
            segment_ids=list(range(len(places.request_ids))),
            document_boundary="block_table",
            eos_policy="not_packed",
            packing_version=PACKING_VERSION,
        ),
        _finding("position", places.wrong_position(), position_ids_strategy="absolute_per_sequence"),
        _finding(
            "mask",
            probe.wrong_mask(),
            attention_mask_hash=places.mask_hash(),
            causal_mask_mode="causal_per_sequence",
        ),
        _finding("leakage", leak, leakage_test_result="failed" if leak else "passed"),
    ]


class _Places:
    """What the plan says: the slot and the visible slots of every row."""

    def __init__(self, batch: PackedBatch, plan: StepPlan) -> None:
        self.batch = batch
        self.request_ids: list[str] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.slots: list[list[int]] = []  # of each sequence, by position, up to the end of this step
        self.token_ids: list[int] = []
        size = batch.block_size
        for sequence, start, count in segments(plan):
            self.request_ids.append(sequence.request_id)
            self.starts.append(start)
            self.counts.append(count)
            blocks = sequence.blocks
            self.slots.append([blocks[at // size] * size + at % size for at in range(start + count)])
            self.token_ids += sequence.token_ids[start : start + count]

    def wrong_boundary(self) -> str | None:
        """Every row belongs to one sequence, has its token, and writes a slot that nobody else of the batch sees."""
        bounds = [0]
        for count in self.counts:
            bounds.append(bounds[-1] + count)
        if self.batch.query_starts.tolist() != bounds or self.batch.num_tokens != bounds[-1]:
            return f"rows are split at {self.batch.query_starts.tolist()}, the plan splits them at {bounds}"
        if self.batch.token_ids.tolist() != self.token_ids:
            return "a row holds a token of another place"
        owner: dict[int, int] = {}
        for index, (slots, start) in enumerate(zip(self.slots, self.starts, strict=True)):
            for slot in slots[start:]:
                if owner.setdefault(slot, index) != index:
                    return f"{self.request_ids[index]} and {self.request_ids[owner[slot]]} write one slot, {slot}"
        for index, (slots, start) in enumerate(zip(self.slots, self.starts, strict=True)):
            for slot in slots[:start]:
                if slot in owner:
                    return f"{self.request_ids[owner[slot]]} writes slot {slot}, which {self.request_ids[index]} reads"
        return None

    def wrong_position(self) -> str | None:
        """Positions count up from the place in the own sequence, and KV goes to that position's slot."""
        positions = [
            at for start, count in zip(self.starts, self.counts, strict=True) for at in range(start, start + count)
        ]
        slots = [slot for own, start in zip(self.slots, self.starts, strict=True) for slot in own[start:]]
        for name, found, right in (
            ("position", self.batch.positions.tolist(), positions),
            ("slot", self.batch.slots.tolist(), slots),
        ):
            for row, (is_there, expected) in enumerate(zip(found, right, strict=True)):
                if is_there != expected:
                    return f"row {row} has {name} {is_there}; expected {expected}"
        return None

    def mask_hash(self) -> int:
        """Of the mask as the plan has it: which sequence, and how many of its positions, each row sees."""
        digest = blake2b(digest_size=8)
        for index, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
            digest.update(b"%d %d %d;" % (index, start, count))
        return int.from_bytes(digest.digest(), "little")


class _Probe:
    """Caches of the batch's own blocks alone, to ask the attention with: numbered anew, one to one, so they are small."""

    def __init__(self, places: _Places, attention: Attention, config: ModelConfig) -> None:
        batch = places.batch
        self._places, self._attention, self._config = places, attention, config
        self._device = batch.token_ids.device
        size = batch.block_size
        tables = batch.block_tables.tolist()
        used = {block for row in tables for block in row} | {slot // size for own in places.slots for slot in own}
        number = {block: at for at, block in enumerate(sorted(used - {NO_BLOCK}))}
        # What lies past a table's end is one more block, nobody's: read by mistake, it shows like any other.
        number[NO_BLOCK] = len(number)
        renumbered = torch.tensor([[number[block] for block in row] for row in tables], dtype=torch.int32)
        self._batch = replace(batch, block_tables=renumbered.to(self._device))
        self.shape = (len(number), size, config.num_kv_heads, config.head_dim)
        self.slots = [
            torch.tensor([number[slot // size] * size + slot % size for slot in own], device=self._device)
            for own in places.slots
        ]

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """[N, num_heads, head_dim] of values [*shape]: for each row the mean of what it saw."""
        num_rows, config = len(self._places.token_ids), self._config
        queries = torch.zeros(num_rows, config.num_heads, config.head_dim, device=self._device)
        return self._attention.prepare(self._batch)(queries, values, values)

    def wrong_mask(self) -> str | None:
        """Does each row see exactly the positions up to its own? A row's sum of random +1 and -1 values names its set."""
        places, config = self._places, self._config
        generator = torch.Generator().manual_seed(_SEED)
        values = (torch.randint(0, 2, self.shape, generator=generator) * 2 - 1).float().to(self._device)
        means = self.means(values)
        flat = values.view(-1, *self.shape[2:])
        row = 0
        for request_id, start, slots in zip(places.request_ids, places.starts, self.slots, strict=True):
            sums = flat[slots].cumsum(dim=0)[start:]
            counts = torch.arange(start + 1, len(slots) + 1, device=self._device).view(-1, 1, 1)
            found = means[row : row + len(sums)] * counts
            right = sums.repeat_interleave(config.num_heads // config.num_kv_heads, dim=1)
            # One slot too many or too few moves every sum by 1; rounding moves them by far less. NaN is wrong as well.
            wrong = ~((found - right).abs() < 0.25).flatten(1).all(dim=1)
            if bool(wrong.any()):
                at = start + int(wrong.nonzero()[0])
                return f"{request_id} at position {at} does not see exactly the positions up to it"
            row += len(sums)
        return None

    def leak(self) -> str | None:
        """Does any row see a slot that is not its sequence's? Each sequence has a column in which all foreign slots are 1."""
        places, width = self._places, self._config.head_dim
        bounds = list(accumulate(places.counts, initial=0))
        for first in range(0, len(self.slots), width):
            group = range(first, min(first + width, len(self.slots)))
            foreign = torch.ones(self.shape, device=self._device)
            flat = foreign.view(-1, *self.shape[2:])
            for index in group:
                flat[self.slots[index], :, index - first] = 0.0
            seen = self.means(foreign)
            for index in group:
                traces = seen[bounds[index] : bounds[index + 1], :, index - first]
                if not bool((traces == 0.0).all()):
                    return f"{places.request_ids[index]} sees KV that is not its own"
        return None


def _finding(check: str, why: str | None, **columns: object) -> Check:
    return Check({"check": check, "outcome": "failed" if why else "passed", **columns}, why)
