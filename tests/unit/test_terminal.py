"""Text on a terminal: columns and not characters, and names that stay different when they are cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from collector.terminal.width import cut, padded, told_apart, width_of


def test_columns_are_counted_and_not_characters() -> None:
    """A Chinese character takes two columns, a combining accent none."""
    assert [width_of(text) for text in ("ab", "漢字", "e\u0301", "🚀")] == [2, 4, 1, 2]
    assert padded("漢", 4) == "漢  "
    assert padded("漢", 4, right=True) == "  漢"
    assert cut("漢字漢", 4) == "漢…"


@given(st.text(st.characters(categories=["L", "N", "So"]), max_size=30), st.integers(1, 20))
def test_cut_text_fits(text: str, width: int) -> None:
    """Whatever it holds; what fits already is left alone."""
    made = cut(text, width)
    assert width_of(made) <= width
    assert made == text or width_of(text) > width


def test_what_all_names_share_is_left_out_first() -> None:
    """The number in the middle is what tells them apart."""
    names = [f"gpu-node-{number:02}.rack.example.internal" for number in (1, 2, 11)]
    assert told_apart(names, 12) == ["…01…", "…02…", "…11…"]
    assert told_apart(["a", "b"], 12) == ["a", "b"]
    assert told_apart(["x" * 40], 8) == ["x" * 7 + "…"]
    assert told_apart(["x" * 40] * 2, 8) == ["x" * 7 + "…"] * 2
