"""What speaks against a claim although it owns seconds: the rest of the ledger takes them back, or they grew with something else.

Two ideas. Slower steps take their share of the same decoding that a request's own tokens and a fuller batch take theirs of: where those
got shorter by as much, what was compared is not what requests met (steps that overlap, chunks of several tokens, requests that are not
recorded). And a router's fault that the baseline has to the same extent explains no rise where undisturbed prompts take longer at every
worker, or where more requests came: it costs more because of that.

Invariant: says nothing where it is not known; a cause that the baseline has not is never held back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diagnosis.attribution.passed_on import OF_ROUTER
from diagnosis.cause import Case
from diagnosis.facts import F64, Facts
from diagnosis.ledger.rows import ROWS
from diagnosis.statistics.judged import Judged
from diagnosis.telling.wording import listing, seconds

TAKEN_BACK = 0.5
"""Share of what slower steps would own that shorter decoding may take back; more is no gain of theirs."""
LEAST = 0.10
"""Quantile of seconds a prompt token: prompts that shared their steps with nobody."""
FEWEST = 30
"""Prompts of a worker before that is looked at."""
SLOWER = 1.15
"""Times the baseline's from which on undisturbed prompts are slower at a worker."""
AS_MUCH = 0.5
"""Share of the suspect window's seconds of a fault from which on the baseline has it to the same extent."""
SAME_SHARES = 0.05
"""Share of the requests that may go to other workers than before and routing still be as it was."""
BY_SHARES = frozenset(("hotspot_dead_signal", "hotspot_tie_breaking", "hotspot_affinity"))
"""Faults that lie in how many requests each worker gets."""


def against(cause: str, rows: Sequence[str], case: Case, judged: Judged, *, more_came: bool) -> str | None:
    """Why this claim on these rows is not established; None where nothing speaks against it.

    more_came   more requests came a worker and second
    """
    if "slow_steps" in rows:
        return _taken_back(case, judged)
    if cause not in OF_ROUTER or not _stands(case, cause):
        return None
    slower = slower_everywhere(case.base, case.suspect)
    if slower is not None:
        return (
            f"the {case.base_word} has it to the same extent, and prompts that nobody disturbs take {slower:.2f} times as long at every worker: "
            "what it costs more follows from that"
        )
    if more_came:
        return f"the {case.base_word} has it to the same extent, and more requests came: what it costs more follows from that"
    return None


def slower_everywhere(base: Facts, suspect: Facts) -> float | None:
    """How many times as long undisturbed prompts take at every worker of both windows; None where one is not slower, or too few tell."""
    before, now = _undisturbed(base), _undisturbed(suspect)
    ratios = [now[name] / before[name] for name in before.keys() & now.keys() if before[name] > 0]
    least = min(ratios, default=0.0)
    return least if least >= SLOWER else None


def _undisturbed(facts: Facts) -> dict[str | None, float]:
    """Seconds a computed prompt token of each worker's quickest prompts."""
    r = facts.requests
    computed, prompt = r.get("computed_tokens"), r.get("prompt_tokens")
    tokens = np.where(np.isfinite(computed), computed, prompt)
    rate = r.get("prefill_s") / np.where(tokens > 0, tokens, np.nan)
    out = {}
    for name, rows in zip(r.worker_names, r.by_worker(), strict=True):
        known = rate[rows][np.isfinite(rate[rows])]
        if len(known) >= FEWEST:
            out[name] = float(np.quantile(known, LEAST))
    return out


def _taken_back(case: Case, judged: Judged) -> str | None:
    """Of the judged size; where steps tell the batch, a fuller one is no guess, and less of it is a gain of its own."""
    known = {row.name: row.mean_s if judged.by_mean else row.quantile_s for row in case.attribution.rows}
    slower = known.get("slow_steps", 0.0)
    names = ("own_decode",) if case.model.source == "steps" else ("own_decode", "decode_bandwidth")
    back = {name: known[name] for name in names if known.get(name, 0.0) * slower < 0.0}
    left = slower + sum(known.get(name, 0.0) for name in names)
    if not back or left / slower > 1.0 - TAKEN_BACK:
        return None
    words = listing([f"{ROWS[name]} ({seconds(abs(took))})" for name, took in back.items()])
    return f"what it would own ({seconds(abs(slower))}) is taken back by {words}: requests did not decode slower by as much"


def _stands(case: Case, cause: str) -> bool:
    """Whether the baseline has this fault of the router to the same extent: as many seconds, or as large shares of the requests."""
    if case.base.routing is None or not any(spot.cause == cause for spot in case.base.routing.spots):
        return False
    before, now = (float(ledger.column(cause).mean()) for ledger in (case.base_ledger, case.suspect_ledger))
    return before >= AS_MUCH * now or (cause in BY_SHARES and _moved(case.base, case.suspect) <= SAME_SHARES)


def _moved(base: Facts, suspect: Facts) -> float:
    """Share of the requests that go to other workers than before, 0 to 1."""
    shares = [_shares(facts) for facts in (base, suspect)]
    names = shares[0].keys() | shares[1].keys()
    return 0.5 * sum(abs(shares[0].get(name, 0.0) - shares[1].get(name, 0.0)) for name in names)


def _shares(facts: Facts) -> dict[str | None, float]:
    r = facts.requests
    counts: F64 = np.bincount(r.worker[r.worker >= 0], minlength=len(r.worker_names)).astype(np.float64)
    return dict(zip(r.worker_names, (counts / max(float(counts.sum()), 1.0)).tolist(), strict=True))
