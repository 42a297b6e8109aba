"""Counters and gauges beside the rows that tell the same: out of range, standing still, or not adding up."""

from __future__ import annotations

import numpy as np

from diagnosis.checks.check import Check, differ
from diagnosis.facts import Facts
from diagnosis.sampled import half_interval, margin, num_requests, rate_of, total
from diagnosis.telling.wording import number, percent

COVERED = 0.5
"""Share of the window that scrapes of a counter must span before it can be said to stand still."""
FEWEST_SCRAPES = 5
"""Scrapes of a gauge from which on a 0 in all of them means something."""
FULL = 1.0001
"""A usage above it is no rounding of 1."""
FEWEST_REQUESTS = 20
"""Requests before a counter is said to stand still: what one request brings is counted when it ends, behind the last scrape."""
IN_USE = 0.10
"""KV usage by steps beside which a gauge at 0 is dead."""
FEWEST_TOLD = 100
"""Rows of what a counter counts, beside which one that does not move stands still."""
FEW_PREEMPTIONS, FEW_EVICTIONS = 3.0, 10.0
"""So many more or fewer come between the last scrape and the last row."""
AT_ONCE = 2.0
"""Requests at once, by their own rows, beside which a gauge of running requests at 0 is dead."""
COUNTED = (
    ("requests_finished_total", "requests finished", None),
    ("prompt_tokens_total", "prompt tokens", "prompt_tokens"),
    ("output_tokens_total", "output tokens", "output_tokens"),
)
"""Counters, what they count, and the column of requests that sums to the same (None: their number)."""


def rise(facts: Facts, name: str) -> float | None:
    """How much a counter rose in the whole window, as fast as between its first and its last reading; None where it was not read."""
    counted, covered = facts.samples.get(name), facts.samples.get(f"{name}:span_s", 0.0)
    return counted if counted is None or covered <= 0 else counted * max(facts.duration_s / covered, 1.0)


def leave_out(facts: Facts) -> bool:
    """Whether some of the workers that served were not scraped, though others were: their requests are in no counter."""
    served = set(facts.requests.worker_names) - {None}
    return bool(served & facts.scraped_workers) and bool(served - facts.scraped_workers)


def usage_range(facts: Facts) -> Check | None:
    """KV usage is a ratio, and blocks in use are no more than there are."""
    low, high = facts.samples.get("kv_usage_ratio:min"), facts.samples.get("kv_usage_ratio:max")
    touched = frozenset({"sample.kv_usage_ratio"})
    if low is None or high is None:
        return None
    if low < 0 or high > FULL:
        return Check(
            "kv_usage",
            "contradiction",
            f"{facts.name}: KV usage runs from {low:.3g} to {high:.3g}; it must lie within 0 and 1",
            "telemetry",
            touched,
            low if low < 0 else high,
            "ratio",
        )
    used = _usage_by_steps(facts)
    if high == 0 and used is not None and used >= IN_USE and facts.samples.get("kv_usage_ratio:n", 0) >= FEWEST_SCRAPES:
        return Check(
            "kv_usage",
            "contradiction",
            f"{facts.name}: the gauge of KV usage reads 0 throughout, and by the steps {percent(used)} of the blocks were in use",
            "telemetry",
            touched,
            used,
            "ratio",
        )
    return Check("kv_usage", "ok", f"{facts.name}: KV usage runs from {percent(low)} to {percent(high)}")


def blocks_in_use(facts: Facts) -> Check | None:
    """No step uses more blocks than its worker has."""
    if facts.steps is None:
        return None
    used, of = facts.steps.get("blocks_used"), facts.steps.get("blocks_total")
    over = used > of
    if not over.any():
        return None
    return Check(
        "kv_blocks",
        "contradiction",
        f"{facts.name}: {number(float(over.sum()))} steps use more KV blocks than there are ({number(float(used[over].max()))} of "
        f"{number(float(of[over].min()))})",
        "telemetry",
        frozenset({"step.blocks_used", "step.blocks_total"}),
        float(over.sum()),
        "steps",
    )


def negative(facts: Facts) -> Check | None:
    """Numbers of requests are not below zero."""
    for name in ("requests_running", "requests_waiting"):
        low = facts.samples.get(f"{name}:min")
        if low is not None and low < 0:
            return Check(
                "negative",
                "contradiction",
                f"{facts.name}: {name} goes down to {low:.3g}; there are no fewer than none",
                "telemetry",
                frozenset({f"sample.{name}"}),
                low,
                "requests",
            )
    return None


