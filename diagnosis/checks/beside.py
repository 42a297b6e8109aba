"""Requests that ran beside the recorded ones: what is told of concurrency by rows alone does not hold then.

By the engine's own words: requests that it finished, and its gauge of running ones.
"""

from __future__ import annotations

import numpy as np

from diagnosis.checks.counters import FEWEST_SCRAPES
from diagnosis.facts import Facts
from diagnosis.sampled import num_requests, rate_of
from diagnosis.telling.wording import number

MORE = 1.25
"""Times the recorded requests that the engine finished, from which on others fill its steps as well."""
SEVERAL = 1.5
"""Times the requests that the rows have in the engine at once, from which on the gauge tells of others; it is read now and then."""


def others_beside(facts: Facts) -> tuple[str, float] | None:
    """(what tells of requests that ran and were not recorded, how many of them); None where nothing does."""
    r, counted = facts.requests, facts.samples.get("requests_finished_total")
    rows = num_requests(r) + facts.num_warmup / rate_of(r)
    legs = 1.0 if facts.handover is None else 2.0  # who prefilled a request finished it, and so did who decoded it
    if counted is not None and counted > MORE * legs * rows:
        return (
            f"{facts.name}: the engine finished {number(counted)} requests, {number(round(rows))} are recorded",
            counted - legs * rows,
        )
    gauge = facts.samples.get("requests_running:mean")
    if gauge is None or r.num_assumed or facts.samples.get("requests_running:n", 0.0) < FEWEST_SCRAPES:
        return None
    workers = max(len({*r.worker_names} - {None}), 1)  # the gauge's mean is one worker's
    inside_s = float(np.nansum(np.clip(r.end_s - r.arrival_s, 0.0, None)))
    at_once = inside_s / rate_of(r) / max(facts.duration_s, 1e-9) / workers
    if gauge <= SEVERAL * at_once + 1.0:
        return None
    return (
        f"{facts.name}: {number(round(gauge, 1))} requests ran at once by the engine's gauge, {number(round(at_once, 1))} by what is recorded",
        gauge - at_once,
    )


def engine_counts(facts: Facts) -> bool:
    """Whether the engine says how many requests it served: rows of its own, a counter, or a gauge of running ones."""
    by_rows = facts.requests.vantage == "engine" or bool(np.isfinite(facts.requests.engine_arrival_s).any())
    return by_rows or bool({"requests_finished_total", "requests_running:mean"} & facts.samples.keys())
