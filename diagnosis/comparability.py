"""Comparability: bring two windows to a common mix of requests before their latencies are compared.

Idea: longer prompts alone make TTFT worse, and that is no fault of the cache. Requests are sorted into strata (length
bins x workload x tenant). When the two windows fill them alike, nothing is done; else both are reweighted to one common
mix over the strata that both hold, and what only one holds is left out by name.

Invariant: the common mix gives each window half a voice, so it does not depend on how long the baseline is; weights
have mean 1 over the requests kept; a request left out weighs 0 and is counted in a statement.
Source: post-stratification, Holt & Smith 1979; permutation test of the G statistic, Good 2005.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from diagnosis.quantiles import F64, kish
from engine_probe.errors import DiagnosisError

I64: TypeAlias = npt.NDArray[np.int64]

LENGTHS = ("prompt_tokens", "output_tokens")
CATEGORIES = ("workload", "tenant")
WORDS = {"prompt_tokens": "prompt length", "output_tokens": "output length", "workload": "workload", "tenant": "tenant"}
# Quantiles of the pooled lengths at which bins are cut: finer at the top, where a tail latency is decided.
CUTS = ((0.25, 0.5, 0.75, 0.9, 0.97), (0.5, 0.8, 0.95), (0.5, 0.9), (0.75,))
TOP_CATEGORIES = 6
MAX_STRATA = 256
PER_STRATUM = 20  # requests of the smaller window that a stratum should hold on average
MIN_PRESENT = 5  # fewer requests than this cannot stand for a stratum
MAX_P, MIN_TV = 0.01, 0.02
TAIL, MIN_TAIL_RATIO, TAIL_Z = 0.99, 2.0, 2.576  # a tail moved when its share doubles beyond chance (p < 0.01)
PERMUTATIONS = 500
MAX_BEYOND = 0.05
MAX_NAMED, MIN_NAMED_SHARE = 8, 0.002


@dataclass(frozen=True, slots=True)
class Mix:
    """Weights that give both windows the same mix; pairs are (baseline, suspect).

    w_base [n_b], w_suspect [n_s]: mean 1 over the requests kept, 0 for those left out; all 1 when not `shifted`; all 0
    when the windows have no stratum in common, which n_effective (0, 0) says too. tv_distance: half the sum of absolute
    differences of the strata's shares (0 alike, 1 disjoint); dimension_shift: the same for each dimension alone;
    moved: the dimensions that moved materially.
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


def common_mix(base: Mapping[str, Any], suspect: Mapping[str, Any], *, seed: int = 0) -> Mix:
    """Weights for a common mix of prompt_tokens, output_tokens (NaN = unknown), workload and tenant (None = unknown).

    A mix differs materially when a permutation test of the G statistic says so (p < 0.01) and its total variation
    exceeds what chance gives by 0.02, or the share of the longest 1 % doubles. A dimension that one window does not know
    at all is not compared, and that is said. Raises DiagnosisError when a window's columns differ in length, or hold
    none of the four.
    """
    sizes = (_size(base, "baseline"), _size(suspect, "suspect"))
    dimensions, statements = _dimensions(base, suspect, sizes)
    if min(sizes) == 0 or not dimensions:
        return _unchanged(sizes, [*statements, "the mix of requests could not be compared"], {}, ())
    rng = np.random.default_rng(seed)
    shifts: dict[str, float] = {}
    excess: dict[str, float] = {}
    moved = []
    for name, dimension in dimensions.items():
        test = _difference(*dimension.bins(CUTS[0]), sizes, rng)
        shifts[name], excess[name] = test.tv, test.excess
        if test.material:
            moved.append(name)
            statements.append(f"{WORDS[name]} moved: {test}")
        elif dimension.tail is not None:
            moved.append(name)
            statements.append(f"{WORDS[name]} moved in its tail: {dimension.tail}")
    # Most shifted first, because those are the last to be given up.
    still = sorted((name for name in dimensions if name not in moved), key=lambda name: -excess[name])
    codes, labels = _strata(dimensions, moved, still, sizes)
    test = _difference(codes, labels, sizes, rng)
    strata = f"over {len(labels)} strata: {test}"
    if not test.material and not (moved and test.p < MAX_P):
        statements.append(f"the mixes do not differ materially {strata}; no reweighting")
        return _unchanged(sizes, statements, shifts, tuple(moved), test)
    statements.append(f"the mixes differ {strata}; both windows are reweighted to a common mix")
    mix = _reweighted(codes, labels, sizes, statements, shifts, tuple(moved), test)
    mix.statements.extend(_residual(dimensions[name], mix) for name in moved if dimensions[name].lengths is not None)
    return mix


