"""How many separate episodes a tail holds: requests that waited in one congestion are one piece of evidence.

Idea: exceedances of a high level come in clusters. The extremal index is the share of them that begin a new cluster;
effective n = n times it. Two exceedances belong to one episode while exceedances that far apart are still correlated.

Source: Ferro & Segers 2003 (intervals estimator).
"""

from __future__ import annotations

import numpy as np

from diagnosis.statistics.bootstrap import correlation, exceedances, high_values
from diagnosis.statistics.quantiles import F64, Index, allowed_above


def extremal_index(values: F64, q: str, lag: int | None = None) -> float:
    """Share of exceedances that start a new cluster, in (0, 1]: 1 for an independent tail, 1/k in clusters of k.

    values [n] in arrival order. Intervals estimator on `high_values`; with fewer than four exceedances the runs
    estimator (clusters / exceedances); 1 with at most one exceedance. lag spares working out the correlation again.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.size == 0:
        return 1.0
    at = np.flatnonzero(high_values(values, q))
    if at.size <= 1:
        return 1.0
    if at.size < 4:
        return _clusters(at, max(correlation(values, q).lag if lag is None else lag, 1)) / at.size
    gaps = np.diff(at).astype(np.float64)
    if gaps.max() <= 2:
        top, bottom = 2.0 * gaps.sum() ** 2, gaps.size * (gaps * gaps).sum()
    else:
        top, bottom = 2.0 * (gaps - 1).sum() ** 2, gaps.size * ((gaps - 1) * (gaps - 2)).sum()
    return float(min(1.0, max(top / bottom, 1.0 / at.size)))


def tail_episodes(values: F64, q: str, lag: int | None = None) -> int:
    """Separate clusters of requests above the quantile; two belong together while exceedances are still correlated.

    values [n] in arrival order; lag overrides how far apart, in requests, two of them still belong together.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.size == 0:
        return 0
    at = np.flatnonzero(exceedances(values, allowed_above(values.size, q)))
    return _clusters(at, correlation(values, q).lag if lag is None else lag)


def _clusters(at: Index, lag: int) -> int:
    """Runs of positions, two neighbours in one run when at most `lag` apart; 0 for no position."""
    return int(min(at.size, 1) + np.count_nonzero(np.diff(at) > lag))
