"""What steps usually take whose shape nobody else had: a slow worker's batches are fuller than all others', so its own steps have no like.

    seconds of a step = a + b prompt tokens + c sequences that decode

fitted to the steps of the others of its pool (least squares of the relative error, nothing below 0). More than any of theirs is taken to
need time in proportion, which is the most that it can; less than most of theirs for as little as they do. So it is said of nobody that he
is slow for having more to do.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from diagnosis.facts import F64, I64, Bool
from diagnosis.hotspots.decoding import MIN_OTHERS, MOST_OTHERS, expected
from diagnosis.hotspots.observed import Steps

OWN_COUNTS: Final = 16
"""Workers up to which each is left out of what is usual for itself: of more, one's own steps make no difference."""


def usual_beyond(steps: Steps, used: Bool, pool: I64, asked: Bool) -> F64:
    """Seconds that each of the steps `used` [S] usually takes at the others of its worker's pool [K], [m]; NaN of workers not `asked` [K]."""
    worker, took = steps.worker[used], steps.duration_s[used]
    prefill, decode = np.nan_to_num(steps.prefill_tokens[used]), np.nan_to_num(steps.decode_tokens[used])
    amounts = np.stack([np.ones(len(took)), prefill, decode], axis=1)
    usual = np.full(len(took), np.nan)
    sharing = [np.flatnonzero(asked & (pool == code)) for code in np.unique(pool[asked])]
    if len(pool) <= OWN_COUNTS:
        sharing = [np.array([one]) for one in np.flatnonzero(asked).tolist()]
    for workers in sharing:
        is_mine, is_other = np.isin(worker, workers), pool[worker] == pool[workers[0]]
        if len(pool) <= OWN_COUNTS:
            is_other &= ~is_mine
        others = np.flatnonzero(is_other)
        others = others[:: max(1, len(others) // MOST_OTHERS)]
        if len(others) >= MIN_OTHERS:
            usual[is_mine] = expected(amounts[others], took[others], amounts[is_mine], is_relative=True)
    return usual
