"""What a model keeps in its KV cache, layer by layer, read from the fields of its config.json.

Invariant: every layer that attends is in exactly one group of layers that are alike, or the config is refused with the
field that is missing or not understood. Fields and rules: Hugging Face configurations and vLLM 0.33 (`config/model.py`,
`v1/kv_cache_interface.py`); widths of the packed fp8 layout of sparse MLA: vLLM `fp8_ds_mla`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine_probe.errors import UsageError
from engine_probe.models.kv_hybrid import MAMBA, MAMBA2, NOTHING, hybrid_kinds, mamba_state, refuse_state_space

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}
FP8_DS_MLA = "fp8_ds_mla"
"""Packed layout of sparse MLA: 512 fp8 values, 4 float32 scales, 64 bfloat16 rope values a token and layer."""

FP8_DS_MLA_BYTES = 512 + 4 * 4 + 64 * 2
NESTED = ("text_config", "llm_config", "language_config")
NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
NUM_HEADS = ("num_attention_heads", "n_head", "n_heads")
NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
HIDDEN = ("hidden_size", "n_embd", "d_model")

FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window_pattern": 4},
    "gemma2": {"sliding_window_pattern": 2, "head_dim": 256},
    "gemma3_text": {
        "sliding_window_pattern": 6,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "gpt_oss": {"sliding_window_pattern": 2, "head_dim": 64},
    "llama4_text": {"no_rope_layer_interval": 4},
    "qwen3_next": {"full_attention_interval": 4},
}
"""What the family's code assumes where its config.json is silent. gemma3 and llama4 nest these under text_config."""

MOST_LAYERS = 10_000
LARGEST = 1 << 40
"""No count in a config is larger; of layers each is looked at."""

