"""Steps stood still to compile for a shape that was new."""

from __future__ import annotations

import numpy as np

from diagnosis.cause import BY_CALIBRATION, Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.evidence_sql import event_where
from diagnosis.telling.wording import number, seconds


@cause("recompile", needs=("step.prefill_tokens", "step.decode_tokens"), rows=("recompile",))
def recompile(case: Case) -> Claim | Excluded | None:
    """Steps stood still because their shape (number of tokens) was new: a kernel or a graph was compiled or captured for it.

    Why: compilers specialise on shapes. After a start without warm-up, a lost compile cache or another build, the first step of each shape
    compiles, and everybody in that step and behind it waits. Later steps of that shape are as quick as ever.

    Refuted by: long steps of shapes that had run before on that worker; first steps of a shape that are no longer than others.

    Remedy:
    - vLLM: capture at start what occurs (--compilation-config, --cudagraph-capture-sizes, --max-cudagraph-capture-size); keep its compile cache (VLLM_CACHE_ROOT) across restarts
    - vLLM: --enforce-eager compiles nothing, at the price of slower steps
    - fleet: send warm-up requests of every length before a worker takes traffic, and let deployments keep the compile cache
    - application: fewer different lengths (padding to a few sizes) on engines that compile for each

    Experiment: restart one worker and send the same traffic twice; the long steps must be gone the second time.
    """
    steps = case.suspect.steps
    if steps is None or case.base.steps is None:
        return None
    spent = case.suspect.step_extras.get("recompile")
    if spent is None:
        known = steps.duration_s[np.isfinite(steps.duration_s)]
        longest = float(known.max()) if len(known) else 0.0
        return Excluded(
            f"0 of {number(len(steps))} steps stood still for a new shape; the longest took {seconds(longest)}"
        )
    rows = np.flatnonzero(spent > 0)
    before = case.base.step_extras.get("recompile")
    num_before = 0 if before is None else int((before > 0).sum())
    mine = case.suspect_ledger.column("recompile")
    longest = float(steps.duration_s[rows].max())
    return Claim(
        [
            Evidence(
                f"{number(len(rows))} of {number(len(steps))} steps were the first of their shape on their worker and took "
                f"{seconds(float(spent[rows].mean()))} longer than their work ({number(num_before)} in the {case.base_word})",
                float(len(rows)),
                "steps",
                None,
                case.worst_requests("recompile"),
                BY_CALIBRATION,
            ),
            Evidence(
                f"the longest of these took {seconds(longest)}",
                longest,
                "s",
                f"SELECT max(duration_s) AS longest_s FROM step WHERE {event_where(case, case.suspect)}"
                if longest == float(np.nanmax(steps.duration_s))
                else None,
                computed_by=BY_CALIBRATION,
            ),
            Evidence(
                f"they cost a request {seconds(float(mine.mean()))} on average, in steps that it waited for or shared",
                float(mine.mean()),
                "s",
            ),
        ],
        case.worker_subject("recompile"),
        case.when("recompile"),
    )
