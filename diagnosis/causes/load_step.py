"""More requests arrived a second for each worker."""

from __future__ import annotations

import math

from diagnosis.calibration import all_reached, threshold
from diagnosis.cause import BY_CALIBRATION, Case, Claim, Evidence, Excluded, cause, rate_per_s
from diagnosis.claims.evidence_sql import num_requests_sql, request_sql
from diagnosis.facts import Facts
from diagnosis.sampled import sampled_words, total
from diagnosis.telling.wording import number, percent

GROWTH = threshold(
    "load_step.growth",
    least=0.10,
    unit="relative",
    says="growth of the arrival rate at each worker",
    why="a tenth more load is what capacity is planned with",
)
STANDS_OUT = threshold(
    "load_step.standard_errors",
    least=3.0,
    unit="standard errors",
    says="how far that growth is from two draws of one rate",
    why="one in 700 pairs of equal rates is as far apart",
)


@cause("load_step", rows=("queue_load", "queue_seats", "queue_budget", "decode_bandwidth", "shared_prefill"))
def load_step(case: Case) -> Claim | Excluded | None:
    """More requests arrived a second for each worker, and ordinary work queued behind ordinary work.

    Why: near saturation a little more load costs much waiting; the steps are as fast as before, there are only more of them.
    More arrivals for as many workers and fewer workers for as many arrivals are the same to a worker.

    Refuted by: an arrival rate a worker that did not change; steps that got longer for the same work.

    Remedy:
    - fleet: add workers, or shed load earlier (vLLM: --max-num-queued-reqs) so that what is accepted meets its target
    - vLLM: --max-num-batched-tokens and --max-num-seqs if steps are far from full
    - application: find who sends more (tenant, retries, a new feature), limit or spread it

    Experiment: replay the suspect's arrivals at the baseline's rate; if the waiting goes, it was the load.
    """
    base, suspect = case.base, case.suspect
    workers_b, workers_s = _num_workers(base), _num_workers(suspect)
    rate_b, rate_s = rates_a_worker(base, suspect)
    growth, z = rate_s / rate_b - 1.0, growth_z(base, suspect)
    each = " at each worker" if (workers_b, workers_s) != (1, 1) else ""
    said = f"{number(rate_s)} requests/s arrived{each} in the {case.suspect_word}, {number(rate_b)} in the {case.base_word} ({_grown(growth)})"
    rates = [facts.requests.sample_rate for facts in (base, suspect) if facts.requests.sample_rate is not None]
    said += sampled_words(min(rates, default=None))
    if workers_b != workers_s:
        said += f"; {number(workers_s)} and {number(workers_b)} workers served"
    tokens_b, tokens_s = _tokens_per_s(base), _tokens_per_s(suspect)
    if tokens_b and tokens_s:
        grown = _grown(tokens_s / workers_s / (tokens_b / workers_b) - 1.0)
        said += f"; offered tokens{' in all' if each else ''} {number(tokens_s)} and {number(tokens_b)} a second ({grown}{each})"
    if not all_reached((GROWTH, growth), (STANDS_OUT, z)):
        return Excluded(f"the offered load did not grow: {said}")
    evidence = [Evidence(said, growth, "relative", _growth_sql(case))]
    factor = case.model.slow_raw
    if factor is not None:
        evidence.append(
            Evidence(
                f"steps with the same work took {percent(factor)} of the {case.base_word}'s time",
                factor,
                "ratio",
                computed_by=BY_CALIBRATION,
            )
        )
    return Claim(evidence, ("fleet", None), case.when("queue_load"), 1.0)


def rates_a_worker(base: Facts, suspect: Facts) -> tuple[float, float]:
    """Arrivals a second and worker of both windows."""
    return rate_per_s(base) / _num_workers(base), rate_per_s(suspect) / _num_workers(suspect)


def growth_z(base: Facts, suspect: Facts) -> float:
    """Standard errors of the growth of arrivals a worker, on the log scale.

    Of two Poisson rates sd = sqrt(1/n + 1/m), of a sample too: n and m are what was seen.
    """
    rate_b, rate_s = rates_a_worker(base, suspect)
    return math.log(rate_s / rate_b) / math.sqrt(1 / len(base.requests) + 1 / len(suspect.requests))


def _growth_sql(case: Case) -> str:
    """Arrivals over the time in which they came, of each window and its workers, suspect over baseline, less 1."""
    rates = [
        f"({request_sql(case, facts, num_requests_sql(facts))}) / {max(facts.offered_s, 1e-9) * _num_workers(facts)!r}"
        for facts in (case.suspect, case.base)
    ]
    return f"SELECT {rates[0]} / ({rates[1]}) - 1 AS growth"


def _num_workers(facts: Facts) -> int:
    """Workers that served the window, those that decode what others prefilled among them; 1 where requests do not name them."""
    names = {*facts.requests.worker_names, *(() if facts.handover is None else facts.handover.worker_names)}
    return 1 if None in names else max(len(names), 1)


def _grown(growth: float) -> str:
    return "unchanged" if abs(growth) < 0.005 else f"{growth:+.0%}"


def _tokens_per_s(facts: Facts) -> float | None:
    prompt, output = (total(facts.requests, name) for name in ("prompt_tokens", "output_tokens"))
    return None if prompt is None else (prompt + (output or 0.0)) / max(facts.offered_s, 1e-9)
