"""Windows that were served by different models: what a request costs is then another thing, whatever the engine did.

Invariant: models are only held to differ where both windows tell theirs and have none in common. What workers serve counts before what
requests name: adapters of one model, and other names for it, are no other model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from diagnosis.facts import Facts
from diagnosis.telling.verdict import NamedCause, confidence_word
from diagnosis.telling.wording import listing

MOST_NAMED = 3
"""Models of a window that are named in a sentence."""
CAP = 0.49
"""Most confidence of a cause between windows of different models: low."""


def other_models(base: Facts, suspect: Facts) -> tuple[str, str] | None:
    """(models of the baseline, of the suspect window) in words; None where they have one in common, or do not tell."""
    of_workers = [frozenset(w.model for w in facts.workers if w.model) for facts in (base, suspect)]
    told = of_workers if all(of_workers) else [base.asked_models, suspect.asked_models]
    if not all(told) or told[0] & told[1]:
        return None
    return _words(told[0]), _words(told[1])


def tentative(causes: Sequence[NamedCause]) -> list[NamedCause]:
    """The causes with no more confidence than one can have between windows of different models."""
    capped = [min(cause.confidence, CAP) for cause in causes]
    return [
        replace(cause, confidence=most, confidence_word=confidence_word(most), tentative=True)
        for cause, most in zip(causes, capped, strict=True)
    ]


def _words(names: frozenset[str]) -> str:
    known = sorted(names)
    more = [f"{len(known) - MOST_NAMED} more"] if len(known) > MOST_NAMED else []
    return listing([*known[:MOST_NAMED], *more])