@dataclass(frozen=True, slots=True)
class _Test:
    """Difference of two mixes: permutation p of the G statistic, total variation, and its excess over chance."""

    p: float
    tv: float
    excess: float

    @property
    def material(self) -> bool:
        return self.p < MAX_P and self.excess >= MIN_TV

    def __str__(self) -> str:
        return f"total variation {self.tv:.2f} ({self.tv - self.excess:.2f} expected by chance), p {self.p:.3f}"


@dataclass(frozen=True, slots=True)
class _Dimension:
    """One pooled column, baseline first: lengths with NaN for unknown, or category numbers with their words.

    edges: lengths that bins never reach across: where one window ends and a good part of the other lies beyond, and
    where a tail that moved begins, which `tail` then states.
    """

    name: str
    lengths: F64 | None = None
    edges: tuple[float, ...] = ()
    tail: str | None = None
    codes: I64 | None = None
    words: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        column = self.codes if self.lengths is None else self.lengths
        return 0 if column is None else int(column.size)

    def bins(self, cuts: tuple[float, ...]) -> tuple[I64, list[str]]:
        """Bin number of each request and the bins' names; unknown is a bin of its own."""
        word = WORDS[self.name]
        if self.codes is not None:
            return self.codes, [*(f"{word} {w}" for w in self.words), f"any other {word}", f"unknown {word}"]
        assert self.lengths is not None
        known = ~np.isnan(self.lengths)
        inside = self.lengths[known]
        edges = np.unique([*np.quantile(inside, cuts, method="inverted_cdf"), *self.edges])
        edges = edges[edges < inside.max()]  # a bin above the largest length would be empty
        codes = np.where(known, np.searchsorted(edges, np.where(known, self.lengths, 0.0)), edges.size + 1)
        bounds = [f"{edge:,.0f}" for edge in edges]
        if not bounds:
            return codes.astype(np.int64), [f"any {word}", f"unknown {word}"]
        between = [f"{word} {low} to {high}" for low, high in pairwise(bounds)]
        names = [f"{word} up to {bounds[0]}", *between, f"{word} above {bounds[-1]}", f"unknown {word}"]
        return codes.astype(np.int64), names


def _size(window: Mapping[str, Any], name: str) -> int:
    lengths = {key: len(window[key]) for key in (*LENGTHS, *CATEGORIES) if key in window}
    if len(set(lengths.values())) != 1:
        raise DiagnosisError(
            f"the {name} window needs at least one of {', '.join(WORDS)}, all of one length; got {lengths or 'none'}"
        )
    return next(iter(lengths.values()))


def _dimensions(
    base: Mapping[str, Any], suspect: Mapping[str, Any], sizes: tuple[int, int]
) -> tuple[dict[str, _Dimension], list[str]]:
    """The dimensions that both windows know at least in part, and statements about those that only one knows."""
    found: dict[str, _Dimension] = {}
    statements: list[str] = []
    for name in (*LENGTHS, *CATEGORIES):
        columns = [window.get(name) for window in (base, suspect)]
        known_in = [column is not None and size > 0 for column, size in zip(columns, sizes, strict=True)]
        dimension = None
        if all(known_in):
            dimension, known = _pool(name, columns)
            known_in = [bool(part.any()) for part in np.split(known, [sizes[0]])]
        if all(known_in) and dimension is not None:
            found[name] = dimension
        elif any(known_in):
            side = "baseline" if not known_in[0] else "suspect"
            statements.append(f"{WORDS[name]} is not known in the {side} window, so it was not compared")
    return found, statements


def _pool(name: str, columns: list[Any]) -> tuple[_Dimension, npt.NDArray[np.bool_]]:
    if name in LENGTHS:
        lengths = np.concatenate([np.asarray(column, dtype=np.float64) for column in columns])
        known = ~np.isnan(lengths)
        sides = [side[~np.isnan(side)] for side in np.split(lengths, [len(columns[0])])]
        if any(side.size == 0 for side in sides):
            return _Dimension(name, lengths=lengths), known
        tail_edge, tail = _tail(*sides)
        return _Dimension(name, lengths=lengths, edges=(*_support_ends(sides), *tail_edge), tail=tail), known
    pooled = np.concatenate([np.asarray(column, dtype=object) for column in columns])
    encoded = pa.array(pooled, type=pa.string(), from_pandas=True).dictionary_encode()
    words = encoded.dictionary.to_pylist()
    raw = encoded.indices.fill_null(len(words)).to_numpy(zero_copy_only=False).astype(np.int64)
    frequency = np.bincount(raw, minlength=len(words) + 1)
    top = sorted(range(len(words)), key=lambda w: (-int(frequency[w]), words[w]))[:TOP_CATEGORIES]
    renumber = np.full(len(words) + 1, len(top), dtype=np.int64)
    renumber[top] = np.arange(len(top))
    renumber[len(words)] = len(top) + 1
    return _Dimension(name, codes=renumber[raw], words=tuple(words[w] for w in top)), raw < len(words)


