"""Causes that are about what is told and not about what was done: they own no seconds, and are named where they are the answer.

A contradiction stands in `quality` in any case. It is the answer where nobody else is named: then what looked like a change is one
of the telemetry. Beside a cause of the engine it is named only where that cause rests on the numbers that contradict each other,
and after it. Invariant: it never takes a second, or a rank, from a cause that owns some.
"""

from __future__ import annotations

from collections.abc import Sequence

from diagnosis.cause import Case, Cause, Claim, all_causes, to_json
from diagnosis.checks.check import Check
from diagnosis.telling.verdict import NamedCause, confidence_word

Claims = Sequence[tuple[Cause, Claim]]
ABOUT = {"telemetry_contradiction": "telemetry", "clock_skew": "clock"}
"""What the checks behind each of them are about."""


def of_engine(claims: Claims) -> list[tuple[Cause, Claim]]:
    """Claims of causes that can own seconds."""
    return [(cause, claim) for cause, claim in claims if cause.rows]


def answers(claims: Claims, named: Sequence[NamedCause], case: Case) -> tuple[list[NamedCause], list[dict[str, str]]]:
    """(causes of the telemetry that are named beside these, exclusions of the others)."""
    found: list[NamedCause] = []
    excluded: list[dict[str, str]] = []
    known = all_causes()
    needs = [known[one.cause].needs for one in named]
    for cause, claim in claims:
        if cause.rows:
            continue
        wrong = [check for check in case.checks if check.contradicts and check.about == ABOUT.get(cause.name)]
        rests = any(check.is_under(need) for check in wrong for need in needs)
        if named and not rests:
            because = (
                f"it stands in the data quality ({len(wrong)} contradictions), and {named[0].cause} does not rest on it"
            )
            excluded.append({"cause": cause.name, "because": because})
            continue
        found.append(_named(cause, claim))
    return sorted(found, key=lambda one: (-one.confidence, one.cause)), excluded


def sentence(named: Sequence[NamedCause], checks: Sequence[Check]) -> str:
    """What is said after the verdict where a cause of the telemetry is named; empty where none is."""
    about = [ABOUT[one.cause] for one in named if one.cause in ABOUT]
    said = [check.statement for check in checks if check.contradicts and check.about in about]
    if not said:
        return ""
    more = f" ({len(said) - 1} more in the data quality)" if len(said) > 1 else ""
    return f" What is told contradicts itself: {said[0]}{more}."


def _named(cause: Cause, claim: Claim) -> NamedCause:
    return NamedCause(
        cause=cause.name,
        rows=[],
        summary=cause.summary(),
        subject={"kind": claim.subject[0], "id": claim.subject[1]},
        interval=None,
        share_p99=None,
        mean_s=0.0,
        p99_s=0.0,
        confidence=claim.strength,
        confidence_word=confidence_word(claim.strength),
        evidence=[to_json(evidence) for evidence in claim.evidence],
        refuted_by=cause.paragraph("Refuted by"),
        remedy=[*claim.advice, *cause.remedies()],
    )
