"""KV size of published models, worked from their config.json, and of the configs that people really have."""

from __future__ import annotations

from typing import Any

import pytest

from diagnosis.capacity.kv_size import GIB, fit_blocks, fit_memory, kv_size
from engine_probe.errors import UsageError
from engine_probe.models.catalogue import MODELS, find_model
from engine_probe.models.kv_geometry import geometry

MIB = 1 << 20
# Bytes per token at 16 bit, as published for each model.
KNOWN = {
    "Llama-2-7B": 524_288,
    "Llama-2-13B": 819_200,
    "Llama-2-70B": 327_680,
    "SmolLM2-135M": 23_040,
    "SmolLM2-360M": 40_960,
    "SmolLM2-1.7B": 196_608,
    "Llama-3-8B": 131_072,
    "Llama-3.2-1B": 32_768,
    "Llama-3.2-3B": 114_688,
    "Llama-3-70B": 327_680,
    "Llama-3.1-405B": 516_096,
    "Qwen2.5-0.5B": 12_288,
    "Qwen2.5-1.5B": 28_672,
    "Qwen2.5-7B": 57_344,
    "Qwen2.5-14B": 196_608,
    "Qwen2.5-32B": 262_144,
    "Qwen2.5-72B": 327_680,
    "Qwen3-0.6B": 114_688,
    "Qwen3-1.7B": 114_688,
    "Qwen3-4B": 147_456,
    "Qwen3-8B": 147_456,
    "Qwen3-14B": 163_840,
    "Qwen3-32B": 262_144,
    "Qwen3-30B-A3B": 98_304,
    "Qwen3-235B-A22B": 192_512,
    "Qwen3-Next-80B-A3B": 24_576,
    "Mistral-7B": 131_072,
    "Mistral-7B-v0.1": 131_072,
    "Mistral-Nemo-12B": 163_840,
    "Mistral-Small-24B": 163_840,
    "Mixtral-8x7B": 131_072,
    "Mixtral-8x22B": 229_376,
    "Phi-4-14B": 204_800,
    "DeepSeek-V3": 70_272,
    "DeepSeek-V2": 69_120,
    "DeepSeek-V2-Lite": 31_104,
    "Kimi-K2": 70_272,
    "gpt-oss-20b": 24_576,
    "gpt-oss-120b": 36_864,
    "Gemma-3-1b": 4_096,
    "Gemma-3-4b": 20_480,
    "Gemma-3-12b": 65_536,
    "Gemma-3-27B": 81_920,
}
# Constant bytes once every window is full: gpt-oss-20b 12 layers * 2 * 8 * 64 * 2 bytes * 128 tokens = 3 MiB.
KNOWN_CONSTANT = {
    "gpt-oss-20b": 3 * MIB,
    "gpt-oss-120b": 4_718_592,
    "gemma-3-1b": 11_534_336,
    "gemma-3-4b": 121_634_816,
    "gemma-3-12b": 335_544_320,
    "gemma-3-27b": 416 * MIB,
    "qwen3-next-80b-a3b": 36 * (1_048_576 + 49_152),
}


def _size(config: dict[str, Any], tokens: int = 1, **options: Any) -> Any:
    kv_dtype = options.pop("kv_dtype", "auto")
    return kv_size(geometry(config, kv_dtype), tokens, **options)


@pytest.mark.parametrize("name", KNOWN)
def test_bytes_per_token_of_a_published_model(name: str) -> None:
    """The figure published for the model, found by the name people write; fp8 halves it."""
    _, config = find_model(name)
    assert _size(config).bytes_per_token == KNOWN[name]
    assert _size(config, kv_dtype="fp8").bytes_per_token * 2 == KNOWN[name]


def test_every_built_in_model_has_a_known_figure() -> None:
    """No model is built in without a number of its own or of its namesake in this file."""
    checked = {find_model(name)[0] for name in KNOWN}
    same_as = {"llama-3.1-8b", "llama-3.1-70b", "llama-3.3-70b", "mistral-7b-v0.2", "deepseek-r1", "deepseek-v3.1"}
    assert set(MODELS) - checked - same_as == {"deepseek-v3.2"}


@pytest.mark.parametrize("name", KNOWN_CONSTANT)
def test_windows_and_states_cost_a_constant(name: str) -> None:
    """Far beyond every window the request is growth of the full layers plus the published constant."""
    size = _size(MODELS[name], 100_000)
    assert size.constant_bytes == KNOWN_CONSTANT[name]
    assert size.request_bytes == size.bytes_per_token * 100_000 + KNOWN_CONSTANT[name]


def test_below_its_window_a_window_layer_grows_like_any_other() -> None:
    """gpt-oss-20b at 100 tokens (window 128): all 24 layers hold 100 tokens, 49,152 bytes each."""
    assert _size(MODELS["gpt-oss-20b"], 100).request_bytes == 100 * 49_152


