"""What the scheduler said that requests wait for, and what was free meanwhile: shared by the causes of small settings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnosis.facts import MAX_SEATS, Facts
from engine_probe.digits import whole_number

ROOM = 0.90
"""Share of the blocks in use up to which there was room for another request."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Steps in which requests waited for one thing, over all workers.

    num_steps   how many of them there are, of `num_known` that tell what bound
    blocks_used share of the blocks that was in use in them in the median; None where steps do not tell
    """

    num_steps: int
    num_known: int
    blocks_used: float | None

    @property
    def had_room(self) -> bool:
        """Whether blocks were free meanwhile; unknown counts as no."""
        return self.blocks_used is not None and self.blocks_used < ROOM


def bound_by(facts: Facts, what: str) -> Bound | None:
    """Steps in which requests waited for `what` (seats or budget); None where no step tells."""
    if facts.steps is None:
        return None
    waiting = facts.steps.get(f"waiting_on_{what}")
    known = np.isfinite(waiting)
    if not known.any():
        return None
    bound = known & (waiting > 0)
    used = facts.steps.get("blocks_used") / np.where(
        facts.steps.get("blocks_total") > 0, facts.steps.get("blocks_total"), np.nan
    )
    used = used[bound & np.isfinite(used)]
    return Bound(int(bound.sum()), int(known.sum()), float(np.median(used)) if len(used) else None)


def setting(facts: Facts, flag: str) -> int | None:
    """A whole-number flag of the workers, where all say the same."""
    told = {whole_number(w.flags.get(flag, ""), MAX_SEATS) or None for w in facts.workers}
    return told.pop() if len(told) == 1 else None


def lowered(base: Facts, suspect: Facts, flag: str, at: str | None = None) -> tuple[int, int] | None:
    """(now, before) of a setting that is lower than it was: of all workers where all tell the same, else of the worker `at`; without that
    of the one of both windows that has the least of it now. None where none is lower."""
    now, before = setting(suspect, flag), setting(base, flag)
    if now is not None and before is not None:
        return (now, before) if now < before else None
    told = [
        {w.worker: whole_number(w.flags.get(flag, ""), MAX_SEATS) or 0 for w in facts.workers if w.worker is not None}
        for facts in (suspect, base)
    ]
    lower = [(told[0][name], told[1][name]) for name in told[0].keys() & told[1].keys() if at in (None, name)]
    return min(((here, there) for here, there in lower if 0 < here < there), default=None)
