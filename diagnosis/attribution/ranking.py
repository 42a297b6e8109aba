"""Who is blamed: causes are asked, rows get one owner, claims are ranked, and how sure the ranking is comes from the bootstrap.

Invariant: a second is blamed once; a claim that owns less than `MATERIAL` of the change is an exclusion with its number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from diagnosis import quality
from diagnosis.attribution.passed_on import follows
from diagnosis.attribution.shapley import Attribution, Row
from diagnosis.attribution.standing import against, slower_everywhere
from diagnosis.attribution.traffic import Traffic
from diagnosis.calibration import stated
from diagnosis.cause import MATERIAL, Case, Cause, Claim, Evidence, Excluded, all_causes, to_json
from diagnosis.causes.load_step import GROWTH, rates_a_worker
from diagnosis.checks.check import Check
from diagnosis.claims.onset import began
from diagnosis.facts import Facts
from diagnosis.ledger.rows import ROWS
from diagnosis.statistics.judged import Judged
from diagnosis.telling.movement import only_tail, suspicious
from diagnosis.telling.verdict import Change, LedgerRow, NamedCause, confidence_word
from diagnosis.telling.wording import listing, percent, signed
from diagnosis.telling.wording import seconds as in_seconds

DUST_S = 1e-9
"""Below a nanosecond, the clocks' own step, nothing changed."""
MOST = 0.5
"""Share of the change from which on a cause that the baseline has not may be named, although few requests carry the change."""
OVER = "What the baseline had and is over: "
NOTHING_TO_DO = "nothing: the baseline had it, the suspect window has not"
CHEAPER = "nothing: these requests take less than the baseline's did"
CAP_WHEN_TENTATIVE = 0.49
"""Most confidence where the change itself is large but not established, or not by enough to accuse what both windows have: low."""
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
            claims.append((cause if answer.rows is None else replace(cause, rows=answer.rows), answer))
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
    checks: Sequence[Check],
    rows: Sequence[LedgerRow],
    delta: Change,
) -> tuple[list[NamedCause], list[dict[str, str]]]:
    """Claims that own a material part of the change in its direction, most seconds first; the others become exclusions.

    Causes of the engine are measured against the change at the common mix, the traffic's own row against the raw change.
    """
    known = {row.name: row for row in case.attribution.rows}
    p99 = {row.cause: row for row in rows}
    tentative = not judged.changed and suspicious(case)
    by_tail = only_tail(case, judged, delta)
    owner = _owners([cause for cause, _ in claims], {row.cause: row for row in rows})
    excluded: list[dict[str, str]] = []
    kept: list[_Owned] = []
    more_came = any(cause.name == "load_step" for cause, _ in claims)
    for cause, claim in claims:
        mine = [name for name in cause.rows if owner.get(name) == cause.name]
        if case.traffic is not None and case.traffic.row in mine:
            found = _of_traffic(cause, claim, mine, case.traffic, judged)
        elif by_tail:
            found = _of_tail(cause, claim, mine, p99, case, judged)
        else:
            found = _of_engine(cause, claim, mine, known, case, judged, stands=judged.changed or tentative)
        doubt = against(cause.name, mine, case, judged, more_came=more_came) if found.share >= MATERIAL else None
        if doubt is not None:  # what it claimed may follow from another
            owner = {name: who for name, who in owner.items() if who != cause.name}
            excluded.append({"cause": cause.name, "because": doubt})
        elif found.stands and (found.share >= MATERIAL or (found.share > 0.0 and _fills_steps(mine, case))):
            kept.append(found)
        else:
            excluded.append(_excluded(found, owner))
    kept = kept if by_tail else _with_what_follows(kept, owner, case, judged, more_came=more_came)
    excluded += [_excluded(found, owner) for found in kept if found.share < MATERIAL]
    kept = [found for found in kept if found.share >= MATERIAL]
    kept.sort(key=lambda found: (-abs(found.seconds), found.cause.name))
    support = _support(case.attribution, [f.cause for f in kept if f.support is None], owner, judged)
    named = []
    for found in kept:
        sure = support.pop(0) if found.support is None else found.support
        certainty = min(1.0, sure) * found.claim.strength * quality.penalty(checks, found.cause.needs)
        is_new = found.share >= MOST and (found.claim.began or began(case, found.rows))
        cap = 1.0 if judged.requested.enough and not tentative else CAP_WHEN_FEW
        # a change of traffic has evidence of its own: that the mixes differ
        is_sure = found.claim.is_sure or found.support is not None
        is_guess = not is_new and (tentative or (judged.changed and not judged.sure and not is_sure))
        cap = CAP_WHEN_TENTATIVE if is_guess else cap
        named.append(
            _named(found, certainty, min(stated(certainty), cap), case, p99, delta, began=is_new, is_guess=is_guess)
        )
    return named, excluded


