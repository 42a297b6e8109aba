"""Disjoint phases: the short way for spans that stand apart gives what the walk through all beginnings and ends gives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_probe.events import PHASES
from engine_probe.recording.phases import Span, disjoint, tiled

span = st.builds(
    lambda phase, start, length, tokens: Span(phase, start, start + length, tokens),
    st.sampled_from(PHASES),
    st.integers(0, 30),
    st.integers(0, 6),
    st.none() | st.integers(0, 3),
)


@given(st.lists(span, max_size=6), st.integers(0, 20), st.integers(0, 20))
def test_both_ways_give_the_same_pieces(spans: list[Span], start_ns: int, length: int) -> None:
    """Whether spans overlap or not, are empty, lie outside or touch."""
    found = disjoint(spans, start_ns, start_ns + length)
    assert found == tiled(sorted(spans, key=lambda one: one.start_ns), start_ns, start_ns + length)
    assert sum(piece.end_ns - piece.start_ns for piece in found) == length
