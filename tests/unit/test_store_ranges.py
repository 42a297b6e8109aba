"""Ranges of applied batches: what is in, what is missing, and how they merge."""

from __future__ import annotations

import pytest

from store.ranges import SeqRanges


def test_neighbours_become_one_range():
    """0, 2, then 1: the gap closes and one range is left."""
    ranges = SeqRanges()
    for seq in (0, 2, 1):
        ranges.add(seq)
    assert list(ranges) == [(0, 2)]
    assert ranges.missing() == []


def test_missing_numbers_are_told_from_zero_on():
    """With 3, 4 and 8 applied, 0..2 and 5..7 are missing; what follows the last is not missing yet."""
    ranges = SeqRanges([(3, 4), (8, 8)])
    assert ranges.missing() == [(0, 2), (5, 7)]
    assert ranges.last == 8
    assert 4 in ranges
    assert 5 not in ranges


def test_an_empty_set_has_no_last():
    """Nothing applied: last is -1, nothing is missing."""
    assert SeqRanges().last == -1
    assert SeqRanges().missing() == []
    assert len(SeqRanges()) == 0


@pytest.mark.parametrize("span", [(2, 2), (0, 5), (4, 9), (1, 1), (7, 6), (-1, -1)])
def test_what_is_there_cannot_be_added_again(span):
    """Overlaps, backward and negative ranges raise, and the set stays as it was."""
    ranges = SeqRanges([(1, 4)])
    with pytest.raises(ValueError, match="overlaps"):
        ranges.add_range(*span)
    assert list(ranges) == [(1, 4)]


def test_overlapping_ranges_cannot_be_loaded():
    """A damaged record of ranges is refused."""
    with pytest.raises(ValueError, match="overlaps"):
        SeqRanges([(0, 5), (5, 6)])
