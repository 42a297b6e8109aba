"""Attribution: how many seconds of the change of a quantile each cause owns, as Shapley values that sum to it.

Idea: put causes back to baseline one coalition at a time and read the quantile again. v(S) is the quantile of the
suspect window in which every cause outside S has its baseline size at the same rank (a request in the worst 3 % of
queueing gets what the worst 3 % of the baseline got), while the suspect's dependence between causes stays. A cause's
row is its Shapley value: what it adds, averaged over all orders. What is left, v(none) - quantile(baseline), is how the
causes fall together on the same requests; it is a row of its own, `dependence`, where it goes with the change, and else
given back by the rows that do (`overlap.py`).

Invariant: rows + dependence = quantile(suspect) - quantile(baseline); the same for the mean (dependence 0) and for the
expected shortfall. Identical windows give exact zeros.
Source: Shapley 1953. Why ranks are matched and why no Euler allocation: docs/method.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from diagnosis.attribution.arms import Arm
from diagnosis.attribution.coalitions import Game, Play
from diagnosis.attribution.overlap import with_overlap_given_back
from diagnosis.parallel import each
from diagnosis.statistics.bootstrap import widen
from diagnosis.statistics.draws import derived_seed, interval_95
from diagnosis.statistics.quantiles import F64, expected_shortfall, nearest_rank, parse_quantile
from diagnosis.statistics.significance import MIN_FOR_MEAN
from diagnosis.statistics.sufficiency import sufficient
from engine_probe.errors import BadWindow, DiagnosisError

MATERIAL_MARGINAL = 0.01  # of all marginal differences: a part below it cannot own a visible row
MATERIAL_SHARE = 0.10  # of the change, from which on a replicate counts a row as material
WORK_BUDGET = 3.0e8  # numbers that are looked at in about a second
MIN_REPLICATES = 40  # fewer, and a 95 % interval would be the extremes alone
WORK_PER_THREAD = 1.0e6  # numbers below which a second thread costs more than it brings


@dataclass(frozen=True, slots=True)
class Row:
    """One cause's seconds of the change: of the mean, of the quantile, of the expected shortfall."""

    name: str
    mean_s: float
    quantile_s: float
    es_s: float
    interval_95: tuple[float, float] | None = None
    mean_interval_95: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Attribution:
    """Rows that, with `dependence`, sum to the change suspect - baseline, in seconds.

    first_share     share of replicates in which the row is the largest in the direction of the change; `dependence`
                    competes but is not listed, so the shares may sum to less than 1
    material_share  share of replicates in which the row has at least 10 % of the change, with its sign
    merged          the parts reported together inside the row "other"
    replicates      how many replicates were drawn: fewer than asked when the windows are large
    draws, draws_mean   [replicates, len(rows)] the rows' seconds of the quantile and of the mean in each replicate;
                    with draws_dependence [replicates] a replicate's change of the quantile is complete
    to_traffic      (mean, quantile, expected shortfall) s taken from the rows for the traffic's own (`shared_load.py`);
                    rows + dependence + these sum to the change
    Intervals are None where the windows do not carry the quantile (`reason`), mean intervals with under 20 requests.
    """

    rows: list[Row]
    dependence: Row
    delta_mean_s: float
    delta_quantile_s: float
    delta_es_s: float
    first_share: dict[str, float]
    material_share: dict[str, float]
    first_share_mean: dict[str, float] = field(default_factory=dict)
    material_share_mean: dict[str, float] = field(default_factory=dict)
    merged: list[str] = field(default_factory=list)
    replicates: int = 0
    reason: str | None = None
    draws: F64 = field(default_factory=lambda: np.empty((0, 0)), repr=False)
    draws_mean: F64 = field(default_factory=lambda: np.empty((0, 0)), repr=False)
    draws_dependence: F64 = field(default_factory=lambda: np.empty(0), repr=False)
    to_traffic: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def row(self, name: str) -> Row | None:
        """The row of a part; of "other" for a part that was merged; None for a name that is not known."""
        wanted = "other" if name in self.merged else name
        return next((row for row in self.rows if row.name == wanted), None)


