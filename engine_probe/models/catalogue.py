"""Published shapes of well-known models, so that their KV size and their work can be asked for by name.

Source: the config.json each model was published with; always the values that decide the KV cache, and for models of
plain attention those that decide weights and arithmetic. A checkpoint of yours may differ: its own config.json is the
better source. A name is found without its organisation, in any case, and without the
suffixes that do not change the geometry (-instruct, -it, -chat, -hf, -base, -fp8, ...).
"""

from __future__ import annotations

import difflib
import re
from typing import Any

from engine_probe.errors import UsageError

SOURCE = "published config.json values"


def _gqa(
    layers: int, heads: int, kv_heads: int, hidden: int, head_dim: int | None = None, **more: Any
) -> dict[str, Any]:
    config = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "torch_dtype": "bfloat16",
    }
    return config | ({} if head_dim is None else {"head_dim": head_dim}) | more


def _mla(layers: int, heads: int, hidden: int, **more: Any) -> dict[str, Any]:
    config = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}
    return config | {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": hidden} | more


def _body(family: str, intermediate: int, vocab: int, *, tied: bool = False, **more: Any) -> dict[str, Any]:
    """What decides weights and arithmetic beside attention."""
    fields = {"model_type": family, "intermediate_size": intermediate, "vocab_size": vocab}
    return fields | {"tie_word_embeddings": tied} | more


def _experts(number: int, active: int, intermediate: int) -> dict[str, Any]:
    return {"num_experts": number, "num_experts_per_tok": active, "moe_intermediate_size": intermediate}


def _windows(pattern: int, window: int) -> dict[str, Any]:
    return {"sliding_window_pattern": pattern, "sliding_window": window}


MODELS: dict[str, dict[str, Any]] = {
    "llama-2-7b": _gqa(32, 32, 32, 4096, **_body("llama", 11008, 32000)),
    "llama-2-13b": _gqa(40, 40, 40, 5120, **_body("llama", 13824, 32000)),
    "llama-2-70b": _gqa(80, 64, 8, 8192, **_body("llama", 28672, 32000)),
    "llama-3-8b": _gqa(32, 32, 8, 4096, **_body("llama", 14336, 128256)),
    "llama-3.1-8b": _gqa(32, 32, 8, 4096, **_body("llama", 14336, 128256)),
    "llama-3.2-1b": _gqa(16, 32, 8, 2048, 64, **_body("llama", 8192, 128256, tied=True)),
    "llama-3.2-3b": _gqa(28, 24, 8, 3072, 128, **_body("llama", 8192, 128256, tied=True)),
    "llama-3-70b": _gqa(80, 64, 8, 8192, **_body("llama", 28672, 128256)),
    "llama-3.1-70b": _gqa(80, 64, 8, 8192, **_body("llama", 28672, 128256)),
    "llama-3.3-70b": _gqa(80, 64, 8, 8192, **_body("llama", 28672, 128256)),
    "llama-3.1-405b": _gqa(126, 128, 8, 16384, **_body("llama", 53248, 128256)),
    "qwen2.5-0.5b": _gqa(24, 14, 2, 896, **_body("qwen2", 4864, 151936, tied=True)),
    "qwen2.5-1.5b": _gqa(28, 12, 2, 1536, **_body("qwen2", 8960, 151936, tied=True)),
    "qwen2.5-7b": _gqa(28, 28, 4, 3584, **_body("qwen2", 18944, 152064)),
    "qwen2.5-14b": _gqa(48, 40, 8, 5120, **_body("qwen2", 13824, 152064)),
    "qwen2.5-32b": _gqa(64, 40, 8, 5120, **_body("qwen2", 27648, 152064)),
    "qwen2.5-72b": _gqa(80, 64, 8, 8192, **_body("qwen2", 29568, 152064)),
    "qwen3-0.6b": _gqa(28, 16, 8, 1024, 128, **_body("qwen3", 3072, 151936, tied=True)),
    "qwen3-1.7b": _gqa(28, 16, 8, 2048, 128, **_body("qwen3", 6144, 151936, tied=True)),
    "qwen3-4b": _gqa(36, 32, 8, 2560, 128, **_body("qwen3", 9728, 151936, tied=True)),
    "qwen3-8b": _gqa(36, 32, 8, 4096, 128, **_body("qwen3", 12288, 151936)),
    "qwen3-14b": _gqa(40, 40, 8, 5120, 128, **_body("qwen3", 17408, 151936)),
    "qwen3-32b": _gqa(64, 64, 8, 5120, 128, **_body("qwen3", 25600, 151936)),
    "qwen3-30b-a3b": _gqa(48, 32, 4, 2048, 128, **_body("qwen3_moe", 6144, 151936, **_experts(128, 8, 768))),
    "qwen3-235b-a22b": _gqa(94, 64, 4, 4096, 128, **_body("qwen3_moe", 12288, 151936, **_experts(128, 8, 1536))),
    "qwen3-next-80b-a3b": _gqa(
        48,
        16,
        2,
        2048,
        256,
        full_attention_interval=4,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    ),
    "mistral-7b-v0.1": _gqa(32, 32, 8, 4096, sliding_window=4096, **_body("mistral", 14336, 32000)),
    "mistral-7b-v0.2": _gqa(32, 32, 8, 4096, **_body("mistral", 14336, 32000)),
    "mistral-7b-v0.3": _gqa(32, 32, 8, 4096, **_body("mistral", 14336, 32768)),
    "mistral-nemo-12b": _gqa(40, 32, 8, 5120, 128, **_body("mistral", 14336, 131072)),
    "mistral-small-24b": _gqa(40, 32, 8, 5120, 128, **_body("mistral", 32768, 131072)),
    "mixtral-8x7b": _gqa(32, 32, 8, 4096, **_body("mixtral", 14336, 32000, num_local_experts=8, num_experts_per_tok=2)),
    "mixtral-8x22b": _gqa(
        56, 48, 8, 6144, **_body("mixtral", 16384, 32768, num_local_experts=8, num_experts_per_tok=2)
    ),
    "smollm2-135m": _gqa(30, 9, 3, 576, **_body("llama", 1536, 49152, tied=True)),
    "smollm2-360m": _gqa(32, 15, 5, 960, **_body("llama", 2560, 49152, tied=True)),
    "smollm2-1.7b": _gqa(24, 32, 32, 2048, **_body("llama", 8192, 49152, tied=True)),
    "phi-4": _gqa(40, 40, 10, 5120, **_body("phi3", 17920, 100352)),
    "deepseek-v3": _mla(61, 128, 7168, num_nextn_predict_layers=1),
    "deepseek-r1": _mla(61, 128, 7168, num_nextn_predict_layers=1),
    "deepseek-v3.1": _mla(61, 128, 7168, num_nextn_predict_layers=1),
    "deepseek-v3.2": _mla(61, 128, 7168, num_nextn_predict_layers=1, index_head_dim=128),
    "deepseek-v2": _mla(60, 128, 5120),
    "deepseek-v2-lite": _mla(27, 16, 2048),
    "kimi-k2": _mla(61, 64, 7168),
    "gpt-oss-20b": _gqa(24, 64, 8, 2880, 64, **_windows(2, 128)),
    "gpt-oss-120b": _gqa(36, 64, 8, 2880, 64, **_windows(2, 128)),
    "gemma-3-1b": _gqa(26, 4, 1, 1152, 256, **_body("gemma3_text", 6912, 262144, tied=True), **_windows(6, 512)),
    "gemma-3-4b": _gqa(34, 8, 4, 2560, 256, **_body("gemma3_text", 10240, 262208, tied=True), **_windows(6, 1024)),
    "gemma-3-12b": _gqa(48, 16, 8, 3840, 256, **_body("gemma3_text", 15360, 262208, tied=True), **_windows(6, 1024)),
    "gemma-3-27b": _gqa(62, 32, 16, 5376, 128, **_body("gemma3_text", 21504, 262208, tied=True), **_windows(6, 1024)),
}
ALIASES = {
    "mistral-7b": "mistral-7b-v0.3",
    "mistral-nemo": "mistral-nemo-12b",
    "mistral-small": "mistral-small-24b",
    "phi-4-14b": "phi-4",
    "qwen3-next": "qwen3-next-80b-a3b",
    "meta-llama-3-8b": "llama-3-8b",
    "meta-llama-3-70b": "llama-3-70b",
    "meta-llama-3.1-8b": "llama-3.1-8b",
    "meta-llama-3.1-70b": "llama-3.1-70b",
    "meta-llama-3.1-405b": "llama-3.1-405b",
}
_SUFFIX = re.compile(r"-(instruct|it|chat|hf|base|fp8|bf16|awq|gptq|int4|thinking|pt|\d{4})$")


def find_model(name: str) -> tuple[str, dict[str, Any]]:
    """Its name here and the fields of its config. Raises UsageError with the closest names where it is not known."""
    key = name.strip().lower().replace("_", "-").rsplit("/", 1)[-1]
    candidates = [key]
    while (shorter := _SUFFIX.sub("", candidates[-1])) != candidates[-1]:
        candidates.append(shorter)
    for candidate in candidates:
        found = ALIASES.get(candidate, candidate)
        if found in MODELS:
            return found, MODELS[found]
    close = difflib.get_close_matches(candidates[-1], [*MODELS, *ALIASES], n=4, cutoff=0.5)
    hint = f"close to it: {', '.join(close)}" if close else f"known are {', '.join(MODELS)}"
    raise UsageError(
        f"there is no file '{name}' and no built-in model of that name; {hint}. Or give the model's own config.json",
        name=name,
        close=close,
    )
