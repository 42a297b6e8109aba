"""What a decoder computes, read from the fields of its config.json.

Invariant: a config is either understood whole or refused with the name of the field that is not. A field that is not
known could change the result, so it is refused as well; fields that change nothing here are listed by name. Fields:
Hugging Face configurations of Llama, Mistral, Qwen2 and Qwen3 (`rope_parameters` is transformers 5's name of `rope_scaling`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from engine_probe.errors import ModelUnreadable

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
LARGEST = 1 << 31
"""No size of a model is larger; what claims to be is damaged, and would only end in a lack of memory."""
LARGEST_NUMBER = 1e30
MOST_LAYERS = 4096
DTYPES = ("float32", "bfloat16", "float16")
UNDERSTOOD = frozenset(
    [
        "architectures",
        "attention_bias",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "max_window_layers",
        "mlp_bias",
        "model_type",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "partial_rotary_factor",
        "quantization_config",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "tie_word_embeddings",
        "torch_dtype",
        "use_sliding_window",
        "vocab_size",
    ]
)
WITHOUT_EFFECT = frozenset(
    [
        "attention_dropout",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gradient_checkpointing",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "is_llama_config",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "rope_interleaved",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "use_bfloat16",
        "use_cache",
    ]
)
"""For training, for generation by another library, or of a slicing that leaves the sums as they are (pretraining_tp)."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding: base `theta`, and how its frequencies are stretched.

    kind     default | linear | llama3
    factor   of stretching; low_factor, high_factor and original_context belong to llama3 alone
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_factor: float = 1.0
    high_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    max_context  tokens; dtype: of the published weights; qk_norm: RMSNorm over each query and key head (Qwen3)
    tied         the output head is the embedding
    """

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    rms_eps: float = 1e-6
    rope: Rope = Rope()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def query_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads; of all value heads alike."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Numbers in all weights, a tied head counted once."""
        attention = self.hidden_size * (self.query_size * 2 + self.kv_size * 2)
        mlp = 3 * self.hidden_size * self.intermediate_size
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        biases = (self.query_size + 2 * self.kv_size) * self.qkv_bias + self.hidden_size * self.output_bias
        biases += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return self.num_layers * (attention + mlp + norms + biases) + embeddings + self.hidden_size


