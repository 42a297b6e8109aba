"""Numbers of block names, and the index that goes by them, against what a dict and a set would say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_probe.engine.fleet.prefix_bits import PrefixBits
from engine_probe.engine.fleet.prefix_index import PrefixIndex
from engine_probe.engine.name_book import NOBODY, NameBook
from engine_probe.errors import UsageError

Text = tuple[int, ...]
TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=9).map(tuple), max_size=25)


def names(text: Text) -> list[int]:
    """Chain hashes of a text of one-token blocks: each tells the whole beginning."""
    found, parent = [], 1
    for token in text:
        parent = (parent * 0x9E3779B97F4A7C15 + token + 1) % 2**64
        found.append(parent)
    return found


@given(TEXTS, st.lists(st.booleans(), min_size=25, max_size=25))
def test_a_name_keeps_its_number_while_somebody_holds_it(texts: list[Text], are_held: list[bool]) -> None:
    """Texts that part anywhere share the numbers of what they share, and no others; so after some were forgotten."""
    book = NameBook()
    number_of: dict[int, int] = {}
    for is_held, text in zip(are_held, texts, strict=False):
        numbers = book.number(names(text))
        assert book.names(numbers).tolist() == names(text)
        for name, number in zip(names(text), numbers.tolist(), strict=True):
            assert number_of.setdefault(name, number) == number
        assert len(set(number_of.values())) == len(number_of)
        if is_held:
            held = np.zeros(book.num_given, dtype=bool)
            held[numbers] = True
            book.forget(held)
            number_of = dict(zip(names(text), numbers.tolist(), strict=True))


def test_numbers_that_nobody_holds_are_given_again() -> None:
    """A thousand texts of which one is held at a time need the room of a few."""
    book = NameBook()
    for text in range(1000):
        numbers = book.number(np.arange(text * 100, text * 100 + 70, dtype=np.uint64))
        held = np.zeros(book.num_given, dtype=bool)
        held[numbers] = True
        book.forget(held)
    assert book.num_given <= 3 * 80
    assert not book.is_full


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["stored", "removed", "cleared", "reset"]),
        st.integers(0, 69),
        st.integers(0, 7),
        st.integers(0, 8),
        st.integers(0, 8),
        st.booleans(),
    ),
    max_size=30,
)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8).map(tuple), min_size=8, max_size=8), CHANGES)
def test_bits_answer_as_the_index_of_names_does(
    texts: list[Text], changes: list[tuple[str, int, int, int, int, bool]]
) -> None:
    """Any part of any text is stored, with gaps or without its beginning, and removed: beliefs and counts are the same."""
    book, exact, bits = NameBook(), PrefixIndex(70), PrefixBits(70)
    for change, worker, text, begin, length, has_gap in changes:
        chain = names(texts[text])
        chosen = [index for index in range(begin, min(begin + length, len(chain))) if not has_gap or index % 3 != 1]
        numbers = book.number(chain)
        if change == "stored":
            parents = [chain[index - 1] if index else None for index in chosen]
            above = np.array([numbers[index - 1] if index else NOBODY for index in chosen], dtype=np.int64)
            exact.stored(worker, [chain[index] for index in chosen], parents)
            bits.stored(worker, numbers[chosen] if chosen else numbers[:0], above)
        elif change == "removed":
            exact.removed(worker, [chain[index] for index in reversed(chosen)])
            bits.removed(worker, numbers[chosen][::-1] if chosen else numbers[:0])
        elif change == "cleared":
            exact.cleared(worker)
            bits.cleared(worker)
        else:
            exact.reset()
            bits.reset()
        for asked in texts:
            assert bits.match(book.number(names(asked))) == exact.match(names(asked))
        assert bits.num_blocks(worker) == exact.num_blocks(worker)
        assert (bits.num_orphans, bits.num_unknown) == (exact.num_orphans, exact.num_unknown)


def test_an_index_of_nobody_is_refused() -> None:
    """As `PrefixIndex` refuses it."""
    with pytest.raises(UsageError, match="knows nobody"):
        PrefixBits(0)
