"""What records the engine slowed it down."""

from __future__ import annotations

import numpy as np

from diagnosis.calibration import threshold
from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.evidence_sql import event_where
from diagnosis.facts import Facts
from diagnosis.telling.wording import percent, seconds

SHARE = threshold(
    "probe_overhead.share",
    least=0.01,
    unit="ratio",
    says="share of a step that recording takes, more than in the baseline",
    why="what recording may take of a step",
)


@cause("probe_overhead", needs=("step.probe_s",), rows=("probe_overhead",))
def probe_overhead(case: Case) -> Claim | Excluded | None:
    """Recording took a part of every step: the observer slows down what it looks at.

    Why: the probe runs in the engine's own process, between two steps. It promises half a percent; a spool on a slow disk, a collector
    that does not answer, block events by the thousand or a debug build of the probe take more. Its own clock tells.

    Refuted by: as short a time of recording as in the baseline; steps that are as long with the probe off.

    Remedy:
    - host: give the probe a spool on a local disk, and the collector a core of its own
    - fleet: sample requests and blocks in the probe, or record on a part of the workers
    - vLLM: fewer KV events to publish (--kv-events-config)

    Experiment: switch the probe off on one of two equal workers for ten minutes and compare TPOT as their callers see it.
    """
    now, then = _mean(case.suspect), _mean(case.base)
    if now is None or then is None:
        return None
    (probe, share), (before, share_before) = now, then
    if not SHARE.is_reached(share - share_before) or probe <= before:
        return Excluded(
            f"recording took {seconds(probe)} of a step ({percent(share)}; {seconds(before)} in the {case.base_word})"
        )
    spent = case.suspect_ledger.column("probe_overhead")
    return Claim(
        [
            Evidence(
                f"recording took {seconds(probe)} of a step on average, {percent(share)} of its time ({seconds(before)} in the {case.base_word})",
                probe,
                "s",
                f"SELECT avg(probe_s) AS mean_s FROM step WHERE {event_where(case, case.suspect)}",
                case.worst_requests("probe_overhead"),
            ),
            Evidence(
                f"it cost a request {seconds(float(spent.mean()))} on average, in steps that it waited for or was in",
                float(spent.mean()),
                "s",
            ),
        ],
        case.worker_subject("probe_overhead"),
        case.when("probe_overhead"),
    )


def _mean(facts: Facts) -> tuple[float, float] | None:
    """(mean seconds of recording in a step, their share of the steps' time); None where the probe does not tell."""
    steps = facts.steps
    if steps is None:
        return None
    probe, lasted = steps.get("probe_s"), steps.duration_s
    known = np.isfinite(probe) & np.isfinite(lasted)
    if not known.any():
        return None
    return float(probe[known].mean()), float(probe[known].sum() / max(float(lasted[known].sum()), 1e-12))
