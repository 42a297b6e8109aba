"""Did requests get the right tokens? Rows of the kind `check` tell; a fast wrong answer is no answer."""

from __future__ import annotations

from diagnosis.checks.check import NOTHING, Check, is_rare
from diagnosis.facts import Facts
from diagnosis.telling.wording import listing, number, percent

MEANS = {
    "sample_boundary": "tokens of one sample in another's stream, or lost or reordered on the way",
    "mask": "attention to tokens that must not be seen",
    "position": "positions that do not fit the tokens",
    "leakage": "one sample could see another",
}


def integrity(facts: Facts) -> Check | None:
    """Failed checks of batches and streams, by kind."""
    if not facts.integrity:
        return None
    failed = {name: bad for name, (_, bad) in facts.integrity.items() if bad}
    made = sum(num for num, _ in facts.integrity.values())
    if not failed:
        return Check("integrity", "ok", f"{facts.name}: {number(made)} checks of tokens were made, none failed")
    bad = sum(failed.values())
    # some report only what failed: then the requests are what was looked at
    share = bad / max(made, len(facts.requests), 1)
    said = listing([f"{number(count)} {name} ({MEANS.get(name, name)})" for name, count in sorted(failed.items())])
    return Check(
        "integrity",
        "warning" if is_rare(share) else "contradiction",
        f"{facts.name}: {number(bad)} checks of tokens failed ({percent(share)}): {said}; latency of wrong answers compares with nothing",
        "service",
        NOTHING,
        float(bad),
        "checks",
    )
