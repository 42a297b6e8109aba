"""A llama model in one GGUF file, turned into the folder that Hugging Face publishes: config.json, safetensors, tokenizer.

Reads what the small model beside llama-server uses: tensors in F32, Q8_0 and Q4_1 (blocks of 32 numbers), a byte-level BPE.
Source: the GGUF specification, version 3, and `ggml-quants.c` of llama.cpp.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _SPECIAL = 8, 9, 3
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Gguf:
    """fields: metadata by name. Tensors are read when asked for."""

    def __init__(self, path: Path) -> None:
        self._data = np.memmap(path, dtype=np.uint8, mode="r")
        self._at = 0
        magic, _, num_tensors, num_fields = self._unpack("<4sIQQ")
        assert magic == b"GGUF"
        self.fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._string()
            self.fields[name] = self._value(*self._unpack("<I"))
        self._tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self._string()
            (num_dims,) = self._unpack("<I")
            dims = self._unpack(f"<{num_dims}Q")
            kind, offset = self._unpack("<IQ")
            self._tensors[name] = (tuple(reversed(dims)), kind, offset)
        alignment = self.fields.get("general.alignment", 32)
        self._begin = -(-self._at // alignment) * alignment

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def tensor(self, name: str) -> np.ndarray:
        """Its numbers in float32, rows first."""
        shape, kind, offset = self._tensors[name]
        read, per_block, block_bytes = _KINDS[kind]
        num_blocks = int(np.prod(shape)) // per_block
        begin = self._begin + offset
        return read(self._data[begin : begin + num_blocks * block_bytes].reshape(num_blocks, block_bytes)).reshape(
            shape
        )

    def _unpack(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return found

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        self._at += length
        return bytes(self._data[self._at - length : self._at]).decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._unpack("<IQ")
            return [self._value(inner) for _ in range(count)]
        return self._unpack("<" + _SCALARS[kind])[0]


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of each block, as a column of float32."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _f32(blocks: np.ndarray) -> np.ndarray:
    return blocks.copy().view(np.float32)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    """Scale, then 32 signed bytes."""
    return _halves(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    """Scale and smallest value, then 16 bytes: low halves are the numbers 0 to 15, high halves 16 to 31."""
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
    return _halves(blocks, 0) * nibbles + _halves(blocks, 2)


_KINDS: dict[int, tuple[Callable[[np.ndarray], np.ndarray], int, int]] = {
    0: (_f32, 1, 4),
    3: (_q4_1, 32, 20),
    8: (_q8_0, 32, 34),
}


def convert(path: Path, folder: Path, dtype: torch.dtype = torch.float16) -> Path:
    """Write the model of a GGUF file into `folder`; the folder."""
    source = Gguf(path)
    fields = source.fields
    assert fields["general.architecture"] == "llama"
    config = {
        "model_type": "llama",
        "num_hidden_layers": fields["llama.block_count"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "vocab_size": fields["llama.vocab_size"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": "output.weight" not in source.names,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "architectures": ["LlamaForCausalLM"],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for name in source.names:
        stem, _, kind = name.rpartition(".")
        layer = stem.split(".")[1] if stem.startswith("blk.") else None
        part = stem.split(".")[-1]
        found = source.tensor(name)
        if part in heads:
            found = _pairs_apart(found, heads[part])
        target = _NAMES[part] if layer is None else f"model.layers.{layer}.{_NAMES[part]}"
        tensors[f"{target}.{kind}"] = torch.from_numpy(found).to(dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    tokens = fields["tokenizer.ggml.tokens"]
    chat = {
        "chat_template": fields["tokenizer.chat_template"],
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(chat))
    return folder


def _pairs_apart(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF keeps the two rows of a rotary pair side by side; here they are half a head apart."""
    return rows.reshape(num_heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE of the kind `smollm`: digits one by one, then GPT-2's words."""
    assert fields["tokenizer.ggml.pre"] == "smollm"
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL]
    )
    return made
