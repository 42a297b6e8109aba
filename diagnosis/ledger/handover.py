"""Where hand-overs to a decode worker stand in a request's time, and what that worker computed of prompts meanwhile.

What a hand-over's own seconds went into is told by the facts (`loading/handover.py`); here they are given away.
"""

from __future__ import annotations

import numpy as np

from diagnosis.facts import F64, Facts
from diagnosis.ledger.rows import HANDOVER
from diagnosis.ledger.sheet import Sheet


def carve_handover(sheet: Sheet, facts: Facts, left: F64, *, before_first: bool) -> F64:
    """What is left of the seconds before (or after) the first token without the hand-overs that lie there, [n]."""
    if facts.handover is None:
        return left
    here = facts.handover.before_first == before_first
    for name in HANDOVER:
        left = sheet.carve(left, name, np.where(here, facts.handover.parts[name], 0.0))
    return left


def prefilled_beside(facts: Facts, token_s: float | None) -> dict[str, F64]:
    """Seconds that each hand-over's decode worker computed prompts of others between its first and last token there, [n] by row.

    A decode worker computes what it should have been sent; the rest of it, last partial blocks, is ordinary.
    """
    moves, steps = facts.handover, facts.steps
    if moves is None or steps is None or token_s is None:
        return {}
    beside = np.zeros(len(facts.requests))
    computed = 0.0
    for code, name in enumerate(moves.worker_names):
        rows = np.flatnonzero((moves.worker == code) & np.isfinite(moves.first_s) & np.isfinite(moves.last_s))
        if name not in steps.worker_names or len(rows) == 0:
            continue
        mine = steps.worker == list(steps.worker_names).index(name)
        tokens = np.nan_to_num(steps.get("prefill_tokens")[mine])
        computed += float(tokens.sum())
        through = np.concatenate([[0.0], np.cumsum(np.minimum(tokens * token_s, steps.duration_s[mine]))])
        at = steps.at_s[mine]
        first, last = (np.searchsorted(at, instant[rows], "right") for instant in (moves.first_s, moves.last_s))
        beside[rows] = through[last] - through[first]
    shares = {name: tokens / max(computed, 1.0) for name, tokens in moves.again.items() if tokens > 0}
    rest = max(0.0, 1.0 - sum(shares.values()))
    return {name: beside * min(share, 1.0) for name, share in (shares | {"shared_prefill": rest}).items()}
