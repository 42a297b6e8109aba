"""KV size of models of which not every layer attends, and of checkpoints that quantise their cache; worked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from diagnosis.capacity.kv_size import kv_size
from engine_probe.errors import UsageError
from engine_probe.models.kv_geometry import geometry

PLAIN: dict[str, Any] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
JAMBA = PLAIN | {
    "model_type": "jamba",
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
MAMBA2_FIELDS = {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 256, "mamba_n_groups": 1, "mamba_d_conv": 4}


def test_jamba_keeps_every_eighth_layer() -> None:
    """4 of 32 layers at 2 * 8 * 128 * 2 bytes a token. The other 28 keep 8,192 * 16 * 2 bytes of state and 3 * 8,192 * 2 of convolution."""
    size = kv_size(geometry(JAMBA), 1000)
    assert size.bytes_per_token == 4 * 4096
    assert size.request_bytes == 4 * 4096 * 1000 + 28 * (8192 * 16 * 2 + 3 * 8192 * 2)


def test_bamba_lists_its_attention_layers() -> None:
    """3 of 32 layers attend; each Mamba-2 layer keeps 128 * 64 * 256 numbers and 3 * (128 * 64 + 2 * 256) of convolution."""
    size = kv_size(geometry(PLAIN | MAMBA2_FIELDS | {"attn_layer_indices": [9, 18, 27]}), 1000)
    assert size.bytes_per_token == 3 * 4096
    assert size.request_bytes == 3 * 4096 * 1000 + 29 * 2 * (128 * 64 * 256 + 3 * (128 * 64 + 2 * 256))


def test_granite_names_each_layer() -> None:
    """layer_types of mamba and attention: one of four attends."""
    kinds = ["mamba", "mamba", "attention", "mamba"]
    size = kv_size(geometry(PLAIN | MAMBA2_FIELDS | {"num_hidden_layers": 4, "layer_types": kinds}), 10)
    assert size.bytes_per_token == 4096


def test_nemotron_h_spells_its_layers() -> None:
    """M-M*-: one layer attends, two are Mamba-2, two feed-forward layers keep nothing."""
    fields = {"hybrid_override_pattern": "M-M*-", "num_hidden_layers": 5}
    names = {"mamba_num_heads": 2, "mamba_head_dim": 4, "ssm_state_size": 8, "n_groups": 1, "conv_kernel": 4}
    size = kv_size(geometry(PLAIN | fields | names), 10)
    assert size.request_bytes == 4096 * 10 + 2 * 2 * (2 * 4 * 8 + 3 * (2 * 4 + 2 * 8))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attn_type_list": [0, 1] * 16}, "attn_type_list says that not every layer"),
        ({"block_types": ["recurrent", "attention"]}, "block_types says that not every layer"),
        (
            {"linear_attn_config": {"kda_layers": [1]}, "kv_lora_rank": 512},
            "linear_attn_config says that not every layer",
        ),
        ({"mamba_d_ssm": 4096}, "mamba_d_ssm says that not every layer"),
        ({"attn_layer_period": 8, "kv_lora_rank": 512}, "layers of latent attention"),
        ({"attn_layer_period": 0}, "attn_layer_period is 0; expected a whole number above 0"),
        ({"attn_layer_period": 8}, "mamba_expand is not in the config"),
        ({"attn_layer_indices": [1], "mamba_n_heads": -1}, "mamba_n_heads is -1 in the config"),
        ({"hybrid_override_pattern": "M*"}, "hybrid_override_pattern has 2 letters for 32 layers"),
        ({"hybrid_override_pattern": "X" * 32}, "hybrid_override_pattern holds 'X'"),
        (
            {"num_attention_heads": None, "num_key_value_heads": None, "state_size": 128},
            "a state space model keeps a constant state and no KV cache",
        ),
        ({"layer_types": ["linear_attention"] * 32}, r"the config has no linear_num_value_heads$"),
    ],
)
def test_what_is_not_understood_is_refused(change: dict[str, Any], words: str) -> None:
    """Never taken for a model of attention alone: the field that says otherwise is named."""
    with pytest.raises(UsageError, match=words):
        geometry(PLAIN | change)


@pytest.mark.parametrize(
    "scheme",
    [
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
    ],
)
def test_a_checkpoint_that_quantises_its_cache_is_followed(scheme: dict[str, Any]) -> None:
    """auto means what the engine will do: one byte an element, and it is said. An explicit --kv-dtype wins."""
    model = geometry(PLAIN | {"quantization_config": scheme})
    assert model.dtype == "fp8"
    assert kv_size(model, 1).bytes_per_token == 32 * 2 * 8 * 128
    assert model.notes == ("the config quantises the KV cache (fp8), which auto follows",)
    assert geometry(PLAIN | {"quantization_config": scheme}, "bfloat16").dtype == "bfloat16"


def test_quantised_weights_alone_change_nothing() -> None:
    """AWQ stores weights in 4 bits and the cache in the model's dtype; an unknown cache format is refused."""
    awq = PLAIN | {"quantization_config": {"quant_method": "awq", "bits": 4, "kv_cache_scheme": None}}
    assert geometry(awq).dtype == "bfloat16"
    with pytest.raises(UsageError, match="quantises the KV cache as 'NVFP4'"):
        geometry(PLAIN | {"quantization_config": {"kv_cache_quant_algo": "NVFP4"}})
