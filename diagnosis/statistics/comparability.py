"""Comparability: bring two windows to a common mix of requests before their latencies are compared.

Idea: longer prompts alone make TTFT worse, and that is no fault of the cache. Requests are sorted into strata (length
bins x workload x tenant). When the two windows fill them alike, nothing is done; else both are reweighted to one common
mix over the strata that both hold, and what only one holds is left out by name.

Invariant: the common mix gives each window half a voice, so it does not depend on how long the baseline is; weights
have mean 1 over the requests kept; a request left out weighs 0 and is counted in a statement.
Source: post-stratification, Holt & Smith 1979.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from diagnosis.statistics.dimensions import CATEGORIES, I64, LENGTHS, WORDS, Dimension, dimensions_of
from diagnosis.statistics.quantiles import F64, kish
from diagnosis.statistics.strata import CUTS, MAX_P, MixTest, difference, strata_of
from engine_probe.errors import DiagnosisError

MIN_PRESENT = 5  # fewer requests than this cannot stand for a stratum
MAX_NAMED, MIN_NAMED_SHARE = 8, 0.002
"""Strata that are named where they are left out: so many, and none that holds fewer of either window."""


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
    by_category: float = 0.0
    """Share of the change of mean lengths that another share of workloads or tenants explains, each of them as long as before."""


def common_mix(base: Mapping[str, Any], suspect: Mapping[str, Any], *, seed: int = 0) -> Mix:
    """Weights for a common mix of prompt_tokens, output_tokens (NaN = unknown), workload and tenant (None = unknown).

    A mix differs materially when a permutation test of the G statistic says so (p < 0.01) and its total variation
    exceeds what chance gives by 0.02, or the share of the longest 1 % doubles. Where a few requests of a kind of their own drown in
    the many strata of all dimensions, those are looked at alone that moved whichever of them is asked (p < 0.01 / dimensions). A dimension that one window does not know
    at all is not compared, and that is said. Raises DiagnosisError when a window's columns differ in length, or hold
    none of the four.
    """
    sizes = (_size(base, "baseline"), _size(suspect, "suspect"))
    dimensions, statements = dimensions_of(base, suspect, sizes)
    if min(sizes) == 0 or not dimensions:
        return _unchanged(sizes, [*statements, "the mix of requests could not be compared"], {}, ())
    rng = np.random.default_rng(seed)
    shifts: dict[str, float] = {}
    excess: dict[str, float] = {}
    moved, certain = [], []
    for name, dimension in dimensions.items():
        test = difference(*dimension.bins(CUTS[0]), sizes, rng)
        shifts[name], excess[name] = test.tv, test.excess
        if test.material:
            moved.append(name)
            certain += [name] if test.p * len(dimensions) < MAX_P else []
            statements.append(f"{WORDS[name]} moved: {test}")
        elif dimension.tail is not None:
            moved.append(name)
            statements.append(f"{WORDS[name]} moved in its tail: {dimension.tail}")
    # Most shifted first, because those are the last to be given up.
    still = sorted((name for name in dimensions if name not in moved), key=lambda name: -excess[name])
    codes, labels = strata_of(dimensions, moved, still, sizes)
    test = difference(codes, labels, sizes, rng)
    if certain and test.p >= MAX_P:
        codes, labels = strata_of(dimensions, certain, [], sizes)
        test = difference(codes, labels, sizes, rng)
    strata = f"over {len(labels)} strata: {test}"
    if not test.material and not (moved and test.p < MAX_P):
        statements.append(f"the mixes do not differ materially {strata}; no reweighting")
        return _unchanged(sizes, statements, shifts, tuple(moved), test)
    statements.append(f"the mixes differ {strata}; both windows are reweighted to a common mix")
    mix = _reweighted(codes, labels, sizes, statements, shifts, tuple(moved), test)
    mix = replace(mix, by_category=_by_category(dimensions, moved, sizes[0]))
    mix.statements.extend(_residual(dimensions[name], mix) for name in moved if dimensions[name].lengths is not None)
    return mix


def _size(window: Mapping[str, Any], name: str) -> int:
    lengths = {key: len(window[key]) for key in (*LENGTHS, *CATEGORIES) if key in window}
    if len(set(lengths.values())) != 1:
        raise DiagnosisError(
            f"the {name} window needs at least one of {', '.join(WORDS)}, all of one length; got {lengths or 'none'}"
        )
    return next(iter(lengths.values()))


def _unchanged(
    sizes: tuple[int, int],
    statements: list[str],
    shifts: dict[str, float],
    moved: tuple[str, ...],
    test: MixTest | None = None,
) -> Mix:
    test = test or MixTest(1.0, 0.0, 0.0)
    n = (float(sizes[0]), float(sizes[1]))
    return Mix(np.ones(sizes[0]), np.ones(sizes[1]), False, [], n, statements, test.tv, shifts, test.p, moved)


def _reweighted(
    codes: I64,
    labels: list[str],
    sizes: tuple[int, int],
    statements: list[str],
    shifts: dict[str, float],
    moved: tuple[str, ...],
    test: MixTest,
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


def _by_category(dimensions: Mapping[str, Dimension], moved: list[str], num_base: int) -> float:
    """Of the lengths that moved, the least share that a category which moved too explains: change of its shares at equal lengths.

    Source: Kitagawa 1955 (a difference of means is one of shares plus one within groups). 0.0 where no category moved.
    """
    categories = [dimensions[name].codes for name in moved if name in CATEGORIES]
    found = []
    for name in moved:
        lengths = dimensions[name].lengths
        if lengths is None:
            continue
        shares = [_between(codes, lengths, num_base) for codes in categories if codes is not None]
        found.append(max(shares, default=0.0))
    return min(found, default=0.0)


def _between(codes: I64, lengths: F64, num_base: int) -> float:
    """Share of the change of the mean length that the groups' shares explain, at the mean of both windows' lengths in each."""
    known = np.isfinite(lengths)
    in_base = np.arange(lengths.size) < num_base
    size = int(codes.max()) + 1
    counts, sums = np.zeros((2, size)), np.zeros((2, size))
    for side, rows in enumerate((known & in_base, known & ~in_base)):
        counts[side] = np.bincount(codes[rows], minlength=size)
        sums[side] = np.bincount(codes[rows], weights=lengths[rows], minlength=size)
    if not counts.any(axis=1).all():
        return 0.0
    shares = counts / counts.sum(axis=1, keepdims=True)
    # a group that one window alone has is as long in the other, for all that is known
    own = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
    middle = own.sum(axis=0) / np.maximum((counts > 0).sum(axis=0), 1)
    total = float(np.diff(sums.sum(axis=1) / counts.sum(axis=1))[0])
    between = float(((shares[1] - shares[0]) * middle).sum())
    return min(1.0, max(0.0, between / total)) if total else 0.0


def _residual(dimension: Dimension, mix: Mix) -> str:
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