def running(facts: Facts) -> Check | None:
    """A gauge of running requests that reads 0 while requests ran."""
    r, most = facts.requests, facts.samples.get("requests_running:max")
    if (
        most is None
        or most > 0
        or facts.samples.get("requests_running:n", 0) < FEWEST_SCRAPES
        or r.num_assumed
        or leave_out(facts)
    ):
        return None
    served = np.nansum(
        np.clip(r.end_s - np.where(np.isfinite(r.first_token_s), r.first_token_s, r.arrival_s), 0.0, None)
    )
    at_once = float(served) / rate_of(r) / max(facts.duration_s, 1e-9)
    if at_once < AT_ONCE:
        return None
    return Check(
        "running",
        "contradiction",
        f"{facts.name}: the gauge of running requests reads 0 throughout, and by their own rows {number(round(at_once, 1))} ran at once",
        "telemetry",
        frozenset({"sample.requests_running"}),
        at_once,
        "requests",
    )


def still_counters(facts: Facts) -> Check | None:
    """Counters that were read over most of the window and did not move while rows tell of what they count.

    A stream that its caller cuts is finished to the caller and failed to the engine: what counts as failed is taken off first.
    """
    if leave_out(facts):
        return None
    r, failed = facts.requests, rise(facts, "requests_failed_total")
    finished = float(r.finished.sum()) / rate_of(r)
    cut = max((failed or 0.0) - (num_requests(r) - finished), 0.0)
    left = max(1.0 - cut / finished, 0.0) if finished else 0.0
    for name, word, column in COUNTED:
        counted, covered = facts.samples.get(name), facts.samples.get(f"{name}:span_s", 0.0)
        if counted is None or counted > 0 or covered < COVERED * facts.duration_s:
            continue
        told = finished if column is None else float(np.nansum(r.get(column)[r.finished])) / rate_of(r, column)
        if told * left < FEWEST_TOLD:
            continue
        return Check(
            "still_counters",
            # callers alone do not tell whom the engine takes for one that went away
            "contradiction" if r.vantage == "engine" or failed is not None else "warning",
            f"{facts.name}: the counter {name} stands still, and rows tell of {number(round(told * left))} {word}"
            + (", beside those counted as failed" if failed else ""),
            "telemetry",
            frozenset({f"sample.{name}"}),
            told * left,
            word,
        )
    return None


def preemptions(facts: Facts) -> Check | None:
    """Preemptions by request and by counter."""
    counted = facts.samples.get("preemptions_total")
    told = facts.requests.get("num_preemptions")
    if counted is None or not np.isfinite(told).any():
        return None
    of_all, error = total(facts.requests, "num_preemptions") or 0.0, margin(facts.requests, "num_preemptions")
    if differ(of_all, counted, least=FEW_PREEMPTIONS, error=error):
        return Check(
            "preemptions",
            "warning",
            f"{facts.name}: {number(round(of_all))} preemptions by request, {number(counted)} by counter",
            "telemetry",
            frozenset({"sample.preemptions_total", "request.num_preemptions"}),
        )
    return Check("preemptions", "ok", f"{facts.name}: preemptions by request and by counter agree ({number(counted)})")


def evictions(facts: Facts) -> Check | None:
    """Evictions by event and by counter."""
    counted = facts.samples.get("blocks_evicted_total")
    if counted is None or facts.blocks is None:
        return None
    rate, evicted = facts.blocks.sample_rate or 1.0, facts.blocks.evicted
    error = half_interval(np.ones(round(evicted * rate)), rate)
    if differ(counted, evicted, least=FEW_EVICTIONS, error=error):
        return Check(
            "evictions",
            "warning",
            f"{facts.name}: {number(counted)} evictions by counter, {number(facts.blocks.evicted)} by events",
            "telemetry",
            frozenset({"sample.blocks_evicted_total", "block.evicted"}),
        )
    return Check("evictions", "ok", f"{facts.name}: evictions by counter and by events agree")


def _usage_by_steps(facts: Facts) -> float | None:
    if facts.steps is None:
        return None
    ratio = facts.steps.get("blocks_used") / np.where(
        facts.steps.get("blocks_total") > 0, facts.steps.get("blocks_total"), np.nan
    )
    return float(np.nanmean(ratio)) if np.isfinite(ratio).any() else None