def attribute(
    names: Sequence[str],
    base: F64,
    suspect: F64,
    q: str,
    *,
    w_base: F64 | None = None,
    w_suspect: F64 | None = None,
    replicates: int = 200,
    seed: int = 0,
    max_groups: int = 8,
    repeat_base: npt.NDArray[np.generic] | None = None,
    repeat_suspect: npt.NDArray[np.generic] | None = None,
) -> Attribution:
    """Split the change of a quantile between two windows over named parts, exactly.

    names [k] unique; base [n_b, k], suspect [n_s, k] cause-seconds in arrival order, rows summing to the metric;
    weights as from `comparability.common_mix`; repeat_* name the repeat of each request where an arm was run several
    times. Parts whose marginals hardly differ, or beyond max_groups, are merged as "other". Large windows get fewer
    replicates than asked (`Attribution.replicates`). Raises BadWindow for an empty window, DiagnosisError for unknown
    (NaN) parts or shapes that do not fit.
    """
    if len(set(names)) != len(names) or not names:
        raise DiagnosisError(f"attribution needs parts with different names, got {list(names)}")
    if parse_quantile(q) == 1 or not 1 <= max_groups <= 12:
        raise DiagnosisError(f"attribution works for quantiles below 1 and 1 to 12 groups, got {q} and {max_groups}")
    windows = [
        _load(base, w_base, repeat_base, len(names), "baseline"),
        _load(suspect, w_suspect, repeat_suspect, len(names), "suspect"),
    ]
    groups, merged = _group(names, windows, q, max_groups)
    labels = ["other" if g[0] in merged else names[g[0]] for g in groups]
    arms = [_arm(window, groups, labels, q, derived_seed(seed, side)) for side, window in enumerate(windows)]
    game = Game(arms[0], arms[1], q)
    point = game.play(arms[0].itself(), arms[1].itself())
    drawn = affordable(replicates, point.work) if min(arm.n for arm in arms) > 1 else 0
    some = [arm.draw(drawn, derived_seed(seed, 2 + side), game.at_once()) for side, arm in enumerate(arms)]
    # arrays this large let go of the interpreter lock
    draws = each(game.play, *some) if point.work > WORK_PER_THREAD else list(map(game.play, *some))
    enough = sufficient(
        arms[0].total,
        arms[1].total,
        q,
        w_base=arms[0].weights,
        w_suspect=arms[1].weights,
        correlations=(arms[0].correlation, arms[1].correlation),
    )
    point, draws = with_overlap_given_back(point), [with_overlap_given_back(play) for play in draws]
    return _collect(labels, sorted(names[k] for k in merged), arms, q, point, draws, enough.reason)


@dataclass(frozen=True, slots=True)
class _Loaded:
    parts: F64  # [k, n]
    weights: F64 | None
    repeats: npt.NDArray[np.generic] | None


def _load(parts: F64, weights: F64 | None, repeats: npt.NDArray[np.generic] | None, k: int, name: str) -> _Loaded:
    parts = np.asarray(parts, dtype=np.float64)
    if parts.ndim != 2 or parts.shape[1] != k:
        raise DiagnosisError(f"the {name} parts have shape {parts.shape}; expected one column for each of {k} names")
    if not np.isfinite(parts).all():
        raise DiagnosisError(f"the {name} parts hold unknown values; leave out requests whose parts are not all known")
    repeats = None if repeats is None else np.asarray(repeats)
    if weights is not None:
        weights = np.asarray(weights, dtype=np.float64)
        if weights.shape != parts.shape[:1] or not np.isfinite(weights).all() or (weights < 0).any():
            raise DiagnosisError(f"the {name} weights must be finite, not negative, and one per request")
        kept = weights > 0
        if not kept.all():
            parts, weights = parts[kept], weights[kept]
            repeats = None if repeats is None else repeats[kept]
        if weights.size and weights.min() == weights.max():
            weights = None
    if parts.shape[0] == 0:
        raise BadWindow(f"the {name} window holds no request to attribute; widen it", window=name)
    return _Loaded(np.ascontiguousarray(parts.T), weights, repeats)


def _group(names: Sequence[str], windows: list[_Loaded], q: str, max_groups: int) -> tuple[list[list[int]], set[int]]:
    """Groups of part numbers, each a player of the game, and the part numbers that are reported inside "other"."""
    score, live = np.zeros(len(names)), np.zeros(len(names), dtype=bool)
    for k in range(len(names)):
        means = [float(np.average(w.parts[k], weights=w.weights)) for w in windows]
        tails = [expected_shortfall(w.parts[k], q, w.weights) for w in windows]
        score[k] = abs(means[1] - means[0]) + abs(tails[1] - tails[0])
        live[k] = any(w.parts[k].any() for w in windows)
    by_size = sorted(range(len(names)), key=lambda k: (-score[k], names[k]))
    own = [k for k in by_size if live[k] and names[k] != "other" and score[k] >= MATERIAL_MARGINAL * score.sum()]
    if len(own) > max_groups or (len(own) == max_groups and len(own) < np.count_nonzero(live)):
        own = own[: max_groups - 1]
    rest = [k for k in by_size if k not in own]
    live_rest = [k for k in rest if live[k]]
    groups = [[k] for k in sorted(own)]
    if len(live_rest) == 1 and names[live_rest[0]] != "other":
        groups = sorted([*groups, live_rest])
        return groups, set(rest) - set(live_rest)
    return groups + ([sorted(live_rest)] if live_rest else []), set(rest)


