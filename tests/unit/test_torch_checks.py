"""The checks of a packed batch pass where it is right, and find every corruption that a test puts in."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from engine_probe.engine.executor import Chunk, StepPlan
from engine_probe.engine.torch_executor.attention import Attend, Attention, TorchAttention
from engine_probe.engine.torch_executor.batch import PackedBatch, pack
from engine_probe.engine.torch_executor.checks import check_batch
from engine_probe.events import KINDS
from tests.torch_models import TINY, Tables, tiny_executor

os.environ.setdefault("TRITON_INTERPRET", "1")

CPU = torch.device("cpu")


def plan() -> StepPlan:
    """Two decodes, a whole prompt, and a chunk of a prompt whose first two blocks another request shares."""
    tables = Tables(tiny_executor())
    tables.free.reverse()
    made = StepPlan()
    for name, length in (("d0", 7), ("d1", 12)):
        sequence = tables.sequence(list(range(length)), name)
        tables.grow(sequence, length)
        sequence.num_computed = length - 1
        made.decodes.append(sequence)
    whole = tables.sequence([3] * 9, "whole")
    tables.grow(whole, 9)
    late = tables.sequence([1] * 30, "late")
    late.blocks = made.decodes[1].blocks[:2]
    tables.grow(late, 20)
    made.prefills += [Chunk(whole, 0, 9, emits=True), Chunk(late, 8, 12, emits=False)]
    return made


def failed(batch: PackedBatch, made: StepPlan, attention: Attention | None = None) -> dict[str, str | None]:
    """Checks that did not pass, with why."""
    found = check_batch(batch, made, attention or TorchAttention(), TINY)
    assert [check.columns["check"] for check in found] == ["sample_boundary", "position", "mask", "leakage"]
    assert all(check.columns["outcome"] == ("passed" if check.passed else "failed") for check in found)
    return {str(check.columns["check"]): check.why for check in found if not check.passed}


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_right_batch_passes(name: str) -> None:
    """With either attention; shared blocks are no leak."""
    attention: Attention = TorchAttention()
    if name == "triton":
        pytest.importorskip("triton")
        from engine_probe.engine.torch_executor.kernels.triton_attention import TritonAttention

        attention = TritonAttention()
    made = plan()
    assert failed(pack(made, 4, CPU), made, attention) == {}


def shift_position(batch: PackedBatch) -> None:
    batch.positions[5] += 1


def restart_positions(batch: PackedBatch) -> None:
    """As if the chunk began its sequence."""
    batch.positions[11:] = torch.arange(12)


def write_elsewhere(batch: PackedBatch) -> None:
    batch.slots[11] = batch.slots[0]


def read_anothers_block(batch: PackedBatch) -> None:
    """The decode's table leads to a block of the whole prompt."""
    batch.block_tables[0, 0] = batch.block_tables[2, 0]


def read_a_block_of_nobody(batch: PackedBatch) -> None:
    """The table leads out of the pool."""
    batch.block_tables[2, 0] = 10**6


def swap_blocks(batch: PackedBatch) -> None:
    """Two blocks of the late chunk change places: nothing foreign is seen, but too much of the future."""
    batch.block_tables[3, [3, 4]] = batch.block_tables[3, [4, 3]]


def see_too_far(batch: PackedBatch) -> None:
    """The decode's context reaches one token past its own, where its block was not written."""
    batch.context_lens[0] += 1
    batch.contexts[0] += 1


def see_too_little(batch: PackedBatch) -> None:
    batch.context_lens[1] -= 1
    batch.contexts[1] -= 1


def split_elsewhere(batch: PackedBatch) -> None:
    """A row of the whole prompt is counted to the late chunk."""
    batch.query_starts[3] -= 1


def mix_up_tokens(batch: PackedBatch) -> None:
    batch.token_ids[[0, 1]] = batch.token_ids[[1, 0]]


@pytest.mark.parametrize(
    ("corrupt", "found_by"),
    [
        (shift_position, {"position"}),
        (restart_positions, {"position"}),
        (write_elsewhere, {"position"}),
        (read_anothers_block, {"mask", "leakage"}),
        (read_a_block_of_nobody, {"mask", "leakage"}),
        (swap_blocks, {"mask"}),
        (see_too_far, {"mask", "leakage"}),
        (see_too_little, {"mask"}),
        (split_elsewhere, {"sample_boundary"}),
        (mix_up_tokens, {"sample_boundary"}),
    ],
)
def test_corrupted_batch_is_caught(corrupt: Callable[[PackedBatch], None], found_by: set[str]) -> None:
    """By the check that is made for it."""
    made = plan()
    batch = pack(made, 4, CPU)
    corrupt(batch)
    assert set(failed(batch, made)) == found_by