def _fills_steps(mine: Sequence[str], case: Case) -> bool:
    """Whether these rows are the traffic's, and its requests ask for so much more that what waits for them may be most of it."""
    return case.traffic is not None and case.traffic.row in mine and case.traffic.fills_steps


def _excluded(found: _Owned, owner: Mapping[str, str]) -> dict[str, str]:
    """Why a claim is no cause, with its number."""
    because = f"it owns {signed(found.seconds)} of the change ({percent(found.share)}), less than {percent(MATERIAL)}"
    if found.share >= MATERIAL:
        because = f"it would own {signed(found.seconds)}, but that change is not beyond noise"
    others = sorted({owner[name] for name in found.cause.rows if name in owner} - {found.cause.name})
    if others:
        because = f"its seconds follow from {listing(others)}; " + because
    return {"cause": found.cause.name, "because": because}


@dataclass(frozen=True, slots=True)
class _Owned:
    """What a claiming cause owns: seconds and share of the change that carries the verdict.

    stands    that change is beyond noise
    support   how sure the share is, where the bootstrap of the attribution does not tell
    """

    cause: Cause
    claim: Claim
    rows: list[str]
    seconds: float
    share: float
    stands: bool
    support: float | None = None


def _of_engine(
    cause: Cause,
    claim: Claim,
    mine: list[str],
    known: Mapping[str, Row],
    case: Case,
    judged: Judged,
    *,
    stands: bool,
) -> _Owned:
    moved_s, moved_mean_s = case.attribution.delta_quantile_s, case.attribution.delta_mean_s
    rows = [known[name] for name in mine if name in known]
    if judged.by_mean:
        seconds, moved = sum(row.mean_s for row in rows), moved_mean_s
    else:
        seconds, moved = sum(row.quantile_s for row in rows), moved_s
    # seconds too small to print are dust, not a share
    share = seconds / moved if abs(moved) > DUST_S else 0.0
    return _Owned(cause, claim, mine, seconds, share, stands)


def _of_tail(
    cause: Cause, claim: Claim, mine: list[str], rows: Mapping[str, LedgerRow], case: Case, judged: Judged
) -> _Owned:
    """Of the quantile that was asked for, where it alone moved and has no interval: it stands where it began and owns most of that."""
    seconds, moved = sum(rows[name].p99_s for name in mine if name in rows), judged.requested.delta_s
    share = seconds / moved if abs(moved) > DUST_S else 0.0
    stands = share >= MOST and (claim.began or began(case, mine))
    return _Owned(cause, claim, mine, seconds, share, stands, support=1.0)  # it is counted: no draw tells more


def _of_traffic(cause: Cause, claim: Claim, mine: list[str], traffic: Traffic, judged: Judged) -> _Owned:
    """Of the raw change of the mean where the mean carries the verdict on the engine: a share of the one is none of the other."""
    by_mean = traffic.by_mean or (judged.changed and judged.by_mean)
    seconds = traffic.mean_s if by_mean else traffic.quantile_s
    moved = traffic.raw_mean_s if by_mean else traffic.raw_quantile_s
    share = seconds / moved if abs(moved) > DUST_S else 0.0
    # a mix that moves the mean and the quantile to opposite sides owns a tail at most
    stands = traffic.changed and (traffic.mean_s * traffic.quantile_s >= 0 or share >= MOST)
    return _Owned(cause, claim, mine, seconds, share, stands, 1.0 - traffic.p_value)


