"""What prompts share was in the cache, and too short to be used."""

from __future__ import annotations

import numpy as np

from diagnosis.cause import BY_CHAINS, Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.bound_wait import setting
from diagnosis.claims.evidence_sql import HIT_RATE, request_sql
from diagnosis.ledger.reuse_units import Grid, found_tokens, grid_of, larger_unit, unit_tokens
from diagnosis.telling.wording import number, percent, seconds


@cause(
    "reuse_below_unit",
    needs=("request.cached_tokens|sample.prefix_hits_tokens_total",),
    rows=("reuse_below_unit",),
)
def reuse_below_unit(case: Case) -> Claim | Excluded | None:
    """What prompts share is shorter than the smallest piece that the cache gives back: it was there, and was computed again.

    Why: a cache gives back whole units: blocks, snapshots of a state, or runs of a minimum length. A shared prefix below that
    length is stored each time and never found; a conversation whose length falls badly onto a grid of snapshots misses all of itself.
    Counted by lineage: the block at which the chain broke was in the cache when it was asked for, and nobody was given so short a piece. Without it, by the unit that grew
    beyond what was found before, or by misses that follow the length's remainder and nothing else.

    Refuted by: blocks that had been evicted or given up by age before they were asked for; prompts that had never been stored.

    Remedy:
    - vLLM: a smaller --block-size, where the unit is the block; for hybrid models --mamba-block-size and --mamba-cache-mode, which set the state's grid
    - fleet: lower the cache's or connector's smallest reusable run below the length of the shared prefixes
    - application: make the shared part of the prompts longer than the unit: system text, tools and examples first, in a fixed order

    Experiment: halve the smallest reusable unit on one worker; the hit rate must rise there from nothing.
    """
    lineage = case.suspect.lineage
    unused = None if lineage is None else lineage.unused_tokens
    if lineage is None or unused is None or not unused.any():
        return _by_lengths(case)
    missed = lineage.lost_tokens + lineage.apart_tokens + float(lineage.new_tokens.sum() + lineage.cleared_tokens.sum())
    spent = case.suspect_ledger.column("reuse_below_unit")
    worst = np.argsort(unused)[::-1][:5]
    shared = unused[unused > 0]
    evidence = [
        Evidence(
            f"{number(float(unused.sum()))} prompt tokens ({percent(float(unused.sum()) / missed)} of all that were missed) in "
            f"{number(len(shared))} requests were in the cache when they were asked for, and were computed again all the same",
            float(unused.sum()),
            "tokens",
            None,
            [str(case.suspect.requests.request_id[i]) for i in worst if unused[i] > 0],
            BY_CHAINS,
        ),
        Evidence(
            f"what such a prompt shares is {number(float(np.median(shared)))} tokens long in the median",
            float(np.median(shared)),
            "tokens",
            computed_by=BY_CHAINS,
        ),
        Evidence(
            f"computing them costs a request {seconds(float(spent.mean()))} on average, its own and those of others that it waited for or shared steps with",
            float(spent.mean()),
            "s",
        ),
    ]
    unit = setting(case.suspect, "min_reuse_tokens")
    if unit:
        evidence.append(
            Evidence(
                f"the cache gives back no less than {number(unit)} tokens at once (`min_reuse_tokens`)",
                float(unit),
                "tokens",
                computed_by="the workers' own settings",
            )
        )
    return Claim([*evidence, *_hit_rates(case)], case.worker_subject("reuse_below_unit"), case.when("reuse_below_unit"))


