"""Long prompts of others held up the steps."""

from __future__ import annotations

import numpy as np

from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.evidence_sql import num_requests_sql, request_sql
from diagnosis.ledger.spent import long_prefill_tokens
from diagnosis.sampled import rate_of, sampled_words
from diagnosis.telling.wording import number, seconds


@cause(
    "long_prefill_interference",
    needs=("request.computed_tokens|step.prefill_tokens", "request.prefill_s|step"),
    rows=("long_prefill_interference",),
)
def long_prefill_interference(case: Case) -> Claim | Excluded | None:
    """Long prompts of other requests filled the steps: those who waited or decoded meanwhile lost that time.

    Why: a step takes as long as its largest prefill; with a large token budget one long prompt stalls every decode in the batch.

    Refuted by: no prompt that had to compute far more than usual; slow requests that shared no step with one.

    Remedy:
    - vLLM: a smaller --max-num-batched-tokens (chunked prefill is on unless --no-enable-chunked-prefill), or --long-prefill-token-threshold
    - fleet: separate workers for long prompts, or prefill/decode disaggregation
    - application: cap RAG top-k and history, send long documents as batch work

    Experiment: route prompts above the threshold to one worker; ITL and TTFT of the others must recover.
    """
    facts = case.suspect
    threshold = long_prefill_tokens(case.base)
    computed = facts.requests.get("computed_tokens")
    long = np.flatnonzero(np.nan_to_num(computed) >= threshold)
    if len(long) == 0:
        return Excluded(
            f"no request computed {number(threshold)} prompt tokens or more (4 times the median prompt of the {case.base_word}, at least 1,024)"
        )
    lost = case.suspect_ledger.column("long_prefill_interference")
    if not (lost > 0).any():
        return Excluded(f"{number(len(long))} long prompts were computed, but no other request shared a step with them")
    ids = [str(facts.requests.request_id[i]) for i in long[np.argsort(computed[long])[::-1]][:5]]
    told = "coalesce(computed_tokens, prompt_tokens - cached_tokens)"
    rate = rate_of(facts.requests, "computed_tokens")
    num_long = len(long) / rate
    return Claim(
        [
            Evidence(
                f"{number(num_long)} prompts of the {case.suspect_word} computed {number(threshold)} tokens or more, up to "
                f"{number(float(np.nanmax(computed)))}{sampled_words(rate)}",
                num_long,
                "requests",
                request_sql(
                    case,
                    facts,
                    f"{num_requests_sql(facts, 'computed_tokens')} AS long_prompts",
                    "computed_tokens prompt_tokens cached_tokens",
                    f"{told} >= {threshold!r}",
                ),
                ids,
            ),
            Evidence(
                f"{number(int((lost > 0).sum()))} requests lost {seconds(float(lost.sum()))} in all in steps with them",
                float(lost.sum()),
                "s",
                None,
                case.worst_requests("long_prefill_interference"),
            ),
        ],
        case.worker_subject("long_prefill_interference"),
        case.when("long_prefill_interference"),
    )
