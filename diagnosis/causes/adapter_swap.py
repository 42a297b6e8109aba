"""LoRA adapters were swapped in again and again."""

from __future__ import annotations

import numpy as np

from diagnosis.cause import BY_CALIBRATION, Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.evidence_sql import request_sql
from diagnosis.telling.wording import number, percent, seconds


@cause("adapter_swap", needs=("step.prefill_tokens", "step.decode_tokens", "request.model"), rows=("adapter_swap",))
def adapter_swap(case: Case) -> Claim | Excluded | None:
    """Requests asked for more LoRA adapters than a worker has slots for: weights were swapped in, and the step waited for them.

    Why: a step that admits a request whose adapter holds no slot loads it first, from host memory or from disk, and everybody in the
    step waits. With more adapters in turn than slots each pushes another out. Told by the requests' models: such steps take longer
    than their work, and steps for adapters that were asked for a moment ago do not.

    Refuted by: steps of adapters that had been away which are as quick as others; as few adapters in turn as slots.

    Remedy:
    - vLLM: as many slots as adapters in turn (--max-loras), and host copies for all of them (--max-cpu-loras); a lower --max-lora-rank makes each smaller
    - SGLang: --max-loras-per-batch likewise
    - router: keep an adapter on few workers, so that each has to hold fewer of them
    - application: merge adapters that are hardly used, or send their requests together

    Experiment: send only as many adapters as there are slots to one worker; the long steps must go.
    """
    steps, model = case.suspect.steps, case.suspect.requests.model
    if steps is None or model is None or case.base.steps is None:
        return None
    num_models = len({str(name) for name in model if name is not None})
    spent = case.suspect.step_extras.get("adapter_swap")
    if spent is None:
        return Excluded(
            f"requests asked for {number(num_models)} models, and 0 steps took longer because one of them had been away"
        )
    rows, before = np.flatnonzero(spent > 0), case.base.step_extras.get("adapter_swap")
    mine = case.suspect_ledger.column("adapter_swap")
    prefills = int((np.nan_to_num(steps.get("prefill_tokens")) > 0).sum())
    num_before = 0 if before is None else int((before > 0).sum())
    return Claim(
        [
            Evidence(
                f"{number(len(rows))} of {number(prefills)} steps that computed prompts ({percent(len(rows) / max(prefills, 1))}) took "
                f"{seconds(float(spent[rows].mean()))} longer than their work, each with a request whose adapter had been away "
                f"({number(num_before)} in the {case.base_word})",
                float(len(rows)),
                "steps",
                None,
                case.worst_requests("adapter_swap"),
                BY_CALIBRATION,
            ),
            Evidence(
                f"requests asked for {number(num_models)} models in turn",
                float(num_models),
                "models",
                request_sql(case, case.suspect, "count(DISTINCT model) AS models"),
            ),
            Evidence(
                f"swaps cost a request {seconds(float(mine.mean()))} on average, in steps that it waited for or shared",
                float(mine.mean()),
                "s",
            ),
        ],
        case.worker_subject("adapter_swap"),
        case.when("adapter_swap"),
    )
