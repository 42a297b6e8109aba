"""Composition: what the requests around the quantile are made of, as component value-at-risk.

Idea: one request is the quantile, and its parts are an anecdote; the parts of the requests around it, averaged with a
kernel over ranks, are a description. The difference between that average and the exact order statistic is shown as
`smoothing` and never hidden in a part. It describes one window and blames nothing; attribution does that.

Invariant: parts + smoothing = exact nearest-rank quantile. Requests with equal totals count alike, in whatever order.
Source: Hallerbach 2003, component value-at-risk as a conditional mean; Gourieroux et al. 2000, its kernel estimate.
"""

from __future__ import annotations

import numpy as np

from diagnosis.statistics.quantiles import F64, check_values, nearest_rank, parse_quantile, rank_order
from engine_probe.errors import DiagnosisError

MIN_HALF_WIDTH = 3.0  # requests: below this an average is an anecdote again


def kernel_half_width(n: float, q: str) -> float:
    """Half-width of the kernel in ranks: half the smaller tail (P99 of 1,250: 6.25 ranks), at least 3."""
    exact = parse_quantile(q)
    return max(MIN_HALF_WIDTH, float(min(exact, 1 - exact)) * n / 2.0)


def compose(parts: F64, q: str, weights: F64 | None = None) -> tuple[F64, float]:
    """Mean parts of the requests around the quantile of their sum, and what the smoothing left over.

    parts [n, k] seconds, rows summing to the metric; weights [n] or None. Returns ([k] seconds, smoothing in seconds):
    their sum is the exact quantile. Epanechnikov kernel of `kernel_half_width` ranks on each side, cut at the extremes.
    Raises DiagnosisError for NaN, wrong shapes or no requests.
    """
    parts = np.asarray(parts, dtype=np.float64)
    if parts.ndim != 2 or parts.shape[0] == 0 or np.isnan(parts).any():
        raise DiagnosisError(f"composition needs known parts of at least one request, got shape {parts.shape}")
    if weights is not None:
        weights = np.asarray(weights, dtype=np.float64)
        check_values(parts.sum(axis=1), weights)
        kept = weights > 0
        parts, weights = parts[kept], weights[kept]
        if parts.shape[0] == 0:
            raise DiagnosisError("composition needs at least one request with a weight above 0")
    total = parts.sum(axis=1)
    exact = nearest_rank(total, q, weights)
    around = _kernel(total, exact, q, np.ones(total.size) if weights is None else weights)
    rows = around @ parts
    return rows, exact - float(rows.sum())


def _kernel(total: F64, exact: float, q: str, mass: F64) -> F64:
    """Weights [n] that sum to 1, of the requests around the exact quantile; equal totals share theirs."""
    order = rank_order(total)
    ordered, ordered_mass = total[order], mass[order]
    rank = (np.cumsum(ordered_mass) - ordered_mass / 2.0) * (total.size / float(mass.sum()))
    at_quantile = ordered == exact
    centre = float(np.average(rank[at_quantile], weights=ordered_mass[at_quantile]))
    half_width = kernel_half_width(total.size, q)
    bump = np.maximum(1.0 - ((rank - centre) / half_width) ** 2, 0.0) * ordered_mass
    if not bump[at_quantile].any():  # few and heavy: none of them has its rank near their middle
        bump[at_quantile] = ordered_mass[at_quantile]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    sizes = np.diff(np.append(starts, ordered.size))
    shared = np.add.reduceat(bump, starts) / np.add.reduceat(ordered_mass, starts)
    bump = np.repeat(shared, sizes) * ordered_mass
    out = np.empty(total.size)
    out[order] = bump / bump.sum()
    return out
