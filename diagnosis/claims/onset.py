"""What one window has and the other has not: evidence that needs no interval.

Where few independent requests carry a change, no interval of it can be given, and two draws of one process may differ as much. But a
cause of which the baseline shows nothing, and which many requests of the suspect window met, is no other draw of the same: it began.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diagnosis.cause import Case
from diagnosis.facts import Bool
from diagnosis.ledger.rows import NEUTRAL, ORDINARY, UNOBSERVED

TRACE = 0.05
"""Share of the suspect window's seconds that the baseline may have of it and still count as having none."""
MET_BY = 20
"""Requests of the suspect window that must have met it."""
MET_S = 0.001
"""Less than a millisecond nobody has met."""


def met_here_alone(now: Bool, then: Bool) -> bool:
    """Whether many requests met what is told of each of them [n] here, and next to none of them [m] there."""
    if not len(now) or not len(then):
        return False
    return bool(int(now.sum()) >= MET_BY and float(then.mean()) <= TRACE * float(now.mean()))


def waited_here_alone(case: Case, row: str) -> bool:
    """Whether many requests have some of this row here, and next to none there."""
    now, then = (ledger.column(row) > MET_S for ledger in (case.suspect_ledger, case.base_ledger))
    return met_here_alone(now, then)


def more_than_ever(case: Case, row: str) -> bool:
    """Whether many requests have more of this row here than any has there."""
    now, then = (ledger.column(row) for ledger in (case.suspect_ledger, case.base_ledger))
    return len(then) > 0 and int((now > then.max()).sum()) >= MET_BY


def began(case: Case, rows: Sequence[str]) -> bool:
    """Whether these rows' own seconds are in the suspect window and next to none in the baseline; never of rows of ordinary work."""
    own = [name for name in rows if name not in NEUTRAL | ORDINARY | UNOBSERVED]
    if not own:
        return False
    now, then = (
        np.sum([ledger.column(name) for name in own], axis=0) for ledger in (case.suspect_ledger, case.base_ledger)
    )
    return bool(int((now > MET_S).sum()) >= MET_BY and float(then.mean()) <= TRACE * float(now.mean()))
