"""Made-up token ids for a call whose blocks are only named: equal blocks get equal tokens, distinct ones distinct tokens.

So an engine that computes finds the same prefixes shared that the traffic says are shared.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine_probe.engine.kv_identity import extend
from engine_probe.engine.traffic.call import Call, mixed


def with_tokens(call: Call, block_size: int, vocab_size: int, *, root: int, salt: bytes, first_id: int = 0) -> Call:
    """The call with token ids in [first_id, vocab_size), and with the blocks' names that the engine will give them."""
    ids: list[int] = []
    for name in call.blocks:
        ids += np.random.default_rng(name).integers(first_id, vocab_size, block_size).tolist()
    rest = call.prompt_tokens - len(ids)
    own = mixed(int.from_bytes(call.request_id.encode()[-8:], "little"))
    ids += np.random.default_rng(own).integers(first_id, vocab_size, max(0, rest)).tolist()
    del ids[call.prompt_tokens :]
    names: list[int] = []
    extend(names, ids, block_size, root, salt)
    return replace(call, token_ids=ids, blocks=names, names=None)
