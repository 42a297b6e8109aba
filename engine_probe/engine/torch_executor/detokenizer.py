"""Tokens to text while they come: what is said once is never taken back, and a character is never cut.

Invariant: the pieces joined, the last included, are the text of all tokens. A token may end in the middle of a UTF-8
character, so U+FFFD at the end is held back: the rest may come. Some tokenizers write a token differently after another
one, so decoding begins at the piece before the one that is not said yet, not at that one. Source of the second:
vLLM 0.33 `detokenizer_utils.py`.
"""

from __future__ import annotations

from engine_probe.engine.torch_executor.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"
_LONGEST_UNFINISHED = 3
"""Bytes of a character that can be there without it; some tokenizers write each as a U+FFFD of its own."""


class Detokenizer:
    """The text of one request's output."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._from = 0  # decoding begins at this id
        self._whole = 0  # the text of the ids before this one is said
        self._num_said = 0  # characters of the decoding that are said

    def add(self, token_id: int) -> str:
        """The text that this token makes certain; empty while a character is not whole."""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids[self._from :])
        num_held = min(len(text) - len(text.rstrip(_UNFINISHED)), _LONGEST_UNFINISHED)
        piece = self._say(text[: len(text) - num_held])
        if not num_held:
            self._from, self._whole = self._whole, len(self._ids)
            self._num_said = len(self._tokenizer.decode(self._ids[self._from :]))
        return piece

    def finish(self) -> str:
        """What was held back, an unfinished character as U+FFFD. Nothing is added afterwards."""
        return self._say(self._tokenizer.decode(self._ids[self._from :]))

    def _say(self, text: str) -> str:
        piece = text[self._num_said :]
        self._num_said = max(self._num_said, len(text))
        return piece
