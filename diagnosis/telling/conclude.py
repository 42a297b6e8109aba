"""The status of a verdict, and which sentence goes with it: the order in which its answers are tried, first match wins.

The sentences are written in `incomparable.py`, `established.py` and `unestablished.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from diagnosis.cause import Case
from diagnosis.models import other_models
from diagnosis.statistics.judged import Judged
from diagnosis.telling.established import of_established, of_traffic_alone
from diagnosis.telling.incomparable import of_incomparable, of_other_models
from diagnosis.telling.movement import only_tail, suspicious
from diagnosis.telling.unestablished import of_chance, of_no_change, of_suspicious, of_what_began
from diagnosis.telling.verdict import Change, Conclusion, LedgerRow, NamedCause

WHY_NOT = {
    "no_change": "the metric did not change",
    "not_distinguishable": "the change itself is not established",
    "not_observable": "the change lies where this setup cannot look",
}
"""Why a claim is no cause where the verdict names none."""


def conclude(
    case: Case,
    judged: Judged,
    causes: Sequence[NamedCause],
    delta: Change,
    rows: Sequence[LedgerRow],
) -> Conclusion:
    """What is said of the change."""
    incomparable = of_incomparable(case, judged, causes, delta)
    if incomparable is not None:
        return Conclusion("not_distinguishable", incomparable)
    models = other_models(case.base, case.suspect)
    if models is not None and (
        judged.changed or suspicious(case) or (case.traffic is not None and case.traffic.changed)
    ):
        return Conclusion("not_distinguishable", of_other_models(case, judged, causes, delta, models), named=True)
    if judged.changed and causes and all(c.tentative for c in causes):
        return Conclusion("not_distinguishable", of_chance(case, judged, causes, delta), named=True)
    if judged.changed:
        return of_established(case, judged, causes, delta, rows)
    if case.traffic is not None and case.traffic.changed:
        return of_traffic_alone(case, judged, causes, delta)
    if causes and causes[0].began and (suspicious(case) or only_tail(case, judged, delta)):
        return Conclusion("explained", of_what_began(case, judged, causes, delta), named=True)
    if suspicious(case):
        return Conclusion("not_distinguishable", of_suspicious(case, judged, causes, delta), named=True)
    return Conclusion("no_change", of_no_change(case, judged, delta))
