"""Columns of rows as arrays: places among names, numbers, instants; what an engine tells wrong is no crash."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from diagnosis.hotspots.aligning import goes_by_load
from diagnosis.hotspots.columns import codes, floats, numbers, seconds_after

HUGE = (1 << 62) + 1
"""A count that no double holds to its last digit."""


def test_counts_beyond_a_double_lose_their_last_digits() -> None:
    """2^62 + 1 is told as 2^62; null stays unknown."""
    found = numbers(pa.chunked_array([[HUGE, None]], type=pa.int64()))
    assert found[0] == 2.0**62
    assert np.isnan(found[1])
    assert floats(pa.array([HUGE, None], type=pa.int64()))[0] == 2.0**62


def test_instants_keep_their_nanoseconds() -> None:
    """1 ns and 1.5 s after an origin that a double would round by hundreds of nanoseconds."""
    origin = 1_780_000_000_000_000_001
    at = pa.chunked_array([[origin + 1, origin + 1_500_000_000]], type=pa.int64())
    assert seconds_after(at, origin).tolist() == pytest.approx([1e-9, 1.5], rel=1e-12)


def test_a_name_that_nobody_knows_has_no_place() -> None:
    """w1 is the second name; w7 and null are none of them."""
    assert codes(pa.array(["w1", "w7", None]), ("w0", "w1")).tolist() == [1, -1, -1]


@pytest.mark.parametrize(
    ("policy", "by_load"),
    [("least-request", True), ("Round Robin", True), ("power_of_two", True), ("kv-cache-aware", False), ("least", False), (None, False)],
)  # fmt: skip
def test_policies_are_known_however_they_are_spelt(policy: str | None, by_load: bool) -> None:
    assert goes_by_load(policy) is by_load
