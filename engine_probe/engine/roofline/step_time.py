"""How long a scheduler step takes: each part of it at the pace of what it is short of, FLOPs or bytes.

Roofline (Williams, Waterman and Patterson 2009): a kernel takes max(FLOPs / reached FLOP/s, bytes / reached bytes/s). The
parts run one after another, so the maximum is taken part by part and the parts are added:

    linears      every token times every matrix of the layers; their weights are read once a step, however many tokens share
                 them (which is why a batch multiplies throughput); of experts, those that the step's tokens can be expected
                 to hit; the KV of the new tokens is written
    prefill      4 * heads * head_dim FLOPs for each layer and pair of (query, key it sees); keys and values read once a chunk
    decode       the same for one query a sequence; its keys and values are read (memory bound at any batch)
    head         hidden x vocabulary, for sequences that get a token
    links        with tensor parallelism two all-reduces a layer (Shoeybi et al. 2019), as a ring: 2 (tp - 1) / tp of the bytes
    host         a constant

Source of the arithmetic: Pope et al. 2022, sections 2 and 3; Kwon et al. 2023. Left out, as small against these: softmax, norms,
activations' own traffic, sampling. Splitting a prefill into chunks leaves its pairs as they were, to the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_probe.engine.roofline.hardware import Hardware
from engine_probe.engine.roofline.model_shape import ModelShape
from engine_probe.errors import UsageError

ACTIVATION_BYTES = 2
"""Activations are 16 bit, whatever the weights are."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """Seconds of one step, part by part."""

    linears_s: float
    prefill_s: float
    decode_s: float
    head_s: float
    links_s: float
    host_s: float

    @property
    def total_s(self) -> float:
        return self.linears_s + self.prefill_s + self.decode_s + self.head_s + self.links_s + self.host_s


class StepTime:
    """Times of one model on `tp` of one hardware. Raises UsageError where tp does not divide its heads."""

    def __init__(self, shape: ModelShape, hardware: Hardware, *, tp: int = 1) -> None:
        if tp < 1 or shape.heads % tp or (shape.kv_heads % tp and tp % shape.kv_heads):
            raise UsageError(
                f"{shape.name} has {shape.heads} heads and {shape.kv_heads} KV heads, which tp {tp} does not divide",
                tp=tp,
            )
        self.shape, self.hardware, self.tp = shape, hardware, tp
        width, kv_width = shape.heads * shape.head_dim, kv_heads_on_rank(shape, tp) * shape.head_dim
        flops, per_s = hardware.flops(shape.element_bytes), hardware.bytes_per_s
        attention_flops = hardware.flops(ACTIVATION_BYTES)
        key_flops_s = 4 * width * shape.layers / tp / attention_flops
        key_bytes_s = 2 * kv_width * shape.kv_element_bytes * shape.layers / per_s
        self.decode_key_s = max(key_flops_s, key_bytes_s)
        """Seconds of reading one earlier token in one decode: both sides of the roof grow with it alike."""
        self._pair_s, self._key_s = key_flops_s, key_bytes_s
        head, layer = shape.head_parameters, shape.attention_parameters + shape.layer_extra
        self._token_flops_s = 2 * (shape.active_parameters - head) / tp / flops
        self._dense_s = shape.layers * layer * shape.element_bytes / tp / per_s
        self._expert_s = shape.layers * shape.expert_parameters * shape.element_bytes / tp / per_s
        self._head_flops_s = 2 * head / tp / flops
        self._head_s = head * shape.element_bytes / tp / per_s
        reduces = 2 * shape.layers if tp > 1 else 0
        self._links_s = reduces * hardware.link_latency_s
        token_bytes = shape.hidden * ACTIVATION_BYTES * 2 * (tp - 1) / tp
        self._token_links_s = reduces * token_bytes / hardware.link_bytes_per_s

    @property
    def decode_floor_s(self) -> float:
        """What no decode step goes below: every weight that a token needs, read once; nothing for host and links."""
        return self._weights_s(1) + self._head_s

    def parts(
        self, tokens: int, emitted: int, *, decode_keys: float = 0, prefill_pairs: float = 0, prefill_keys: float = 0
    ) -> StepParts:
        """Seconds of a step.

        tokens         computed in all, of chunks and decodes
        emitted        sequences that get a token
        decode_keys    tokens that the decodes attend to, summed over them, each counting itself
        prefill_pairs  (query, key) pairs of all chunks (`causal_pairs`); prefill_keys: keys the chunks read
        """
        return StepParts(
            linears_s=max(tokens * self._token_flops_s, self._weights_s(tokens) + tokens * self._key_s),
            prefill_s=max(prefill_pairs * self._pair_s, prefill_keys * self._key_s),
            decode_s=decode_keys * self.decode_key_s,
            head_s=max(emitted * self._head_flops_s, self._head_s) if emitted else 0.0,
            links_s=self._links_s + tokens * self._token_links_s,
            host_s=self.hardware.host_overhead_s,
        )

    def _weights_s(self, tokens: int) -> float:
        """Reading the layers' weights once: of E experts, those that `tokens` tokens hit where each goes to k by chance."""
        experts, active = self.shape.experts, self.shape.active_experts
        hit = 1.0 if experts == 1 else experts * (1.0 - (1.0 - active / experts) ** tokens)
        return self._dense_s + hit * self._expert_s


def kv_heads_on_rank(shape: ModelShape, tp: int) -> int:
    """KV heads that each of `tp` ranks holds: at least one."""
    return max(shape.kv_heads // tp, 1)


def causal_pairs(start: int, num_tokens: int, window: int | None = None) -> int:
    """(query, key) pairs of queries [start, start + num_tokens), each seeing itself and what is before it (in its window)."""

    def before(end: int) -> int:
        if window is None or end <= window:
            return end * (end + 1) // 2
        return window * (window + 1) // 2 + (end - window) * window

    return before(start + num_tokens) - before(start)
