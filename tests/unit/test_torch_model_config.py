"""A config.json is understood whole or refused by the name of what is not."""

from __future__ import annotations

import pytest

from engine_probe.engine.torch_executor.model_config import ModelConfig, Rope, read_config
from engine_probe.errors import ModelUnreadable
from tests.torch_models import CONFIG_JSON, TINY

LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}


def read(**changes: object) -> ModelConfig:
    """CONFIG_JSON with other fields."""
    return read_config({**CONFIG_JSON, **changes})


def test_published_llama_is_understood() -> None:
    """Every field of a published config is read: sizes, stretching, tied head, end tokens, and the parameters they make."""
    config = read_config(LLAMA_3_2_1B)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (16, 32, 8, 64)
    assert config.rope == Rope(500_000.0, "llama3", 32.0, 1.0, 4.0, 8192)
    assert config.tied
    assert config.eos_token_ids == {128001, 128008, 128009}
    assert config.dtype == "bfloat16"
    # 128256*2048 + 16*(2048*2048*2 + 2048*512*2 + 3*2048*8192 + 2*2048) + 2048: the published 1.24 B.
    assert config.num_parameters == 1_235_814_400


def test_silent_fields_take_the_familys_defaults() -> None:
    """As many KV heads as heads, head_dim from the width, rope of base 10,000, an untied head."""
    fields = {name: value for name, value in CONFIG_JSON.items() if name != "num_key_value_heads"}
    config = read_config(fields)
    assert (config.num_kv_heads, config.head_dim, config.rope, config.tied) == (4, 8, Rope(), False)


def test_families_differ_where_their_code_does() -> None:
    """Qwen2 has biases on query, key and value alone; Qwen3 norms its heads; Llama with attention_bias also the output."""
    qwen2 = read(model_type="qwen2", use_sliding_window=False, sliding_window=32, max_window_layers=28)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = read(model_type="qwen3", head_dim=16)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 16)
    llama = read(attention_bias=True)
    assert (llama.qkv_bias, llama.output_bias) == (True, True)


def test_rope_of_newer_files_is_the_same() -> None:
    """`rope_parameters` holds what `rope_scaling` and `rope_theta` did."""
    new = read(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6})
    old = read(rope_scaling={"type": "linear", "factor": 4.0}, rope_theta=1e6)
    assert new.rope == old.rope == Rope(1e6, "linear", 4.0)


def test_window_that_hides_nothing_is_no_window() -> None:
    """A sliding window at least as long as the context changes nothing."""
    assert read(model_type="mistral", sliding_window=256).max_context == 256


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef"),
        ({"num_experts": 8}, "num_experts"),
        ({"logit_scale": 2.0}, "logit_scale"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 1}}, "beta_fast"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"model_type": "mistral", "sliding_window": 128}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"model_type": "qwen2", "num_key_value_heads": None}, "num_key_value_heads"),
        ({"hidden_size": 33}, "hidden_size"),
        ({"head_dim": 7}, "head_dim"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype"),
        ({"eos_token_id": "end"}, "eos_token_id"),
        ({"eos_token_id": [1, -2]}, "eos_token_id"),
    ],
)
def test_what_is_not_understood_is_named(changes: dict[str, object], named: str) -> None:
    """Another model, another sum, a wrong type or a gap: refused, and the message names the field."""
    with pytest.raises(ModelUnreadable, match=named):
        read(**changes)


def test_something_that_is_no_object_is_refused() -> None:
    """A config is a JSON object."""
    with pytest.raises(ModelUnreadable, match="list"):
        read_config([])  # type: ignore[arg-type]


def test_parameters_are_counted_by_hand() -> None:
    """2 layers of 32 x (32+16+16+32) + 3 x 32 x 48 + 2 x 32, embedding and head of 258 x 32, one norm of 32."""
    assert TINY.num_parameters == 2 * (32 * 96 + 4608 + 64) + 2 * 258 * 32 + 32
