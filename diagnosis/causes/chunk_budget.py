"""Prompts took many steps, since a step may compute few tokens."""

from __future__ import annotations

import numpy as np

from diagnosis.calibration import threshold
from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.bound_wait import ROOM, bound_by, lowered, setting
from diagnosis.claims.evidence_sql import event_where, request_sql
from diagnosis.claims.onset import waited_here_alone
from diagnosis.facts import F64, Facts
from diagnosis.telling.wording import number, percent, seconds

MORE_CHUNKS = threshold(
    "chunk_budget.ratio",
    least=1.5,
    unit="ratio",
    says="steps for as many prompt tokens over the baseline's",
    why="half as many steps again: the rest of a prompt makes one more or less",
)


@cause(
    "chunk_budget",
    needs=("step.waiting_on_budget|request.prefill_chunks", "step.waiting_on_budget|worker.flags"),
    rows=("queue_budget",),
)
def chunk_budget(case: Case) -> Claim | Excluded | None:
    """The token budget of a step was small: prompts were computed in many chunks, and others waited for their turn.

    Why: a step computes no more tokens than its budget, and decoding takes its share first. Each chunk pays the fixed cost of a
    step again, and one who waits comes in only when a step has tokens left. Small budgets are set to keep TPOT even. Where no step tells
    what requests wait for, a lower setting and prompts that took more steps do.

    Refuted by: prompts of a given length that took as few steps as in the baseline (then more work filled the same budget); a pool
    that was nearly full while requests waited; waiting for seats or blocks.

    Remedy:
    - vLLM: raise --max-num-batched-tokens (and --long-prefill-token-threshold, where it cuts prompts smaller); watch TPOT
    - fleet: prefill on workers of its own, where TPOT allows no larger steps
    - application: shorter prompts, and prefixes that are found in the cache, need fewer chunks

    Experiment: double --max-num-batched-tokens on one worker; TTFT must fall there, and TPOT tells the price.
    """
    bound = bound_by(case.suspect, "budget")
    if bound is None:
        return _by_settings(case)
    if bound.num_steps == 0:
        return Excluded(f"in 0 of {number(bound.num_known)} steps a request waited for the token budget")
    budget, budget_before = (setting(facts, "max_num_batched_tokens") for facts in (case.suspect, case.base))
    most, most_before = (
        (budget, budget_before) if budget and budget_before else map(_largest, (case.suspect, case.base))
    )
    if most is not None and most_before is not None and most >= most_before and not _cut_by_threshold(case):
        MORE_CHUNKS.note(0.0)  # however prompts are cut, it misleads nobody
        return Excluded(
            f"a step computes up to {number(most)} tokens ({number(most_before)} in the {case.base_word}): what fills it is another cause"
        )
    chunk, chunk_before = _tokens_a_chunk(case)
    size, before = (chunk, chunk_before) if chunk is not None and chunk_before is not None else (budget, budget_before)
    if size is None or before is None:
        return None
    if not MORE_CHUNKS.is_reached(before / size):
        return Excluded(
            f"prompts were computed {number(size)} tokens at a time ({number(before)} in the {case.base_word}): the budget cut them as before"
        )
    if bound.blocks_used is not None and not bound.had_room:
        return Excluded(
            f"while requests waited for the budget {percent(bound.blocks_used)} of the blocks were in use (up to {percent(ROOM)} there is room)"
        )
    waits = case.suspect_ledger.column("queue_budget")
    where = event_where(case, case.suspect)
    evidence = [
        Evidence(
            f"in {number(bound.num_steps)} of {number(bound.num_known)} steps requests waited for the token budget",
            float(bound.num_steps),
            "steps",
            f"SELECT count(*) AS steps FROM step WHERE waiting_on.budget > 0 AND {where}",
            case.worst_requests("queue_budget"),
        ),
        Evidence(
            f"the wait for a step with tokens left costs a request {seconds(float(waits.mean()))} on average",
            float(waits.mean()),
            "s",
        ),
    ]
    if chunk is not None and chunk_before is not None:
        evidence.insert(1, _chunks(case, chunk, chunk_before))
    if budget is not None and budget_before is not None and budget != budget_before:
        evidence.append(_budget(case, budget, budget_before))
    # a budget that was lowered, for which next to nobody waited before, is no other draw of one traffic
    is_lower = budget is not None and budget_before is not None and budget < budget_before
    began = is_lower and waited_here_alone(case, "queue_budget")
    return Claim(evidence, case.worker_subject("queue_budget"), case.when("queue_budget"), began=began)


