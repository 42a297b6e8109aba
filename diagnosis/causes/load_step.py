"""More requests arrived a second for each worker."""

from __future__ import annotations

import math

import numpy as np

from diagnosis.calibration import all_reached, threshold
from diagnosis.cause import BY_CALIBRATION, MATERIAL, Case, Claim, Evidence, Excluded, cause, rate_per_s
from diagnosis.claims.evidence_sql import num_requests_sql, request_sql
from diagnosis.claims.offered_load import HIDDEN, MOSTLY, Load, PastKnee, num_workers, offered_load, past_knee
from diagnosis.facts import F64, Facts
from diagnosis.ledger.overheads import of_each
from diagnosis.ledger.rows import OVERHEADS
from diagnosis.sampled import sampled_words, total
from diagnosis.telling.wording import metric_name, number, percent, quantile_name, seconds

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


SURE_Z = 4.5
"""Standard errors from which on the growth of arrivals is evidence by itself, whatever the odds of the latency's: one pair in 100,000."""
STRETCHES = 20
"""Parts of a window by which it is told whether arrivals come in bursts."""
BLIND = 0.6
"""How sure it is that waiting which nobody can look into is for a place."""
ROWS = ("queue_load", "queue_seats", "queue_budget", "decode_bandwidth", "shared_prefill")


AS_DEAR = 0.10
"""Growth of a request's own bookkeeping up to which it is as dear as before, and more waiting for it is more requests'."""


@cause("load_step", rows=(*ROWS, *OVERHEADS[:3], "front_end", *HIDDEN))
def load_step(case: Case) -> Claim | Excluded | None:
    """More requests arrived a second for each worker, and ordinary work queued behind ordinary work.

    Why: near saturation a little more load costs much waiting; the steps are as fast as before, there are only more of them.
    More arrivals for as many workers and fewer workers for as many arrivals are the same to a worker. Callers that wait for an answer
    before they send the next request offer requests in flight. Several times the load can be past the knee: then requests wait more than
    in proportion for a place, in the engine's queue or at a front end before it.

    Refuted by: an arrival rate a worker that did not change; steps that got longer for the same work.

    Remedy:
    - fleet: add workers, or shed load earlier so that what is accepted meets its target
    - vLLM: --max-num-queued-reqs sheds it; --max-num-batched-tokens and --max-num-seqs if steps are far from full
    - SGLang: --max-queued-requests sheds it; --max-running-requests and --chunked-prefill-size if steps are far from full
    - application: find who sends more (tenant, retries, a new feature), limit or spread it

    Experiment: replay the suspect's arrivals at the baseline's rate; if the waiting goes, it was the load.
    """
    base, suspect = case.base, case.suspect
    workers_b, workers_s = num_workers(base, suspect)
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
    load = offered_load(base, suspect)
    if load.is_closed and load.factor - 1.0 >= GROWTH.value:
        evidence = [_in_flight(case, load), Evidence(said, growth, "relative", _growth_sql(case))]
    elif all_reached((GROWTH, growth), (STANDS_OUT, z)):
        evidence = [Evidence(said, growth, "relative", _growth_sql(case))]
    else:
        return Excluded(f"the offered load did not grow: {said}")
    knee = past_knee(case)
    if knee is not None:
        evidence.append(_knee(case, knee))
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
    rows = (*ROWS, *_as_dear_as_before(base, suspect))
    if knee is None:
        subject, when = ("fleet", None), case.when("queue_load") or case.when("queue_seats")
        return Claim(evidence, subject, when, 1.0, rows=rows, is_sure=z >= SURE_Z)
    is_hidden = knee.hidden_s >= MOSTLY * knee.wait_s[1]
    return Claim(
        evidence,
        ("fleet", None),
        case.when(_where(knee)),
        BLIND if is_hidden else 1.0,
        rows=(*rows, "front_end", *HIDDEN),
        is_sure=z >= SURE_Z,
    )


