"""Models of which not every layer attends: which layers keep KV, and what the recurrent ones keep instead.

Invariant: a config that says in any known way that some layers do not attend is understood or refused; it is never taken
for a model of attention alone. A recurrent layer keeps a state of constant size a sequence. Source: Hugging Face
configurations of Jamba, Bamba, Nemotron-H and Granite 4; vLLM 0.33 `MambaStateShapeCalculator`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from engine_probe.errors import UsageError

FULL, MAMBA, MAMBA2, NOTHING = "full", "mamba", "mamba2", "nothing"
OF_LETTER: Final = {"*": FULL, "M": MAMBA2, "-": NOTHING, "E": NOTHING}
"""Layers of a Nemotron-H pattern: attention, Mamba-2, and the feed-forward ones that keep nothing."""
NOT_UNDERSTOOD: Final = ("attn_type_list", "block_types", "_block_types", "linear_attn_config", "mamba_d_ssm")
"""Fields of MiniMax, RecurrentGemma, Kimi Linear and Falcon-H1: some layers do not attend, or do more than that."""
STATE_SPACE: Final = ("state_size", "ssm_cfg", "time_step_rank")
"""Fields of models that have no attention at all."""


def hybrid_kinds(text: Mapping[str, Any], num_layers: int) -> list[str] | None:
    """Kind of each layer, in order; None where the config says nothing of layers that do not attend.

    Raises UsageError where it does in a way that is not understood.
    """
    for name in NOT_UNDERSTOOD:
        if text.get(name) is not None:
            raise UsageError(
                f"{name} says that not every layer of this model is plain attention, in a way that is not known here",
                field=name,
            )
    recurrent = MAMBA2 if "mamba_n_heads" in text else MAMBA
    pattern = text.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        unknown = sorted(set(pattern) - set(OF_LETTER))
        if unknown or len(pattern) != num_layers:
            said = f"has {len(pattern)} letters for {num_layers} layers" if not unknown else f"holds {unknown[0]!r}"
            raise UsageError(f"hybrid_override_pattern {said}", field="hybrid_override_pattern")
        return [OF_LETTER[letter] for letter in pattern]
    indices = text.get("attn_layer_indices")
    if isinstance(indices, list):
        return [FULL if layer in indices else recurrent for layer in range(num_layers)]
    period = text.get("attn_layer_period")
    if period is not None:
        if type(period) is not int or period < 1:
            raise UsageError(
                f"attn_layer_period is {period!r}; expected a whole number above 0", field="attn_layer_period"
            )
        offset = text.get("attn_layer_offset", 0)
        return [FULL if layer % period == offset else recurrent for layer in range(num_layers)]
    return None


def mamba_state(text: Mapping[str, Any], kind: str, model_bytes: int, state_bytes: int) -> tuple[int, int]:
    """(bytes of the state and the convolution of one layer and sequence, what tensor parallelism divides).

    Raises UsageError naming a field that is missing.
    """
    hidden = _whole(text, "hidden_size")
    if kind == MAMBA:
        inner, size = _whole(text, "mamba_expand") * hidden, _whole(text, "mamba_d_state")
        conv = (_whole(text, "mamba_d_conv") - 1) * inner
        return inner * size * state_bytes + conv * model_bytes, inner
    heads = _either(text, "mamba_n_heads", "mamba_num_heads")
    width = _either(text, "mamba_d_head", "mamba_head_dim")
    size = _either(text, "mamba_d_state", "ssm_state_size")
    groups = _either(text, "mamba_n_groups", "n_groups")
    conv = (_either(text, "mamba_d_conv", "conv_kernel") - 1) * (heads * width + 2 * groups * size)
    return heads * width * size * state_bytes + conv * model_bytes, heads


def refuse_state_space(text: Mapping[str, Any]) -> None:
    """UsageError for a model without attention: nothing of it grows with tokens."""
    told = next((name for name in STATE_SPACE if name in text), None)
    if told is not None:
        raise UsageError(
            f"this model has no attention heads but {told}: a state space model keeps a constant state and no KV cache",
            field=told,
        )


def _either(text: Mapping[str, Any], name: str, other: str) -> int:
    return _whole(text, name if name in text else other)


def _whole(text: Mapping[str, Any], name: str) -> int:
    value = text.get(name)
    if type(value) is not int or value < 1:
        said = f"is {value!r} in the config" if name in text else "is not in the config"
        raise UsageError(f"{name} {said}; a recurrent layer's state needs it, a whole number above 0", field=name)
    return value
