"""More requests came and each asks for more: whose is the waiting behind ordinary work?

Idea: the work that is offered a second is arrivals times work a request, so its growth on the log scale is the sum of both, and so is
split what grew with it. At a common mix of requests the waiting behind the others' longer prompts is still there; without this it would
all be the load's. Paired runs of the lab show it: take either away, and most of the waiting is gone.

Invariant: seconds move from rows to the traffic's row and none is lost. Nothing moves where the mix or the arrivals did not grow, or one
fell: then the waiting has one owner (`passed_on.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from diagnosis.attribution.shapley import Attribution, Row
from diagnosis.cause import BY_MIX, Case, Evidence
from diagnosis.causes.load_step import GROWTH, STANDS_OUT, growth_z, rates_a_worker
from diagnosis.facts import F64, I64, Facts
from diagnosis.ledger.work_model import WorkModel
from diagnosis.statistics.comparability import Mix
from diagnosis.telling.wording import seconds

WAITS = ("queue_load", "queue_seats", "queue_budget", "decode_bandwidth", "shared_prefill")
"""Rows that grow with the work that is offered."""


def share_of_mix(windows: tuple[Facts, Facts], rows: tuple[I64, I64], mix: Mix, model: WorkModel) -> float:
    """Share of the growth of offered work, 0 to 1, that another mix of requests has, where more of them came too (or fewer, and less).

    rows   of the (baseline, suspect) requests that the mix weighs
    """
    if not mix.shifted:
        return 0.0
    before, now = rates_a_worker(*windows)
    if max(now / before, before / now) - 1.0 < GROWTH.value or abs(growth_z(*windows)) < STANDS_OUT.value:
        return 0.0
    by_mix, by_load = growth_by_mix(windows, rows, mix, model), math.log(now / before)
    return by_mix / (by_mix + by_load) if by_mix * by_load > 0 else 0.0


def growth_by_mix(windows: tuple[Facts, Facts], rows: tuple[I64, I64], mix: Mix, model: WorkModel) -> float:
    """Growth of the work that a request asks for which another mix of them has, on the log scale; 0 where that is not known."""
    if not mix.shifted:
        return 0.0
    means = [
        _means(work_s(facts, model)[kept], weight)
        for facts, kept, weight in zip(windows, rows, (mix.w_base, mix.w_suspect), strict=True)
    ]
    if any(told is None for told in means):
        return 0.0
    (raw_b, mixed_b), (raw_s, mixed_s) = (told for told in means if told is not None)
    return math.log(raw_s / mixed_s) + math.log(mixed_b / raw_b)


def with_traffic_apart(found: Attribution, share: float) -> Attribution:
    """The attribution less this share of what waits behind ordinary work; the rest goes `to_traffic`."""
    if share == 0.0:
        return found
    left = np.array([1.0 - share if row.name in WAITS else 1.0 for row in found.rows])
    taken = [
        sum(getattr(row, size) * (1.0 - kept) for row, kept in zip(found.rows, left, strict=True))
        for size in ("mean_s", "quantile_s", "es_s")
    ]
    return replace(
        found,
        rows=[_scaled(row, float(kept)) for row, kept in zip(found.rows, left, strict=True)],
        draws=found.draws * left if found.draws.size else found.draws,
        draws_mean=found.draws_mean * left if found.draws_mean.size else found.draws_mean,
        to_traffic=(taken[0], taken[1], taken[2]),
    )


def evidence(case: Case) -> list[Evidence]:
    """What of the waiting stands with the traffic's mix, where the load has the rest of it."""
    mean_s = case.attribution.to_traffic[0]
    if not mean_s:
        return []
    direction = "grew" if mean_s > 0 else "fell"
    return [
        Evidence(
            f"the number of requests a second {direction} too: of the waiting behind ordinary work {seconds(abs(mean_s))} a request is put down to "
            "how much each asks for, by its share of the growth of work a second",
            mean_s,
            "s",
            computed_by=BY_MIX,
        )
    ]


def _scaled(row: Row, kept: float) -> Row:
    return Row(
        row.name,
        row.mean_s * kept,
        row.quantile_s * kept,
        row.es_s * kept,
        _bounds(row.interval_95, kept),
        _bounds(row.mean_interval_95, kept),
    )


def _bounds(told: tuple[float, float] | None, kept: float) -> tuple[float, float] | None:
    return None if told is None else (told[0] * kept, told[1] * kept)


def work_s(facts: Facts, model: WorkModel) -> F64:
    """[n] seconds of steps that each request asks for by itself: prompt tokens that are computed, and answers; NaN where not known."""
    r = facts.requests
    computed, prompt = r.get("computed_tokens"), r.get("prompt_tokens")
    tokens: Sequence[tuple[F64, float | None]] = (
        (np.where(np.isfinite(computed), computed, prompt), model.prefill_s_per_token),
        (r.get("output_tokens"), model.decode_s_per_seq),
    )
    told = [number * cost for number, cost in tokens if cost is not None and np.isfinite(number).any()]
    return np.sum(told, axis=0) if told else np.full(len(r), np.nan)


def _means(work: F64, weight: F64) -> tuple[float, float] | None:
    """Mean work a request as it came, and at the common mix; None where nothing is known or asked for."""
    known = np.isfinite(work)
    if not known.any() or not weight[known].sum():
        return None
    raw, mixed = float(work[known].mean()), float(np.average(work[known], weights=weight[known]))
    return (raw, mixed) if raw > 0 and mixed > 0 else None