def _as_dear_as_before(base: Facts, suspect: Facts) -> tuple[str, ...]:
    """Rows of bookkeeping that requests tell and that takes each of them as long as before: those who wait for more of it are more."""
    now, then = of_each(suspect.requests), of_each(base.requests)
    return tuple(
        name for name in now if name in then and float(now[name].mean()) <= (1.0 + AS_DEAR) * float(then[name].mean())
    )


def _where(knee: PastKnee) -> str:
    """The row in which most of the waiting past the knee stands."""
    if knee.hidden_s >= MOSTLY * knee.wait_s[1]:
        return "ttft_unobserved"
    return "front_end" if knee.front_s >= MOSTLY * knee.wait_s[1] else "queue_load"


def _in_flight(case: Case, load: Load) -> Evidence:
    return Evidence(
        f"callers kept {number(load.now)} requests in flight at each worker in the {case.suspect_word}, {number(load.before)} in the "
        f"{case.base_word} ({_grown(load.factor - 1.0)}): each sends the next when an answer comes, so arrivals follow what the server gives",
        load.factor - 1.0,
        "relative",
        computed_by="the requests' arrivals and ends",
    )


def _knee(case: Case, knee: PastKnee) -> Evidence:
    """That the load is past the knee, with what waiting did."""
    (quantile_b, quantile_s), (wait_b, wait_s) = knee.quantile_s, knee.wait_s
    where = f", of which {seconds(knee.front_s)} before the engine" if knee.front_s >= MATERIAL * wait_s else ""
    return Evidence(
        f"the load is past the knee: at {number(knee.load.factor)} times the load the wait for a place went {seconds(wait_b)} -> "
        f"{seconds(wait_s)} a request{where}, and {quantile_name(case.quantile)} {metric_name(case.metric)} {seconds(quantile_b)} -> {seconds(quantile_s)}; the knee lies "
        "between the two loads",
        knee.load.factor,
        "times",
        None,
        case.worst_requests(_where(knee)),
    )


def rates_a_worker(base: Facts, suspect: Facts) -> tuple[float, float]:
    """Arrivals a second and worker of both windows."""
    workers_b, workers_s = num_workers(base, suspect)
    return rate_per_s(base) / workers_b, rate_per_s(suspect) / workers_s


def growth_z(base: Facts, suspect: Facts) -> float:
    """Standard errors of the growth of arrivals a worker, on the log scale.

    Of two Poisson rates sd = sqrt(1/n + 1/m), of a sample too: n and m are what was seen. Arrivals in bursts scatter more: by their index
    of dispersion as much variance.
    """
    rate_b, rate_s = rates_a_worker(base, suspect)
    spread = sum(_dispersion(facts.requests.arrival_s) / len(facts.requests) for facts in (base, suspect))
    return math.log(rate_s / rate_b) / math.sqrt(spread)


def _dispersion(arrival_s: F64) -> float:
    """Variance of the arrivals in each of STRETCHES of a window over their mean; at least the 1 of Poisson's. Source: Cox & Lewis 1966."""
    if len(arrival_s) < 2 * STRETCHES or np.ptp(arrival_s) <= 0:
        return 1.0
    counts, _ = np.histogram(arrival_s, STRETCHES)
    return max(1.0, float(counts.var(ddof=1) / counts.mean()))


def _growth_sql(case: Case) -> str:
    """Arrivals over the time in which they came, of each window and its workers, suspect over baseline, less 1."""
    workers_b, workers_s = num_workers(case.base, case.suspect)
    rates = [
        f"({request_sql(case, facts, num_requests_sql(facts))}) / {max(facts.offered_s, 1e-9) * workers!r}"
        for facts, workers in ((case.suspect, workers_s), (case.base, workers_b))
    ]
    return f"SELECT {rates[0]} / ({rates[1]}) - 1 AS growth"


def _grown(growth: float) -> str:
    return "unchanged" if abs(growth) < 0.005 else f"{growth:+.0%}"


def _tokens_per_s(facts: Facts) -> float | None:
    prompt, output = (total(facts.requests, name) for name in ("prompt_tokens", "output_tokens"))
    return None if prompt is None else (prompt + (output or 0.0)) / max(facts.offered_s, 1e-9)
