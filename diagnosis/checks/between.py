"""One window against the other: a hit counter that says what the times rule out.

Idea: where no request and no step tells what was reused, prefill does. The least disturbed requests (those of the lowest tenth in
seconds of prefill a prompt token) share their steps with nobody, so between two windows they move with what had to be computed, and
with the speed of the machine, which decoding shows too. A counter that drops to 0 of all look-ups while they stay where they were
lies; so does one that stays at 0 while they fall to a part. Where nobody tells prefill, TTFT stands in for it: beside the prompt it holds
a way that is always the same, so that less of a rise would show, and less is said of one that does not.
"""

from __future__ import annotations

import numpy as np

from diagnosis.checks.check import NUMBERS_OF_REUSE, Check
from diagnosis.checks.reuse import COUNTERS, was_read
from diagnosis.facts import F64, Facts
from diagnosis.telling.wording import number, percent

LEAST = 0.10
"""Quantile of prefill seconds a prompt token: requests that shared their steps with nobody."""
FEWEST = 50
"""Requests that tell their prefill, or their decoding, before the tenth that is least disturbed is looked at."""
HAD = 0.20
"""Hit rate of the other window from which on its loss must show in the times."""
SHOWN = 0.3
"""Share of the rise that a lost hit rate would bring, below which it was not lost."""
SHOWN_IN_TTFT = 0.1
"""The same where TTFT stands in: of a rise to several times the prefill something shows, unless prefill is next to nothing of it."""
FELL = 0.6
"""Ratio of prefill below which something was reused, whatever a counter at 0 says."""
SAME_PACE = 1.25
"""Decoding faster or slower by more than this is another machine, and prefill tells nothing."""


def hits_against_times(one: Facts, other: Facts) -> Check | None:
    """Whether the hit counter of `one`, which reads 0 of all look-ups, can be true by the times of both windows."""
    counted, asked = (one.samples.get(name) for name in COUNTERS)
    if counted != 0 or not asked or _tells(one) or not was_read(one):
        return None
    by_prefill = all(_least(facts, _prefill(facts)) is not None for facts in (one, other))
    mine, theirs = (_least(facts, _prefill(facts) if by_prefill else _ttft(facts)) for facts in (one, other))
    pace = _pace(one, other)
    if mine is None or not theirs or pace is None or not 1 / SAME_PACE <= pace <= SAME_PACE:
        return None
    ratio, word = mine / theirs, "prefill" if by_prefill else "the first token"
    rate = _hit_rate(other)
    said = (
        f"{one.name}: the hit counter reads 0 of {number(asked)} looked-up tokens, and {word} took {ratio:.2f} times what it took a prompt "
        f"token in {other.name}"
    )
    if rate is not None and rate >= HAD:
        expected = 1.0 / (1.0 - min(rate, 0.95))
        lies = ratio < 1.0 + (SHOWN if by_prefill else SHOWN_IN_TTFT) * (expected - 1.0)
        said += (
            f", where {percent(rate)} were hits (without them prefill would take about {expected:.1f} times as long)"
        )
    else:
        lies = ratio < FELL
        said += ", where nothing was found either"
    if not lies:
        return Check("hits_against_times", "ok", said + "; the times bear the counter out", "telemetry")
    return Check(
        "hits_against_times" if by_prefill else "hits_against_ttft",
        "contradiction",
        said
        + ": the counter is not telling the truth"
        + ("" if by_prefill else ", or prefill is next to nothing of TTFT"),
        "telemetry",
        NUMBERS_OF_REUSE["counter"] | {"request.computed_tokens"},
        ratio,
        "times",
    )


def _tells(facts: Facts) -> bool:
    """Whether requests themselves say what they found."""
    return bool(np.isfinite(facts.requests.get("cached_tokens")).any())


def _hit_rate(facts: Facts) -> float | None:
    r = facts.requests
    cached, prompt = r.get("cached_tokens"), r.get("prompt_tokens")
    known = np.isfinite(cached) & np.isfinite(prompt)
    if float(prompt[known].sum()) > 0:
        return float(cached[known].sum() / prompt[known].sum())
    counted, asked = (facts.samples.get(name) for name in COUNTERS)
    return counted / asked if asked and counted is not None else None


def _prefill(facts: Facts) -> F64:
    return facts.requests.get("prefill_s")


def _ttft(facts: Facts) -> F64:
    return facts.requests.first_token_s - facts.requests.arrival_s


def _least(facts: Facts, seconds: F64) -> float | None:
    """Seconds a prompt token of the least disturbed requests; None where too few tell."""
    prompt = facts.requests.get("prompt_tokens")
    rate = seconds / np.where(prompt > 0, prompt, np.nan)
    rate = rate[np.isfinite(rate) & (rate >= 0)]
    return float(np.quantile(rate, LEAST)) if len(rate) >= FEWEST else None


def _pace(one: Facts, other: Facts) -> float | None:
    """How much longer a decoded token takes in `one`: its fastest tenth of requests against that of `other`; None unknown."""
    paces = []
    for facts in (one, other):
        r = facts.requests
        tokens = r.get("output_tokens")
        each = (r.last_token_s - r.first_token_s) / np.where(tokens > 1, tokens - 1, np.nan)
        each = each[np.isfinite(each) & (each > 0)]
        if len(each) < FEWEST:
            return None
        paces.append(float(np.quantile(each, LEAST)))
    return paces[0] / paces[1]
