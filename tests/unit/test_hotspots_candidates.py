"""Names of candidates as codes: lists that all tell the same are not hashed name by name, and nobody can tell the difference."""

from __future__ import annotations

import pyarrow as pa
import pytest

from diagnosis.hotspots.candidates import encoded


@pytest.mark.parametrize(
    ("names", "num_lists"),
    [
        (["w0", "w1"] * 5, 5),
        (["w0", "w1"] * 4 + ["w1", "w0"], 5),
        (["a", "bc", "ab", "c"], 2),
        (["w0", "w0"] * 3, 3),
        (["w0", None] * 3, 3),
        (["w0"] * 3, 3),
        ([""] * 3, 3),
        (["w0", "w1", "w2"], 2),
    ],
    ids=["same", "other order", "same letters", "twice in a list", "null", "one", "no letters", "of two lengths"],
)
@pytest.mark.parametrize("begin", [0, 1])
def test_codes_are_those_of_a_dictionary_whatever_the_lists(
    names: list[str | None], num_lists: int, begin: int
) -> None:
    """Also of a part of a longer array."""
    told = pa.array(["else"] * begin + names)[begin:]
    assert encoded(told, num_lists).equals(told.dictionary_encode())
