"""Text to token ids and back: a byte-level tokenizer that needs no file, or the `tokenizer.json` of a model.

Neither ever loses text: bytes that are no UTF-8 yet wait for their rest (`detokenizer.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from engine_probe.errors import ModelUnreadable

NUM_BYTES = 256


class Tokenizer(Protocol):
    """How one model reads and writes text."""

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to below this."""

    @property
    def bos_token_id(self) -> int | None:
        """Put before a text that begins; None where the model wants none."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """With which the model ends its text."""

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """Token ids of `text`. begins: with what the model wants before a text, e.g. bos."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out; U+FFFD where bytes are no UTF-8."""


class ByteTokenizer:
    """One token a byte of UTF-8, bos 256, eos 257; ids beyond are no text. For models without a vocabulary of their own."""

    bos_token_id: int = 256
    eos_token_ids: frozenset[int] = frozenset({257})
    vocab_size: int = 258

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        # A lone surrogate has no UTF-8; like any other bad text it becomes a question mark, not an error in mid-stream.
        ids = list(text.encode("utf-8", errors="replace"))
        return [self.bos_token_id, *ids] if begins else ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < NUM_BYTES).decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json` of Hugging Face, read by the package `tokenizers`."""

    def __init__(self, path: Path, bos_token_id: int | None, eos_token_ids: frozenset[int]) -> None:
        """Raises ModelUnreadable where the package or the file is missing, or the file is none."""
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError as error:
            raise ModelUnreadable(
                f"reading {path.name} needs the package tokenizers; install kvscope[engine]", path=str(path)
            ) from error
        try:
            self._loaded: Any = Loaded.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelUnreadable(f"{path} is no tokenizer: {error}", path=str(path)) from error
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.vocab_size = int(self._loaded.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        ids: list[int] = self._loaded.encode(text, add_special_tokens=begins).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._loaded.decode(list(token_ids), skip_special_tokens=True))


def load_tokenizer(
    folder: Path | None, bos_token_id: int | None = None, eos_token_ids: frozenset[int] = frozenset()
) -> Tokenizer:
    """That of the folder where it has a tokenizer.json, else bytes."""
    path = None if folder is None else folder / "tokenizer.json"
    if path is None or not path.exists():
        return ByteTokenizer()
    return FileTokenizer(path, bos_token_id, eos_token_ids)
