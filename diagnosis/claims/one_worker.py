"""Whether requests waited longer at one worker alone, where something else than the load took its steps' time.

Idea: a load that grew for the whole fleet is met by every worker, so the other workers show what it does. Where they hardly wait longer for
as much more load, what waits at the one follows from what happened there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from diagnosis.cause import MATERIAL, Case
from diagnosis.facts import F64
from diagnosis.ledger.ledger import Ledger
from diagnosis.ledger.rows import OVERHEADS, PASSED_ON

FEWEST: Final = 30
"""Requests of a worker in either window before its waiting is compared."""
OTHERS: Final = 2
"""Workers beside the one that show what the load does."""
SMALL: Final = 0.5
"""Growth of the load up to which what it does beside the other cause is little: beyond, both are needed for the wait."""
ROUTED: Final = 1.25
"""Times the fleet's growth of arrivals from which on a worker was sent more, and its load is its own."""


@dataclass(frozen=True, slots=True)
class OneWorker:
    """The worker, seconds that a request waits longer there, in the median of the others, and how many those are."""

    name: str
    here_s: float
    others_s: float
    num_others: int


def waits_at_one(case: Case, rows: Sequence[str], growth: float) -> OneWorker | None:
    """None where others wait longer too, the one was sent more, or nothing else took its steps' time. growth: relative, of the fleet's load."""
    names = [list(facts.requests.worker_names) for facts in (case.base, case.suspect)]
    common = sorted(name for name in set(names[0]) & set(names[1]) if name is not None)
    if growth >= SMALL or len(common) <= OTHERS or len(common) < max(len(set(each) - {None}) for each in names):
        return None
    waits, beside = (_means(case, common, chosen) for chosen in (rows, (*PASSED_ON, *OVERHEADS, "slow_steps")))
    if waits is None or beside is None:
        return None
    grew, count = waits
    place = int(np.argmax(grew * count[1]))
    others = float(np.median(np.delete(grew, place)))
    whole = float((grew * count[1]).sum())
    if whole <= 0.0 or max(others, 0.0) * float(count[1].sum()) >= MATERIAL * whole:
        return None
    sent = count[1] / count[0]
    if sent[place] >= ROUTED * float(count[1].sum() / count[0].sum()) or beside[0][place] < MATERIAL * grew[place]:
        return None
    return OneWorker(common[place], float(grew[place]), others, len(common) - 1)


def _means(case: Case, names: Sequence[str], rows: Sequence[str]) -> tuple[F64, F64] | None:
    """(growth of the mean of these rows at each worker [k], s; requests of each window at each [2, k]); None where too few."""
    means, counts = np.zeros((2, len(names))), np.zeros((2, len(names)))
    for side, (facts, ledger) in enumerate(((case.base, case.base_ledger), (case.suspect, case.suspect_ledger))):
        seconds, worker = _sum(ledger, rows), facts.requests.worker[ledger.rows]
        for k, name in enumerate(names):
            mine = worker == list(facts.requests.worker_names).index(name)
            counts[side, k] = mine.sum()
            if counts[side, k] < FEWEST:
                return None
            means[side, k] = float(seconds[mine].mean())
    return means[1] - means[0], counts


def _sum(ledger: Ledger, rows: Sequence[str]) -> F64:
    out = np.zeros(len(ledger.rows))
    for name in rows:
        out += ledger.column(name)
    return out
