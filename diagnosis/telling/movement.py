"""Which way the metric moved, by how much, and whether by so much that noise is a poor answer where nothing is established.

All of it is asked of a case whose change is judged already; what is said of the answers is not known here.
"""

from __future__ import annotations

from diagnosis.cause import Case
from diagnosis.statistics.judged import Judged
from diagnosis.telling.verdict import Change

SUSPICIOUS = 0.20
"""Relative change of the mean from which on an answer of `no_change` needs more than a wide interval."""


def fell(case: Case, judged: Judged) -> bool:
    """Whether the metric changed for the better, at the common mix or, where it did not change there, in the raw numbers."""
    if judged.changed:
        return moved_s(case, judged) < 0
    if case.traffic is not None and case.traffic.changed:
        return (case.traffic.raw_mean_s if case.traffic.by_mean else case.traffic.raw_quantile_s) < 0
    return False


def raw_s(case: Case, judged: Judged) -> float:
    """The raw change, s, by which the traffic is measured; 0 where nothing was reweighted."""
    if case.traffic is None:
        return 0.0
    by_mean = case.traffic.by_mean or (judged.changed and judged.by_mean)
    return case.traffic.raw_mean_s if by_mean else case.traffic.raw_quantile_s


def traffic_fell(case: Case, judged: Judged) -> bool:
    """Whether the raw numbers changed for the better, which is the way of what the traffic's mix owns of them."""
    return raw_s(case, judged) < 0


def outweighed(case: Case, judged: Judged) -> bool:
    """Whether the raw numbers went the other way than those at a common mix, both beyond noise: the traffic has more than all of that."""
    stands = judged.changed and case.traffic is not None and case.traffic.changed
    return stands and raw_s(case, judged) * moved_s(case, judged) < 0


def seems_to_fall(case: Case, judged: Judged, delta: Change) -> bool:
    """Whether what moved much and is not established went down: the mean, else the quantile that was asked for."""
    if judged.changed:
        return False
    if suspicious(case):
        return case.attribution.delta_mean_s < 0
    return only_tail(case, judged, delta) and judged.requested.delta_s < 0


def moved_s(case: Case, judged: Judged) -> float:
    """The change that carries the verdict, s, at the common mix."""
    return case.attribution.delta_mean_s if judged.by_mean else case.attribution.delta_quantile_s


def suspicious(case: Case) -> bool:
    """Whether the mean moved so much that noise is a poor answer, although too few independent requests carry it."""
    attribution = case.attribution
    before = float(case.base_ledger.values.mean() if not case.ended else case.suspect_ledger.values.mean())
    return abs(attribution.delta_mean_s) >= SUSPICIOUS * before and abs(attribution.delta_mean_s) > 0


def only_tail(case: Case, judged: Judged, delta: Change) -> bool:
    """Whether nothing is established, the mean hardly moved, and the quantile that was asked for moved much and has no interval.

    Two draws of one traffic do that too, so only a cause that began may be named for it.
    """
    if judged.changed or judged.requested.enough or suspicious(case):
        return False
    return abs(judged.requested.delta_s) >= SUSPICIOUS * delta.base_p99_s > 0.0
