"""The same work took longer per step."""

from __future__ import annotations

from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.wording import number, percent


@cause("slow_steps", needs=("request.token_ns|step|request.decode_s",), rows=("slow_steps",))
def slow_steps(case: Case) -> Claim | Excluded | None:
    """The same work took longer per step: the machine or the code below the scheduler got slower.

    Why: clocks throttled, CPU or memory taken by others, another kernel, attention backend or driver, logging in the loop.
    Compared at equal batch size, in steps that compute no prompt, so neither load nor capacity can cause it.

    Refuted by: equal step times at equal batch size; a ratio within the drift inside each window.

    Remedy:
    - host: look for thermal or power throttling, CPU steal and noisy neighbours at that time (GPU and host metrics beside the window)
    - vLLM: compare version, attention backend, --enforce-eager, compilation and CUDA-graph settings with the baseline's
    - fleet: take the slow worker out and repeat the same request on it and on a healthy one

    Experiment: send the same single request ten times to the suspect and to a healthy worker, nothing else running; compare ITL.
    """
    model = case.model
    if model.slow_raw is None:
        return None
    compared = f"at equal batch size ({number(model.num_compared)} {'steps' if model.source == 'steps' else 'gaps'} compared, from {model.source})"
    said = f"the same step took {model.slow_raw:.2f} times the baseline's time {compared}"
    if model.slow_factor is None or model.slow_factor <= 1.0:
        return Excluded(f"{said}; drift inside the windows explains up to {percent(model.slow_noise)}")
    where = case.sql_where(case.suspect_window, "arrival_ns")
    return Claim(
        [
            Evidence(
                f"{said}; drift inside the windows explains up to {percent(model.slow_noise)}",
                model.slow_raw,
                "ratio",
                f"SELECT median(gap_s) AS median_itl_s FROM token_gap WHERE request_id IN (SELECT request_id FROM request WHERE {where})"
                if model.source == "token gaps"
                else None,
                case.worst_requests("slow_steps"),
            )
        ],
        case.worker_subject("slow_steps"),
        None,
        1.0 if model.source in ("steps", "token gaps") else 0.8,
    )