def read_config(fields: Mapping[str, Any]) -> ModelConfig:
    """Understand a config.json. Raises ModelUnreadable naming the field that is missing, wrong or not understood."""
    if not isinstance(fields, Mapping):
        raise ModelUnreadable(f"a config is a JSON object, this is a {type(fields).__name__}")
    said = {name: value for name, value in fields.items() if value is not None}
    family = said.get("model_type")
    if family not in MODEL_TYPES:
        _refuse("model_type", family, f"known here: {', '.join(MODEL_TYPES)}")
    unknown = [name for name in said if name not in UNDERSTOOD | WITHOUT_EFFECT and not name.startswith("_")]
    if unknown:
        raise ModelUnreadable(
            f"the config has fields that are not known here and may change the result: {', '.join(sorted(unknown))}; "
            "take them out of config.json if they do not",
            field=sorted(unknown)[0],
        )
    _refuse_other_math(said)
    num_heads = _count(said, "num_attention_heads")
    # The families' own defaults differ (8, 32): only Llama's is the number of heads, the others must say it.
    num_kv_heads = _count(said, "num_key_value_heads", num_heads if family == "llama" else None)
    hidden = _count(said, "hidden_size")
    if (num_layers := _count(said, "num_hidden_layers")) > MOST_LAYERS:
        _refuse("num_hidden_layers", num_layers, f"at most {MOST_LAYERS} are held here")
    if num_heads % num_kv_heads:
        _refuse("num_key_value_heads", num_kv_heads, f"expected a divisor of num_attention_heads {num_heads}")
    if "head_dim" not in said and (hidden % num_heads or family == "qwen3"):
        _refuse(
            "hidden_size", hidden, f"with num_attention_heads {num_heads} it gives no head_dim; expected that field"
        )
    head_dim = _count(said, "head_dim", hidden // num_heads)
    if head_dim % 2:
        _refuse("head_dim", head_dim, "rotary positions turn pairs: expected an even number")
    bias = _flag(said, "attention_bias", False)
    return ModelConfig(
        model_type=str(family),
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=_count(said, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_count(said, "vocab_size"),
        max_context=_count(said, "max_position_embeddings"),
        rms_eps=_number(said, "rms_norm_eps", 1e-6),
        rope=_rope(said),
        qkv_bias=bias or family == "qwen2",
        output_bias=bias and family != "qwen2",
        mlp_bias=_flag(said, "mlp_bias", False),
        qk_norm=family == "qwen3",
        tied=_flag(said, "tie_word_embeddings", False),
        dtype=_dtype(said),
        bos_token_id=_token(said.get("bos_token_id")),
        eos_token_ids=token_ids(said.get("eos_token_id"), "eos_token_id"),
    )


def token_ids(value: Any, field: str) -> frozenset[int]:
    """One id or a list of them, as config.json and generation_config.json write them; None: none."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(one) is int and one >= 0 for one in ids):
        _refuse(field, value, "expected a token id or a list of them")
    return frozenset(ids)


def _refuse_other_math(said: Mapping[str, Any]) -> None:
    if (act := said.get("hidden_act", "silu")) != "silu":
        _refuse("hidden_act", act, "only silu (SwiGLU) is computed here")
    if (factor := said.get("partial_rotary_factor", 1.0)) != 1.0:
        _refuse("partial_rotary_factor", factor, "only whole heads are turned here")
    if "quantization_config" in said:
        _refuse("quantization_config", "set", "only unquantised weights are read here")
    kinds = said.get("layer_types", [])
    if not isinstance(kinds, list):
        _refuse("layer_types", kinds, "expected a list")
    if others := sorted({str(kind) for kind in kinds} - {"full_attention"}):
        _refuse("layer_types", ", ".join(others), "every layer here attends to all tokens")
    is_used = _flag(said, "use_sliding_window", said["model_type"] in ("mistral", "llama"))
    if is_used and "sliding_window" in said:
        window = _count(said, "sliding_window")
        if window < _count(said, "max_position_embeddings"):
            _refuse("sliding_window", window, "every layer here attends to all tokens")


def _rope(said: Mapping[str, Any]) -> Rope:
    scaling: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = said.get(name, {})
        if not isinstance(value, Mapping):
            _refuse(name, value, "expected an object")
        scaling |= value
    theta = scaling.pop("rope_theta", said.get("rope_theta", 10_000.0))
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    known = {"default": (), "linear": ("factor",)}
    known["llama3"] = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if not isinstance(kind, str) or kind not in known:
        _refuse("rope_scaling", kind, f"known here: {', '.join(known)}")
    for name in known[kind]:
        if name not in scaling:
            _refuse(f"rope_scaling.{name}", None, f"needed for {kind}")
    if others := sorted(set(scaling) - set(known[kind]) - {"factor"}):
        _refuse(f"rope_scaling.{others[0]}", scaling[others[0]], f"not a part of '{kind}'")
    rope = Rope(
        _number({"rope_theta": theta}, "rope_theta", 0.0),
        kind,
        _number(scaling, "factor", 1.0),
        _number(scaling, "low_freq_factor", 1.0),
        _number(scaling, "high_freq_factor", 4.0),
        _count(scaling, "original_max_position_embeddings", 8192),
    )
    if kind == "llama3" and rope.low_factor >= rope.high_factor:
        _refuse("rope_scaling.low_freq_factor", rope.low_factor, f"expected below high_freq_factor {rope.high_factor}")
    return rope


def _dtype(said: Mapping[str, Any]) -> str:
    name = str(said.get("dtype", said.get("torch_dtype", "float32"))).removeprefix("torch.")
    if name not in DTYPES:
        _refuse("dtype", name, f"known here: {', '.join(DTYPES)}")
    return name


def _token(value: Any) -> int | None:
    ids = token_ids(value, "bos_token_id")
    return min(ids) if ids else None


def _count(said: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = said.get(field, default)
    if value is None:
        raise ModelUnreadable(f"the config has no {field}", field=field)
    if type(value) is not int or not 0 < value <= LARGEST:
        _refuse(field, value, f"expected a whole number above 0, at most {LARGEST}")
    return int(value)


def _number(said: Mapping[str, Any], field: str, default: float) -> float:
    value = said.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST_NUMBER:
        _refuse(field, value, "expected a number above 0")
    return float(value)


def _flag(said: Mapping[str, Any], field: str, default: bool) -> bool:
    value = said.get(field, default)
    if not isinstance(value, bool):
        _refuse(field, value, "expected true or false")
    return bool(value)


def _refuse(field: str, value: Any, why: str) -> NoReturn:
    raise ModelUnreadable(f"{field} is {value!r} in the config: {why}", field=field, value=value)
