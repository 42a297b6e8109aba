"""Single steps at which a worker stood still, for no reason that is told: a garbage collection, a held lock, a host that swaps.

Idea: what computes more takes longer for what it computes, and a machine that is slower is so for a while. A process that is held up is so
at some instant: one step takes several times its work, those before and after it do not, and whether it computed a prompt makes no difference.

Invariant: steps that follow one another, or that nearly all compute prompts where others do not, are never said to have stood still: those
are slow for a spell, or for what they compute.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from diagnosis.calibration import threshold
from diagnosis.facts import F64, I64, Bool

TIMES: Final = 3.0
"""A step stood still from this many times its work on: what it computed cannot have been as much dearer."""
LEAST_S: Final = 0.03
"""Time beyond its work that is no jitter of the scheduler's."""
RARE: Final = 0.1
"""Share of a window's steps that may have: beyond that they are the usual pace."""
ALONE: Final = 0.5
"""Share of them that have to be quick both before and after."""
WHATEVER: Final = 0.5
"""Times their share of the step time that steps without a prompt have to be among them: pauses do not choose."""
PAUSES: Final = threshold(
    "pauses.steps",
    least=5,
    unit="steps",
    says="single steps of a window that took several times their work",
    why="one or two pauses of a window come by chance, a collector's or a host's come back",
)


def stood_still(worker: I64, work_s: F64, beyond_s: F64, prompts: Bool) -> Bool | None:
    """[k] steps that stood still; None where too few did, or where they have something in common.

    worker    [k] code of each step's worker; steps come by worker and time
    work_s    [k] what its work takes      beyond_s  [k] what it took more, s, of those that stand out, else 0
    prompts   [k] whether it computed any
    """
    still = beyond_s > np.maximum(LEAST_S, (TIMES - 1.0) * work_s)
    num = int(still.sum())
    if num > RARE * len(still) or not _is_alone(worker, still) or not _chooses_nothing(work_s, still, prompts):
        PAUSES.note(0.0)
        return None
    return still if PAUSES.is_reached(num) else None


def _is_alone(worker: I64, still: Bool) -> bool:
    """Most of them have a quick step before and after."""
    joined = still[1:] & still[:-1] & (worker[1:] == worker[:-1])
    beside = np.append(joined, False) | np.append(False, joined)
    return int((still & ~beside).sum()) >= ALONE * int(still.sum())


def _chooses_nothing(work_s: F64, still: Bool, prompts: Bool) -> bool:
    """Steps without a prompt are among them as their share of the time has it, or half of that."""
    total, num = float(work_s.sum()), int(still.sum())
    share = float(work_s[~prompts].sum()) / total if total > 0 else 0.0
    return int((still & ~prompts).sum()) >= WHATEVER * share * num