def _with_what_follows(
    kept: Sequence[_Owned], owner: dict[str, str], case: Case, judged: Judged, *, more_came: bool
) -> list[_Owned]:
    """The same, one of them with the ordinary queueing that follows from it (`passed_on`); the owner's book is told."""
    found = follows(
        {each.cause.name: each.seconds for each in kept},
        {each.cause.name: each.rows for each in kept},
        owner,
        case.attribution.rows,
        by_mean=judged.by_mean,
        same_kind=case.mix is not None and not case.mix.shifted and "prompt_tokens" in case.mix.dimension_shift,
        more_came=more_came,
        slower_everywhere=slower_everywhere(case.base, case.suspect) is not None,
    )
    if found is None:
        return list(kept)
    name, rows = found
    owner.update(dict.fromkeys(rows, name))
    known = {row.name: row for row in case.attribution.rows}
    more = sum(known[row].mean_s if judged.by_mean else known[row].quantile_s for row in rows)
    words = listing([ROWS[row] for row in rows])
    largest = max(rows, key=lambda row: abs(known[row].mean_s))
    with_it = {each.cause.name: each.seconds for each in kept}[name] * more >= 0
    before, now = rates_a_worker(case.base, case.suspect)
    why = "" if more_came or now / before - 1.0 >= GROWTH.value else ", for no more requests came"
    how = f"of it followed from this{why}" if with_it else "less were waited because of this"
    said = Evidence(
        f"{in_seconds(abs(more))} {how}: {words}",
        more,
        "s",
        request_ids=case.worst_requests(largest),
    )
    return [
        replace(
            each,
            claim=replace(each.claim, evidence=[*each.claim.evidence, said]),
            rows=[*each.rows, *rows],
            seconds=each.seconds + more,
            share=each.share * (1.0 + more / each.seconds),
        )
        if each.cause.name == name
        else each
        for each in kept
    ]


def _named(
    found: _Owned,
    certainty: float,
    confidence: float,
    case: Case,
    rows: Mapping[str, LedgerRow],
    delta: Change,
    *,
    began: bool,
    is_guess: bool,
) -> NamedCause:
    mine = [rows[name] for name in found.rows if name in rows]
    tail = sum(row.p99_s for row in mine)
    cause, is_traffic = found.cause, case.traffic is not None and case.traffic.row in found.rows
    asked = case.of_traffic() if is_traffic else case
    nothing = CHEAPER if is_traffic else NOTHING_TO_DO
    # a share of a change that went the other way, or nowhere, is no share
    aligned = abs(delta.p99_s) > DUST_S and (delta.p99_s > 0) == (found.seconds > 0)
    return NamedCause(
        cause=cause.name,
        rows=found.rows,
        summary=(OVER if asked.ended and not is_traffic else "") + cause.summary(),
        subject={"kind": found.claim.subject[0], "id": found.claim.subject[1]},
        interval=_interval_ns(found.claim, asked.suspect),
        share_p99=tail / delta.p99_s if aligned else None,
        mean_s=sum(row.mean_s for row in mine),
        p99_s=tail,
        confidence=round(confidence, 4),
        confidence_word=confidence_word(confidence),
        evidence=[to_json(e) for e in found.claim.evidence],
        refuted_by=cause.paragraph("Refuted by"),
        remedy=[nothing] if asked.ended else [*found.claim.advice, *cause.remedies()],
        ended=asked.ended,
        certainty=round(certainty, 4),
        began=began,
        tentative=is_guess,
    )


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


def _interval_ns(claim: Claim, facts: Facts) -> dict[str, int] | None:
    if claim.interval_s is None:
        return None
    origin = facts.requests.origin_ns
    start, end = claim.interval_s
    return {"start_ns": origin + int(start * 1e9), "end_ns": origin + int(end * 1e9)}
