"""What another mix of requests did to the metric, beside what the engine did at a common mix.

Idea: the raw change is the change at a common mix plus what reweighting took away; that rest belongs to the traffic (longer
prompts, another tenant), and blaming the engine for it would be wrong. It has a row of its own in the attribution.

Where more requests came too, the waiting that grew is of both, and the traffic's part of it stands here as well (`shared_load.py`).

Invariant: the rows at the common mix + this row = raw change, of the mean, the quantile and the expected shortfall.
"""

from __future__ import annotations

from dataclasses import dataclass

from diagnosis.attribution.shapley import Attribution
from diagnosis.ledger.ledger import Ledger
from diagnosis.statistics.comparability import Mix
from diagnosis.statistics.dimensions import LENGTHS
from diagnosis.statistics.judged import Judged
from diagnosis.statistics.quantiles import expected_shortfall, nearest_rank

ROWS = ("length_shift", "mix_shift")
MORE_WORK = 0.10
"""A tenth more work a request keeps others waiting; less is lost in what one draw of the traffic differs from another."""
MOSTLY = 0.5
"""Share of the change of lengths that categories explain, from which on it is their mix that moved."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Seconds of the raw change that the traffic's mix owns, at the judged quantile, and the raw change itself.

    row       length_shift where prompts or answers moved by themselves, else mix_shift
    changed   the raw change stands out from noise; `by_mean`: its mean does, its quantile does not
    p_value   of the mixes being alike
    growth    of the work that a request asks for, which the mix has, on the log scale; 0 where not known
    """

    row: str
    mean_s: float
    quantile_s: float
    raw_mean_s: float
    raw_quantile_s: float
    changed: bool
    by_mean: bool
    p_value: float
    growth: float = 0.0

    @property
    def fills_steps(self) -> bool:
        """Whether requests ask for so much more (or less) that others wait for it, the way the raw change went."""
        moved = self.raw_mean_s if self.by_mean else self.raw_quantile_s
        return abs(self.growth) >= MORE_WORK and self.growth * moved > 0


def row_name(mix: Mix) -> str:
    """The row that seconds of another mix stand in: of lengths, unless other workloads or tenants explain most of how they moved."""
    return "length_shift" if set(mix.moved) & set(LENGTHS) and mix.by_category < MOSTLY else "mix_shift"


def beyond(attribution: Attribution, base: Ledger, suspect: Ledger, q: str) -> tuple[float, float, float]:
    """(mean, quantile, expected shortfall) of the raw change less what the rows at the common mix hold of it, s."""
    mean_s, quantile_s, es_s = attribution.to_traffic
    return (
        float(suspect.values.mean() - base.values.mean()) - attribution.delta_mean_s + mean_s,
        nearest_rank(suspect.values, q) - nearest_rank(base.values, q) - attribution.delta_quantile_s + quantile_s,
        expected_shortfall(suspect.values, q) - expected_shortfall(base.values, q) - attribution.delta_es_s + es_s,
    )


def traffic(
    mix: Mix, attribution: Attribution, base: Ledger, suspect: Ledger, judged: Judged, growth: float = 0.0
) -> Traffic | None:
    """None where nothing was reweighted. growth: as in `Traffic`."""
    if not mix.shifted or judged.raw is None:
        return None
    mean_s, quantile_s, _ = beyond(attribution, base, suspect, judged.quantile)
    return Traffic(
        row=row_name(mix),
        mean_s=mean_s,
        quantile_s=quantile_s,
        raw_mean_s=float(suspect.values.mean() - base.values.mean()),
        raw_quantile_s=nearest_rank(suspect.values, judged.quantile) - nearest_rank(base.values, judged.quantile),
        changed=judged.raw.changed or judged.raw.changed_mean,
        by_mean=not judged.raw.changed,
        p_value=mix.p_value,
        growth=growth,
    )
