"""When tokens came: one instant a piece of the stream, and how many tokens it held where that can be known.

Idea: several chunks in one read came together, so they are one entry. A chunk's tokens are known where it says so
(log probabilities, token ids, a running count); where nothing says so and there were as many chunks as tokens in the
end, each held one. Else the counts are unknown as a whole, never guessed. Of several choices (n > 1) the entries follow the
one that spoke first, since gaps between tokens of different sequences mean nothing. Memory: `MAX_ENTRIES` entries.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_ENTRIES: Final = 1 << 17


class TokenLog:
    """`add` each chunk that held tokens. Instants are monotonic ns."""

    __slots__ = (
        "_entry_ns",
        "_followed",
        "_merged",
        "_tokens",
        "choices",
        "first_ns",
        "is_cut",
        "last_ns",
        "num_chunks",
    )

    def __init__(self) -> None:
        self.first_ns: int | None = None
        self.last_ns: int | None = None
        self.choices: set[int] = set()
        self.num_chunks = 0
        self.is_cut = False
        self._followed: int | None = None
        self._entry_ns = array("q")
        self._merged: dict[int, int] = {}
        self._tokens: array[int] | None = array("q")

    def add(self, now_ns: int, choice: int = 0, tokens: int | None = None) -> None:
        """A chunk of this choice came. tokens: how many it says it holds, None where it says nothing."""
        if self.first_ns is None:
            self.first_ns, self._followed = now_ns, choice
        if choice not in self.choices and len(self.choices) < 1024:
            self.choices.add(choice)
        if choice != self._followed:
            self.num_chunks += 1
            self.last_ns = now_ns
            return
        if tokens is None:
            self._tokens = None
        elif self._tokens is not None:
            if self._entry_ns and self._entry_ns[-1] == now_ns:
                self._tokens[-1] += tokens
            elif len(self._entry_ns) < MAX_ENTRIES:
                self._tokens.append(tokens)
        self.add_plain(now_ns)

    def add_plain(self, now_ns: int) -> None:
        """A chunk like the one before it: of the choice that is followed, saying nothing of its tokens."""
        self.num_chunks += 1
        self.last_ns = now_ns
        entries = self._entry_ns
        if entries and entries[-1] == now_ns:
            last = len(entries) - 1
            self._merged[last] = self._merged.get(last, 1) + 1
        elif len(entries) < MAX_ENTRIES:
            entries.append(now_ns)
        else:
            self.is_cut = True

    def counts(self, output_tokens: int | None) -> npt.NDArray[np.int64] | None:
        """Tokens of each entry; None where that is not known. output_tokens: of the whole answer, where it is known."""
        import numpy as np

        if not self._entry_ns or self.is_cut:
            return None
        if self._tokens is not None:
            told = np.array(self._tokens, dtype=np.int64)
            return told if output_tokens is None or len(self.choices) > 1 or told.sum() <= output_tokens else None
        if len(self.choices) == 1 and output_tokens == self.num_chunks:
            chunks = np.ones(len(self._entry_ns), dtype=np.int64)
            for entry, number in self._merged.items():
                chunks[entry] = number
            return chunks
        return None

    def follows(self, choice: int) -> bool:
        """The entries are of this choice."""
        return choice == self._followed

    def instants(self) -> npt.NDArray[np.int64] | None:
        """The instant of each entry, ascending; None where there is none, or were more than are kept."""
        import numpy as np

        return None if not self._entry_ns or self.is_cut else np.array(self._entry_ns, dtype=np.int64)
