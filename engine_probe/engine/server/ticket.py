"""One sequence of a client's request, between the engine's thread that makes its tokens and the loop that sends them.

Tokens become text in the engine's thread, right after their step, so that a stop string ends the sequence before another
token of it is computed. Invariant: the texts of a ticket's pieces joined are its answer, and the last piece alone has a
finish reason or an error.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from engine_probe.engine.sequence import Sequence
from engine_probe.engine.server.stops import StopStrings
from engine_probe.engine.torch_executor.detokenizer import Detokenizer
from engine_probe.engine.torch_executor.tokenizer import Tokenizer
from engine_probe.errors import KvscopeError


@dataclass(frozen=True, slots=True)
class Piece:
    """What came of one step. finish_reason: stop | length; None while it goes on. error: it ended without an answer."""

    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    error: KvscopeError | None = None

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None


class Ticket:
    """first_ns, last_ns: instants of its tokens so far (engine's clock), None before the first.

    deliver   called with each piece, in the thread of the event loop
    """

    def __init__(
        self,
        sequence: Sequence,
        tokenizer: Tokenizer,
        stops: StopStrings,
        deliver: Callable[[Ticket, Piece], None],
        index: int = 0,
    ) -> None:
        self.sequence = sequence
        self.deliver = deliver
        self.index = index
        self.first_ns: int | None = None
        self.last_ns: int | None = None
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = stops
        self._quiet = tokenizer.eos_token_ids | sequence.params.stop_token_ids

    def take(self, tokens: Items[int], finish_reason: str | None) -> Piece:
        """What the step's tokens say. Its finish reason is `stop` where a stop string is complete now."""
        text, is_stopped = "", False
        for token in tokens:
            if token in self._quiet and finish_reason == "stop":
                continue  # the token that ends it is no part of the text
            piece, is_stopped = self._stops.take(self._detokenizer.add(token))
            text += piece
            if is_stopped:
                break
        if not is_stopped and finish_reason is not None:
            piece, is_stopped = self._stops.take(self._detokenizer.finish())
            text += piece if is_stopped else piece + self._stops.finish()
        return Piece(text, len(tokens), "stop" if is_stopped else finish_reason)
