"""What else moved while the metric moved: the other latencies, throughput and errors, each with its interval.

Many differences are looked at together, and of twenty that are none one has an interval without 0. So a row is called
`changed` only where its p-value stands among all the others' (`draws.false_discoveries`): at most 5 % of what is called
changed is chance. Intervals are each row's own.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from diagnosis.facts import F64, I64, Facts
from diagnosis.ledger.values import judged_values, metric_values
from diagnosis.sampled import rate_of, total
from diagnosis.statistics.draws import false_discoveries, normal_p
from diagnosis.statistics.quantiles import nearest_rank
from diagnosis.statistics.significance import compare
from store.metrics import PRESET_SLOS

REPLICATES = 200
"""For 95 % intervals of many numbers that nobody asked for: their ends scatter by a tenth of a standard error."""
LIMITED = {"ttft": "ttft", "tpot": "tpot", "e2e_token": "e2e"}
"""What an SLO limits, and the metric of ours that it is."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in both windows. interval_95 of suspect - baseline and p_value of "no difference": None where nothing tells."""

    metric: str
    baseline: float
    suspect: float
    interval_95: tuple[float, float] | None = None
    p_value: float | None = None


def side_effects(base: Facts, suspect: Facts, metric: str, seed: int) -> list[dict[str, Any]]:
    """Rows of {metric, baseline, suspect, interval_95, p_value, changed}: mean and P95 of the other latencies (s), requests/s,
    tokens/s, goodput, failures. `changed` None: nothing tells."""
    rows: list[Difference] = []
    for name in ("ttft", "tpot", "e2e"):
        if name != metric:
            rows += _latency(base, suspect, name, seed)
    # a sample of rate p, seen for d seconds, tells as much of a rate as all would in p * d seconds
    seen_s = [rate_of(f.requests) * f.duration_s for f in (base, suspect)]
    rows.append(_rate("requests_per_s", len(base.requests), seen_s[0], len(suspect.requests), seen_s[1]))
    tokens = [total(f.requests, "output_tokens") or 0.0 for f in (base, suspect)]
    if min(tokens) > 0:
        rows.append(Difference("output_tokens_per_s", tokens[0] / base.duration_s, tokens[1] / suspect.duration_s))
    goodput = [_num_good(facts) for facts in (base, suspect)]
    if goodput[0] is not None and goodput[1] is not None:
        rows.append(_rate("goodput_per_s", goodput[0], seen_s[0], goodput[1], seen_s[1]))
    rows.append(
        _share(
            "unfinished_ratio", base.num_unfinished, len(base.requests), suspect.num_unfinished, len(suspect.requests)
        )
    )
    return marked(rows)


def marked(rows: list[Difference]) -> list[dict[str, Any]]:
    """The rows as documents, with what stands of them when they are all looked at together."""
    told = [row for row in rows if row.p_value is not None]
    stands = dict(
        zip((row.metric for row in told), false_discoveries([row.p_value or 0.0 for row in told]), strict=True)
    )
    return [{**asdict(row), "changed": stands.get(row.metric)} for row in rows]


def _latency(base: Facts, suspect: Facts, name: str, seed: int) -> list[Difference]:
    (a, a_of), (b, b_of) = (_known(facts, name) for facts in (base, suspect))
    if len(a) == 0 or len(b) == 0:
        return []
    found = compare(a, b, "0.95", replicates=REPLICATES, seed=seed, repeat_base=a_of, repeat_suspect=b_of)
    p95 = nearest_rank(b, "0.95")
    mean = Difference(f"{name}_mean_s", float(a.mean()), float(b.mean()), found.mean_interval_95, found.p_mean)
    return [mean, Difference(f"{name}_p95_s", p95 - found.delta_s, p95, found.interval_95, found.p_quantile)]


def _known(facts: Facts, name: str) -> tuple[F64, I64 | None]:
    """Values of the requests that have the metric, and which repeat of an arm each is of."""
    values = judged_values(facts, name)
    known = np.isfinite(values) & (values >= 0)
    of = facts.requests.repeat
    return values[known], None if of is None or len(np.unique(of[known])) < 2 else of[known]


def _num_good(facts: Facts) -> int | None:
    """Finished requests within every limit of the preset of their workload (interactive where none fits); None if unknowable."""
    r = facts.requests
    values = {f"{name}_s": metric_values(facts, metric) for name, metric in LIMITED.items()}
    if not np.isfinite(values["ttft_s"]).any():
        return None
    good = r.finished.copy()
    preset = np.array([w if w in PRESET_SLOS else "interactive" for w in r.workload], dtype=object)
    for workload in set(preset):
        for name in values:
            limit = getattr(PRESET_SLOS[workload], name)
            if limit is None:
                continue
            met = values[name] <= limit
            if name == "tpot_s":  # TPOT does not apply to one token
                met |= r.get("output_tokens") <= 1
            good &= met | (preset != workload)
    return int(good.sum())


def _rate(metric: str, n_b: int, s_b: float, n_s: int, s_s: float) -> Difference:
    """Difference of two Poisson rates; normal interval."""
    a, b = n_b / max(s_b, 1e-9), n_s / max(s_s, 1e-9)
    error = math.sqrt(n_b / max(s_b, 1e-9) ** 2 + n_s / max(s_s, 1e-9) ** 2)
    return Difference(metric, a, b, (b - a - 1.96 * error, b - a + 1.96 * error), normal_p(b - a, error))


def _share(metric: str, k_b: int, n_b: int, k_s: int, n_s: int) -> Difference:
    """Difference of two shares; Newcombe's interval from Wilson scores, p-value of the score test."""

    def wilson(k: int, n: int) -> tuple[float, float, float]:
        p, z = k / n, 1.96
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return p, centre - half, centre + half

    a, low_a, high_a = wilson(k_b, n_b)
    b, low_b, high_b = wilson(k_s, n_s)
    difference, pooled = b - a, (k_b + k_s) / (n_b + n_s)
    interval = (difference - math.hypot(b - low_b, high_a - a), difference + math.hypot(high_b - b, a - low_a))
    error = math.sqrt(pooled * (1 - pooled) * (1 / n_b + 1 / n_s))
    return Difference(metric, a, b, interval, normal_p(difference, error))
