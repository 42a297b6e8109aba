"""The same work took longer per step."""

from __future__ import annotations

import numpy as np

from diagnosis.cause import BY_CALIBRATION, Case, Claim, Evidence, Excluded, cause
from diagnosis.checks.beside import engine_counts, others_beside
from diagnosis.claims.evidence_sql import median_gap_sql
from diagnosis.facts import Facts
from diagnosis.telling.wording import number, percent, seconds

BY_GAPS, BY_MEANS, BY_FLEET = 0.9, 0.6, 0.45
"""What equal concurrency is worth where no step tells the batch: by gaps, by means or gaps of callers whose engine does not say that it
served nobody else, and a guess, in which confidence is low."""

BY_COUNTS = "the engine's own counts beside the recorded requests"


@cause("slow_steps", needs=("request.token_ns|step|request.decode_s",), rows=("slow_steps",))
def slow_steps(case: Case) -> Claim | Excluded | None:
    """The same work took longer per step: the machine or the code below the scheduler got slower.

    Why: clocks throttled, CPU or memory taken by others, another kernel, attention backend or driver, logging in the loop.
    Or single steps stood still while those beside them were as quick as ever: a garbage collection of the engine's process, a thread that held
    it up, a host that swapped or took its CPUs away. Everybody in such a step and behind it waits.
    Compared at equal batch size, in steps that compute no prompt, so neither load nor capacity can cause it. Where only a part of
    the worse window was slower and its rest as usual, that part is named with its time. Without steps the batch is told by the recorded
    requests: where others ran beside them, fuller batches look the same.

    Refuted by: equal step times at equal batch size; a ratio within the drift inside each window; single long steps whose work was more than
    they tell, or that a shape, an adapter or a load explains.

    Remedy:
    - host: look for thermal or power throttling, CPU steal and noisy neighbours at that time (GPU and host metrics beside the window)
    - host: where single steps stood still, look at those instants for swapping and major page faults, CPU throttling of the container, and a process that is stopped or moved; pin the engine to CPUs of its own
    - vLLM: compare version, --attention-backend, --enforce-eager, compilation and CUDA-graph settings with the baseline's
    - vLLM: where single steps stood still, set VLLM_GC_DEBUG=1 and compare the collections it logs with those instants
    - SGLang: compare version, --attention-backend and --disable-cuda-graph with the baseline's
    - SGLang: where single steps stood still, POST /freeze_gc after warm-up keeps what has been loaded out of later collections
    - llama.cpp: compare build, --flash-attn, --n-gpu-layers and --threads with the baseline's
    - fleet: take the slow worker out and repeat the same request on it and on a healthy one

    Experiment: send the same single request ten times to the suspect and to a healthy worker, nothing else running; compare ITL.
    """
    model = case.model
    pauses, more = _standing(case)
    if model.slow_raw is None:
        return _of_pauses(case, pauses) if more else None
    beside = () if model.source == "steps" else _others(case)
    knows_batch = model.source == "steps" or (not beside and _engines_count(case))
    equal = "at equal batch size" if knows_batch else "with as many recorded requests at once"
    compared = f"{equal} ({number(model.num_compared)} {'steps' if model.source == 'steps' else 'gaps'} compared, from {model.source})"
    said = f"the same step took {model.slow_raw:.2f} times the {case.base_word}'s time {compared}"
    ratio, noise = model.slow_raw, model.slow_noise
    spell = model.spell if model.spell_in_suspect else None
    if spell is not None:
        ratio, noise = spell.factor, spell.noise
        said = (
            f"for {seconds(spell.end_s - spell.start_s)} of {seconds(case.suspect.duration_s)} the same step took {ratio:.2f} "
            f"times the {case.base_word}'s time {compared}"
        )
    elif model.slow_factor is None or model.slow_factor <= 1.0:
        because = f"{said}; drift inside the windows explains up to {percent(noise)}"
        return (
            _of_pauses(case, [*pauses, Evidence(because, ratio, "ratio", None, [], BY_CALIBRATION)])
            if more
            else Excluded(because)
        )
    evidence = [
        Evidence(
            f"{said}; drift inside the windows explains up to {percent(noise)}",
            ratio,
            "ratio",
            None,
            case.worst_requests("slow_steps"),
            BY_CALIBRATION,
        )
    ]
    evidence += [
        Evidence(f"{told}: batches that others fill look the same", num, "requests", computed_by=BY_COUNTS)
        for told, num in beside
    ]
    evidence += pauses
    gap_s, gap_before_s = _median_gap(case.suspect), _median_gap(case.base)
    if gap_s is not None and gap_before_s is not None:
        evidence.append(
            Evidence(
                f"the median gap between two tokens was {seconds(gap_s)} ({seconds(gap_before_s)} in the {case.base_word}), whatever the batch",
                gap_s,
                "s",
                median_gap_sql(case, case.suspect),
            )
        )
    return Claim(
        evidence,
        case.worker_subject("slow_steps"),
        None if spell is None else (spell.start_s, spell.end_s),
        BY_FLEET if beside else _strength(case),
    )


def _of_pauses(case: Case, evidence: list[Evidence]) -> Claim:
    """Single steps stood still, and the others were as quick as before."""
    return Claim(evidence, case.worker_subject("slow_steps"), case.when("slow_steps"))


def _standing(case: Case) -> tuple[list[Evidence], bool]:
    """What single steps that stood still tell, and whether they took more of the steps' time than in the other window."""
    spent = case.suspect.step_extras.get("slow_steps")
    if spent is None or case.suspect.steps is None:
        return [], False
    took, rows = case.suspect.steps.duration_s, np.flatnonzero(spent > 0)
    before = case.base.step_extras.get("slow_steps")
    had = (
        0.0
        if before is None or case.base.steps is None
        else float(before.sum() / np.nansum(case.base.steps.duration_s))
    )
    num_before = 0 if before is None else int((before > 0).sum())
    times = float(np.median(took[rows] / np.maximum(took[rows] - spent[rows], 1e-9)))
    said = (
        f"{number(len(rows))} of {number(len(took))} steps took {number(times)} times what their work takes, {seconds(float(spent[rows].mean()))} "
        f"longer on average, and those beside them no longer than usual: the process stood still, and nothing tells why ({number(num_before)} in the {case.base_word})"
    )
    told = Evidence(said, float(len(rows)), "steps", None, case.worst_requests("slow_steps"), BY_CALIBRATION)
    return [told], float(spent.sum() / np.nansum(took)) > had


def _others(case: Case) -> list[tuple[str, float]]:
    """What tells of requests beside the recorded ones in either window, and how many they were."""
    return [told for told in map(others_beside, (case.base, case.suspect)) if told is not None]


def _strength(case: Case) -> float:
    """What the comparison is worth: the steps themselves, gaps at equal concurrency of a worker, means of requests, or gaps of who
    knows no worker: requests that share one with many and with few are then taken for alike."""
    names = (*case.base.requests.worker_names, *case.suspect.requests.worker_names)
    if case.model.source == "steps":
        return 1.0
    if None in names:
        return BY_FLEET
    return BY_GAPS if case.model.source == "token gaps" and _engines_count(case) else BY_MEANS


def _engines_count(case: Case) -> bool:
    """Whether in both windows the engine says how many requests it served."""
    return engine_counts(case.base) and engine_counts(case.suspect)


def _median_gap(facts: Facts) -> float | None:
    gaps = facts.requests.gaps
    return float(np.median(gaps.gap_s)) if gaps is not None and len(gaps.gap_s) else None
