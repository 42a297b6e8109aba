"""The intervals that are tested, and how often the tests together may tell what is not there: FALSE_ALARMS an interval.

The tests share that rate between them (Bonferroni), and each shares its part between the workers.
"""

from __future__ import annotations

import math

import numpy as np

from diagnosis.facts import I64
from diagnosis.hotspots.observed import Observed

INTERVAL_S = 10.0
"""Time that is judged at once: long enough for some decisions at each worker, short beside what a person waits for an answer."""
FALSE_ALARMS = 0.01
"""Most of the intervals without a hotspot in which one is told."""
LONG = 6
"""Intervals that are also looked at as one."""
BY_TEST = {
    "requests": 0.0015,
    "tokens": 0.0015,
    "requests_long": 0.001,
    "tokens_long": 0.001,
    "pace": 0.004,
    "belief": 0.001,
}
"""What each test may use up of FALSE_ALARMS, for all workers of an interval together: 1 % in all."""


def intervals(seen: Observed) -> tuple[I64, int]:
    """([N] interval of each decision, how many intervals the window has)."""
    num = max(1, math.ceil(seen.end_s / INTERVAL_S - 1e-9))
    return np.clip((seen.decisions.at_s / INTERVAL_S).astype(np.int64), 0, num - 1), num
