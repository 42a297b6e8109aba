"""Windows that have no length of a request in common: what then tells longer prompts or answers from a slower engine.

Idea: latencies of such windows cannot be brought to a common mix, but their steps can be compared, for a step does not know how long its
requests are. Where steps of the same work took as long as before, what each request asks for is what grew: its own work, and what others
wait for it.

Invariant: nothing is put down to lengths where steps got slower, or cannot be compared, or where tenants or workloads moved too.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from diagnosis.attribution.shared_load import work_s
from diagnosis.cause import Case, rate_per_s
from diagnosis.claims.bound_wait import setting
from diagnosis.claims.offered_load import num_workers
from diagnosis.facts import Facts
from diagnosis.statistics.dimensions import LENGTHS

OWN: Final = ("own_prefill", "own_decode")
"""Rows of what a request does itself: they grow with its lengths, and with nothing that others do."""
WITH_OTHERS: Final = ("long_prefill_interference", "shared_prefill", "decode_bandwidth", "queue_load")
"""Rows of what others wait for it, which more arrivals make longer too."""
BY_SETTING: Final = {"queue_seats": "max_num_seqs", "queue_budget": "max_num_batched_tokens"}
"""Likewise, where what a step takes in is set as it was."""


def rows_of_lengths(case: Case) -> tuple[str, ...] | None:
    """Rows of the ledger that longer requests explain, where the windows have none in common; None where that cannot be told."""
    if not case.apart or not set(case.apart) <= set(LENGTHS):
        return None
    model = case.model
    if model.slow_raw is None or model.slow_factor != 1.0 or model.spell is not None:
        return None
    before, now = (_mean_work(facts, case) for facts in (case.base, case.suspect))
    if before is None or now is None or now <= before:
        return None
    workers = num_workers(case.base, case.suspect)
    arrivals = [rate_per_s(facts) / n for facts, n in zip((case.base, case.suspect), workers, strict=True)]
    if math.log(now / before) <= math.log(arrivals[1] / arrivals[0]):
        return OWN
    kept = [row for row, flag in BY_SETTING.items() if setting(case.base, flag) == setting(case.suspect, flag)]
    return (*OWN, *WITH_OTHERS, *kept)


def _mean_work(facts: Facts, case: Case) -> float | None:
    """Seconds of steps that a request asks for on average; None where nobody tells, or none."""
    work = work_s(facts, case.model)
    known = work[np.isfinite(work)]
    return float(known.mean()) if len(known) and known.mean() > 0 else None