def _by_settings(case: Case) -> Claim | Excluded | None:
    """Where no step tells what requests wait for: a lower budget by the workers' settings, and prompts in more and smaller chunks."""
    budget = lowered(case.base, case.suspect, "max_num_batched_tokens")
    chunk, before = _tokens_a_chunk(case)
    if budget is None or chunk is None or before is None:
        return None
    if not MORE_CHUNKS.is_reached(before / chunk):
        return Excluded(
            f"a step may compute {number(budget[0])} tokens ({number(budget[1])} in the {case.base_word}), and prompts were computed "
            f"{number(chunk)} tokens at a time ({number(before)})"
        )
    return Claim(
        [_chunks(case, chunk, before), _budget(case, *budget)],
        case.worker_subject("own_prefill"),
        case.when("own_prefill"),
        rows=("queue_budget", "own_prefill"),
    )


def _chunks(case: Case, chunk: float, before: float) -> Evidence:
    mean, mean_before = (float(np.nanmean(f.requests.get("prefill_chunks"))) for f in (case.suspect, case.base))
    return Evidence(
        f"a prompt took {number(mean)} steps on average ({number(mean_before)} in the {case.base_word}), and who takes several was computed "
        f"{number(chunk)} tokens at a time ({number(before)})",
        mean,
        "steps",
        request_sql(case, case.suspect, "avg(prefill_chunks) AS steps", "prefill_chunks"),
    )


def _budget(case: Case, budget: int, before: int) -> Evidence:
    return Evidence(
        f"a step may compute {number(budget)} tokens ({number(before)} in the {case.base_word})",
        float(budget),
        "tokens",
        computed_by="the workers' own settings",
    )


def _largest(facts: Facts) -> float | None:
    """Tokens of the largest step: the budget, where requests wait for one with tokens left. None where no step tells them."""
    if facts.steps is None:
        return None
    tokens = facts.steps.get("prefill_tokens") + np.nan_to_num(facts.steps.get("decode_tokens"))
    return float(np.nanmax(tokens)) if np.isfinite(tokens).any() else None


def _cut_by_threshold(case: Case) -> bool:
    """Whether prompts are cut smaller by a setting of their own."""
    return lowered(case.base, case.suspect, "long_prefill_token_threshold") is not None


def _tokens_a_chunk(case: Case) -> tuple[float | None, float | None]:
    """Computed prompt tokens over the steps that they took, of (suspect, base): of prompts that one of the windows computes in one step and
    the other could not, where both have such, else of all that tell both. Short prompts take one step at any budget."""
    told = []
    for facts in (case.suspect, case.base):
        tokens, chunks = facts.requests.get("computed_tokens"), facts.requests.get("prefill_chunks")
        known = np.isfinite(tokens) & np.isfinite(chunks) & (chunks > 0)
        told.append((tokens[known], chunks[known]))
    if not all(len(tokens) for tokens, _ in told):
        return _over(*told[0]), _over(*told[1])
    least = min(float((tokens / chunks).max()) for tokens, chunks in told)
    longer = [(tokens[tokens > least], chunks[tokens > least]) for tokens, chunks in told]
    now, before = longer if all(len(tokens) for tokens, _ in longer) else told
    return _over(*now), _over(*before)


def _over(tokens: F64, chunks: F64) -> float | None:
    return float(tokens.sum() / chunks.sum()) if len(tokens) else None
