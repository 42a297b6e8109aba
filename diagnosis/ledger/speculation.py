"""Tokens that a decode step gives a sequence: one, and the drafts that it accepts."""

from __future__ import annotations

import numpy as np

from diagnosis.facts import F64, Facts


def tokens_per_step(facts: Facts) -> float | None:
    """Of the requests that tell what was accepted; None where none does, or none decoded."""
    r = facts.requests
    output, accepted = r.get("output_tokens"), r.get("accepted_tokens")
    known = np.isfinite(output) & np.isfinite(accepted) & (output > 1)
    steps = float((output - 1 - accepted)[known].sum())
    return float((output - 1)[known].sum()) / steps if steps > 0 else None


def acceptance(facts: Facts) -> float | None:
    """Share of the drafted tokens that were accepted; None where nobody drafted, or tells."""
    r = facts.requests
    drafted, accepted = r.get("draft_tokens"), r.get("accepted_tokens")
    known = np.isfinite(drafted) & np.isfinite(accepted)
    total = float(drafted[known].sum())
    return float(accepted[known].sum()) / total if total > 0 else None


def refused_share(facts: Facts, other: Facts) -> F64:
    """[n] share of each request's decode steps that drafts would have saved, were as many accepted as in `other`."""
    r, there = facts.requests, tokens_per_step(other)
    if there is None or tokens_per_step(facts) is None:
        return np.zeros(len(r))
    decoded = np.nan_to_num(r.get("output_tokens")) - 1
    steps = decoded - np.nan_to_num(r.get("accepted_tokens"), nan=0.0)
    known = np.isfinite(r.get("accepted_tokens")) & (decoded > 0) & (steps > 0)
    return np.where(known, np.clip(1.0 - decoded / there / np.where(steps > 0, steps, 1.0), 0.0, 1.0), 0.0)
