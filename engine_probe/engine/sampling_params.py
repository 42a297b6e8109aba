"""How a request wants its tokens chosen, and when it has enough."""

from __future__ import annotations

from dataclasses import dataclass

from engine_probe.errors import PromptRefused


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """max_tokens: tokens to generate at most (1 or more).

    temperature     0: greedy
    top_p           keep the likeliest tokens that reach this share (0 < top_p <= 1)
    seed            of this request's own random stream; None: from the engine's seed and the request's number
    stop_token_ids  ends after any of these (the token is not part of the text)
    ignore_eos      goes on after the model's own end token
    Raises PromptRefused naming the field.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise PromptRefused(f"max_tokens is {self.max_tokens}; expected 1 or more", field="max_tokens")
        if not 0.0 <= self.temperature < float("inf"):
            raise PromptRefused(f"temperature is {self.temperature}; expected 0 or more", field="temperature")
        if not 0.0 < self.top_p <= 1.0:
            raise PromptRefused(f"top_p is {self.top_p}; expected above 0, at most 1", field="top_p")
