"""One window against the other: a hit counter that says what the times rule out.

Idea: where no request and no step tells what was reused, prefill does. The least disturbed requests (those of the lowest tenth in
seconds of prefill a prompt token) share their steps with nobody, so between two windows they move with what had to be computed, and
with the speed of the machine, which decoding shows too. A counter that drops to 0 of all look-ups while they stay where they were
lies; so does one that finds nothing once caching is switched on, while they fall to a part. Else a prefill that moved is no witness: it is
another kernel's as well as a cache's, and decoding alike does not tell the two apart. Where nobody tells prefill, TTFT stands in for it:
beside the prompt it holds a way, so that less of a rise would show.
"""

from __future__ import annotations

import numpy as np

from diagnosis.checks.check import NUMBERS_OF_REUSE, Check
from diagnosis.checks.reuse import COUNTERS, found_outside, says_off, was_read, witnesses
from diagnosis.facts import F64, Facts
from diagnosis.telling.wording import number, percent

LEAST = 0.10
"""Quantile of prefill seconds a prompt token: requests that shared their steps with nobody."""
FEWEST = 50
"""Requests that tell their prefill, or their decoding, before the tenth that is least disturbed is looked at."""
HAD = 0.20
"""Hit rate of the other window from which on its loss must show in the times."""
STAYED = 0.1
"""Share of the rise that a lost hit rate would bring, below which prefill stayed where it was."""
SHOWN = 0.3
"""The same, from which on the times bear the loss out; TTFT holds more than prefill, so that in it `STAYED` is enough."""
FELL = 0.45
"""Ratio of prefill below which something is reused once caching was switched on: less than another kernel alone makes of it."""
SAME = 1.25
"""Decoding faster or slower by more than this is another machine, prompts longer or shorter another load: prefill tells nothing then."""
SAME_MACHINE = 1.05
"""Decoding within this is that of the same engine, where a fall of prefill is to be the cache's."""


def hits_against_times(one: Facts, other: Facts) -> Check | None:
    """Whether the hit counter of `one`, which reads 0 of all look-ups, can be true by the times of both windows."""
    counted, asked = (one.samples.get(name) for name in COUNTERS)
    if counted != 0 or not asked or not was_read(one) or witnesses(one) or found_outside(one) or found_outside(other):
        return None
    by_prefill = all(_least(facts, _prefill(facts)) is not None for facts in (one, other))
    mine, theirs = (_least(facts, _prefill(facts) if by_prefill else _ttft(facts)) for facts in (one, other))
    pace, length = _pace(one, other), _length(one, other)
    if mine is None or not theirs or pace is None or not all(1 / SAME <= each <= SAME for each in (pace, length)):
        return None
    ratio, word = mine / theirs, "prefill" if by_prefill else "the first token"
    rate = _hit_rate(other)
    said = (
        f"{one.name}: the hit counter reads 0 of {number(asked)} looked-up tokens, and {word} took {ratio:.2f} times what it took a prompt "
        f"token in {other.name}"
    )
    if rate is not None and rate >= HAD:
        expected = 1.0 / (1.0 - min(rate, 0.95))
        rise = (ratio - 1.0) / (expected - 1.0)
        lies, bears_out = ratio >= 1 / SAME and rise < STAYED, rise >= (SHOWN if by_prefill else STAYED)
        said += (
            f", where {percent(rate)} were hits (without them prefill would take about {expected:.1f} times as long)"
        )
    elif says_off(other) or other.samples.get(COUNTERS[1]) == 0:
        lies, bears_out = ratio < FELL and 1 / SAME_MACHINE <= pace <= SAME_MACHINE, ratio >= 1 / SAME
        said += ", where nothing was looked up"
    else:
        lies, bears_out = False, 1 / SAME <= ratio <= SAME
        said += ", where nothing was found either" if rate is not None else ", where nobody tells what was found"
    if not lies:
        end = (
            "; the times bear the counter out"
            if bears_out
            else "; whether a cache or a faster prefill made the difference cannot be told"
        )
        return Check("hits_against_times", "ok", said + end, "telemetry")
    return Check(
        "hits_against_times" if by_prefill else "hits_against_ttft",
        "contradiction",
        said
        + ": the counter is not telling the truth, or "
        + ("prefill became faster by as much" if by_prefill else "prefill is next to nothing of TTFT"),
        "telemetry",
        NUMBERS_OF_REUSE["counter"] | {"request.computed_tokens"},
        ratio,
        "times",
    )


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


def _length(one: Facts, other: Facts) -> float:
    """How much longer the median prompt is in `one`; both have enough of them."""
    mine, theirs = (float(np.nanmedian(facts.requests.get("prompt_tokens"))) for facts in (one, other))
    return mine / theirs


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
