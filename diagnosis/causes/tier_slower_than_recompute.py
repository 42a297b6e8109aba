"""Loading KV from a slower tier took longer than computing it again would have."""

from __future__ import annotations

import numpy as np

from diagnosis.calibration import threshold
from diagnosis.cause import BY_CALIBRATION, Case, Claim, Evidence, Excluded, cause
from diagnosis.causes.tier_saves_nothing import FELL, LOST, lost_rows
from diagnosis.claims.evidence_sql import request_sql
from diagnosis.claims.onset import met_here_alone
from diagnosis.facts import F64, Bool, Facts
from diagnosis.ledger.overheads import share_of_loading
from diagnosis.ledger.tiers import held_share, loads, read_per_request, token_cost_s
from diagnosis.statistics.quantiles import nearest_rank
from diagnosis.telling.wording import bandwidth, number, percent, quantile_name, seconds

RISE = threshold(
    "tier_slower_than_recompute.rise",
    least=0.001,
    unit="s",
    says="rise of the mean load of a request",
    why="a caller feels no less than a millisecond",
)
MOST = 0.5
"""Share of the additional seconds that loads slower than recomputing must carry."""


HELD = threshold(
    "tier_slower_than_recompute.held",
    least=0.02,
    unit="share of the pool",
    says="blocks that loads under way hold, where it is twice as many as in the baseline, before others wait for them",
    why="in a pool as large as before and nearly full a fiftieth more is what others wait for; in one that is not nobody waits",
)


@cause("tier_slower_than_recompute", needs=("request.kv_load_s",), rows=("tier_load", *LOST))
def tier_slower_than_recompute(case: Case) -> Claim | Excluded | None:
    """KV was loaded from a slower tier (host memory, disk, another machine) more slowly than the prompt would have been computed.

    Why: a hit in a tier is worth its load only above a bandwidth: the bytes of a token over the seconds that computing one takes. Below
    that break-even, on a busy link or a slow disk, the engine waits for what it could have had sooner; most engines wait without a
    limit once a hit is reported. Where steps stand still for a load, everybody in them and behind them waits for it. Meanwhile the blocks that the KV will land in are taken: others wait for blocks, or lose theirs.

    Refuted by: loads that are shorter than computing the same tokens; as much time for loads as in the baseline.

    Remedy:
    - vLLM: fewer or no loads by the connector (--kv-transfer-config): a longest wait and a shortest run where it has such settings; try without --kv-offloading-size
    - SGLang: --hicache-storage-prefetch-policy timeout (it computes what has not come in time), or no --hicache-storage-backend
    - fleet: a tier on a faster link (pinned host memory before disk, local disk before shared storage), and fewer workers on one link
    - application: shorter shared prefixes have less to be loaded

    Experiment: let one worker compute what another loads, same prefixes; their TTFT tells on which side of the break-even the tier is.
    """
    spent, before = (ledger.column("tier_load") for ledger in (case.suspect_ledger, case.base_ledger))
    mean, mean_before = float(spent.mean()), float(before.mean())
    load_s, tokens, num_bytes = loads(case.suspect)
    usual, usual_before = _mean(load_s), _mean(loads(case.base)[0])
    held = _held(case)
    if not RISE.is_reached(mean - mean_before):
        return Excluded(
            f"loads from a tier cost a request {seconds(mean)} on average ({seconds(mean_before)} in the {case.base_word})"
        )
    cost = token_cost_s(case.model, suspect=not case.ended)
    computing_s = _computing_s(tokens, cost)
    over = np.nan_to_num(load_s - (usual_before or 0.0)).clip(0.0)
    slower = np.isfinite(computing_s) & (load_s > computing_s)
    load_before_s, tokens_before, _ = loads(case.base)
    slower_before = load_before_s > _computing_s(tokens_before, token_cost_s(case.model, suspect=case.ended))
    instead = _instead_of_computing(case, load_s, computing_s, slower) if usual_before is None else None
    carries = over[slower].sum() >= MOST * over.sum() if usual_before is not None else instead is not None
    if np.isfinite(computing_s).any() and not carries:
        known = np.isfinite(computing_s) & np.isfinite(load_s)
        return Excluded(
            f"a load took {seconds(_mean(load_s[known]))} on average, and computing the same tokens would have taken "
            f"{seconds(_mean(computing_s[known]))}: "
            + (f"slower than in the {case.base_word}, and still worth it" if usual_before is not None else "worth it")
        )
    evidence = [
        Evidence(
            f"a load from the tier took {seconds(usual)} on average"
            + (f" ({seconds(usual_before)} in the {case.base_word})" if usual_before is not None else "")
            + f", the slowest {seconds(float(np.nanmax(load_s)))}",
            usual,
            "s",
            request_sql(case, case.suspect, "avg(kv_load_s) AS mean_s", "kv_load_s", "kv_load_s > 0"),
            case.worst_requests("tier_load"),
        ),
        Evidence(
            f"loads cost a request {seconds(mean)} on average ({seconds(mean_before)} in the {case.base_word})",
            mean,
            "s",
        ),
    ]
    evidence += [] if instead is None else [instead]
    if slower.any():
        evidence.append(_slower(case.suspect, load_s, computing_s, slower))
    if cost is not None and np.isfinite(num_bytes).any():
        evidence.append(_break_even(case.suspect, load_s, tokens, num_bytes, cost))
    others = [told for told in (held, _standing(case), _saved_less(case)) if told is not None]
    rows = ("tier_load", *lost_rows(case)) if others else ("tier_load",)
    evidence += others
    strength = 1.0 if slower.any() else 0.6
    began = met_here_alone(slower, slower_before)
    return Claim(evidence, case.worker_subject("tier_load"), case.when("tier_load"), strength, rows=rows, began=began)


