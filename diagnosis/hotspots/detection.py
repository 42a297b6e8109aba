"""In which intervals a worker gets too much, or is slow: three tests (`excess`, `pace`, `wrong_beliefs`) and what they must have cost.

A test that finds something is no hotspot yet: it must have done harm (`harm`), or its cost must be unknown. Which kind it is, `kinds` says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnosis.facts import F64, I64, Bool
from diagnosis.hotspots.by_design import slower_by_design
from diagnosis.hotspots.excess import excess_load
from diagnosis.hotspots.harm import did_harm, did_harm_by_pace, did_harm_to_answers
from diagnosis.hotspots.intervals import INTERVAL_S, intervals
from diagnosis.hotspots.observed import Observed
from diagnosis.hotspots.pace import SLOWER, pace, pace_of_answers
from diagnosis.hotspots.regret import Regret, bear
from diagnosis.hotspots.wrong_beliefs import wrong_beliefs, wrong_intervals


@dataclass(frozen=True, slots=True)
class Detected:
    """By interval [I], unknown and untested false.

    edges_s    [I + 1] bounds of the intervals; of: [N] interval of each decision
    load       [I, K] the worker got more than chance would give it, and it cost; load_at_once: told by that interval alone
    slow       [I, K] its steps took longer than those of the others, and it cost; slow_at_once: told by that interval alone
    wrong      [I] the router's index was wrong more often than it may
    slowness   [I, K] times as long as the median of the others, NaN unknown
    p_load     [I, K] most that chance makes as likely, all tests of the load together
    by_design  [K] times as long as the others' that it takes all the time with a router that knows it, which is no hotspot; NaN of all others
    is_wrong   [N] decisions whose belief was wrong; can_err: [N] those where it can be told
    """

    edges_s: F64
    of: I64
    load: Bool
    load_at_once: Bool
    slow: Bool
    slow_at_once: Bool
    wrong: Bool
    slowness: F64
    p_load: F64
    is_wrong: Bool
    can_err: Bool
    by_design: F64

    @property
    def num(self) -> int:
        return len(self.edges_s) - 1


def detect(seen: Observed, regret: Regret) -> Detected:
    """All intervals of the window, from its begin on; the last may be shorter."""
    decisions, workers = seen.decisions, seen.num_workers
    of, num = intervals(seen)
    edges = np.minimum(np.arange(num + 1) * INTERVAL_S, max(seen.end_s, 1e-9))
    borne = bear(seen, regret)
    p_load, load, at_once = excess_load(of, decisions.chosen, regret, borne, num, workers, decisions.there)
    harmful = did_harm(of, decisions.chosen, borne, num, workers)
    slowness, slow_at_once = pace(seen, num)
    is_slow = stays(slow_at_once, slowness >= 1.0 + SLOWER.value)
    by_answers = pace_of_answers(seen, num)
    slowness = np.where(by_answers[1], np.fmax(slowness, by_answers[0]), slowness)
    is_slow &= harmful | did_harm_by_pace(seen, of, regret, is_slow) | did_harm_to_answers(seen, is_slow & ~harmful)
    is_slow, slow_at_once = is_slow | by_answers[1], slow_at_once | by_answers[1]
    by_design = slower_by_design(seen, regret, borne, slowness, is_slow)
    is_slow &= np.isnan(by_design)
    is_wrong, can_err = wrong_beliefs(seen, regret.token_s)
    return Detected(
        edges,
        of,
        load,
        at_once,
        is_slow,
        slow_at_once,
        wrong_intervals(of, is_wrong, can_err, num),
        slowness,
        p_load,
        is_wrong,
        can_err,
        by_design,
    )


def stays(found: Bool, looks_so: Bool) -> Bool:
    """[I, K] what was found in an interval, and holds on in those before and after it for as long as they look so too."""
    held = found.copy()
    for order in (range(1, len(held)), range(len(held) - 2, -1, -1)):
        for index in order:
            held[index] |= looks_so[index] & held[index - 1 if order.step > 0 else index + 1]
    return held
