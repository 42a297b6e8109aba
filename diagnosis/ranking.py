"""Who is blamed: causes are asked, rows get one owner, claims are ranked, and how sure the ranking is comes from the bootstrap.

Invariant: a second is blamed once; a claim that owns less than `MATERIAL` of the change is an exclusion with its number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diagnosis import quality
from diagnosis.attribution import Attribution
from diagnosis.cause import MATERIAL, Case, Cause, Claim, Excluded, all_causes, to_json
from diagnosis.facts import Facts
from diagnosis.judged import Judged
from diagnosis.verdict import Change, NamedCause, confidence_word
from diagnosis.wording import listing, percent, signed

CAP_WHEN_FEW = 0.79
"""Most confidence a cause can have where the requested quantile has no interval: medium, whatever the evidence."""


def ask_causes(case: Case) -> tuple[list[tuple[Cause, Claim]], list[dict[str, str]], list[dict[str, Any]]]:
    claims: list[tuple[Cause, Claim]] = []
    excluded: list[dict[str, str]] = []
    unseen: list[dict[str, Any]] = []
    for cause in all_causes().values():
        missing = cause.missing(case.suspect.visible)
        if missing:
            unseen.append(
                {
                    "cause": cause.name,
                    "missing": missing,
                    "because": f"not observable here: {listing(missing)} was not seen",
                }
            )
            continue
        answer = cause.judge(case)
        if isinstance(answer, Claim):
            claims.append((cause, answer))
        elif isinstance(answer, Excluded):
            excluded.append({"cause": cause.name, "because": answer.because})
        else:
            unseen.append(
                {"cause": cause.name, "missing": [], "because": "not observable here: too little was recorded to judge"}
            )
    return claims, excluded, unseen


def rank(
    claims: Sequence[tuple[Cause, Claim]],
    case: Case,
    judged: Judged,
    checks: Sequence[quality.Check],
    at_p99: Attribution,
    delta: Change,
) -> tuple[list[NamedCause], list[dict[str, str]]]:
    """Claims that own a material part of the change in its direction, largest first; the others become exclusions."""
    moved = judged_change(case, judged)
    p99 = {row.name: row for row in at_p99.rows}
    rows = {row.name: row for row in case.attribution.rows}
    ranked: list[tuple[float, Cause, Claim]] = []
    excluded: list[dict[str, str]] = []
    owner = _owners([cause for cause, _ in claims], rows)
    for cause, claim in claims:
        mine = [name for name in cause.rows if owner.get(name) == cause.name]
        owned = sum(rows[name].quantile_s for name in mine)
        owned_mean = sum(rows[name].mean_s for name in mine)
        share = owned / moved[0] if moved[0] else 0.0
        share_mean = owned_mean / moved[1] if moved[1] else 0.0
        best = share_mean if judged.by_mean else share
        if best < MATERIAL:
            size = signed(owned_mean if judged.by_mean else owned)
            because = f"it owns {size} of the change ({percent(best)}), less than {percent(MATERIAL)}"
            others = sorted({owner[name] for name in cause.rows if name in owner} - {cause.name})
            if others:
                because = f"its seconds follow from {listing(others)}; " + because
            excluded.append({"cause": cause.name, "because": because})
            continue
        ranked.append((best, cause, claim))
    ranked.sort(key=lambda item: (-item[0], item[1].name))
    support = _support(case.attribution, [cause for _, cause, _ in ranked], owner, judged)
    factor = quality.penalty(checks)
    named = []
    for position, (_, cause, claim) in enumerate(ranked):
        confidence = min(1.0, support[position]) * claim.strength * factor
        if not judged.requested.enough:
            confidence = min(confidence, CAP_WHEN_FEW)
        mine = [name for name in cause.rows if owner.get(name) == cause.name]
        tail = sum(p99[name].quantile_s for name in mine if name in p99)
        named.append(
            NamedCause(
                cause=cause.name,
                rows=mine,
                summary=cause.summary(),
                subject={"kind": claim.subject[0], "id": claim.subject[1]},
                interval=_interval_ns(claim, case.suspect),
                share_p99=tail / delta.p99_s if delta.p99_s else 0.0,
                mean_s=sum(rows[name].mean_s for name in mine),
                p99_s=tail,
                confidence=round(confidence, 4),
                confidence_word=confidence_word(confidence),
                evidence=[to_json(e) for e in claim.evidence],
                refuted_by=cause.paragraph("Refuted by"),
                remedy=cause.remedies(),
            )
        )
    return named, excluded


def _owners(causes: Sequence[Cause], rows: Mapping[str, Any]) -> dict[str, str]:
    """Which claiming cause owns each row: a second is blamed once. The cause that explains more of the rows comes first."""
    owner: dict[str, str] = {}
    for cause in sorted(causes, key=lambda c: (-len(c.rows), c.name)):
        for name in cause.rows:
            if name in rows:
                owner.setdefault(name, cause.name)
    return owner


def _support(
    attribution: Attribution, ranked: Sequence[Cause], owner: Mapping[str, str], judged: Judged
) -> list[float]:
    """Bootstrap support of each ranked cause: how often the first one ranks first, and the others are material."""
    draws = attribution.draws_mean if judged.by_mean else attribution.draws
    if not ranked or len(draws) == 0:
        return [0.0] * len(ranked)
    names = [row.name for row in attribution.rows]
    sign = np.sign(attribution.delta_mean_s if judged.by_mean else attribution.delta_quantile_s)
    owned = np.stack(
        [draws[:, [owner.get(name) == cause.name for name in names]].sum(axis=1) * sign for cause in ranked], axis=1
    )
    total = draws.sum(axis=1) * sign
    if not judged.by_mean:
        total = total + attribution.draws_dependence * sign
    material = (owned >= MATERIAL * total[:, None]) & (owned > 0)
    first = (owned.argmax(axis=1) == 0) & material[:, 0]
    return [float(first.mean()), *(float(m) for m in material[:, 1:].mean(axis=0))]


def judged_change(case: Case, judged: Judged) -> tuple[float, float]:
    """(change of the judged quantile, change of the mean) at the common mix."""
    return case.attribution.delta_quantile_s, case.attribution.delta_mean_s


def _interval_ns(claim: Claim, facts: Facts) -> dict[str, int] | None:
    if claim.interval_s is None:
        return None
    origin = facts.requests.origin_ns
    start, end = claim.interval_s
    return {"start_ns": origin + int(start * 1e9), "end_ns": origin + int(end * 1e9)}
