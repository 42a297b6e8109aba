"""Latencies counted in log buckets: live quantiles without SQL, and exact counts for Prometheus, for arrays at a time.

Idea: the exponent and the first five bits of the mantissa of a float32 number its bucket, so a bucket is found by a
shift and is at most 1/32 of its value wide (an answer is off by at most 1.6 %). Prometheus' bounds fall inside few of
these buckets; only values in those are compared with the bound itself, so its counts are exact.
Answers that people are given come from raw requests in the store, never from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from store.metric_catalogue import LATENCY_BOUNDS_S
from store.metrics import rank_index

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[Any]
"""Whole numbers; fractions where a row of a sample stands for several."""

BOUNDS_S: Final[Floats] = np.array(LATENCY_BOUNDS_S)
"""Upper bounds (s) of the histograms on /metrics."""

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
_AT_BOUND[_bucket(BOUNDS_S)] = True
# Where a bound is a bucket's edge: a float64 just under it becomes the edge itself as float32, and the other way round.
_AT_BOUND[_bucket(BOUNDS_S)[np.isin(BOUNDS_S, EDGES_S)] - 1] = True
_TO_BOUND = np.searchsorted(BOUNDS_S, EDGES_S[:-1], side="left")
_LAST_OF_BOUND = np.searchsorted(_TO_BOUND, np.arange(len(BOUNDS_S) + 1), side="right")


@dataclass(frozen=True, slots=True)
class Tallies:
    """Counts of durations by group.

    fine      [num_groups, NUM_BUCKETS] counts by log bucket
    coarse    [num_groups, len(BOUNDS_S) + 1] counts by Prometheus bound, the last above all
    total_s   [num_groups] sum of the durations
    """

    fine: Counts
    coarse: Counts
    total_s: Floats

    def __add__(self, other: Tallies) -> Tallies:
        return Tallies(self.fine + other.fine, self.coarse + other.coarse, self.total_s + other.total_s)


def tally(
    values: Floats,
    groups: Counts | None = None,
    num_groups: int = 1,
    *,
    weights: Counts | None = None,
    total_s: Floats | None = None,
) -> Tallies:
    """Count durations (s, finite, not negative) by group (None: all are group 0).

    weights   how often each duration counts (fractions too, and 0); None: once
    total_s   sums by group where the caller knows them cheaper
    """
    bucket = _bucket(values)
    fine = _count(bucket, groups, num_groups, NUM_BUCKETS, weights)
    below = np.zeros((num_groups, NUM_BUCKETS + 1), fine.dtype)
    np.cumsum(np.where(_AT_BOUND, 0, fine), axis=1, out=below[:, 1:])
    coarse = np.maximum(np.diff(below[:, _LAST_OF_BOUND], axis=1, prepend=0), 0)  # fractions are rounded
    at_bound = _AT_BOUND.take(bucket)
    unsure = np.searchsorted(BOUNDS_S, values.compress(at_bound), side="left")
    if unsure.size:
        of_group = None if groups is None else groups.compress(at_bound)
        of_weight = None if weights is None else weights.compress(at_bound)
        coarse = coarse + _count(unsure, of_group, num_groups, len(BOUNDS_S) + 1, of_weight)
    if total_s is None:
        seconds = values if weights is None else values * weights
        of_value = np.zeros(len(seconds), np.int64) if groups is None else groups
        total_s = np.bincount(of_value, seconds, num_groups).astype(np.float64)
    return Tallies(fine, coarse, total_s)


def quantile(fine: Counts, q: str) -> float | None:
    """Nearest-rank quantile (s) of counts by log bucket, off by at most 1.6 %; None without durations."""
    count = round(float(fine.sum()))
    if count == 0:
        return None
    through = np.cumsum(fine)
    rank = min(rank_index(count, q), through[-1])
    bucket = int(np.searchsorted(through, rank, side="left"))
    return float((EDGES_S[bucket] + EDGES_S[bucket + 1]) / 2)


def _count(
    index: npt.NDArray[Any], groups: Counts | None, num_groups: int, width: int, weights: Counts | None
) -> Counts:
    """[num_groups, width] how often each index occurs in each group."""
    flat = index if groups is None else groups * width + index
    counts: Counts = np.bincount(flat, weights, minlength=num_groups * width)
    if weights is None or weights.dtype.kind != "f":
        counts = counts.astype(np.int64)
    return counts.reshape(num_groups, width)
