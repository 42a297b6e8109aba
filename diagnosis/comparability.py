"""Comparability: bring two windows to a common mix of requests before their latencies are compared.

Idea: longer prompts alone make TTFT worse, and that is no fault of the cache. Requests are sorted into strata (length bins x
workload x tenant). When the two windows fill them alike, nothing is done; else both are reweighted to one common mix over
the strata that both hold, and what only one holds is left out by name.

Invariant: the common mix gives each window half a voice, so it does not depend on how long the baseline is; weights have mean
1 over the requests kept; a request left out weighs 0 and is counted in a statement.
Source: post-stratification, Holt & Smith 1979; permutation test on the G statistic, Good 2005.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from diagnosis.quantiles import F64, kish
from engine_probe.errors import DiagnosisError

LENGTHS = ("prompt_tokens", "output_tokens")
CATEGORIES = ("workload", "tenant")
WORDS = {"prompt_tokens": "prompt length", "output_tokens": "output length", "workload": "workload", "tenant": "tenant"}
# Quantiles of the pooled lengths at which bins are cut: finer at the top, where a tail latency is decided.
CUTS = ((0.25, 0.5, 0.75, 0.9, 0.97), (0.5, 0.8, 0.95), (0.5, 0.9), (0.75,))
TOP_CATEGORIES = 6
PER_STRATUM = 20  # requests of the smaller window a stratum should hold on average
MIN_PRESENT = 5  # fewer requests than this cannot stand for a stratum
MAX_P, MIN_TV = 0.01, 0.02
PERMUTATIONS = 500
MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class Mix:
    """Weights that give both windows the same mix; pairs are (baseline, suspect).

    w_base [n_b], w_suspect [n_s]: mean 1 over the requests kept, 0 for those left out; all 1 when not `shifted`. All 0 when
    the windows have no stratum in common, which n_effective (0, 0) says. tv_distance: half the sum of absolute differences of
    the strata's shares (0 same, 1 disjoint). dimension_shift: the same for each dimension alone; moved: those that moved.
    """

    w_base: F64
    w_suspect: F64
    shifted: bool
    left_out: list[str]
    n_effective: tuple[float, float]
    statements: list[str]
    tv_distance: float
    dimension_shift: dict[str, float]
    p_value: float = 1.0
    moved: tuple[str, ...] = ()


def common_mix(base: Mapping[str, npt.ArrayLike], suspect: Mapping[str, npt.ArrayLike], *, seed: int = 0) -> Mix:
    """Weights for a common mix of prompt_tokens, output_tokens (NaN = unknown), workload and tenant (None = unknown).

    A mix differs materially when a permutation test of the G statistic says so (p < 0.01) and the total variation exceeds
    what chance gives by 0.02. A dimension that one window does not know at all is not compared, and that is said.
    Raises DiagnosisError when columns of one window differ in length, or none is given.
    """
    sizes = (_size(base, "baseline"), _size(suspect, "suspect"))
    columns, statements = _columns(base, suspect, sizes)
    if min(sizes) == 0 or not columns:
        return _unchanged(sizes, [*statements, "the mix of requests could not be compared"])
    rng = np.random.default_rng(seed)
    codes, labels = _strata(columns, sizes)
    shifts, moved = {}, []
    for name, column in columns.items():
        p, tv, excess = _difference(*_code(name, column, CUTS[0]), sizes, rng)
        shifts[name] = tv
        if p < MAX_P and excess >= MIN_TV:
            moved.append(name)
            statements.append(
                f"{WORDS[name]} moved: total variation {tv:.2f} ({tv - excess:.2f} expected by chance), p {p:.3f}"
            )
    p, tv, excess = _difference(codes, labels, sizes, rng)
    seen = f"total variation {tv:.2f} ({tv - excess:.2f} expected by chance), p {p:.3f}"
    if not (p < MAX_P and excess >= MIN_TV):
        statements = [
            *statements,
            f"the mixes do not differ materially over {len(labels)} strata: {seen}; no reweighting",
        ]
        return _unchanged(sizes, statements, tv, shifts, p, tuple(moved))
    statements.append(
        f"the mixes differ over {len(labels)} strata: {seen}; both windows are reweighted to the common mix"
    )
    return _reweighted(codes, labels, sizes, statements, tv, shifts, p, tuple(moved))


def _unchanged(
    sizes: tuple[int, int],
    statements: list[str],
    tv: float = 0.0,
    shifts: dict[str, float] | None = None,
    p: float = 1.0,
    moved: tuple[str, ...] = (),
) -> Mix:
    n = (float(sizes[0]), float(sizes[1]))
    return Mix(np.ones(sizes[0]), np.ones(sizes[1]), False, [], n, statements, tv, shifts or {}, p, moved)


def _reweighted(
    codes: npt.NDArray[np.int64],
    labels: list[str],
    sizes: tuple[int, int],
    statements: list[str],
    tv: float,
    shifts: dict[str, float],
    p: float,
    moved: tuple[str, ...],
) -> Mix:
    sides = (codes[: sizes[0]], codes[sizes[0] :])
    counts = np.array([np.bincount(side, minlength=len(labels)) for side in sides])
    kept = (counts >= MIN_PRESENT).all(axis=0)
    shares = np.where(kept, counts, 0) / np.maximum(np.where(kept, counts, 0).sum(axis=1, keepdims=True), 1)
    common = shares.mean(axis=0)
    factor = np.divide(common, shares, out=np.zeros_like(shares), where=shares > 0)
    weights = [factor[side][codes_of] for side, codes_of in enumerate(sides)]
    all_shares = counts / counts.sum(axis=1, keepdims=True)
    left_out = sorted(np.flatnonzero(~kept & (counts.sum(axis=0) > 0)), key=lambda s: -all_shares[:, s].max())
    named = [
        f"{labels[s]} ({all_shares[0, s]:.1%} of the baseline, {all_shares[1, s]:.1%} of the suspect)" for s in left_out
    ]
    if named:
        lost = all_shares[:, left_out].sum(axis=1)
        statements.append(
            f"{len(named)} strata without enough requests in both windows are left out: {lost[0]:.1%} of the baseline, "
            f"{lost[1]:.1%} of the suspect"
        )
    if not kept.any():
        statements.append("the windows have no kind of request in common: their latencies cannot be compared")
    effective = (kish(weights[0]), kish(weights[1]))
    statements.append(
        f"after reweighting {sizes[0]:,} and {sizes[1]:,} requests count as {effective[0]:,.0f} and {effective[1]:,.0f}"
    )
    hidden = len(named) - MAX_NAMED
    shown = named[:MAX_NAMED] + ([f"{hidden} more"] if hidden > 0 else [])
    return Mix(weights[0], weights[1], True, shown, effective, statements, tv, shifts, p, moved)


def _size(window: Mapping[str, npt.ArrayLike], name: str) -> int:
    lengths = {key: len(np.asarray(window[key])) for key in (*LENGTHS, *CATEGORIES) if key in window}
    if len(set(lengths.values())) != 1:
        raise DiagnosisError(f"the {name} window's columns must be given and have one length, got {lengths}")
    return next(iter(lengths.values()))


def _columns(
    base: Mapping[str, npt.ArrayLike], suspect: Mapping[str, npt.ArrayLike], sizes: tuple[int, int]
) -> tuple[dict[str, Any], list[str]]:
    """Pooled columns (baseline first) of the dimensions that both windows know, and statements about the others."""
    columns: dict[str, Any] = {}
    statements: list[str] = []
    for name in (*LENGTHS, *CATEGORIES):
        if name not in base or name not in suspect:
            continue
        if name in LENGTHS:
            pooled: Any = np.concatenate([np.asarray(w[name], dtype=np.float64) for w in (base, suspect)])
            known = ~np.isnan(pooled)
        else:
            pooled = np.concatenate([np.asarray(w[name], dtype=object) for w in (base, suspect)])
            known = ~np.asarray(pa.array(pooled, from_pandas=True).is_null())
        unknown_in = [
            side
            for side, part in (("baseline", known[: sizes[0]]), ("suspect", known[sizes[0] :]))
            if part.size and not part.any()
        ]
        if unknown_in == ["baseline", "suspect"]:
            continue
        if unknown_in:
            statements.append(f"{WORDS[name]} is not known in the {unknown_in[0]} window, so it was not compared")
            continue
        columns[name] = pooled
    return columns, statements


def _strata(columns: dict[str, Any], sizes: tuple[int, int]) -> tuple[npt.NDArray[np.int64], list[str]]:
    """The finest cross of all dimensions that still leaves the smaller window some requests in each stratum."""
    for cuts in CUTS:
        codes = np.zeros(sum(sizes), dtype=np.int64)
        labels = [""]
        for name, column in columns.items():
            part, names = _code(name, column, cuts)
            joined = codes * len(names) + part
            present, codes = np.unique(joined, return_inverse=True)
            labels = [
                ", ".join(filter(None, (labels[j // len(names)], names[j % len(names)]))) for j in present.tolist()
            ]
        if len(labels) * PER_STRATUM <= min(sizes):
            break
    return codes.astype(np.int64), labels


def _code(name: str, column: Any, cuts: tuple[float, ...]) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Bin numbers of one dimension and the bins' names; unknown is a bin of its own."""
    if name in LENGTHS:
        known = ~np.isnan(column)
        edges = np.unique(np.quantile(column[known], cuts, method="inverted_cdf"))
        edges = edges[edges < column[known].max()]
        codes = np.where(known, np.searchsorted(edges, np.where(known, column, 0.0)), edges.size + 1)
        bounds = [*(f"{edge:,.0f}" for edge in edges)]
        names = [f"{WORDS[name]} up to {bounds[0]}"] if bounds else [f"any {WORDS[name]}"]
        names += [f"{WORDS[name]} {low} to {high}" for low, high in zip(bounds, bounds[1:], strict=False)]
        names += [f"{WORDS[name]} above {bounds[-1]}"] if bounds else []
        return codes.astype(np.int64), [*names, f"unknown {WORDS[name]}"]
    encoded = pa.array(column, from_pandas=True).cast(pa.string()).dictionary_encode()
    words = encoded.dictionary.to_pylist()
    raw = encoded.indices.fill_null(len(words)).to_numpy(zero_copy_only=False).astype(np.int64)
    frequency = np.bincount(raw, minlength=len(words) + 1)[: len(words)]
    top = sorted(range(len(words)), key=lambda w: (-int(frequency[w]), words[w]))[:TOP_CATEGORIES]
    renumber = np.full(len(words) + 1, len(top), dtype=np.int64)
    renumber[top] = np.arange(len(top))
    renumber[len(words)] = len(top) + 1
    names = [f"{WORDS[name]} {words[w]}" for w in top]
    return renumber[raw], [*names, f"any other {WORDS[name]}", f"unknown {WORDS[name]}"]


