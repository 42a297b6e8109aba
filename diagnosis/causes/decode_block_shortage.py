"""Decode workers had no blocks for what was prefilled: it looks like a slow transfer and is none."""

from __future__ import annotations

import numpy as np

from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.evidence_sql import event_where
from diagnosis.claims.handover import BETWEEN, bytes_per_s, cost, decode_worker, quiet, spent, transfer_sql
from diagnosis.facts import Facts
from diagnosis.telling.wording import number, percent, seconds

ROW = "decode_block_shortage"
AS_FAST = 0.9
"""Share of the baseline's bytes a second from which on the wire is called no slower."""


@cause(ROW, needs=("transfer.wait_s", "step.blocks_used|sample.kv_usage_ratio"), rows=(ROW,))
def decode_block_shortage(case: Case) -> Claim | Excluded | None:
    """Finished prefills waited for KV blocks at the decode worker; some were preempted there. From outside it looks like a slow transfer.

    Why: the decode worker must hold a prompt's blocks before a byte may come, and gives them back only when the answer ends. With too
    few of them hand-overs queue although link and steps are fast, and prefill workers hold what they cannot hand over.

    Refuted by: blocks free at the decode worker while the hand-over waited; a wire that was slower; a wait that is as long on an
    empty decode worker.

    Remedy:
    - vLLM: more blocks on the decode workers (--gpu-memory-utilization, --num-gpu-blocks-override, --kv-cache-dtype fp8)
    - SGLang: --mem-fraction-static higher and --num-reserved-decode-tokens lower on the decode workers
    - fleet: more decode workers for as many prefill workers
    - router: hand over to the worker with the most free blocks, not with the fewest requests
    - application: lower max_tokens and shorter prompts hold fewer blocks for less time

    Experiment: halve the traffic for a minute; if hand-overs are fast at once and the link carries less a second, it was room.
    """
    found = spent(case, ROW)
    now = case.suspect.handover
    if found is None or now is None or not now.sees_room:
        return None
    if not found.grew:
        return Excluded(quiet(case, found, "waiting for blocks at the decode worker"))
    used, before = _used(case.suspect), _used(case.base)
    evidence = [
        cost(case, ROW, "waiting for blocks at the decode worker (stalls after preemption there with it)", found),
        Evidence(
            f"from the end of a prefill to the first byte passed {seconds(float(now.wait_s.mean()))} on average",
            float(now.wait_s.mean()),
            "s",
            transfer_sql(case, case.suspect, "avg(coalesce(wait_s, 0)) AS wait_s"),
        ),
    ]
    if used is not None:
        then = "" if before is None else f" ({percent(before)} in the {case.base_word})"
        evidence.append(
            Evidence(
                f"in one of ten of their steps at least {percent(used)} of the decode workers' blocks were in use{then}",
                used,
                "ratio",
                _used_sql(case),
            )
        )
    rate, rate_before = bytes_per_s(now), bytes_per_s(case.base.handover)
    if rate is not None and rate_before is not None:
        evidence.append(
            Evidence(
                f"the wire was no slower: {number(rate / 1e9)} GB/s while KV moved ({number(rate_before / 1e9)} GB/s in the {case.base_word})"
                if rate >= AS_FAST * rate_before
                else f"while KV moved it moved at {number(rate / 1e9)} GB/s ({number(rate_before / 1e9)} GB/s in the {case.base_word})",
                rate,
                "bytes/s",
                transfer_sql(
                    case,
                    case.suspect,
                    "sum(num_bytes) / sum(wire_s) AS bytes_per_s",
                    "num_bytes IS NOT NULL AND wire_s > 0 AND coalesce(outcome, 'ok') NOT IN ('fell_back', 'failed', 'refused')",
                ),
            )
        )
    return Claim(evidence, decode_worker(now, ROW), case.when(ROW))


def _used(facts: Facts) -> float | None:
    """Share of the decode workers' blocks that one in ten of their steps had in use, or more; None where they do not tell."""
    steps, moves = facts.steps, facts.handover
    if steps is None or moves is None:
        return None
    codes = [code for code, name in enumerate(steps.worker_names) if name in moves.worker_names]
    total = steps.get("blocks_total")
    share = steps.get("blocks_used") / np.where(total > 0, total, np.nan)
    inside = np.isin(steps.worker, codes) & np.isfinite(share)
    inside &= (steps.at_s >= facts.start_s) & (steps.at_s < facts.end_s)
    return float(np.quantile(share[inside], 0.9, method="inverted_cdf")) if inside.any() else None


def _used_sql(case: Case) -> str:
    where = event_where(case, case.suspect)
    decoders = f"SELECT DISTINCT target_worker FROM transfer WHERE {where} AND {BETWEEN}"
    return (
        f"SELECT quantile_disc(blocks_used / blocks_total, 0.9) AS used FROM step WHERE {where} AND blocks_total > 0 "
        f"AND worker IN ({decoders})"
    )