class Careless(TorchAttention):
    """Attention with a fault of its own; the batch is right."""

    def __init__(self, spoil: Callable[[PackedBatch], None]) -> None:
        self._spoil = spoil

    def prepare(self, batch: PackedBatch) -> Attend:
        copied = PackedBatch(
            batch.token_ids,
            batch.positions,
            batch.slots,
            batch.query_starts,
            batch.context_lens.clone(),
            batch.block_tables.clone(),
            batch.emit_rows,
            list(batch.query_lens),
            list(batch.contexts),
            batch.num_decodes,
            batch.block_size,
        )
        self._spoil(copied)
        return super().prepare(copied)


def padding_is_not_masked(batch: PackedBatch) -> None:
    """Every decode sees as much as the longest."""
    longest = int(batch.context_lens[: batch.num_decodes].max())
    batch.context_lens[: batch.num_decodes] = longest
    batch.contexts[: batch.num_decodes] = [longest] * batch.num_decodes


def tables_off_by_one(batch: PackedBatch) -> None:
    """A sequence reads its neighbour's blocks."""
    batch.block_tables.copy_(batch.block_tables.roll(1, dims=0).clamp_min(0))


@pytest.mark.parametrize("spoil", [padding_is_not_masked, tables_off_by_one])
def test_faulty_attention_is_caught(spoil: Callable[[PackedBatch], None]) -> None:
    """A mask or table that goes wrong inside the attention shows, although every packed tensor is right."""
    made = plan()
    assert set(failed(pack(made, 4, CPU), made, Careless(spoil))) == {"mask", "leakage"}


class Acausal(TorchAttention):
    """Every row of a chunk sees the whole chunk: no causal mask."""

    def prepare(self, batch: PackedBatch) -> Attend:
        def attend(queries: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(queries)
            first = 0
            group = queries.shape[1] // key_cache.shape[2]
            for index, (count, context) in enumerate(zip(batch.query_lens, batch.contexts, strict=True)):
                blocks = batch.block_tables[index, : -(-context // batch.block_size)].long()
                seen = value_cache[blocks].flatten(0, 1)[:context]
                out[first : first + count] = seen.mean(dim=0).repeat_interleave(group, dim=0)
                first += count
            return out

        return attend


def test_missing_causal_mask_is_caught() -> None:
    """It shows nobody else's tokens, but the future of one's own."""
    made = plan()
    assert set(failed(pack(made, 4, CPU), made, Acausal())) == {"mask"}


def test_two_requests_that_write_one_block_are_caught() -> None:
    """The plan itself is wrong: an allocated block has two owners, or one is written that another still reads."""
    made = plan()
    made.decodes[0].blocks[-1] = made.decodes[1].blocks[-1]
    found = failed(pack(made, 4, CPU), made)
    assert "sample_boundary" in found
    assert "d0" in str(found["sample_boundary"])


def test_findings_fit_the_event_contract() -> None:
    """Every column is one of the kind `check`."""
    made = plan()
    known = {column.name for column in KINDS["check"]}
    for check in check_batch(pack(made, 4, CPU), made, TorchAttention(), TINY):
        assert set(check.columns) <= known


def test_executor_checks_every_so_many_steps() -> None:
    """Findings come with the step that was checked; none are made where nobody asked."""
    for every, found in ((2, [0, 4, 0, 4]), (0, [0] * 4)):
        tables = Tables(tiny_executor(check_every=every))
        steps = []
        sequence = tables.sequence([1])
        for _ in range(4):
            tables.step([sequence])
            steps.append(tables.last.checks)
        assert [len(checks) for checks in steps] == found
        assert all(columns["outcome"] == "passed" for checks in steps for columns in checks)


def test_failed_check_is_told_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The step's row says failed, the log says why; the step goes on."""
    executor = tiny_executor(check_every=1)
    executor.attention = Acausal()
    tables = Tables(executor)
    tables.step(chunks=[(tables.sequence([1, 2, 3]), 3)])
    assert [columns["outcome"] for columns in tables.last.checks] == ["passed", "passed", "failed", "passed"]
    assert [(record.message, record.check) for record in caplog.records] == [("packed batch failed a check", "mask")]  # type: ignore[attr-defined]
