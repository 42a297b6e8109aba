"""The tables of a verdict: attribution (rows sum to the change), composition (describes), and the change itself."""

from __future__ import annotations

from collections.abc import Sequence

from diagnosis.attribution.composition import compose
from diagnosis.attribution.shapley import Attribution
from diagnosis.attribution.traffic import beyond, row_name
from diagnosis.facts import F64
from diagnosis.ledger.ledger import Ledger
from diagnosis.ledger.rows import ROWS
from diagnosis.statistics.censored import Waits
from diagnosis.statistics.comparability import Mix
from diagnosis.statistics.judged import Judged, weights
from diagnosis.statistics.quantiles import nearest_rank
from diagnosis.telling.verdict import Change, CompositionRow, LedgerRow, NamedCause


def attribution_rows(
    attribution: Attribution, at_p99: Attribution, base: Ledger, suspect: Ledger, mix: Mix, judged_q: str, p99_q: str
) -> list[LedgerRow]:
    """Rows of attribution (b): they sum to the raw change of the metric, in every column, within 1e-9."""
    p99 = {row.name: row for row in [*at_p99.rows, at_p99.dependence]}
    rows = []
    for row in [*attribution.rows, attribution.dependence]:
        other = p99.get(row.name)
        rows.append(
            LedgerRow(
                row.name,
                _row_text(row.name, attribution),
                row.mean_s,
                other.quantile_s if other else 0.0,
                other.es_s if other else 0.0,
                row.quantile_s,
                row.interval_95,
                row.mean_interval_95,
            )
        )
    listed = {row.name for row in attribution.rows} | {attribution.dependence.name}
    rows += [
        LedgerRow(r.name, _row_text(r.name, at_p99), r.mean_s * 0.0, r.quantile_s, r.es_s, 0.0)
        for n, r in p99.items()
        if n not in listed
    ]
    if mix.shifted:
        name = row_name(mix)
        mean_s, judged_s, _ = beyond(attribution, base, suspect, judged_q)
        _, p99_s, es_s = beyond(at_p99, base, suspect, p99_q)
        rows.append(LedgerRow(name, ROWS[name], mean_s, p99_s, es_s, judged_s))
    rows.sort(key=lambda r: (r.cause in ("dependence", "other"), -abs(r.judged_s), r.cause))
    return rows


def _row_text(name: str, attribution: Attribution) -> str:
    if name == "dependence":
        return "how the parts coincide in the same requests, beyond the parts themselves"
    if name == "other":
        return "small parts together: " + ", ".join(attribution.merged)
    return ROWS.get(name, name)


def change(base: Ledger, suspect: Ledger, judged: Judged, open_waits: tuple[Waits, Waits], p99_q: str) -> Change:
    """The raw change with its intervals, and the ranges of quantiles where first tokens never came."""

    def ranged(side: int, quantile: str) -> tuple[float, float | None] | None:
        if len(open_waits[side].at_least) == 0:
            return None
        found = open_waits[side].range(quantile)
        return found.low_s, found.high_s

    def q(ledger: Ledger, quantile: str) -> float:
        return nearest_rank(ledger.values, quantile)

    return Change(
        mean_s=float(suspect.values.mean() - base.values.mean()),
        p99_s=q(suspect, p99_q) - q(base, p99_q),
        judged_s=q(suspect, judged.quantile) - q(base, judged.quantile),
        mean_interval_95=judged.significance.mean_interval_95,
        p99_interval_95=judged.requested.interval_95,
        interval_95=judged.significance.interval_95,
        base_p99_s=q(base, p99_q),
        suspect_p99_s=q(suspect, p99_q),
        base_mean_s=float(base.values.mean()),
        suspect_mean_s=float(suspect.values.mean()),
        base_judged_s=q(base, judged.quantile),
        suspect_judged_s=q(suspect, judged.quantile),
        base_p99_range=ranged(0, p99_q),
        suspect_p99_range=ranged(1, p99_q),
        base_judged_range=ranged(0, judged.quantile),
        suspect_judged_range=ranged(1, judged.quantile),
    )


def composition(names: Sequence[str], base: F64, suspect: F64, q: str, mix: Mix) -> list[CompositionRow]:
    parts_b, smooth_b = compose(base, q, weights(mix, 0))
    parts_s, smooth_s = compose(suspect, q, weights(mix, 1))
    rows = [
        CompositionRow(n, ROWS.get(n, n), float(b), float(s)) for n, b, s in zip(names, parts_b, parts_s, strict=True)
    ]
    rows.sort(key=lambda r: -max(abs(r.baseline_s), abs(r.suspect_s)))
    return [*rows, CompositionRow("smoothing", "exact order statistic less the smoothed parts", smooth_b, smooth_s)]


def unexplained(rows: Sequence[LedgerRow], causes: Sequence[NamedCause], delta: Change) -> dict[str, float]:
    """Seconds of the change that no named cause owns, of the mean, of P99 and of the judged quantile, and their share."""
    owned = {name for c in causes for name in c.rows}
    left = [r for r in rows if r.cause not in owned]
    out = {
        "mean_s": sum(r.mean_s for r in left),
        "p99_s": sum(r.p99_s for r in left),
        "judged_s": sum(r.judged_s for r in left),
    }
    out["share_p99"] = out["p99_s"] / delta.p99_s if delta.p99_s else 0.0
    return out
