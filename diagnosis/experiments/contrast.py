"""Two arms beside each other: how far they differ, and what the same calls went through in both.

Invariant: the n-th repeats served the same calls, so calls are paired by (repeat, key); what has no partner is left out of what
is paired, and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from diagnosis.experiments.observed import CLASSES, Observed
from diagnosis.experiments.resampling import Estimate, difference, of_numbers
from diagnosis.experiments.summary import METRICS, STATISTICS, ArmSummary, goodput_rps, tokens_per_s, values
from diagnosis.facts import F64
from diagnosis.statistics.draws import false_discoveries
from diagnosis.statistics.quantiles import nearest_rank
from store.metrics import PRESET_SLOS, Slo

MATERIAL = 0.10
"""A difference below this share of the baseline's value is nobody's concern, however sure it is."""
TAIL = "0.95"
"""Requests from here on are the tail whose extra seconds are shared out: P99 alone would be a handful."""


@dataclass(frozen=True, slots=True)
class HotWorker:
    """The worker with most of the queueing, run by run, over all repeats.

    queue_share    of all seconds of queueing; request_share of the requests
    prefix_share   of the requests of the most common shared prefix; None where no prefix is told
    mean_s         seconds a request waits there, and elsewhere
    tail_share     of the slowest requests (TAIL)
    """

    names: list[str]
    queue_share: float
    request_share: float
    prefix_share: float | None
    mean_s: float
    elsewhere_mean_s: float
    tail_share: float


@dataclass(frozen=True, slots=True)
class Contrast:
    """suspect - baseline, s and 1/s. paired_by_class: of the same calls, by what the cache gave them in the suspect arm.

    paired          [n] seconds of TTFT that each paired call has more in the suspect arm
    tail_extra_s    sum of those over the suspect's tail; the `*_extra_s` are parts of it
    """

    baseline: ArmSummary
    suspect: ArmSummary
    latency: dict[str, dict[str, Estimate]]
    paired_by_class: dict[str, Estimate]
    paired: F64
    num_unpaired: int
    hot: HotWorker | None
    baseline_hot: HotWorker | None
    lookup_s: Estimate
    lookup_paid_share: float | None
    tail_extra_s: float
    tail_extra_hot_s: float
    tail_extra_not_hit_s: float
    tail_extra_lookup_s: float
    side_effects: list[dict[str, Any]]

    def moved(self, metric: str, statistic: str) -> int:
        """1 where it rose beyond noise and by something that matters, -1 where it fell so, else 0."""
        found, base = self.latency[metric][statistic], self.baseline.latency[metric][statistic].value
        return direction(found, base)


def direction(found: Estimate, base: float | None) -> int:
    """Sign of a difference that excludes 0 and is at least MATERIAL of the baseline's value; else 0."""
    if found.value is None or base is None or abs(found.value) < MATERIAL * abs(base):
        return 0
    return 1 if found.is_above_0 and found.value > 0 else -1 if found.is_below_0 and found.value < 0 else 0


def contrast(baseline: ArmSummary, suspect: ArmSummary, slo: Slo | None = None) -> Contrast:
    """Everything that the two arms' difference shows. slo: what a good request keeps (default: interactive)."""
    slo = slo or PRESET_SLOS["interactive"]
    pairs = [_pair(*both) for both in zip(baseline.runs, suspect.runs, strict=False)]
    hot, pooled = _hot(suspect.runs), np.concatenate([values(run, "ttft") for run in suspect.runs])
    edge = nearest_rank(pooled, TAIL) if pooled.size else np.inf
    sums = {"all": 0.0, "hot": 0.0, "not_hit": 0.0, "lookup": 0.0}
    for index, pair in enumerate(pairs):
        tail = pair.suspect_ttft >= edge
        extra = np.where(tail, pair.extra, 0.0)
        sums["all"] += float(extra.sum())
        if hot is not None:
            sums["hot"] += float(extra[pair.worker == hot.names[index]].sum())
        sums["not_hit"] += float(extra[(pair.outcome != "hit") & (pair.outcome != "")].sum())
        sums["lookup"] += float(np.nansum(np.where(tail, pair.lookup, 0.0)))
    return Contrast(
        baseline=baseline,
        suspect=suspect,
        latency={
            metric: {
                name: difference(
                    [values(run, metric) for run in baseline.runs], [values(run, metric) for run in suspect.runs], q
                )
                for name, q in STATISTICS
            }
            for metric in METRICS
        },
        paired_by_class=_by_class(pairs),
        paired=np.concatenate([pair.extra for pair in pairs]) if pairs else np.empty(0),
        num_unpaired=suspect.num_requests - sum(len(pair.extra) for pair in pairs),
        hot=hot,
        baseline_hot=_hot(baseline.runs),
        lookup_s=_lookup(pairs),
        lookup_paid_share=_paid(suspect.runs),
        tail_extra_s=sums["all"],
        tail_extra_hot_s=sums["hot"],
        tail_extra_not_hit_s=sums["not_hit"],
        tail_extra_lookup_s=sums["lookup"],
        side_effects=_side_effects(baseline, suspect, slo),
    )


@dataclass(frozen=True, slots=True)
class _Pair:
    """One repeat's calls that have a first token in both arms, [n] each. lookup: extra seconds of looking up."""

    extra: F64
    suspect_ttft: F64
    outcome: np.ndarray
    worker: np.ndarray
    lookup: F64


