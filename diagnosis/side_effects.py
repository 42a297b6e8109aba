"""What else moved while the metric moved: the other latencies, throughput and errors, each with its interval."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from diagnosis.facts import Facts
from diagnosis.ledger import judged_values, metric_values
from diagnosis.significance import compare
from store.metrics import PRESET_SLOS

REPLICATES = 200
LIMITED = {"ttft": "ttft", "tpot": "tpot", "e2e_token": "e2e"}
"""What an SLO limits, and the metric of ours that it is."""


def side_effects(base: Facts, suspect: Facts, metric: str, seed: int) -> list[dict[str, Any]]:
    """Rows of {metric, baseline, suspect, interval_95}: mean and P95 of the other latencies (s), requests/s, tokens/s, goodput, failures."""
    rows: list[dict[str, Any]] = []
    for name in ("ttft", "tpot", "e2e"):
        if name == metric:
            continue
        a, b = (v[np.isfinite(v) & (v >= 0)] for v in (judged_values(base, name), judged_values(suspect, name)))
        if len(a) == 0 or len(b) == 0:
            continue
        found = compare(a, b, "0.95", replicates=REPLICATES, seed=seed)
        rows.append(_row(f"{name}_mean_s", float(a.mean()), float(b.mean()), found.mean_interval_95))
        p95 = np.sort(b)[math.ceil(0.95 * len(b)) - 1]
        rows.append(_row(f"{name}_p95_s", float(p95 - found.delta_s), float(p95), found.interval_95))
    rows.append(_rate("requests_per_s", len(base.requests), base.duration_s, len(suspect.requests), suspect.duration_s))
    tokens = [np.nansum(f.requests.get("output_tokens")) for f in (base, suspect)]
    if min(tokens) > 0:
        rows.append(_row("output_tokens_per_s", tokens[0] / base.duration_s, tokens[1] / suspect.duration_s, None))
    goodput = [_num_good(facts) for facts in (base, suspect)]
    if goodput[0] is not None and goodput[1] is not None:
        rows.append(_rate("goodput_per_s", goodput[0], base.duration_s, goodput[1], suspect.duration_s))
    rows.append(
        _share(
            "unfinished_ratio", base.num_unfinished, len(base.requests), suspect.num_unfinished, len(suspect.requests)
        )
    )
    return rows


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


def _row(metric: str, base: float, suspect: float, interval: tuple[float, float] | None) -> dict[str, Any]:
    return {"metric": metric, "baseline": float(base), "suspect": float(suspect), "interval_95": interval}


def _rate(metric: str, n_b: int, s_b: float, n_s: int, s_s: float) -> dict[str, Any]:
    """Difference of two Poisson rates; normal interval."""
    a, b = n_b / max(s_b, 1e-9), n_s / max(s_s, 1e-9)
    half = 1.96 * math.sqrt(n_b / max(s_b, 1e-9) ** 2 + n_s / max(s_s, 1e-9) ** 2)
    return _row(metric, a, b, (b - a - half, b - a + half))


def _share(metric: str, k_b: int, n_b: int, k_s: int, n_s: int) -> dict[str, Any]:
    """Difference of two shares; Newcombe's interval from Wilson scores."""

    def wilson(k: int, n: int) -> tuple[float, float, float]:
        p, z = k / n, 1.96
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return p, centre - half, centre + half

    a, low_a, high_a = wilson(k_b, n_b)
    b, low_b, high_b = wilson(k_s, n_s)
    difference = b - a
    return _row(
        metric,
        a,
        b,
        (difference - math.hypot(b - low_b, high_a - a), difference + math.hypot(high_b - b, a - low_a)),
    )
