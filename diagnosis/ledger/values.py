"""The number that each request has of a metric, and which requests have one: what a ledger is written of.

A request whose first token never came counts with what it waited at least (`censored.py`). Definitions: design section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnosis.facts import F64, I64, Bool, Facts
from diagnosis.statistics.censored import METRICS as CENSORED_METRICS
from diagnosis.statistics.censored import at_least_s, counted


@dataclass(frozen=True, slots=True)
class Counted:
    """The requests that have a metric: `values` [n] s, `rows` [n] their position in the facts, `censored` [n] as in a ledger."""

    values: F64
    rows: I64
    censored: Bool


def count(facts: Facts, metric: str) -> Counted:
    """The requests that a ledger for `metric` is written of."""
    values = judged_values(facts, metric)
    keep = np.flatnonzero(np.isfinite(values) & (values >= 0))
    # a finished request without a first token is not censored: only nobody saw when it came
    is_open = np.isfinite(at_least_s(facts)[keep]) if metric in CENSORED_METRICS else np.zeros(len(keep), dtype=bool)
    return Counted(values[keep], keep, is_open)


def judged_values(facts: Facts, metric: str) -> F64:
    """As `metric_values`, and where the first token never came what the request waited at least (see `censored.py`)."""
    values = metric_values(facts, metric)
    if metric not in CENSORED_METRICS:
        return values
    at_least = at_least_s(facts)
    return np.where(counted(values, at_least), at_least, values)


def metric_values(facts: Facts, metric: str) -> F64:
    """TTFT, TPOT, decode seconds or E2E of each request, s; NaN where it has none. Definitions: design section 4."""
    r = facts.requests
    if metric == "ttft":
        return r.first_token_s - r.arrival_s
    if metric == "e2e":
        return r.last_token_s - r.arrival_s
    decode = r.last_token_s - r.first_token_s
    if metric == "decode":
        return decode
    tokens = r.get("output_tokens")
    return np.where(tokens > 1, decode / np.where(tokens > 1, tokens - 1, 1.0), np.nan)