def _pair(base: Observed, suspect: Observed) -> _Pair:
    place = {key: index for index, key in enumerate(base.key)}
    both = [
        (place[key], index)
        for index, key in enumerate(suspect.key)
        if key in place and np.isfinite(suspect.ttft_s[index]) and np.isfinite(base.ttft_s[place[key]])
    ]
    left = np.array([b for b, _ in both], dtype=np.intp)
    right = np.array([s for _, s in both], dtype=np.intp)
    looked = [run.phase("cache_lookup") for run in (base, suspect)]
    return _Pair(
        extra=suspect.ttft_s[right] - base.ttft_s[left],
        suspect_ttft=suspect.ttft_s[right],
        outcome=suspect.outcome[right],
        worker=suspect.worker[right],
        lookup=looked[1][right] - np.nan_to_num(looked[0][left]),
    )


def _by_class(pairs: Sequence[_Pair]) -> dict[str, Estimate]:
    """Mean extra TTFT of each class's calls, one number a repeat."""
    found = {}
    for name in CLASSES:
        extras = [pair.extra[pair.outcome == name] for pair in pairs]
        if sum(extra.size for extra in extras):
            found[name] = of_numbers([float(extra.mean()) for extra in extras if extra.size])
    others = [pair.extra[(pair.outcome != "hit") & (pair.outcome != "")] for pair in pairs]
    if sum(extra.size for extra in others):
        found["not_hit"] = of_numbers([float(extra.mean()) for extra in others if extra.size])
    return found


def _hot(runs: Sequence[Observed]) -> HotWorker | None:
    """None with fewer than two workers, or where nobody waited or nobody told."""
    names, queue, all_queue, count, tail_hot, tail = [], 0.0, 0.0, 0, 0, 0
    num_hot_prefix = num_prefix = 0
    pooled = np.concatenate([values(run, "ttft") for run in runs]) if runs else np.empty(0)
    edge = nearest_rank(pooled, TAIL) if pooled.size else np.inf
    for run in runs:
        loads = [load for load in run.workers if load.queue_s is not None]
        if len(loads) < 2:
            return None
        first = max(loads, key=lambda load: load.queue_s or 0.0)
        names.append(first.worker)
        queue += first.queue_s or 0.0
        all_queue += sum(load.queue_s or 0.0 for load in loads)
        count += first.num_requests
        there, slow = run.worker == first.worker, run.ttft_s >= edge
        tail += int(slow.sum())
        tail_hot += int((slow & there).sum())
        common = Counter(prefix for prefix in run.prefix if prefix is not None).most_common(1)
        if common:
            of_prefix = run.prefix == common[0][0]
            num_prefix += int(of_prefix.sum())
            num_hot_prefix += int((of_prefix & there).sum())
    total = sum(len(run) for run in runs)
    if not runs or all_queue <= 0.0 or not count:
        return None
    return HotWorker(
        names=names,
        queue_share=queue / all_queue,
        request_share=count / total,
        prefix_share=num_hot_prefix / num_prefix if num_prefix else None,
        mean_s=queue / count,
        elsewhere_mean_s=(all_queue - queue) / max(total - count, 1),
        tail_share=tail_hot / tail if tail else 0.0,
    )


def _lookup(pairs: Sequence[_Pair]) -> Estimate:
    """Mean extra seconds of looking up a call pays, one number a repeat."""
    told = [pair.lookup[np.isfinite(pair.lookup)] for pair in pairs]
    if not told or not all(lookup.size for lookup in told):
        return Estimate(None, None, "no look-up is told")
    return of_numbers([float(lookup.mean()) for lookup in told])


def _paid(runs: Sequence[Observed]) -> float | None:
    """Share of the requests with a look-up that took time; None where none is told."""
    told = np.concatenate([run.phase("cache_lookup") for run in runs])
    if not np.isfinite(told).any():
        return None
    return float(np.mean(np.nan_to_num(told) > 0))


def _side_effects(base: ArmSummary, suspect: ArmSummary, slo: Slo) -> list[dict[str, Any]]:
    """TPOT, E2E, goodput, throughput and failures: baseline, suspect, difference, interval and p-value, and whether it changed.

    Many differences are looked at together, and of twenty that are none one has an interval without 0: a row is `changed`
    where its p-value stands among all the others' (`draws.false_discoveries`), its interval excludes 0, and it is MATERIAL.
    None: nothing tells.
    """
    rows: list[tuple[str, float | None, float | None, Estimate]] = []
    for metric in ("tpot", "e2e"):
        for name, q in (("mean", None), ("p95", "0.95"), ("p99", "0.99")):
            found = difference([values(r, metric) for r in base.runs], [values(r, metric) for r in suspect.runs], q)
            ends = [arm.latency[metric][name].value for arm in (base, suspect)]
            rows.append((f"{metric}_{name}_s", ends[0], ends[1], found))
    for name, rate in (
        ("goodput_rps", lambda run: goodput_rps(run, slo)),
        ("output_tokens_per_s", tokens_per_s),
        ("unfinished_ratio", lambda run: float((~run.finished).mean())),
    ):
        each = [[rate(run) for run in arm.runs] for arm in (base, suspect)]
        found = of_numbers([after - before for before, after in zip(*each, strict=False)])
        rows.append((name, float(np.mean(each[0])), float(np.mean(each[1])), found))
    told = [(name, found.p_value) for name, _, _, found in rows if found.p_value is not None]
    stands = dict(zip((name for name, _ in told), false_discoveries([p for _, p in told]), strict=True))
    return [
        {
            "metric": name,
            "baseline": before,
            "suspect": after,
            "difference": found.value,
            "interval_95": found.interval_95,
            "p_value": found.p_value,
            "changed": stands[name] and direction(found, before) != 0 if name in stands else None,
        }
        for name, before, after, found in rows
    ]
