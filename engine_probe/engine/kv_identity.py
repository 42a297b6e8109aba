"""Which KV blocks are interchangeable: the chain hash of the tokens, begun from all else that shapes their KV.

A block's name is h(parent, tokens, salt) as in `chain_hash`; the parent of a first block is not zero but the hash of the
model, types, position scheme, template, LoRA and tenant salt. Two blocks with one name hold the same KV. Design section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from hashlib import blake2b

from engine_probe.chain_hash import block_hash


@dataclass(frozen=True, slots=True)
class KvIdentity:
    """What one engine's KV depends on beside the tokens."""

    model: str = ""
    dtype: str = ""
    kv_dtype: str = ""
    position: str = ""
    template: str = ""

    def root(self, salt: bytes, *, lora: str = "", cache_salt: str = "") -> int:
        """Parent of first blocks (uint64). lora, cache_salt: of the request; another value shares nothing."""
        digest = blake2b(digest_size=8, key=salt)
        for part in (*astuple(self), lora, cache_salt):
            digest.update(len(part.encode()).to_bytes(4, "little") + part.encode())
        return int.from_bytes(digest.digest(), "little")


def extend(hashes: list[int], token_ids: Sequence[int], block_size: int, root: int, salt: bytes) -> None:
    """Append to `hashes` the chain hashes of the blocks that `token_ids` fills and that are not there yet."""
    for index in range(len(hashes), len(token_ids) // block_size):
        parent = hashes[-1] if hashes else root
        hashes.append(block_hash(parent, token_ids[index * block_size : (index + 1) * block_size], salt))