def _arm(window: _Loaded, groups: list[list[int]], labels: list[str], q: str, seed: int) -> Arm:
    columns = np.array([window.parts[g].sum(axis=0) for g in groups]).reshape(len(groups), window.parts.shape[1])
    return Arm(columns, labels, window.weights, window.repeats, q, seed)


def affordable(wanted: int, work: int) -> int:
    """How many replicates of so much work each (numbers looked at) fit into about a second; at least 40."""
    return min(wanted, max(MIN_REPLICATES, int(WORK_BUDGET / max(work, 1))))


def _collect(
    labels: list[str],
    merged: list[str],
    arms: list[Arm],
    q: str,
    point: Play,
    draws: list[Play],
    reason: str | None,
) -> Attribution:
    """Rows with their intervals; the sums are checked against changes that are computed apart from the game."""
    none = np.empty((0, len(labels)))
    rows = np.concatenate([none, *(play.rows for play in draws)])
    means = np.concatenate([none, *(play.mean_rows for play in draws)])
    dependence = np.concatenate([np.empty(0), *(play.dependence for play in draws)])
    zeros = np.zeros(len(rows))
    num_blocks, missed = min(arm.num_blocks for arm in arms), max(arm.missed for arm in arms)
    known = len(rows) > 0 and reason is None
    mean_known = len(rows) > 0 and min(arm.n for arm in arms) >= MIN_FOR_MEAN

    def row(name: str, sizes: tuple[float, float, float], draws_q: F64, draws_mean: F64) -> Row:
        return Row(
            name,
            mean_s=float(sizes[0]),
            quantile_s=float(sizes[1]),
            es_s=float(sizes[2]),
            interval_95=interval_95(widen(draws_q, num_blocks, missed)) if known else None,
            mean_interval_95=interval_95(widen(draws_mean, num_blocks, missed)) if mean_known else None,
        )

    table = [
        row(label, (point.mean_rows[0, k], point.rows[0, k], point.es_rows[0, k]), rows[:, k], means[:, k])
        for k, label in enumerate(labels)
    ]
    if merged and "other" not in labels:  # everything merged is zero in both windows
        table.append(row("other", (0.0, 0.0, 0.0), zeros, zeros))
    base, suspect = arms
    change = [
        float(np.average(suspect.total, weights=suspect.weights) - np.average(base.total, weights=base.weights)),
        nearest_rank(suspect.total, q, suspect.weights) - nearest_rank(base.total, q, base.weights),
        expected_shortfall(suspect.total, q, suspect.weights) - expected_shortfall(base.total, q, base.weights),
    ]
    left = row("dependence", (0.0, point.dependence[0], point.es_dependence[0]), dependence, zeros)
    scale = max(1.0, float(np.abs(base.total).max()), float(np.abs(suspect.total).max()))
    for size, name in zip(change, ("mean_s", "quantile_s", "es_s"), strict=True):
        told = sum(getattr(r, name) for r in [*table, left])
        assert abs(told - size) <= 1e-9 * scale, f"rows tell {told} s of a change of {size} s ({name})"
    first, material = _shares(labels, rows, dependence, change[1])
    first_mean, material_mean = _shares(labels, means, zeros, change[0])
    return Attribution(
        rows=table,
        dependence=left,
        delta_mean_s=change[0],
        delta_quantile_s=change[1],
        delta_es_s=change[2],
        first_share=first,
        material_share=material,
        first_share_mean=first_mean,
        material_share_mean=material_mean,
        merged=merged,
        replicates=len(rows),
        reason=reason,
        draws=_as_columns(rows, len(table)),
        draws_mean=_as_columns(means, len(table)),
        draws_dependence=dependence,
    )


def _as_columns(draws: F64, k: int) -> F64:
    """Replicates as [replicates, k]; a row that was added for what is zero everywhere gets zeros."""
    return np.pad(draws, ((0, 0), (0, k - draws.shape[1])))


def _shares(labels: list[str], rows: F64, dependence: F64, delta: float) -> tuple[dict[str, float], dict[str, float]]:
    """In what share of replicates each row is the largest, and is at least a tenth, in the direction of the change."""
    if rows.size == 0 or delta == 0.0:
        return dict.fromkeys(labels, 0.0), dict.fromkeys(labels, 0.0)
    toward = rows * np.sign(delta)
    change = toward.sum(axis=1) + dependence * np.sign(delta)
    best = np.maximum(toward.max(axis=1), dependence * np.sign(delta))
    first = (toward == best[:, None]) & (toward > 0.0)
    material = (toward >= MATERIAL_SHARE * change[:, None]) & (change[:, None] > 0.0) & (toward > 0.0)
    return (
        dict(zip(labels, first.mean(axis=0).tolist(), strict=True)),
        dict(zip(labels, material.mean(axis=0).tolist(), strict=True)),
    )