def test_sparse_mla_in_its_packed_layout() -> None:
    """DeepSeek-V3.2: 656 bytes a token and layer are 40,016; its indexer adds 132, together 48,068."""
    with_indexer = MODELS["deepseek-v3.2"]
    without = {key: value for key, value in with_indexer.items() if key != "index_head_dim"}
    assert _size(without, kv_dtype="fp8_ds_mla").bytes_per_token == 40_016
    assert _size(with_indexer, kv_dtype="fp8_ds_mla").bytes_per_token == 48_068


def test_the_worked_example_of_a_24_layer_model() -> None:
    """L=24, S=2,048, Hkv=4, Dh=128, 2 bytes: 2*24*4*128*2*2048 = 100,663,296 bytes; two requests 192 MiB."""
    config = {"num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
    size = _size(config, 2048, requests=2)
    assert size.request_bytes == 100_663_296 == 96 * MIB
    assert size.total_bytes == 192 * MIB
    # Scores of [2, 16, 2048, 2048] at 2 bytes, as plain attention would materialise them for one layer.
    assert size.attention_scores_bytes == 256 * MIB
    assert _size(config | {"num_key_value_heads": 16}, 2048).request_bytes == 384 * MIB
    assert _size(config, 1_000_000).request_bytes / GIB == pytest.approx(45.8, abs=0.05)


def test_blocks_round_up_and_the_waste_is_told() -> None:
    """Llama-3-8B, 100 tokens, 16 a block: 7 blocks of 2 MiB, of which 12 tokens (12 * 131,072 bytes) are wasted."""
    size = _size(MODELS["llama-3-8b"], 100)
    assert (size.blocks, size.block_bytes, size.waste_tokens) == (7, 2 * MIB, 12)
    assert size.allocated_bytes == 14 * MIB
    assert size.waste_bytes == 12 * 131_072


def test_llama_3_70b_at_8192_tokens() -> None:
    """2 * 80 * 8 * 128 * 2 bytes * 8,192 tokens = 2,684,354,560 bytes, without waste."""
    size = _size(MODELS["llama-3-70b"], 8192)
    assert (size.request_bytes, size.waste_bytes, size.blocks) == (2_684_354_560, 0, 512)


def test_how_many_fit_is_the_concurrency_that_vllm_logs() -> None:
    """Llama-3.1-8B, 53.5 GiB: 27,392 blocks of 2 MiB; at 131,072 tokens (8,192 blocks) 3.34 requests, 3 whole."""
    size = _size(MODELS["llama-3.1-8b"], 131_072)
    fit = fit_memory(size, 53.5 * GIB)
    assert (fit.num_blocks, fit.requests) == (27_392, 3)
    assert fit.concurrency == pytest.approx(3.34, abs=0.005)
    assert fit_blocks(size, 27_392) == fit


def test_less_memory_than_one_request_fits_none() -> None:
    """Half a request's memory fits no request, and says 0.5."""
    size = _size(MODELS["llama-3-8b"], 8192)
    fit = fit_memory(size, 0.5 * GIB)
    assert (fit.requests, fit.concurrency) == (0, 0.5)
    assert fit_memory(size, 1000).requests == 0


def test_mixed_layers_share_one_pool_of_blocks() -> None:
    """gpt-oss-20b, 8,192 tokens: 512 blocks for the full layers and 128/16 + 1 = 9 for the window layers."""
    size = _size(MODELS["gpt-oss-20b"], 8192)
    assert size.blocks == 521
    # 12 layers a group, 2 * 8 * 64 * 2 bytes a token and layer, 16 tokens.
    assert size.block_bytes == 12 * 2048 * 16


def test_unequal_kinds_make_several_groups() -> None:
    """Gemma-3-27B: groups of 10 layers, one full (512 blocks) and six of the 52 window layers (65 blocks each)."""
    assert _size(MODELS["gemma-3-27b"], 8192).blocks == 512 + 6 * 65


def test_recurrent_states_share_the_memory_with_the_blocks() -> None:
    """Qwen3-Next at 8,192 tokens: 192 MiB of blocks and 37.69 MiB of states; 2 GiB fit 8 requests and not 10."""
    size = _size(MODELS["qwen3-next-80b-a3b"], 8192)
    assert size.allocated_bytes == 192 * MIB + 36 * 1_097_728
    assert fit_memory(size, 2 * GIB).requests == 8


def test_tensor_parallelism_divides_heads_but_not_latents() -> None:
    """8 KV heads over 4 GPUs are 2 each, over 16 GPUs 1 each (replicated); MLA is whole on every GPU."""
    llama, deepseek = MODELS["llama-3-8b"], MODELS["deepseek-v3"]
    assert _size(llama, tp=4).rank_bytes_per_token == 131_072 // 4
    assert _size(llama, tp=16).rank_bytes_per_token == 131_072 // 8
    assert _size(deepseek, tp=8).rank_bytes_per_token == 70_272
    with pytest.raises(UsageError, match="--tp 3 and 8 KV heads"):
        _size(llama, tp=3)


def test_absent_fields_mean_what_the_engines_take_them_for() -> None:
    """No num_key_value_heads: as many as attention heads (MHA). multi_query: one. No head_dim: hidden_size / heads."""
    gpt2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "torch_dtype": "float32"}
    model = geometry(gpt2)
    assert (model.attention, kv_size(model, 1).bytes_per_token) == ("MHA", 2 * 12 * 768 * 4)
    falcon = {"num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544, "multi_query": True}
    assert (geometry(falcon).attention, _size(falcon).bytes_per_token) == ("MQA", 2 * 32 * 64 * 2)


def test_values_may_be_wider_or_narrower_than_keys() -> None:
    """v_head_dim: 192 for keys and 128 for values are 320 elements a token and head."""
    config = {"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 192, "v_head_dim": 128}
    assert _size(config).bytes_per_token == 320 * 2


def test_a_multimodal_config_nests_its_language_model() -> None:
    """text_config wins; the dtype may stand outside; what the family's code assumes is filled in (gemma-3-4b)."""
    config = {
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "vision_config": {"num_hidden_layers": 27, "hidden_size": 1152},
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
    }
    size = _size(config, 100_000)
    assert (size.bytes_per_token, size.constant_bytes) == (20_480, 121_634_816)


def test_layer_types_decide_over_patterns() -> None:
    """Two of three layers named sliding: one layer grows; without a window their names mean nothing."""
    config = {
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    assert _size(config, 10).request_bytes == 64 * (10 + 4 + 4)
    assert _size(config | {"sliding_window": None}, 10).request_bytes == 64 * 30


def test_a_window_that_is_switched_off_is_ignored() -> None:
    """use_sliding_window false (Qwen2): every layer keeps every token; true: the first max_window_layers do."""
    config = {"num_hidden_layers": 4, "num_attention_heads": 1, "head_dim": 1, "sliding_window": 2}
    assert _size(config | {"use_sliding_window": False}, 10).request_bytes == 4 * 4 * 10
    on = config | {"use_sliding_window": True, "max_window_layers": 3}
    assert _size(on, 10).request_bytes == 4 * (3 * 10 + 2)


def test_chunked_attention_holds_at_most_a_chunk() -> None:
    """Llama-4: every fourth layer is full, the others hold attention_chunk_size tokens."""
    text = {"num_hidden_layers": 8, "num_attention_heads": 1, "head_dim": 1, "attention_chunk_size": 5}
    config = {"model_type": "llama4", "text_config": text | {"model_type": "llama4_text"}}
    assert _size(config, 100).request_bytes == 4 * (2 * 100 + 6 * 5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        (
            {"num_attention_heads": None, "num_key_value_heads": None},
            "no num_key_value_heads and no num_attention_heads",
        ),
        ({"hidden_size": None}, "no head_dim"),
        ({"hidden_size": 33}, "33 is no multiple of num_attention_heads 4"),
        ({"torch_dtype": "int3"}, "dtype 'int3' is not known"),
        ({"layer_types": ["full_attention", "rwkv"]}, "names rwkv, not known here"),
        ({"layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        ({"num_key_value_heads": [2, 2, 2]}, "expected 2 whole numbers"),
        ({"kv_lora_rank": 512}, "no qk_rope_head_dim"),
        ({"num_hidden_layers": 100_000_000_000}, "num_hidden_layers is above 10,000"),
        ({"hidden_size": 10**400}, "hidden_size is above 1,099,511,627,776"),
    ],
)
def test_a_config_that_cannot_be_read_names_the_field(change: dict[str, Any], words: str) -> None:
    """Missing, wrong or unknown fields are errors that say which."""
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    with pytest.raises(UsageError, match=words):
        geometry(config | change)


def test_an_unknown_name_suggests_close_ones() -> None:
    """llama3-8b is a slip of the pen away from llama-3-8b; nonsense gets the list."""
    with pytest.raises(UsageError, match="close to it: llama-3-8b"):
        find_model("llama3-8b")
    with pytest.raises(UsageError, match="known are llama-2-7b"):
        find_model("@@@@")


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
    ],
)
def test_names_are_found_as_they_are_written_on_the_hub(written: str, found: str) -> None:
    """Organisation, case and suffixes that leave the geometry alone do not matter."""
    assert find_model(written)[0] == found
