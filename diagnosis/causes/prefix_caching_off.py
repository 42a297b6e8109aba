"""Prefix caching was switched off."""

from __future__ import annotations

from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.quality import caching_is_off
from diagnosis.wording import number, percent


@cause(
    "prefix_caching_off",
    needs=("request.cached_tokens|sample.prefix_queries_tokens_total|request.prompt_tokens",),
    rows=("prefix_caching_off",),
)
def prefix_caching_off(case: Case) -> Claim | Excluded | None:
    """Prefix caching is off: every shared prefix is computed again by every request.

    Why: a flag, a version default, or a feature that disables caching without saying so.

    Refuted by: cached tokens above zero; a lookup counter that moves.

    Remedy:
    - vLLM: --enable-prefix-caching (and no --no-enable-prefix-caching); check features that disable it in the start-up log
    - application: none is needed; prompts already share prefixes

    Experiment: switch it on at one worker for ten minutes and compare TTFT of the same prefixes.
    """
    off_now, why_now = caching_is_off(case.suspect)
    off_then, _ = caching_is_off(case.base)
    if not off_now:
        return Excluded(f"prefix caching worked in the suspect window: {why_now}")
    if off_then:
        return Excluded("prefix caching was off in both windows")
    cached, prompt = case.total(case.base, "cached_tokens"), case.total(case.base, "prompt_tokens")
    evidence = [
        Evidence(
            why_now,
            0.0,
            "tokens found in the cache",
            f"SELECT worker, arg_max(prefix_caching, at_ns) AS prefix_caching FROM worker WHERE {case.sql_scope(case.suspect_window)} GROUP BY worker",
        )
    ]
    if cached is not None and prompt:
        evidence.append(
            Evidence(
                f"the baseline served {percent(cached / prompt)} of its {number(prompt)} prompt tokens from the cache",
                cached / prompt,
                "ratio",
                f"SELECT sum(cached_tokens) / sum(prompt_tokens) FROM request WHERE vantage = '{case.base.requests.vantage}' AND "
                + case.sql_where(case.base_window, "arrival_ns"),
                case.worst_requests("prefix_caching_off"),
            )
        )
    told = any(w.prefix_caching is False for w in case.suspect.workers)
    return Claim(evidence, ("fleet", None), None, 1.0 if told else 0.8)
