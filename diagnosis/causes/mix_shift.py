"""Other workloads or tenants than before."""

from __future__ import annotations

from collections import Counter

from diagnosis.attribution import shared_load
from diagnosis.cause import BY_MIX, Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.evidence_sql import request_sql, text
from diagnosis.statistics.dimensions import CATEGORIES, WORDS
from diagnosis.telling.wording import percent


@cause("mix_shift", needs=("request.workload|request.tenant|request.prompt_tokens",), rows=("mix_shift",))
def mix_shift(case: Case) -> Claim | Excluded | None:
    """The traffic changed: workloads or tenants have another share than before, and each has latencies of its own.

    Why: a percentile over all requests moves when a slow class becomes more frequent, although no class got slower.
    The windows are reweighted to a common mix, and what that takes away from the raw change is this row.

    Refuted by: the same change within each workload and tenant; shares that did not move.

    Remedy:
    - fleet: judge the service by targets for each workload and tenant, and give batch work workers of its own
    - application: find out why a tenant or workload grew; limit or spread it if it harms the others

    Experiment: compare the percentile within the class that grew (kvscope sql); it must be as in the baseline.
    """
    mix, case = case.mix, case.of_traffic()
    if mix is None:
        return None
    if case.traffic is None or case.traffic.row != "mix_shift":
        if not mix.dimension_shift:
            return None
        return Excluded(f"the mix of requests owns no row of its own (total variation {percent(mix.tv_distance)})")
    said = f"the mixes differ by {percent(mix.tv_distance)} (total variation)"
    evidence = [Evidence(said, mix.tv_distance, "ratio", computed_by=BY_MIX)]
    for name in CATEGORIES:
        if name in mix.moved:
            evidence.append(_grown(case, name))
    return Claim([*evidence, *shared_load.evidence(case)], _tenant(case))


def _grown(case: Case, name: str) -> Evidence:
    """The class of this dimension whose share moved most."""
    counts = [Counter(getattr(facts.requests, name)) for facts in (case.base, case.suspect)]
    sizes = [sum(c.values()) for c in counts]
    words = sorted(str(w) for w in set(counts[0]) | set(counts[1]) if w is not None)
    shares = {w: (counts[0][w] / sizes[0], counts[1][w] / sizes[1]) for w in words}
    word = max(words, key=lambda w: abs(shares[w][1] - shares[w][0]))
    then, now = shares[word]
    return Evidence(
        f"{WORDS[name]} {word!r} has {percent(now)} of the requests in the {case.suspect_word} ({percent(then)} in the {case.base_word})",
        now,
        "ratio",
        request_sql(case, case.suspect, f"avg(CASE WHEN {name} = {text(word)} THEN 1.0 ELSE 0.0 END) AS share"),
    )


def _tenant(case: Case) -> tuple[str, str | None]:
    """The tenant that grew most, where tenants are what moved."""
    if case.mix is None or "tenant" not in case.mix.moved:
        return "fleet", None
    r_b, r_s = case.base.requests, case.suspect.requests
    then, now = Counter(r_b.tenant), Counter(r_s.tenant)
    names = [t for t in now if t is not None]
    return "tenant", max(names, key=lambda t: (now[t] / len(r_s) - then[t] / len(r_b), t)) if names else None