def _support_ends(sides: list[F64]) -> list[float]:
    """Where one window's lengths end (0.5 % left aside) while more than 5 % of the other's lie beyond."""
    ends: list[float] = []
    for this, other in (sides, sides[::-1]):
        low, high = (float(end) for end in np.quantile(this, [0.005, 0.995], method="inverted_cdf"))
        if (other > high).mean() > MAX_BEYOND:
            ends.append(high)
        if (other < low).mean() > MAX_BEYOND:
            ends.append(low - 1.0)
    return ends


def _tail(base: F64, suspect: F64) -> tuple[list[float], str | None]:
    """Where the longest 1 % of both windows begins, and how its share moved; nothing when it did not."""
    pooled = np.concatenate([base, suspect])
    level = float(np.quantile(pooled, TAIL, method="inverted_cdf"))
    share = float((pooled >= level).mean())
    shares = (float((base >= level).mean()), float((suspect >= level).mean()))
    chance = np.sqrt(share * (1.0 - share) * (1.0 / base.size + 1.0 / suspect.size))
    if abs(shares[1] - shares[0]) <= TAIL_Z * chance or max(shares) < MIN_TAIL_RATIO * min(shares):
        return [], None
    text = f"{shares[0]:.1%} of the baseline and {shares[1]:.1%} of the suspect have {level:,.0f} tokens or more"
    return [level - 1.0], text


