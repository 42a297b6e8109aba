"""Prompts no longer begin alike, so a prefix cache finds nothing."""

from __future__ import annotations

import numpy as np

from diagnosis.cause import BY_CHAINS, Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.evidence_sql import HIT_RATE, request_sql
from diagnosis.ledger.sharing import no_longer_shared
from diagnosis.telling.wording import number, percent, seconds


@cause("prompt_uncacheable", needs=("request.prompt_blocks", "request.cached_tokens"), rows=("prompt_uncacheable",))
def prompt_uncacheable(case: Case) -> Claim | Excluded | None:
    """Prompts that used to begin alike do so no more: something new stands near their beginning, and all behind it is computed anew.

    Why: a prefix is found up to the first token that differs. A time, an id, a user's name, a shuffled list of tools or documents, or a
    salt of its own near the beginning makes every chain part there, however much text behind it is the same. Told from the
    prompts' own block chains, whatever the cache holds.

    Refuted by: prompts that begin alike for as many tokens as before; misses of blocks that had been stored (then they were evicted).

    Remedy:
    - application: what changes goes to the end: system text, tools and examples first and in a fixed order, then documents, then time, ids and names
    - application: compare two prompts as they are sent, at the position below; leave out of the template what nobody needs
    - vLLM: a `cache_salt` of its own for each request parts all chains from the first block on: salt by tenant
    - fleet: pin the versions of chat template and tool descriptions, so that a deployment does not move the beginning

    Experiment: send one prompt twice in a row through the application; the second must hit all but its last block.
    """
    now, then = case.suspect.sharing, case.base.sharing
    if now is None or then is None:
        return None
    num = min(len(now.rows), len(then.rows))
    shared, shared_before = now.among(num), then.among(num)
    common, common_before = float(shared.mean()), float(shared_before.mean())
    if not no_longer_shared(case.suspect, case.base).any():
        return Excluded(
            f"a prompt begins like another one for {number(common)} tokens on average ({number(common_before)} in the {case.base_word})"
        )
    spent = case.suspect_ledger.column("prompt_uncacheable")
    part, part_before = float(np.median(shared)), float(np.median(shared_before))
    alone = float((shared == 0).mean())
    evidence = [
        Evidence(
            f"a prompt begins like another one for {number(common)} tokens on average ({number(common_before)} in the {case.base_word})",
            common,
            "tokens",
            None,
            case.worst_requests("prompt_uncacheable"),
            BY_CHAINS,
        ),
        Evidence(
            f"chains part at token {number(part)} in the median ({number(part_before)} in the {case.base_word}): within the block of "
            f"{number(case.suspect.block_size() or 0)} tokens that begins there stands what is new",
            part,
            "tokens",
            computed_by=BY_CHAINS,
        ),
        Evidence(
            f"{percent(alone)} of {number(num)} prompts have nothing in common with another, from their first block on",
            alone,
            "ratio",
            computed_by=BY_CHAINS,
        ),
        Evidence(
            f"computing what was shared costs a request {seconds(float(spent.mean()))} on average, its own and others' in steps that it "
            "waited for or shared",
            float(spent.mean()),
            "s",
        ),
    ]
    for side in (case.base, case.suspect):
        cached, prompt = case.total(side, "cached_tokens"), case.total(side, "prompt_tokens")
        if cached is not None and prompt:
            evidence.append(
                Evidence(
                    f"token-weighted hit rate in the {case.word_of(side)}: {percent(cached / prompt)}",
                    cached / prompt,
                    "ratio",
                    request_sql(case, side, HIT_RATE, "cached_tokens prompt_tokens"),
                )
            )
    return Claim(evidence, ("fleet", None), case.when("prompt_uncacheable"))
