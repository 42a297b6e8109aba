"""Long prompts of others held up the steps."""

from __future__ import annotations

import numpy as np

from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.spent import long_prefill_tokens
from diagnosis.wording import number, seconds


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
    - vLLM: --enable-chunked-prefill with a smaller --max-num-batched-tokens; --long-prefill-token-threshold and --max-long-partial-prefills
    - fleet: separate workers for long prompts, or prefill/decode disaggregation
    - application: cap RAG top-k and history, send long documents as batch work

    Experiment: route prompts above the threshold to one worker; ITL and TTFT of the others must recover.
    """
    threshold = long_prefill_tokens(case.base)
    computed = case.suspect.requests.get("computed_tokens")
    long = np.flatnonzero(np.nan_to_num(computed) >= threshold)
    if len(long) == 0:
        return Excluded(
            f"no request computed {number(threshold)} prompt tokens or more (4 times the baseline's median prompt)"
        )
    lost = case.suspect_ledger.column("long_prefill_interference")
    if not (lost > 0).any():
        return Excluded(f"{number(len(long))} long prompts were computed, but no other request shared a step with them")
    where = case.sql_where(case.suspect_window, "arrival_ns")
    ids = [str(case.suspect.requests.request_id[i]) for i in long[np.argsort(computed[long])[::-1]][:5]]
    return Claim(
        [
            Evidence(
                f"{number(len(long))} prompts computed {number(threshold)} tokens or more, up to {number(float(np.nanmax(computed)))}",
                float(len(long)),
                "requests",
                "SELECT request_id, prompt_tokens - coalesce(cached_tokens, 0) AS computed FROM request WHERE "
                f"vantage = '{case.suspect.requests.vantage}' AND {where} AND prompt_tokens - coalesce(cached_tokens, 0) >= {threshold:.0f} ORDER BY computed DESC",
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
