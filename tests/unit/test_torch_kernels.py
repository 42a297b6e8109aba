"""Each way to attend over paged KV gives what its definition says: torch runs, Triton kernels in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine_probe.engine.torch_executor.attention import Attention, TorchAttention
from engine_probe.engine.torch_executor.batch import NO_BLOCK, PackedBatch
from engine_probe.engine.torch_executor.kernels.reference import paged_attention_reference, write_kv_reference
from tests import torch_models

# Read when a kernel is defined: before the first import of one. On a CPU there is no other way to run them.
os.environ.setdefault("TRITON_INTERPRET", "1")

assert torch_models.TINY  # one thread
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
RAGGED = ([1, 17, 64, 130], [(5, 5), (3, 40), (70, 70), (1, 9), (66, 131)])
"""Contexts of decodes; (queries, context) of chunks: whole prompts, a chunk after others, one token, more than a tile."""


def attention(name: str) -> Attention:
    """The one of that name, or skip where Triton is not installed."""
    if name == "torch":
        return TorchAttention()
    pytest.importorskip("triton")
    from engine_probe.engine.torch_executor.kernels.triton_attention import TritonAttention

    return TritonAttention()


def random_batch(
    decodes: Sequence[int], chunks: Sequence[tuple[int, int]], block_size: int, generator: torch.Generator
) -> PackedBatch:
    """A batch of these lengths over scattered blocks."""
    query_lens = [*(1 for _ in decodes), *(count for count, _ in chunks)]
    contexts = [*decodes, *(context for _, context in chunks)]
    widths = [-(-context // block_size) for context in contexts]
    blocks = torch.randperm(sum(widths) + 3, generator=generator).tolist()
    tables = torch.full((len(contexts), max(widths)), NO_BLOCK, dtype=torch.int32)
    positions: list[int] = []
    slots: list[int] = []
    for index, (count, context, width) in enumerate(zip(query_lens, contexts, widths, strict=True)):
        own = [blocks.pop() for _ in range(width)]
        tables[index, :width] = torch.tensor(own, dtype=torch.int32)
        for at in range(context - count, context):
            positions.append(at)
            slots.append(own[at // block_size] * block_size + at % block_size)
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    return PackedBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        query_starts=starts,
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        emit_rows=starts[1:].long() - 1,
        query_lens=query_lens,
        contexts=contexts,
        num_decodes=len(decodes),
        block_size=block_size,
    )


def compare(
    name: str,
    heads: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
    decodes: Sequence[int],
    chunks: Sequence[tuple[int, int]],
    head_dim: int = 16,
) -> None:
    """Attention over random keys and values, against the reference."""
    generator = torch.Generator().manual_seed(len(decodes) * 100 + block_size)
    batch = random_batch(decodes, chunks, block_size, generator)
    num_blocks = int(batch.block_tables.max()) + 2
    num_heads, num_kv_heads = heads
    caches = torch.randn(2, num_blocks, block_size, num_kv_heads, head_dim, generator=generator).to(dtype)
    # Queries are a part of a wider row, as in the decoder.
    rows = torch.randn(batch.num_tokens, num_heads + num_kv_heads, head_dim, generator=generator).to(dtype)
    queries = rows[:, :num_heads]
    found = attention(name).prepare(batch)(queries, caches[0], caches[1])
    right = paged_attention_reference(
        queries, caches[0], caches[1], batch.block_tables, batch.query_starts, batch.context_lens
    )
    torch.testing.assert_close(found, right, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(16, 4), (8, 8), (8, 1)], ids=str)
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_ragged_batch_equals_the_definition(name: str, heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Decodes and chunks of many lengths at once, for grouped, full and single KV heads, in both types."""
    compare(name, heads, 16, dtype, *RAGGED)


@pytest.mark.parametrize("block_size", [1, 5, 16, 32])
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_any_block_size_is_the_same_attention(name: str, block_size: int) -> None:
    """Blocks are a layout; their size is no power of two where somebody wants that."""
    compare(name, (4, 2), block_size, torch.float32, [1, 31], [(20, 33)])


@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 24), ((6, 2), 64), ((2, 2), 128)])
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_odd_widths_are_the_same_attention(name: str, heads: tuple[int, int], head_dim: int) -> None:
    """Heads whose number in a group or width is no power of two."""
    compare(name, heads, 16, torch.float32, [3, 20], [(4, 22)], head_dim)


@pytest.mark.parametrize(("decodes", "chunks"), [([600, 1100], []), ([], [(1, 1)]), ([1], []), ([], [(300, 600)])])
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_one_kind_of_work_alone_is_fine(name: str, decodes: list[int], chunks: list[tuple[int, int]]) -> None:
    """Only decodes (contexts read in several parts), only a chunk (in several runs of queries), one token."""
    compare(name, (2, 1), 16, torch.float32, decodes, chunks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_kv_goes_to_its_slots_alone(name: str, dtype: torch.dtype) -> None:
    """Every other slot keeps what it held, bit for bit."""
    generator = torch.Generator().manual_seed(1)
    held = torch.randn(2, 4, 5, 3, 8, generator=generator).to(dtype)
    written, right = held.clone(), held.clone()
    rows = torch.randn(4, 10, 8, generator=generator).to(dtype)
    keys, values = rows[:, 2:5], rows[:, 7:10]
    slots = torch.tensor([7, 0, 19, 12])
    attention(name).write(keys, values, (written[0], written[1]), slots)
    write_kv_reference(keys, values, right[0], right[1], slots)
    assert torch.equal(written, right)
    assert (written != held).any()


def test_extreme_scores_do_not_overflow() -> None:
    """Scores of thousands: the running maximum keeps every weight finite."""
    for name in ("torch", "triton"):
        batch = random_batch([20], [(10, 90)], 16, torch.Generator().manual_seed(0))
        shape = (int(batch.block_tables.max()) + 1, 16, 2, 16)
        keys = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 300
        queries = torch.randn(11, 4, 16, generator=torch.Generator().manual_seed(2)) * 30
        found = attention(name).prepare(batch)(queries, keys, keys)
        right = paged_attention_reference(
            queries, keys, keys, batch.block_tables, batch.query_starts, batch.context_lens
        )
        torch.testing.assert_close(found, right, atol=1e-2, rtol=1e-4)


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """The compiler makes machine code of each for compute capability 9.0 in both types; no GPU is needed for that."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-m", "tests.torch_compile"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["_write_kv", "_paged_decode", "_chunked_prefill"] * 2
