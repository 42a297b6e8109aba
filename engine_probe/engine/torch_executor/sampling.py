"""The next token of each row: the likeliest, or one drawn by temperature and top-p.

A draw depends on the request's seed and on how many tokens it has put out, on nothing else: not on its neighbours in the
batch, not on preemption, not on what was drawn before. So the random number is a hash of (seed, output position).
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from hashlib import blake2b

import torch

from engine_probe.engine.sequence import Sequence
from engine_probe.errors import EngineError


def choose(logits: torch.Tensor, sequences: Items[Sequence], engine_seed: int) -> list[int]:
    """One token id a row of logits [E, vocab_size]; row i belongs to sequences[i].

    Raises EngineError where a row has no largest number: damaged weights, or a type too narrow for them.
    """
    largest, chosen = logits.max(dim=-1)
    for sequence, is_number in zip(sequences, largest.isfinite().tolist(), strict=True):
        if not is_number:
            raise EngineError(
                f"the model's logits for request {sequence.request_id} are no numbers; its weights are damaged, or it "
                "needs a wider dtype (float32 or bfloat16)",
                request_id=sequence.request_id,
            )
    drawn = [row for row, sequence in enumerate(sequences) if sequence.params.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        who = [sequences[row] for row in drawn]
        chosen[rows] = _draw(logits[rows], who, engine_seed)
    found: list[int] = chosen.tolist()
    return found


def uniform(sequence: Sequence, engine_seed: int) -> float:
    """The number in [0, 1) that decides the request's next token."""
    own = sequence.params.seed
    stream = f"request {own}" if own is not None else f"engine {engine_seed} {sequence.number}"
    digest = blake2b(f"{stream} {sequence.num_output}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _draw(logits: torch.Tensor, sequences: Items[Sequence], engine_seed: int) -> torch.Tensor:
    """Inverse of the cumulated probabilities, likeliest first, cut where they reach top_p. [E] int64."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(1)

    temperature = column([sequence.params.temperature for sequence in sequences])
    top_p = column([sequence.params.top_p for sequence in sequences])
    at = column([uniform(sequence, engine_seed) for sequence in sequences])
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).double() / temperature
    ordered, token_ids = scaled.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    reached = ordered.cumsum(dim=-1)
    # The token that reaches top_p is kept; what its sum is, u is a share of.
    num_kept = (reached < top_p).sum(dim=-1, keepdim=True).clamp_max(logits.shape[-1] - 1)
    kept = reached.gather(1, num_kept)
    place = (reached <= at * kept).sum(dim=-1, keepdim=True)
    return token_ids.gather(1, torch.minimum(place, num_kept)).squeeze(1)
