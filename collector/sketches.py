"""Latencies counted in log buckets: live quantiles without SQL, and exact counts for Prometheus, for arrays at a time.

Idea: the exponent and the first five bits of the mantissa of a float32 number its bucket, so a bucket is found by a
shift and is at most 1/32 of its value wide (an answer is off by at most 1.6 %). Prometheus' bounds fall inside few of
these buckets; only values in those are compared with the bound itself, so its counts are exact.
Answers that people are given come from raw requests in the store, never from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

BOUNDS_S: Final[Floats] = np.array(
    """0.001 0.002 0.005 0.01 0.02 0.03 0.05 0.075 0.1 0.15 0.2 0.3 0.5 0.75
    1 1.5 2 3 5 7.5 10 15 20 30 60 120 300 600""".split(),  # noqa: SIM905
    dtype=np.float64,
)
"""Upper bounds (s) of the histograms on /metrics: from one token of a small model to a long batch answer."""

_BITS = 5
_SHIFT = 23 - _BITS
_LOW = (127 - 20) << _BITS  # 2**-20 s, about a microsecond
NUM_BUCKETS: Final = 34 << _BITS  # up to 2**14 s, four and a half hours


def _bucket(values: Floats) -> npt.NDArray[np.int32]:
    shifted = np.right_shift(values.astype(np.float32).view(np.int32), _SHIFT) - np.int32(_LOW)
    clipped: npt.NDArray[np.int32] = np.clip(shifted, 0, NUM_BUCKETS - 1)
    return clipped


def _edges() -> Floats:
    bits = (np.arange(NUM_BUCKETS + 1, dtype=np.int32) + np.int32(_LOW)) << _SHIFT
    return bits.view(np.float32).astype(np.float64)


EDGES_S: Final = _edges()
_AT_BOUND = np.zeros(NUM_BUCKETS, dtype=np.bool_)
# The bucket below is included: a float64 just under a bucket's edge becomes the edge itself as float32.
_AT_BOUND[_bucket(BOUNDS_S)] = _AT_BOUND[np.maximum(_bucket(BOUNDS_S) - 1, 0)] = True
_TO_BOUND = np.searchsorted(BOUNDS_S, EDGES_S[:-1], side="left")


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of one array of durations.

    fine     [NUM_BUCKETS] counts by log bucket
    coarse   [len(BOUNDS_S) + 1] counts by Prometheus bound, the last above all
    total_s  sum of the durations
    """

    fine: Counts
    coarse: Counts
    total_s: float

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.fine + other.fine, self.coarse + other.coarse, self.total_s + other.total_s)

    @property
    def count(self) -> int:
        """How many durations."""
        return int(self.fine.sum())

    def quantile(self, q: str) -> float | None:
        """Nearest-rank quantile (s), off by at most 1.6 %; None without durations."""
        from store.metrics import rank_index

        count = self.count
        if count == 0:
            return None
        bucket = int(np.searchsorted(np.cumsum(self.fine), rank_index(count, q), side="left"))
        return float((EDGES_S[bucket] + EDGES_S[bucket + 1]) / 2)


def tally(values: Floats, weights: Counts | None = None) -> Tally:
    """Count durations (s, finite, not negative), each `weights` times where weights are given."""
    bucket = _bucket(values)
    fine = np.bincount(bucket, weights, minlength=NUM_BUCKETS).astype(np.int64)
    sure = np.where(_AT_BOUND, 0, fine)
    coarse = np.bincount(_TO_BOUND, weights=sure, minlength=len(BOUNDS_S) + 1).astype(np.int64)
    at_bound = _AT_BOUND[bucket]
    unsure = np.searchsorted(BOUNDS_S, values[at_bound], side="left")
    if unsure.size:
        part = None if weights is None else weights[at_bound]
        coarse += np.bincount(unsure, part, minlength=len(BOUNDS_S) + 1).astype(np.int64)
    return Tally(fine, coarse, float(values.sum() if weights is None else values @ weights))


def empty() -> Tally:
    """No durations yet."""
    return Tally(np.zeros(NUM_BUCKETS, np.int64), np.zeros(len(BOUNDS_S) + 1, np.int64), 0.0)
