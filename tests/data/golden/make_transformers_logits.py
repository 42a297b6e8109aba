"""Answers of Hugging Face transformers, which the decoder is held against: run where transformers is installed.

    python tests/data/golden/make_transformers_logits.py >tests/data/golden/transformers_logits.json

The weights are `SeededTensors(0)`; each case is a config and the logits of the last of some tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[3]))

from engine_probe.engine.torch_executor.model_config import read_config
from engine_probe.engine.torch_executor.weights import SeededTensors, expected_shapes

COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES = {
    "llama": {"model_type": "llama"},
    "llama, biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama, llama3 rope": {
        "model_type": "llama",
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 32, "rope_theta": 10000.0},
    },
    "llama, linear rope": {
        "model_type": "llama",
        "rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    },
    "mistral": {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": False, "num_key_value_heads": 4},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "use_sliding_window": False, "num_key_value_heads": 1},
}
TOKENS = [(7 * at * at + 3) % 64 for at in range(40)]


def logits(fields: dict[str, object]) -> list[float]:
    """Of the last token."""
    config = read_config(fields)
    source = SeededTensors(0)
    given = {key: value for key, value in fields.items() if key != "model_type"}
    made = transformers.AutoConfig.for_model(fields["model_type"], **given)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").float().eval()
    state = {name: source.get(name, shape) for name, shape in expected_shapes(config).items()}
    if config.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    missing = model.load_state_dict(state, strict=True)
    assert not missing.missing_keys
    with torch.inference_mode():
        found = model(torch.tensor([TOKENS])).logits[0, -1]
    return [round(value, 5) for value in found.tolist()]


if __name__ == "__main__":
    cases = []
    for name, changes in CASES.items():
        fields = {**COMMON, **changes}
        cases.append({"name": name, "config": fields, "logits": logits(fields)})
    json.dump({"transformers": transformers.__version__, "tokens": TOKENS, "cases": cases}, sys.stdout)
    print()