def _difference(
    codes: npt.NDArray[np.int64], labels: list[str], sizes: tuple[int, int], rng: np.random.Generator
) -> tuple[float, float, float]:
    """Permutation p of the G statistic, total variation, and how far it exceeds its mean under permutation."""
    pooled = np.bincount(codes, minlength=len(labels))
    observed = np.bincount(codes[: sizes[0]], minlength=len(labels))
    shuffled = rng.multivariate_hypergeometric(pooled, sizes[0], size=PERMUTATIONS)
    g, tv = _statistics(np.vstack([observed, shuffled]), pooled, sizes)
    p = float((1 + np.count_nonzero(g[1:] >= g[0] * (1 - 1e-12))) / (1 + PERMUTATIONS))
    return p, float(tv[0]), float(tv[0] - tv[1:].mean())


def _statistics(base: npt.NDArray[np.int64], pooled: npt.NDArray[np.int64], sizes: tuple[int, int]) -> tuple[F64, F64]:
    """G and total variation of tables whose baseline counts are [tables, strata]."""
    g = np.zeros(base.shape[0])
    for counts, size in ((base, sizes[0]), (pooled - base, sizes[1])):
        expected = pooled * (size / sum(sizes))
        ratio = np.divide(counts, expected, out=np.ones(counts.shape), where=counts > 0)
        g += 2.0 * (counts * np.log(ratio)).sum(axis=1)
    tv = 0.5 * np.abs(base / sizes[0] - (pooled - base) / sizes[1]).sum(axis=1)
    return g, tv