def _strata(
    dimensions: dict[str, _Dimension], moved: list[str], still: list[str], sizes: tuple[int, int]
) -> tuple[I64, list[str]]:
    """The cross of the dimensions that resolves what moved as finely as the smaller window can fill.

    What did not move, most shifted first, is crossed with it coarsely as far as there is room. When nothing moved
    alone, all dimensions are crossed, for they may have moved together, and their bins coarsened until there is room.
    """
    most = min(MAX_STRATA, min(sizes) // PER_STRATUM)
    for cuts in CUTS:
        for kept in range(len(still), -1, -1) if moved else [len(still)]:
            resolution: dict[str, tuple[float, ...]] = dict.fromkeys(moved, cuts)
            resolution.update(dict.fromkeys(still[:kept], CUTS[2] if moved else cuts))
            codes, labels = _cross(dimensions, resolution)
            if len(labels) <= most:
                return codes, labels
    for kept in range(len(still), -1, -1):
        codes, labels = _cross(dimensions, dict.fromkeys([*moved, *still[:kept]], CUTS[-1]))
        if len(labels) <= most:
            break
    return codes, labels


def _cross(dimensions: dict[str, _Dimension], resolution: dict[str, tuple[float, ...]]) -> tuple[I64, list[str]]:
    """Stratum number of each request, and the names of the strata that hold any."""
    codes: I64 | None = None
    labels = [""]
    for name in (n for n in dimensions if n in resolution):
        part, words = dimensions[name].bins(resolution[name])
        joined = part if codes is None else codes * len(words) + part
        present = np.flatnonzero(np.bincount(joined, minlength=len(labels) * len(words)))
        renumber = np.zeros(len(labels) * len(words), dtype=np.int64)
        renumber[present] = np.arange(present.size)
        codes = renumber[joined]
        labels = [", ".join(filter(None, (labels[j // len(words)], words[j % len(words)]))) for j in present.tolist()]
    if codes is None:  # nothing to tell requests apart by: one stratum
        return np.zeros(next(iter(dimensions.values())).size, dtype=np.int64), ["all requests"]
    return codes, labels


def _difference(codes: I64, labels: list[str], sizes: tuple[int, int], rng: np.random.Generator) -> _Test:
    pooled = np.bincount(codes, minlength=len(labels))
    observed = np.bincount(codes[: sizes[0]], minlength=len(labels))
    shuffled = rng.multivariate_hypergeometric(pooled, sizes[0], size=PERMUTATIONS, method="marginals")
    g, tv = _statistics(np.vstack([observed, shuffled]), pooled, sizes)
    p = float((1 + np.count_nonzero(g[1:] >= g[0] * (1 - 1e-12))) / (1 + PERMUTATIONS))
    return _Test(p, float(tv[0]), float(tv[0] - tv[1:].mean()))


def _statistics(base: I64, pooled: I64, sizes: tuple[int, int]) -> tuple[F64, F64]:
    """G and total variation of tables whose baseline counts are [tables, strata]."""
    g = np.zeros(base.shape[0])
    for counts, size in ((base, sizes[0]), (pooled - base, sizes[1])):
        expected = pooled * (size / sum(sizes))
        ratio = np.divide(counts, expected, out=np.ones(counts.shape), where=counts > 0)
        g += 2.0 * (counts * np.log(ratio)).sum(axis=1)
    tv = 0.5 * np.abs(base / sizes[0] - (pooled - base) / sizes[1]).sum(axis=1)
    return g, tv


def _unchanged(
    sizes: tuple[int, int],
    statements: list[str],
    shifts: dict[str, float],
    moved: tuple[str, ...],
    test: _Test | None = None,
) -> Mix:
    test = test or _Test(1.0, 0.0, 0.0)
    n = (float(sizes[0]), float(sizes[1]))
    return Mix(np.ones(sizes[0]), np.ones(sizes[1]), False, [], n, statements, test.tv, shifts, test.p, moved)


def _reweighted(
    codes: I64,
    labels: list[str],
    sizes: tuple[int, int],
    statements: list[str],
    shifts: dict[str, float],
    moved: tuple[str, ...],
    test: _Test,
) -> Mix:
    sides = (codes[: sizes[0]], codes[sizes[0] :])
    counts = np.array([np.bincount(side, minlength=len(labels)) for side in sides])
    shares = counts / counts.sum(axis=1, keepdims=True)
    kept = (counts >= MIN_PRESENT).all(axis=0)
    kept_shares = np.where(kept, shares, 0.0)
    kept_shares /= np.maximum(kept_shares.sum(axis=1, keepdims=True), 1e-300)
    common = kept_shares.mean(axis=0)
    factor = np.divide(common, kept_shares, out=np.zeros_like(kept_shares), where=kept)
    weights = [factor[side][codes_of] for side, codes_of in enumerate(sides)]
    left_out = [int(s) for s in np.flatnonzero(~kept)]
    left_out.sort(key=lambda s: -float(shares[:, s].max()))
    if left_out:
        lost = shares[:, left_out].sum(axis=1)
        statements.append(
            f"left out for want of {MIN_PRESENT} requests in each window: {len(left_out)} strata with {lost[0]:.1%} of "
            f"the baseline and {lost[1]:.1%} of the suspect"
        )
    named = [s for s in left_out if shares[:, s].max() >= MIN_NAMED_SHARE][:MAX_NAMED]
    names = [f"{labels[s]} ({shares[0, s]:.1%} of the baseline, {shares[1, s]:.1%} of the suspect)" for s in named]
    if len(left_out) > len(named):
        names.append(f"{len(left_out) - len(named)} {'more' if named else 'small'} strata")
    if not kept.any():
        statements.append("the windows have no kind of request in common: their latencies cannot be compared")
    effective = (kish(weights[0]), kish(weights[1]))
    statements.append(
        f"after reweighting {sizes[0]:,} and {sizes[1]:,} requests count as {effective[0]:,.0f} and {effective[1]:,.0f}"
    )
    return Mix(weights[0], weights[1], True, names, effective, statements, test.tv, shifts, test.p, moved)


def _residual(dimension: _Dimension, mix: Mix) -> str:
    """What difference in mean length is left inside the strata after reweighting."""
    assert dimension.lengths is not None
    means = []
    for weights in ((np.ones_like(mix.w_base), np.ones_like(mix.w_suspect)), (mix.w_base, mix.w_suspect)):
        for lengths, weight in zip(np.split(dimension.lengths, [mix.w_base.size]), weights, strict=True):
            known = ~np.isnan(lengths) & (weight > 0)
            mass = float(weight[known].sum())
            means.append(float((lengths[known] * weight[known]).sum()) / mass if mass > 0 else float("nan"))
    if np.isnan(means).any():
        return f"{WORDS[dimension.name]}: no request is left to compare"
    return (
        f"mean {WORDS[dimension.name]} was {means[0]:,.0f} and {means[1]:,.0f} tokens; "
        f"after reweighting {means[2]:,.0f} and {means[3]:,.0f}"
    )
