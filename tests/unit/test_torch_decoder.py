"""The decoder computes what the published code of its families computes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from engine_probe.engine.executor import Chunk, StepPlan
from engine_probe.engine.sampling_params import SamplingParams
from engine_probe.engine.sequence import Sequence
from engine_probe.engine.torch_executor.attention import TorchAttention
from engine_probe.engine.torch_executor.batch import pack
from engine_probe.engine.torch_executor.decoder import Decoder
from engine_probe.engine.torch_executor.kv_cache import KvCache
from engine_probe.engine.torch_executor.linear import Linear, can_pack
from engine_probe.engine.torch_executor.model_config import Rope, read_config
from engine_probe.engine.torch_executor.rope import frequencies, rotate, rotation_table
from engine_probe.engine.torch_executor.weights import SeededTensors, build_weights

CPU = torch.device("cpu")
GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden" / "transformers_logits.json").read_text())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_logits_are_those_of_transformers(case: dict[str, object], packed: bool) -> None:
    """Same weights, same tokens: the logits of Hugging Face transformers to 1e-4, with plain and with laid-out linears."""
    if packed and not can_pack(torch.empty(1, 1)):
        pytest.skip("this torch has no oneDNN")
    config = read_config(case["config"])  # type: ignore[arg-type]
    weights = build_weights(config, SeededTensors(0), torch.float32, CPU, packed=packed)
    decoder = Decoder(config, weights, TorchAttention(), config.max_context)
    tokens = GOLDEN["tokens"]
    sequence = Sequence("a", 40, SamplingParams(), 0, token_ids=tokens, blocks=[4, 0, 2])
    with torch.inference_mode():
        batch = pack(StepPlan(prefills=[Chunk(sequence, 0, 40, emits=True)]), 16, CPU)
        found = decoder.logits(decoder.hidden_states(batch, KvCache(config, 5, 16, torch.float32, CPU)))
    torch.testing.assert_close(found[0], torch.tensor(case["logits"]), atol=1e-4, rtol=1e-4)


def test_plain_frequencies_are_powers_of_the_base() -> None:
    """theta^(-2i/d): for base 100 and four dimensions 1 and 1/10; linear stretching divides them."""
    assert frequencies(Rope(100.0), 4).tolist() == pytest.approx([1.0, 0.1])
    assert frequencies(Rope(100.0, "linear", 4.0), 4).tolist() == pytest.approx([0.25, 0.025])


def test_llama3_stretches_long_waves_alone() -> None:
    """Over 64 original positions: a wave of 2 pi turns 10 times (kept), one of 200 pi a tenth (stretched by 8)."""
    rope = Rope(10_000.0, "llama3", 8.0, low_factor=1.0, high_factor=4.0, original_context=64)
    found = frequencies(rope, 4).tolist()
    assert found == pytest.approx([1.0, 0.01 / 8])


def test_rotation_turns_pairs_half_a_head_apart() -> None:
    """At position 3 and frequency 1 the pair (1, 0) becomes (cos 3, sin 3); position 0 turns nothing."""
    table = rotation_table(Rope(100.0), 2, 4, CPU)
    heads = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])
    turned = rotate(heads, table[torch.tensor([0, 3])])
    assert turned.flatten().tolist() == pytest.approx([1.0, 0.0, math.cos(3), math.sin(3)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_laid_out_linear_equals_the_plain_one(dtype: torch.dtype, num_tokens: int) -> None:
    """oneDNN's layout changes the speed, not the product; no rows are fine as well."""
    weight, bias, x = torch.randn(7, 5), torch.randn(7), torch.randn(num_tokens, 5)
    if not can_pack(weight.to(dtype)):
        pytest.skip("oneDNN does not multiply this type here")
    with torch.inference_mode():
        laid_out = Linear(weight.to(dtype), bias.to(dtype), packed=True)
        found = laid_out(x.to(dtype))
    right = x.to(dtype).float() @ weight.to(dtype).float().T + bias.to(dtype).float()
    torch.testing.assert_close(found.float(), right, atol=5e-2 if dtype == torch.bfloat16 else 1e-5, rtol=2e-2)
    assert laid_out.is_packed


def test_seeded_weights_depend_on_seed_and_name_alone() -> None:
    """The same seed gives the same model whatever else was made before; another seed another."""
    first = SeededTensors(1)
    first.get("x.weight", (3, 3))
    assert torch.equal(first.get("y.weight", (2, 2)), SeededTensors(1).get("y.weight", (2, 2)))
    assert not torch.equal(SeededTensors(1).get("y.weight", (2, 2)), SeededTensors(2).get("y.weight", (2, 2)))