FULL, WINDOW, CHUNK, LINEAR = "full", "window", "chunk", "linear"
LAYER_TYPES = {
    "full_attention": FULL,
    "attention": FULL,
    "global_attention": FULL,
    "sliding_attention": WINDOW,
    "sliding_window_attention": WINDOW,
    "chunked_attention": CHUNK,
    "linear_attention": LINEAR,
    "mamba": MAMBA2,
    "mamba2": MAMBA2,
}


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that are alike.

    kind         full (keeps every token), window or chunk (keeps at most `window` tokens), linear (a constant state)
    token_bytes  of one token in one layer, all heads; 0 for linear
    kv_heads     heads that tensor parallelism divides; None where it divides nothing (MLA: each rank holds all)
    state_bytes  of one sequence in one layer, whatever its length; 0 but for linear, which all recurrent layers are here
    """

    kind: str
    num_layers: int
    token_bytes: int
    kv_heads: int | None
    window: int | None = None
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """The groups of a model, and what is to be said about how they were read."""

    attention: str
    groups: tuple[LayerGroup, ...]
    dtype: str
    num_heads: int | None
    notes: tuple[str, ...]


def geometry(config: Mapping[str, Any], kv_dtype: str = "auto") -> KvGeometry:
    """Read a config. kv_dtype: auto (the model's), a name of DTYPE_BYTES, or fp8_ds_mla.

    Raises UsageError naming the field that is missing, of the wrong type, or not understood.
    """
    text = _text_part(config)
    notes: list[str] = []
    dtype, element_bytes = _element(config, text, kv_dtype, notes)
    num_layers = _count(text, NUM_LAYERS)
    num_heads = _count(text, NUM_HEADS, optional=True)
    if text.get("kv_lora_rank"):
        if hybrid_kinds(text, num_layers) is not None:
            raise UsageError(
                "layers of latent attention (kv_lora_rank) among layers that do not attend are not known here"
            )
        groups: list[LayerGroup] = [_latent(text, num_layers, dtype, element_bytes)]
        attention = "MLA"
    else:
        if dtype == FP8_DS_MLA:
            raise UsageError(f"--kv-dtype {FP8_DS_MLA} is a layout of MLA models; this one has no kv_lora_rank")
        heads = _kv_heads(text, num_layers, num_heads)
        width = _head_widths(text, num_heads)
        kinds = _kinds(text, num_layers)
        layers = zip(kinds, heads, strict=True)
        groups = _grouped(
            [_layer(text, kind, num, width * element_bytes, dtype) for kind, num in layers if kind != NOTHING]
        )
        attention = _attention_name(heads, num_heads)
    if drafts := text.get("num_nextn_predict_layers"):
        notes.append(f"num_nextn_predict_layers {drafts}: not counted; speculation with draft layers adds their KV")
    return KvGeometry(attention, tuple(groups), dtype, num_heads, tuple(notes))


def _text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's own fields: multimodal configs nest them; the family's defaults fill what is silent."""
    if not isinstance(config, Mapping):
        raise UsageError(f"a config is a JSON object, this is a {type(config).__name__}")
    nested = next((config[name] for name in NESTED if isinstance(config.get(name), Mapping)), None)
    text = dict(config) if nested is None else {**_shared(config), **nested}
    family = str(text.get("model_type", ""))
    if family == "gemma3":
        family = "gemma3_text"
    return {**FAMILY_DEFAULTS.get(family, {}), **{key: value for key, value in text.items() if value is not None}}


def _shared(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("torch_dtype", "dtype", "model_type") if key in config}


def _element(config: Mapping[str, Any], text: Mapping[str, Any], kv_dtype: str, notes: list[str]) -> tuple[str, int]:
    if kv_dtype == FP8_DS_MLA:
        return kv_dtype, 1
    if kv_dtype != "auto":
        if kv_dtype not in DTYPE_BYTES:
            known = ", ".join(("auto", *DTYPE_BYTES, FP8_DS_MLA))
            raise UsageError(f"--kv-dtype '{kv_dtype}' is not known; known: {known}")
        return kv_dtype, DTYPE_BYTES[kv_dtype]
    quantised = _quantised(text.get("quantization_config") or config.get("quantization_config"))
    if quantised is not None:
        notes.append(f"the config quantises the KV cache ({quantised}), which auto follows")
        return quantised, DTYPE_BYTES[quantised]
    said = text.get("torch_dtype") or text.get("dtype") or config.get("torch_dtype") or config.get("dtype")
    if said is None:
        notes.append("the config names no dtype: 2 bytes an element are assumed")
        return "bfloat16", 2
    name = str(said).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise UsageError(f"the config's dtype '{said}' is not known; give --kv-dtype, one of {', '.join(DTYPE_BYTES)}")
    return name, DTYPE_BYTES[name]


def _quantised(scheme: Any) -> str | None:
    """What a checkpoint says of its KV cache: compressed-tensors by `kv_cache_scheme`, ModelOpt by `kv_cache_quant_algo`."""
    if not isinstance(scheme, Mapping):
        return None
    packed, algorithm = scheme.get("kv_cache_scheme"), scheme.get("kv_cache_quant_algo")
    said = packed.get("num_bits") if isinstance(packed, Mapping) else algorithm
    if said is None:
        return None
    if said in (8, "FP8", "fp8"):
        return "fp8"
    raise UsageError(f"the config quantises the KV cache as {said!r}, which is not known here; give --kv-dtype")


def _count(text: Mapping[str, Any], names: Sequence[str], *, optional: bool = False) -> Any:
    """The first of `names` that is there: a whole number above 0."""
    for name in names:
        if name in text:
            value = text[name]
            most = MOST_LAYERS if names is NUM_LAYERS else LARGEST
            if type(value) is not int or value < 1:
                raise UsageError(f"{name} is {value!r} in the config; expected a whole number above 0", field=name)
            if value > most:
                raise UsageError(f"{name} is above {most:,} in the config, which no model has", field=name)
            return value
    if optional:
        return None
    others = f" (nor {', '.join(names[1:])})" if len(names) > 1 else ""
    raise UsageError(f"the config has no {names[0]}{others}", field=names[0])


def _kv_heads(text: Mapping[str, Any], num_layers: int, num_heads: int | None) -> list[int]:
    """KV heads of each layer. Absent: as many as attention heads; `multi_query`: one."""
    listed = next((text[name] for name in NUM_KV_HEADS if isinstance(text.get(name), list)), None)
    if listed is not None:
        if len(listed) != num_layers or not all(type(h) is int and h > 0 for h in listed):
            raise UsageError(f"num_key_value_heads lists {listed!r}; expected {num_layers} whole numbers above 0")
        return [int(heads) for heads in listed]
    heads = _count(text, NUM_KV_HEADS, optional=True)
    if heads is None and text.get("multi_query") is True:
        heads = 1
    if heads is None:
        heads = num_heads
    if heads is None:
        refuse_state_space(text)
        raise UsageError(
            "the config has no num_key_value_heads and no num_attention_heads", field="num_key_value_heads"
        )
    return [int(heads)] * num_layers


def _head_widths(text: Mapping[str, Any], num_heads: int | None) -> int:
    """Elements of one token in one KV head: width of a key plus width of a value."""
    key = _count(text, ("head_dim", "attention_head_dim"), optional=True)
    if key is None:
        hidden = _count(text, HIDDEN, optional=True)
        if hidden is None or num_heads is None:
            raise UsageError("the config has no head_dim, nor hidden_size and num_attention_heads", field="head_dim")
        if hidden % num_heads:
            raise UsageError(
                f"hidden_size {hidden} is no multiple of num_attention_heads {num_heads}, and there is no head_dim",
                field="head_dim",
            )
        key = hidden // num_heads
    value = _count(text, ("v_head_dim",), optional=True) or key
    return int(key) + int(value)


def _kinds(text: Mapping[str, Any], num_layers: int) -> list[str]:
    """Kind of each layer, 0-based, in order: `layer_types`, else the pattern of the family."""
    window = text.get("sliding_window")
    if text.get("use_sliding_window") is False:
        window = None
    listed = text.get("layer_types")
    if listed is not None:
        unknown = sorted({str(kind) for kind in listed} - set(LAYER_TYPES))
        if unknown:
            raise UsageError(
                f"layer_types names {', '.join(unknown)}, not known here; known: {', '.join(LAYER_TYPES)}",
                field="layer_types",
            )
        if len(listed) != num_layers:
            raise UsageError(f"layer_types has {len(listed)} entries for {num_layers} layers", field="layer_types")
        kinds = [LAYER_TYPES[kind] for kind in listed]
        return [FULL if kind == WINDOW and window is None else kind for kind in kinds]
    if (hybrid := hybrid_kinds(text, num_layers)) is not None:
        return hybrid
    if interval := text.get("full_attention_interval"):
        return [FULL if (i + 1) % interval == 0 else LINEAR for i in range(num_layers)]
    if text.get("attention_chunk_size"):
        no_rope = text.get("no_rope_layers") or []
        if len(no_rope) == num_layers:
            return [CHUNK if rope else FULL for rope in no_rope]
        interval = text.get("no_rope_layer_interval", 4)
        return [FULL if (i + 1) % interval == 0 else CHUNK for i in range(num_layers)]
    if window is None:
        return [FULL] * num_layers
    pattern = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern")
    if pattern:
        return [FULL if (i + 1) % pattern == 0 else WINDOW for i in range(num_layers)]
    first_window = text.get("max_window_layers", 0) if text.get("use_sliding_window") else 0
    return [FULL if i < first_window else WINDOW for i in range(num_layers)]


def _layer(text: Mapping[str, Any], kind: str, heads: int, head_bytes: int, dtype: str) -> LayerGroup:
    if kind == LINEAR:
        return LayerGroup(LINEAR, 1, 0, _count(text, ("linear_num_value_heads",)), None, _state_bytes(text, dtype))
    if kind in (MAMBA, MAMBA2):
        return LayerGroup(LINEAR, 1, 0, *_mamba(text, kind, dtype))
    window = None
    if kind == WINDOW:
        window = _count(text, ("sliding_window",))
    elif kind == CHUNK:
        window = _count(text, ("attention_chunk_size",))
    return LayerGroup(kind, 1, heads * head_bytes, heads, window)


def _mamba(text: Mapping[str, Any], kind: str, dtype: str) -> tuple[int, None, int]:
    """(heads that tensor parallelism divides, no window, bytes of the state)."""
    model_bytes = max(DTYPE_BYTES.get(dtype, 2), 2)
    state, divided = mamba_state(
        text, kind, model_bytes, DTYPE_BYTES.get(str(text.get("mamba_ssm_dtype", "")), model_bytes)
    )
    return divided, None, state


def _state_bytes(text: Mapping[str, Any], dtype: str) -> int:
    """Recurrent state and convolution state of one gated-delta-net layer (Qwen3-Next); never quantised with the KV."""
    key_heads, value_heads = _count(text, ("linear_num_key_heads",)), _count(text, ("linear_num_value_heads",))
    key_dim, value_dim = _count(text, ("linear_key_head_dim",)), _count(text, ("linear_value_head_dim",))
    kernel = _count(text, ("linear_conv_kernel_dim",))
    model_bytes = max(DTYPE_BYTES.get(dtype, 2), 2)
    state_bytes = DTYPE_BYTES.get(str(text.get("mamba_ssm_dtype", "")), model_bytes)
    conv = (kernel - 1) * (2 * key_heads * key_dim + value_heads * value_dim)
    return int(value_heads * key_dim * value_dim * state_bytes + conv * model_bytes)


def _latent(text: Mapping[str, Any], num_layers: int, dtype: str, element_bytes: int) -> LayerGroup:
    """MLA: one latent vector a token and layer, no separate value, on every rank."""
    rank, rope = _count(text, ("kv_lora_rank",)), _count(text, ("qk_rope_head_dim",))
    token_bytes = (rank + rope) * element_bytes
    if dtype == FP8_DS_MLA:
        if (rank, rope) != (512, 64):
            raise UsageError(f"{FP8_DS_MLA} packs 512 + 64 elements; this model has kv_lora_rank {rank} + {rope}")
        token_bytes = FP8_DS_MLA_BYTES
    if index := text.get("index_head_dim"):
        # The indexer of sparse MLA keeps its own keys: fp8, one float32 scale per 128.
        token_bytes += index + 4 * -(-index // 128)
    return LayerGroup(FULL, num_layers, token_bytes, None)


def _grouped(layers: Sequence[LayerGroup]) -> list[LayerGroup]:
    """Layers that are alike counted together, in order of first appearance."""
    counts: dict[LayerGroup, int] = {}
    for layer in layers:
        counts[layer] = counts.get(layer, 0) + 1
    return [replace(layer, num_layers=count) for layer, count in counts.items()]


def _attention_name(heads: Sequence[int], num_heads: int | None) -> str:
    if set(heads) == {1}:
        return "MQA"
    return "MHA" if num_heads is not None and set(heads) == {num_heads} else "GQA"
