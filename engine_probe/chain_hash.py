"""Our own chain hash of prompt blocks: joins blocks of different engines and restarts, and nobody can read a prompt back.

h(parent, tokens) = BLAKE2b, digest 8 bytes, key = salt, over the parent's 8 bytes (zeros for the first block) followed by
the block's token ids as little-endian int32; read as little-endian uint64. Source: design section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

ROOT = 0
"""Parent of a first block: eight zero bytes."""


def block_hash(parent: int, token_ids: Sequence[int], salt: bytes) -> int:
    """Chain hash of one block (uint64). `salt` is at most 64 bytes: the deployment's secret."""
    digest = blake2b(parent.to_bytes(8, "little"), digest_size=8, key=salt)
    digest.update(np.asarray(token_ids, dtype="<i4").tobytes())
    return int.from_bytes(digest.digest(), "little")


def chain(token_ids: Sequence[int], block_size: int, salt: bytes, parent: int = ROOT) -> list[int]:
    """Chain hashes of every full block of a prompt; a partial last block has none."""
    ids = np.asarray(token_ids, dtype="<i4")
    hashes = []
    for start in range(0, len(ids) - block_size + 1, block_size):
        parent = block_hash(parent, ids[start : start + block_size], salt)  # type: ignore[arg-type]  # an array of ids does as well
        hashes.append(parent)
    return hashes
