"""What of a model decides time and memory: matrices, heads, vocabulary, experts; read from the fields of its config.json.

Decoders of plain attention with gated feed-forward layers (Llama, Mistral, Qwen, Mixtral, Phi, Gemma, SmolLM, and what follows
them), with windows where a config has some. Latent attention, recurrent layers and shared experts are refused by name:
a wrong time would look like a right one. Invariant: `parameters` is the published count, to the last one, for the
models of the catalogue (tested on those whose count is published).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine_probe.errors import UsageError
from engine_probe.models.config_file import read_config
from engine_probe.models.kv_geometry import DTYPE_BYTES, LINEAR, KvGeometry, geometry

LARGEST = 1 << 40
"""No count in a config is larger."""
REFUSED = ("kv_lora_rank", "n_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace")
"""Fields of latent attention, shared experts and mixed dense and sparse layers."""
BIASED = ("qwen2",)
"""Families whose query, key and value matrices have a bias."""
NORMED_HEADS = ("qwen3", "qwen3_moe", "gemma3_text")
"""Families that normalise queries and keys of each head."""
NORMED_TWICE = ("gemma2", "gemma3_text")
"""Families with a norm before and one after each half of a layer."""
TIED = ("gemma", "gemma2", "gemma3_text")
"""Families whose head is the embedding table where the config is silent."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model. Sizes are elements, and bytes where the name says so.

    intermediate      of one feed-forward layer, or of one expert
    experts, active_experts   1 and 1 for a dense model
    dtype, kv_dtype   of the weights and of the KV cache
    windows           (layers, tokens they keep; None: all) of the layers that attend
    layer_extra       parameters of one layer that are neither attention's nor feed-forward matrices: norms, biases, router
    max_context       what the config allows, tokens; None where it does not say
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    is_tied: bool
    experts: int
    active_experts: int
    dtype: str
    kv_dtype: str
    windows: tuple[tuple[int, int | None], ...]
    layer_extra: int
    max_context: int | None = None

    @property
    def element_bytes(self) -> int:
        """Of one weight."""
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_element_bytes(self) -> int:
        """Of one element of a key or value."""
        return DTYPE_BYTES[self.kv_dtype]

    @property
    def attention_parameters(self) -> int:
        """Of one layer: query, key, value and output matrices."""
        return 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim

    @property
    def expert_parameters(self) -> int:
        """Of one feed-forward layer, or of one expert: gate, up and down matrices."""
        return 3 * self.hidden * self.intermediate

    @property
    def head_parameters(self) -> int:
        """Of the matrix from the last hidden state to the vocabulary."""
        return self.hidden * self.vocab

    @property
    def parameters(self) -> int:
        """All of them: what `weights_bytes` holds."""
        layer = self.attention_parameters + self.experts * self.expert_parameters + self.layer_extra
        embeddings = self.head_parameters * (1 if self.is_tied else 2)
        return self.layers * layer + embeddings + self.hidden

    @property
    def active_parameters(self) -> int:
        """Those that one token is multiplied with: experts it is not sent to, and the embedding table, left out."""
        layer = self.attention_parameters + self.active_experts * self.expert_parameters + self.layer_extra
        return self.layers * layer + self.head_parameters + self.hidden

    @property
    def weights_bytes(self) -> int:
        """Memory that the weights take."""
        return self.parameters * self.element_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token: 2 * layers * kv_heads * head_dim * bytes an element.

        Of the layers that keep every token, as `kv-size` counts; of all layers where none does.
        """
        full = sum(layers for layers, window in self.windows if window is None) or self.layers
        return 2 * full * self.kv_heads * self.head_dim * self.kv_element_bytes


def find_shape(name: str, *, dtype: str = "auto", kv_dtype: str = "auto") -> ModelShape:
    """The shape of a well-known model, a config.json or its folder; UsageError with close names where there is none."""
    found, _, config = read_config(name)
    return model_shape(config, name=found, dtype=dtype, kv_dtype=kv_dtype)


def model_shape(
    config: Mapping[str, Any], *, name: str = "", dtype: str = "auto", kv_dtype: str = "auto"
) -> ModelShape:
    """Read a config. dtype, kv_dtype: of weights and KV cache; auto: what the config says.

    Raises UsageError naming the field that is missing, of the wrong type, or not modelled.
    """
    attends = geometry(config, kv_dtype)
    text = next((config[key] for key in ("text_config", "llm_config") if isinstance(config.get(key), Mapping)), config)
    name = name or str(text.get("_name_or_path") or text.get("model_type") or "model")
    for field in REFUSED:
        if text.get(field):
            raise UsageError(
                f"{name} has {field}, and the roofline has no arithmetic for that kind of layer", field=field
            )
    if any(group.kind == LINEAR for group in attends.groups):
        raise UsageError(f"{name} has recurrent layers, for which the roofline has no arithmetic")
    layers = _count(text, name, "num_hidden_layers")
    heads = _count(text, name, "num_attention_heads")
    hidden = _count(text, name, "hidden_size")
    head_dim = _count(text, name, "head_dim", hidden // heads)
    experts = _count(text, name, "num_experts", _count(text, name, "num_local_experts", 1))
    active = _count(text, name, "num_experts_per_tok", 1)
    if active > experts:
        raise UsageError(f"{name}: {active} of {experts} experts a token", field="num_experts_per_tok")
    intermediate = _count(text, name, "intermediate_size")
    if experts > 1:
        intermediate = _count(text, name, "moe_intermediate_size", intermediate)
    kv_heads = _kv_heads(attends, name)
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=_count(text, name, "vocab_size"),
        is_tied=bool(text.get("tie_word_embeddings", text.get("model_type") in TIED)),
        experts=experts,
        active_experts=active,
        dtype=_weight_dtype(text, name, dtype),
        kv_dtype=attends.dtype,
        windows=tuple((group.num_layers, group.window) for group in attends.groups),
        layer_extra=_extra(text, hidden, heads, kv_heads, head_dim, experts),
        max_context=_count(text, name, "max_position_embeddings", 0) or None,
    )


def _count(text: Mapping[str, Any], name: str, field: str, default: int | None = None) -> int:
    value = text.get(field)
    if value is None:
        if default is None:
            raise UsageError(f"the config of {name} has no {field}, which its time depends on", field=field)
        return default
    if type(value) is not int or not 0 < value <= LARGEST:
        said = "a number of many digits" if type(value) is int and value > LARGEST else repr(value)
        raise UsageError(f"{field} is {said} in the config of {name}; expected a whole number above 0", field=field)
    return value


def _kv_heads(attends: KvGeometry, name: str) -> int:
    heads = {group.kv_heads for group in attends.groups}
    if len(heads) != 1 or None in heads:
        raise UsageError(f"the layers of {name} have different numbers of KV heads, which the roofline does not model")
    return int(heads.pop() or 0)


def _weight_dtype(text: Mapping[str, Any], name: str, dtype: str) -> str:
    said = str(text.get("torch_dtype") or text.get("dtype") or "bfloat16") if dtype == "auto" else dtype
    said = said.removeprefix("torch.")
    if said not in DTYPE_BYTES:
        raise UsageError(
            f"weights of dtype '{said}' ({name}) are not known; known: {', '.join(DTYPE_BYTES)}", dtype=said
        )
    return said


def _extra(text: Mapping[str, Any], hidden: int, heads: int, kv_heads: int, head_dim: int, experts: int) -> int:
    """Norms of a layer; biases, norms of heads and the router where the family has them."""
    family = str(text.get("model_type", ""))
    extra = (4 if family in NORMED_TWICE else 2) * hidden
    if family in BIASED or text.get("attention_bias") is True:
        extra += (heads + 2 * kv_heads) * head_dim
    if family in NORMED_HEADS:
        extra += 2 * head_dim
    return extra + (hidden * experts if experts > 1 else 0)
