"""The ledger of one window by itself: what its requests' seconds went into, without a window to compare it with.

Nothing is blamed: the window is its own usual, so `slow_steps` and `reuse_lost`, which only a comparison can tell, stay empty.
All rows sum to the metric as they do in a diagnosis.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnosis import quality
from diagnosis.checks.check import Check
from diagnosis.facts import Facts
from diagnosis.judge import reuse_ratio
from diagnosis.ledger import ledger as ledgers
from diagnosis.ledger import timeline
from diagnosis.ledger.ledger import Ledger
from diagnosis.ledger.spent import Context, long_prefill_tokens
from diagnosis.ledger.work_model import calibrate


@dataclass(frozen=True, slots=True)
class Alone:
    """Ledgers by metric (those that some request has), and what the telemetry's own checks say."""

    ledgers: dict[str, Ledger]
    checks: list[Check]


def judge_alone(facts: Facts, metrics: tuple[str, ...] = ("ttft", "e2e")) -> Alone:
    """Split the seconds of every request of the window."""
    prefill = facts.requests.get("prefill_s")
    context = Context(
        calibrate(facts, facts),
        round(timeline.most_running(facts)),
        long_prefill_tokens(facts),
        reuse_ratio(facts, facts),
        quality.caching_is_off(facts)[0],
        float(np.nanmedian(prefill)) if np.isfinite(prefill).any() else 0.0,
        False,
    )
    found = {metric: ledgers.write(facts, metric, context) for metric in metrics}
    return Alone({metric: ledger for metric, ledger in found.items() if len(ledger.rows)}, quality.check(facts))
