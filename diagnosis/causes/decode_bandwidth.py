"""Fuller batches made every decode step longer."""

from __future__ import annotations

import numpy as np

from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.wording import number, seconds
from diagnosis.work_model import quiet_gaps


@cause("decode_bandwidth", needs=("request.token_ns|step.decode_tokens|request.decode_s",), rows=("decode_bandwidth",))
def decode_bandwidth(case: Case) -> Claim | Excluded | None:
    """Fuller batches made every decode step longer: each step reads the KV of more sequences.

    Why: decoding is bound by memory bandwidth; step time grows with the sequences (and their context) in the batch. The
    machine is as fast as before at equal batch size.

    Refuted by: steps that are longer at the same number of running sequences (then it is `slow_steps`); the same batch as before.

    Remedy:
    - vLLM: lower --max-num-seqs where TPOT matters more than throughput; --kv-cache-dtype fp8 halves the bytes read
    - fleet: more workers for the same traffic
    - application: shorter contexts and answers; move batch work to other hours

    Experiment: compare TPOT at --max-num-seqs N and N/2 under the same arrivals.
    """
    running_b, running_s = _typical_running(case, True), _typical_running(case, False)
    if running_b is None or running_s is None:
        return None
    if running_s <= running_b * 1.1:
        return Excluded(
            f"batches were not fuller: {number(running_b)} -> {number(running_s)} sequences decoded at once in the median"
        )
    per_seq = case.model.decode_s_per_seq
    if not per_seq:
        return Excluded("a step does not get longer with the sequences it serves in the baseline")
    return Claim(
        [
            Evidence(
                f"{number(running_b)} -> {number(running_s)} sequences decoded at once in the median; each adds {seconds(per_seq)} to a step",
                running_s - running_b,
                "sequences",
                "SELECT avg(num_running) FROM step WHERE " + case.sql_where(case.suspect_window, "at_ns")
                if case.suspect.steps is not None
                else None,
            )
        ],
        case.worker_subject("decode_bandwidth"),
        case.when("decode_bandwidth"),
    )


def _typical_running(case: Case, base: bool) -> float | None:
    facts = case.base if base else case.suspect
    if facts.steps is not None:
        running = facts.steps.get("num_running")
        if np.isfinite(running).any():
            return float(np.nanmedian(running[np.nan_to_num(running) > 0]))
    _, running, _ = quiet_gaps(facts.requests)
    return float(np.median(running)) if len(running) else None
