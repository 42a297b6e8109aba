"""A slower tier of KV is written, asked and waited for, and saves nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diagnosis.calibration import threshold
from diagnosis.cause import BY_CALIBRATION, BY_CHAINS, Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.evidence_sql import event_where, request_sql
from diagnosis.claims.onset import TRACE
from diagnosis.ledger.tiers import claimed_tokens, given_up_share, has_tier, read_per_request, tier_tokens, token_cost_s
from diagnosis.telling.wording import number, percent, seconds

FELL = 0.5
"""Share of what the tier saved a request before, which is left at most."""
GONE = 0.5
"""Share of the blocks that the tier took in and gave up again, from which on it is too small for what is asked of it."""
LITTLE = 0.05
"""Share of the prompts that the tier saves, up to which what it saves is next to nothing."""
COSTS = threshold(
    "tier_saves_nothing.cost",
    least=0.001,
    unit="s",
    says="rise of what loads and look-ups cost a request",
    why="a caller feels no less than a millisecond",
)
LOST = ("premature_eviction", "admission_blocked_on_blocks", "preemption_recompute")
"""Rows in which what the tier no longer saves shows: computed again, and waiting for blocks that are held for longer."""
COST = ("tier_load", "lookup_overhead")


@cause(
    "tier_saves_nothing",
    needs=("request.cached_tokens_host|request.cached_tokens_remote|block.offloaded|sample.tier_written_bytes_total",),
    rows=(*COST, *LOST),
)
def tier_saves_nothing(case: Case) -> Claim | Excluded | None:
    """A slower tier of KV costs its time and saves next to nothing: what it gives the device holds anyway, or it is gone before it is asked for.

    Why: where the working set fits the device, a tier's hits are the device's own, counted a second time, and its look-ups, copies and
    bookkeeping remain. Where the tier is too small for the reuse gap, blocks leave it before anybody asks for them again.

    Refuted by: tokens that only the tier held, worth more seconds of prefill than it cost; as much read from it as in the baseline.

    Remedy:
    - vLLM: a larger tier (--kv-offloading-size) where blocks leave it too soon; none where the device holds the working set
    - SGLang: --hicache-size or --hicache-ratio likewise; --hicache-write-policy write_through_selective keeps what is used once out of it
    - fleet: size it by the reuse gap (`kvscope capacity`), not by the memory that happens to be free
    - application: fewer distinct long prefixes, or asking for them again sooner

    Experiment: switch the tier off on one worker; TTFT must not rise there.
    """
    read, before = read_per_request(case.suspect), read_per_request(case.base)
    if not has_tier(case.suspect) or read is None:
        return None
    gone = given_up_share(case.suspect)
    if before and read <= FELL * before and gone is not None and gone >= GONE:
        return _too_small(case, read, before, gone)
    cost = _cost(case)
    saved = _saved(case)
    share = _share_saved(case)
    if share is None or saved is None or not COSTS.is_reached(cost) or share > LITTLE or saved > cost:
        return Excluded(
            f"the tier saved a request {number(read)} tokens on average"
            + (f" ({number(before)} in the {case.base_word})" if before is not None else "")
            + (
                f", worth {seconds(saved)} of prefill, and cost {seconds(max(cost, 0.0))} more than there"
                if saved is not None
                else ""
            )
        )
    return _only_cost(case, cost, saved, share)


def _too_small(case: Case, read: float, before: float, gone: float) -> Claim:
    taken = case.suspect.blocks.tier_taken if case.suspect.blocks is not None else 0
    where = event_where(case, case.suspect)
    evidence = [
        Evidence(
            f"the tier saved a request {number(read)} prompt tokens on average ({number(before)} in the {case.base_word})",
            read,
            "tokens",
            None,
            case.worst_requests("premature_eviction"),
            "the requests' own tokens by tier",
        ),
        Evidence(
            f"of {number(taken)} blocks that it took in it gave {percent(gone)} up again",
            gone,
            "ratio",
            f"SELECT count(*) FILTER (change IN ('evicted', 'removed')) / count(*) FILTER (change IN ('offloaded', 'stored')) AS share "
            f"FROM block WHERE coalesce(tier, 'device') <> 'device' AND {where}"
            if case.suspect.blocks is not None and case.suspect.blocks.sample_rate is None
            else None,
            computed_by=BY_CHAINS,
        ),
        *lost_seconds(case),
    ]
    before_gone = given_up_share(case.base)
    return Claim(
        evidence,
        case.worker_subject("premature_eviction"),
        case.when("premature_eviction"),
        1.0,
        rows=lost_rows(case),
        began=before_gone is not None and before_gone <= TRACE * gone,
    )


def lost_rows(case: Case) -> tuple[str, ...]:
    """The rows in which a tier that serves no more shows; waiting for blocks only where the pool is as large as before."""
    pools = [facts.num_blocks() for facts in (case.base, case.suspect)]
    return LOST if None in pools or pools[0] == pools[1] else LOST[:1]


def lost_seconds(case: Case, rows: Sequence[str] | None = None) -> list[Evidence]:
    """What computing again, and waiting for blocks meanwhile, cost, and that the pool is no smaller. `rows`: where, else `lost_rows`."""
    mine = sum(float(case.suspect_ledger.column(name).mean()) for name in rows or lost_rows(case))
    told = [
        Evidence(
            f"computing it again, and the wait for blocks meanwhile, cost a request {seconds(mine)} on average",
            mine,
            "s",
        )
    ]
    pool = case.suspect.num_blocks()
    if pool is not None and pool == case.base.num_blocks():
        told.append(
            Evidence(
                f"the pools on the device are as large as before: {number(pool)} blocks",
                float(pool),
                "blocks",
                computed_by="the workers' own settings",
            )
        )
    return told


def _only_cost(case: Case, cost: float, saved: float, share: float) -> Claim:
    evidence = [
        Evidence(
            f"look-ups and loads of the tier cost a request {seconds(cost)} more than in the {case.base_word}",
            cost,
            "s",
            None,
            case.worst_requests("tier_load"),
        ),
        Evidence(
            f"what it saved is {percent(share)} of the prompts' tokens, worth {seconds(saved)} of prefill a request",
            saved,
            "s",
            computed_by=BY_CALIBRATION,
        ),
    ]
    claimed, true = claimed_tokens(case.suspect), float(np.nansum(tier_tokens(case.suspect)))
    if claimed > 2 * true:
        evidence.append(
            Evidence(
                f"it reports {number(claimed)} tokens found, of which the device did not hold {number(true)}: the hit is counted twice",
                claimed,
                "tokens",
                request_sql(
                    case,
                    case.suspect,
                    "sum(coalesce(cached_tokens_host, 0) + coalesce(cached_tokens_remote, 0)) AS tokens",
                    "cached_tokens_host cached_tokens_remote",
                ),
            )
        )
    return Claim(evidence, case.worker_subject("tier_load"), case.when("tier_load"), 1.0, rows=COST)


def _cost(case: Case) -> float:
    """Seconds a request that loads and look-ups cost more than in the baseline."""
    return sum(
        float(case.suspect_ledger.column(name).mean()) - float(case.base_ledger.column(name).mean()) for name in COST
    )


def _saved(case: Case) -> float | None:
    """Seconds of prefill a request that what the tier alone held is worth; None where a token's cost is not known and some were."""
    tokens = float(np.nansum(tier_tokens(case.suspect))) / len(case.suspect.requests)
    cost = token_cost_s(case.model, suspect=not case.ended)
    return 0.0 if tokens == 0 else None if cost is None else tokens * cost


def _share_saved(case: Case) -> float | None:
    tokens, prompt = tier_tokens(case.suspect), case.suspect.requests.get("prompt_tokens")
    known = np.isfinite(prompt)
    total = float(prompt[known].sum())
    return float(np.nansum(tokens[known])) / total if total > 0 and np.isfinite(tokens).any() else None