def _instead_of_computing(case: Case, load_s: F64, computing_s: F64, slower: Bool) -> Evidence | None:
    """Where the baseline computed what is loaded here: loads cost more than that on average, or those that do are why the tail is longer.

    The tail is who waited longer than the baseline's own quantile; loads in it that were slower than computing must have most of its load.
    """
    before, now = case.base_ledger.values, case.suspect_ledger
    limit = nearest_rank(before, case.quantile)
    beyond = now.rows[now.values > limit]
    in_tail = float(np.nansum(load_s[beyond[slower[beyond]]]))
    known = np.isfinite(load_s) & np.isfinite(computing_s)
    if float((load_s - computing_s)[known].sum()) <= 0.0 and (
        in_tail == 0.0 or in_tail < MOST * float(np.nansum(load_s[beyond]))
    ):
        return None
    share = float(slower[beyond].mean()) if len(beyond) else 0.0
    return Evidence(
        f"the {case.base_word} loaded nothing and computed it; of {number(len(beyond))} requests that waited longer than its {quantile_name(case.quantile)} "
        f"({seconds(limit)}) {percent(share)} waited for a load that was slower than computing",
        share,
        "ratio",
        None,
        _ids(case.suspect, np.where(slower, load_s, -np.inf)),
        BY_CALIBRATION,
    )


def _computing_s(tokens: F64, cost: float | None) -> F64:
    """[n] seconds that computing these tokens would have taken; NaN where that is not known."""
    return tokens * (np.nan if cost is None else cost)


def _held(case: Case) -> Evidence | None:
    """Blocks that loads under way hold, where they are so many more than before that others wait for them, or are pushed out."""
    now, before = held_share(case.suspect), held_share(case.base)
    if now is None or before is None:
        return None
    if not HELD.is_reached(now if now >= 2.0 * before else 0.0) or len(lost_rows(case)) < len(LOST):
        return None
    return Evidence(
        f"KV under way held {percent(now)} of the device's blocks ({percent(before)} in the {case.base_word}), in pools as large as before: who "
        "waits for blocks, or has lost its own, pays for the loads too",
        now,
        "ratio",
        computed_by="the loads' seconds and blocks, over the pools and the window",
    )


def _standing(case: Case) -> Evidence | None:
    """Loads that most of the steps' time went into, and not in the baseline: whoever holds blocks meanwhile holds them for longer."""
    now, before = share_of_loading(case.suspect), share_of_loading(case.base)
    if now < MOST or now < 2.0 * before or len(lost_rows(case)) < len(LOST):
        return None
    return Evidence(
        f"steps stood still for loads in {percent(now)} of their time ({percent(before)} in the {case.base_word}), in pools as large as before: "
        "blocks were held for as much longer, and who waits for blocks, or has lost its own, pays for the loads too",
        now,
        "ratio",
        computed_by=BY_CALIBRATION,
    )


def _saved_less(case: Case) -> Evidence | None:
    """What the tier no longer saves, where it saves half as much or less: it is computed again, and holds blocks meanwhile."""
    now, before = read_per_request(case.suspect), read_per_request(case.base)
    if now is None or not before or now > FELL * before or len(lost_rows(case)) < len(LOST):
        return None
    return Evidence(
        f"the tier saved a request {number(now)} prompt tokens on average ({number(before)} in the {case.base_word}), in pools as large as "
        "before: what did not come in time was computed again",
        now,
        "tokens",
        computed_by="the requests' own tokens by tier",
    )


def _slower(facts: Facts, load_s: F64, computing_s: F64, slower: Bool) -> Evidence:
    """How many loads were slower than computing."""
    num, known = int(slower.sum()), int((np.isfinite(load_s) & np.isfinite(computing_s)).sum())
    lost = float((load_s - computing_s)[slower].sum())
    return Evidence(
        f"{number(num)} of {number(known)} loads ({percent(num / known)}) took longer than computing the same tokens: they waited "
        f"{seconds(lost / num)} each for nothing",
        float(num),
        "loads",
        None,
        _ids(facts, np.where(slower, load_s - computing_s, -np.inf)),
        BY_CALIBRATION,
    )


def _break_even(facts: Facts, load_s: F64, tokens: F64, num_bytes: F64, cost: float) -> Evidence:
    """The bandwidth at which loading and computing take equally long, and who was below it."""
    known = np.isfinite(num_bytes) & np.isfinite(tokens) & (tokens > 0)
    even = float(num_bytes[known].sum() / tokens[known].sum()) / cost
    reached = np.where(known, num_bytes / load_s, np.nan)
    below = known & (reached < even)
    return Evidence(
        f"the break-even is {bandwidth(even)} (a token's bytes over the {seconds(cost)} that computing it takes); {number(int(below.sum()))} "
        f"of {number(int(known.sum()))} loads came at less, half of all at {bandwidth(float(np.nanmedian(reached)))} or less",
        even,
        "bytes/s",
        None,
        _ids(facts, np.where(below, -reached, -np.inf)),
        BY_CALIBRATION,
    )


def _ids(facts: Facts, score: F64, limit: int = 5) -> list[str]:
    order = np.argsort(score)[::-1][:limit]
    return [str(facts.requests.request_id[i]) for i in order if np.isfinite(score[i])]


def _mean(values: F64) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None
