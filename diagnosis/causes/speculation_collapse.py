"""Speculative decoding accepted fewer drafts: more steps for the same answer."""

from __future__ import annotations

import numpy as np

from diagnosis.calibration import threshold
from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.evidence_sql import request_sql
from diagnosis.ledger.speculation import acceptance, tokens_per_step
from diagnosis.telling.wording import percent, seconds

FEWER = threshold(
    "speculation_collapse.fewer",
    least=0.05,
    unit="relative",
    says="fall of the tokens that a step gives",
    why="a twentieth fewer tokens a step is a twentieth more TPOT, the least that is told of one",
)
MOST, TOLD_BY_FEW = 0.5, 0.8
"""Strength where fewer than most of the requests tell what they accepted."""
TOLD = "accepted_tokens IS NOT NULL"


@cause("speculation_collapse", needs=("request.accepted_tokens",), rows=("speculation_collapse",))
def speculation_collapse(case: Case) -> Claim | Excluded | None:
    """Fewer drafts were accepted, so a decode step gave fewer tokens, and drafting and verifying what is refused took its time too.

    Why: drafts are guesses. Another kind of text, a higher temperature, a draft model that no longer fits the target (one of them was
    updated), or grammars and penalties that change the choice make the target refuse them. Each step then gives little more than one
    token and costs more than a plain one.

    Refuted by: as many tokens a step as in the baseline; steps that got longer at the same tokens a step (then they are slower).

    Remedy:
    - vLLM: fewer drafts or none while acceptance is low (num_speculative_tokens in --speculative-config); watch it by --per-request-spec-decode-metrics
    - SGLang: --speculative-num-draft-tokens and --speculative-num-steps likewise
    - fleet: a draft model trained for the target that is served now, and traffic that accepts little on workers without speculation
    - application: a low temperature where drafts matter; free text and code accept differently, so measure by workload

    Experiment: switch speculation off on one worker for the same traffic; if TPOT falls there, it no longer pays.
    """
    now, then = tokens_per_step(case.suspect), tokens_per_step(case.base)
    if now is None or then is None:
        return None
    if not FEWER.is_reached(1.0 - now / then):
        return Excluded(f"a decode step gave a sequence {now:.2f} tokens ({then:.2f} in the {case.base_word})")
    spent = case.suspect_ledger.column("speculation_collapse")
    accepted, accepted_before = acceptance(case.suspect), acceptance(case.base)
    evidence = [
        Evidence(
            f"a decode step gave a sequence {now:.2f} tokens ({then:.2f} in the {case.base_word})",
            now,
            "tokens",
            request_sql(
                case,
                case.suspect,
                "sum(output_tokens - 1) / sum(output_tokens - 1 - accepted_tokens) AS tokens_a_step",
                "output_tokens accepted_tokens",
                f"{TOLD} AND output_tokens > 1",
            ),
            case.worst_requests("speculation_collapse"),
        ),
        Evidence(
            f"steps that accepted drafts would have saved cost {seconds(float(spent.mean()))} "
            + ("a token" if case.metric == "tpot" else "a request")
            + " on average",
            float(spent.mean()),
            "s",
        ),
    ]
    if accepted is None:
        evidence.append(
            Evidence(
                f"0 tokens were drafted in the {case.suspect_word}: speculation was off",
                0.0,
                "tokens",
                computed_by="the requests' own words",
            )
        )
    else:
        evidence.append(
            Evidence(
                f"{percent(accepted)} of the drafted tokens were accepted"
                + (f" ({percent(accepted_before)} in the {case.base_word})" if accepted_before is not None else ""),
                accepted,
                "ratio",
                request_sql(
                    case,
                    case.suspect,
                    "sum(accepted_tokens) / sum(draft_tokens) AS accepted",
                    "accepted_tokens draft_tokens",
                    f"{TOLD} AND draft_tokens IS NOT NULL",
                ),
            )
        )
    told = float(np.isfinite(case.suspect.requests.get("accepted_tokens")).mean())
    subject = case.worker_subject("speculation_collapse")
    return Claim(evidence, subject, case.when("speculation_collapse"), 1.0 if told >= MOST else TOLD_BY_FEW)
