"""Prefix caching was switched off."""

from __future__ import annotations

import numpy as np

from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.checks.reuse import says_off
from diagnosis.claims.evidence_sql import HIT_RATE, bounds, counter_sql, request_sql, text
from diagnosis.facts import Facts
from diagnosis.quality import caching_is_off, workers_off
from diagnosis.telling.wording import listing, number, percent, seconds


@cause(
    "prefix_caching_off",
    needs=("request.cached_tokens|sample.prefix_queries_tokens_total|worker.prefix_caching",),
    rows=("prefix_caching_off",),
)
def prefix_caching_off(case: Case) -> Claim | Excluded | None:
    """Prefix caching is off: every shared prefix is computed again by every request.

    Why: a flag, a version default, or a feature that disables caching without saying so.

    Refuted by: much of the prompts found in a cache, whatever a flag says; a lookup counter that moves.

    Remedy:
    - vLLM: --enable-prefix-caching (and no --no-enable-prefix-caching); check features that disable it in the start-up log
    - SGLang: no --disable-radix-cache
    - llama.cpp: --cache-prompt (and no --no-cache-prompt), and no cache_prompt false in requests
    - application: none is needed; prompts already share prefixes

    Experiment: switch it on at one worker for ten minutes and compare TTFT of the same prefixes.
    """
    off_now, why_now = caching_is_off(case.suspect)
    off_then, why_then = caching_is_off(case.base)
    before = {w.worker for w in case.base.workers if w.prefix_caching is False}
    some = [worker for worker in workers_off(case.suspect) if worker not in before]
    if some and not off_now and not off_then:
        off_now, why_now = (
            True,
            f"{number(len(some))} of {number(len(case.suspect.workers))} workers say that it is off: {listing([str(w) for w in some])}",
        )
    if not off_now:
        return Excluded(f"prefix caching is not shown to have been off in the {case.suspect_word}: {why_now}")
    if off_then or says_off(case.base):
        return Excluded(
            f"prefix caching was off in the {case.base_word} too: {why_then}; in the {case.suspect_word} {why_now}"
        )
    cached, prompt = case.total(case.base, "cached_tokens"), case.total(case.base, "prompt_tokens")
    told = [w for w in case.suspect.workers if w.prefix_caching is False]
    evidence = [
        Evidence(
            f"{case.suspect_word}: {why_now}",
            float(len(told)) if told else 0.0,
            "workers with caching off" if told else "tokens looked up",
            _flag_sql(case) if told else counter_sql(case, case.suspect, "prefix_queries_tokens_total"),
        )
    ]
    if cached is not None and prompt:
        evidence.append(
            Evidence(
                f"the {case.base_word} served {percent(cached / prompt)} of its {number(prompt)} prompt tokens from the cache",
                cached / prompt,
                "ratio",
                request_sql(case, case.base, HIT_RATE, "cached_tokens prompt_tokens"),
                case.worst_requests("prefix_caching_off"),
            )
        )
    else:
        took = [_median_prefill_s(facts) for facts in (case.suspect, case.base)]
        if took[0] is not None and took[1] is not None:
            evidence.append(
                Evidence(
                    f"nobody tells what the {case.base_word} found cached; prefill took {seconds(took[0])} in the median ({seconds(took[1])} there), "
                    "of prompts that are computed whole now",
                    took[0],
                    "s",
                    request_sql(case, case.suspect, "median(prefill_s) AS prefill_s", "prefill_s"),
                    case.worst_requests("prefix_caching_off"),
                )
            )
    subject = ("worker", some[0]) if len(some) == 1 else ("fleet", None)
    return Claim(evidence, subject, None, 1.0 if told else 0.8)


def _median_prefill_s(facts: Facts) -> float | None:
    prefill = facts.requests.get("prefill_s")
    return float(np.nanmedian(prefill)) if np.isfinite(prefill).any() else None


def _flag_sql(case: Case) -> str:
    """Workers whose newest word is that caching is off."""
    names = sorted(w.worker for w in case.suspect.workers if w.worker is not None)
    among = f" AND worker IN ({', '.join(map(text, names))})" if names else ""
    scope, end = case.sql_scope(case.suspect_window), bounds(case, case.suspect).end_ns
    return (
        "SELECT count(*) FILTER (NOT prefix_caching) AS workers FROM (SELECT arg_max(prefix_caching, at_ns) AS prefix_caching "
        f"FROM worker WHERE {scope} AND at_ns < {end}{among} GROUP BY worker)"
    )
