"""Prompts or answers got longer or shorter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diagnosis.attribution import shared_load
from diagnosis.calibration import all_reached
from diagnosis.cause import BY_CALIBRATION, Case, Claim, Evidence, Excluded, cause
from diagnosis.causes.load_step import GROWTH, STANDS_OUT, growth_z, rates_a_worker
from diagnosis.claims.apart import rows_of_lengths
from diagnosis.claims.evidence_sql import request_sql
from diagnosis.statistics.dimensions import LENGTHS, WORDS
from diagnosis.telling.wording import number, percent

BY_STEPS = 0.75
"""What equal steps are worth where no two requests can be compared: what only long ones do in them is not among those."""


@cause("length_shift", needs=("request.prompt_tokens|request.output_tokens",), rows=("length_shift",))
def length_shift(case: Case) -> Claim | Excluded | None:
    """The traffic changed: prompts or answers have other lengths than before, and length alone costs time.

    Why: prefill grows with the prompt and decoding with the answer; the engine serves a request of a given length as before.
    The windows are reweighted to a common mix, and what that takes away from the raw change is this row. Where they have no length in
    common, it is told by the steps: if those of the same work took as long as before, longer requests own what they do and what others
    wait for them.

    Refuted by: the same change among requests of equal length; lengths that did not move.

    Remedy:
    - application: find what makes prompts or answers longer (history growth, RAG top-k, tools, a new template) and cap it; set max_tokens
    - fleet: judge the service by targets for each class of length, or send long requests to workers of their own

    Experiment: compare the percentile among requests of one length class (kvscope sql); it must be as in the baseline.
    """
    mix = case.mix
    if mix is None:
        return None
    if case.apart:
        rows = rows_of_lengths(case)
        return (
            None
            if rows is None
            else Claim([*_lengths(case, case.apart), _pace(case), *_arrivals(case)], strength=BY_STEPS, rows=rows)
        )
    if case.traffic is None or case.traffic.row != "length_shift":
        moved = [
            f"{WORDS[name]} by {percent(mix.dimension_shift[name])}" for name in LENGTHS if name in mix.dimension_shift
        ]
        if not moved:
            return None
        return Excluded(f"lengths did not move materially (total variation: {', '.join(moved)})")
    as_it_went = case.exchanged() if case.ended else case
    return Claim([*_lengths(as_it_went, mix.moved), *shared_load.evidence(case)])


def _lengths(case: Case, moved: Sequence[str]) -> list[Evidence]:
    """Mean lengths of both windows, of those that moved."""
    evidence = []
    for name in LENGTHS:
        now, then = case.suspect.requests.get(name), case.base.requests.get(name)
        if np.isfinite(now).any() and np.isfinite(then).any() and name in moved:
            mean, before = float(np.nanmean(now)), float(np.nanmean(then))
            evidence.append(
                Evidence(
                    f"mean {WORDS[name]} in the {case.suspect_word}: {number(mean)} tokens ({number(before)} in the {case.base_word})",
                    mean,
                    "tokens",
                    request_sql(case, case.suspect, f"avg({name}) AS mean_tokens", name),
                )
            )
    return evidence


def _arrivals(case: Case) -> list[Evidence]:
    """That more requests came too: where no two can be compared, what waits for lengths and what waits for numbers is not told apart."""
    before, now = rates_a_worker(case.base, case.suspect)
    if now <= before or not all_reached((GROWTH, now / before - 1.0), (STANDS_OUT, growth_z(case.base, case.suspect))):
        return []
    return [
        Evidence(
            f"arrivals at each worker grew too, from {number(before)} to {number(now)} requests/s ({now / before - 1.0:+.0%}): part of the waiting "
            "is the load's, and how much cannot be told apart here",
            now / before - 1.0,
            "relative",
            computed_by="the requests' arrivals",
        )
    ]


def _pace(case: Case) -> Evidence:
    """That the engine was as fast as before, although no request of one window is like one of the other."""
    model = case.model
    return Evidence(
        f"no request of one window is as long as one of the other, but steps with the same work took {percent(model.slow_raw or 1.0)} of the "
        f"{case.base_word}'s time (by {number(model.num_compared)} {'steps' if model.source == 'steps' else 'gaps'})",
        model.slow_raw,
        "ratio",
        computed_by=BY_CALIBRATION,
    )
