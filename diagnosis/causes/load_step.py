"""More requests arrived a second."""

from __future__ import annotations

import math

from diagnosis.cause import Case, Claim, Evidence, Excluded, cause, rate_per_s
from diagnosis.wording import number, percent

CHANGE = 0.10
"""Relative growth of the arrival rate from which on it can be a cause."""


@cause("load_step", rows=("queue_load", "decode_bandwidth", "shared_prefill"))
def load_step(case: Case) -> Claim | Excluded | None:
    """More requests arrived a second, and ordinary work queued behind ordinary work.

    Why: near saturation a little more load costs much waiting; the steps are as fast as before, there are only more of them.

    Refuted by: an arrival rate that did not change; steps that got longer for the same work.

    Remedy:
    - fleet: add workers, or shed load earlier (vLLM: --max-num-queued-reqs) so that what is accepted meets its target
    - vLLM: --max-num-batched-tokens and --max-num-seqs if steps are far from full
    - application: find who sends more (tenant, retries, a new feature), limit or spread it

    Experiment: replay the suspect's arrivals at the baseline's rate; if the waiting goes, it was the load.
    """
    rate_b, rate_s = rate_per_s(case.base), rate_per_s(case.suspect)
    n_b, n_s = len(case.base.requests), len(case.suspect.requests)
    growth = rate_s / rate_b - 1.0
    # difference of two Poisson rates on the log scale: sd = sqrt(1/n + 1/m)
    z = math.log(rate_s / rate_b) / math.sqrt(1 / n_b + 1 / n_s)
    tokens_b = _tokens_per_s(case, True)
    tokens_s = _tokens_per_s(case, False)
    token_growth = tokens_s / tokens_b - 1.0 if tokens_b and tokens_s else None
    grown = growth >= CHANGE and z > 3
    said = f"arrivals {number(rate_b)} -> {number(rate_s)} requests/s ({_grown(growth)})"
    if token_growth is not None:
        said += f", offered tokens {number(tokens_b or 0)} -> {number(tokens_s or 0)} a second ({_grown(token_growth)})"
    if not grown:
        return Excluded(f"the offered load did not grow: {said}")
    where_s = case.sql_where(case.suspect_window, "arrival_ns")
    evidence = [
        Evidence(
            said,
            growth,
            "relative",
            "SELECT count(*) / (max(arrival_ns) - min(arrival_ns)) * 1e9 AS requests_per_s FROM request "
            f"WHERE vantage = '{case.suspect.requests.vantage}' AND {where_s}",
        )
    ]
    factor = case.model.slow_raw
    if factor is not None:
        evidence.append(
            Evidence(f"steps with the same work took {percent(factor)} of the baseline's time", factor, "ratio")
        )
    return Claim(evidence, ("fleet", None), case.when("queue_load"), 1.0)


def _grown(growth: float) -> str:
    return "unchanged" if abs(growth) < 0.005 else f"{growth:+.0%}"


def _tokens_per_s(case: Case, base: bool) -> float | None:
    facts = case.base if base else case.suspect
    prompt, output = case.total(facts, "prompt_tokens"), case.total(facts, "output_tokens")
    if prompt is None:
        return None
    return (prompt + (output or 0.0)) / max(facts.duration_s, 1e-9)