def _by_lengths(case: Case) -> Claim | Excluded | None:
    """Told by the unit that grew, or by misses on a grid; where neither is, by lineage that nothing was there and unused."""
    units = larger_unit(case.suspect, case.base)
    if units is not None:
        return _larger(case, *units)
    grid = grid_of(case.suspect)
    if grid is not None:
        return _on_a_grid(case, grid)
    lineage = case.suspect.lineage
    untold = 0.0 if lineage is None or lineage.untold_tokens is None else float(lineage.untold_tokens.sum())
    if untold:
        return Excluded(
            f"{number(untold)} prompt tokens were computed again of which no event tells that they had gone, and other requests were given "
            "pieces as short: they were lost for a reason that nobody tells, and not for their length"
        )
    if lineage is not None and not (lineage.unused_tokens is None and lineage.evicted_tokens.any()):
        return Excluded(_nothing(case))
    found, unit = found_tokens(case.suspect), unit_tokens(case.suspect)
    if found is None or unit is None or found[0] == 0.0:
        return None
    return Excluded(f"a request that hits finds {number(found[0])} tokens, and the smallest piece is {number(unit)}")


def _larger(case: Case, unit: int, before: int) -> Claim:
    shared = (found_tokens(case.base) or (0.0, 0.0))[0]
    prompt = case.suspect.requests.get("prompt_tokens")
    total = float(np.nansum(prompt)) / max(int(np.isfinite(prompt).sum()), 1)
    spent = case.suspect_ledger.column("reuse_below_unit")
    evidence = [
        Evidence(
            f"the smallest piece that the cache gives back is {number(unit)} tokens ({number(before)} in the {case.base_word})",
            float(unit),
            "tokens",
            computed_by="the workers' own settings",
        ),
        Evidence(
            f"in the {case.base_word} a request found {number(shared)} tokens of its prompt, less than that: what prompts share is too short "
            f"to be used. At a unit of {number(before)} about {percent(shared / total if total else None)} of the prompts' tokens can hit",
            shared,
            "tokens",
            None,
            case.worst_requests("reuse_below_unit"),
            "the requests' cached tokens, else the engine's counters over the number of requests",
        ),
        Evidence(
            f"computing them costs a request {seconds(float(spent.mean()))} on average",
            float(spent.mean()),
            "s",
        ),
    ]
    return Claim([*evidence, *_hit_rates(case)], case.worker_subject("reuse_below_unit"), case.when("reuse_below_unit"))


def _on_a_grid(case: Case, grid: Grid) -> Claim:
    missed = int(grid.misses.sum())
    spent = case.suspect_ledger.column("reuse_below_unit")
    whose = "its prompt's length" if grid.by == "own" else "the length of the turn before"
    ids = [str(case.suspect.requests.request_id[i]) for i in np.flatnonzero(grid.misses)[:5]]
    evidence = [
        Evidence(
            f"{number(missed)} of {number(grid.num_looked_at)} requests ({percent(missed / grid.num_looked_at)}) missed everything, each where {whose} "
            f"modulo {number(grid.period)} lies from {number(grid.low)} on within {number(grid.width)} tokens; no other missed",
            missed / grid.num_looked_at,
            "ratio",
            None,
            ids,
            "the requests' lengths, laid onto grids",
        ),
        Evidence(
            f"the period is {number(grid.period)} tokens: state is kept on that grid, and what lies between is not given back",
            float(grid.period),
            "tokens",
            computed_by="the requests' lengths, laid onto grids",
        ),
        Evidence(
            f"computing what was missed costs a request {seconds(float(spent.mean()))} on average, one that missed "
            f"{seconds(float(spent[spent > 0].mean()) if (spent > 0).any() else 0.0)}",
            float(spent.mean()),
            "s",
        ),
    ]
    return Claim([*evidence, *_hit_rates(case)], case.worker_subject("reuse_below_unit"), None)


def _hit_rates(case: Case) -> list[Evidence]:
    told = []
    for side in (case.base, case.suspect):
        cached, prompt = case.total(side, "cached_tokens"), case.total(side, "prompt_tokens")
        if cached is not None and prompt:
            told.append(
                Evidence(
                    f"token-weighted hit rate in the {case.word_of(side)}: {percent(cached / prompt)}",
                    cached / prompt,
                    "ratio",
                    request_sql(case, side, HIT_RATE, "cached_tokens prompt_tokens"),
                )
            )
    return told


def _nothing(case: Case) -> str:
    return f"0 tokens that the {case.suspect_word} missed were in the cache when they were asked for"
