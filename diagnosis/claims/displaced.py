"""Whose prompts were pushed out of the cache and for whom: tenants and prefixes by their share of what was computed again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from diagnosis.cause import BY_CHAINS, Case, Evidence
from diagnosis.facts import F64, Facts, LineageFacts, Obj
from diagnosis.ledger.tiers import token_cost_s
from diagnosis.sampled import rate_of
from diagnosis.telling.wording import listing, number, percent, seconds

MOST: Final = 0.8
"""Share of what was computed again from which on one tenant is the subject."""
SHOWN: Final = 3
"""Tenants or prefixes that a statement names."""


def displaced(case: Case, lineage: LineageFacts) -> list[Evidence]:
    """For whom blocks were evicted, whose they were, and the seconds that would be saved; nothing of what is not told."""
    requests, lost = case.suspect.requests, lineage.evicted_tokens
    told = [_by_whom(case, lineage)]
    told.append(_ranked(case, "they were prompts of", "tenant", lost, requests.tenant))
    told.append(_ranked(case, "they began with", "prefix", lost, requests.prefix))
    told.append(_avoidable(case, lineage))
    return [evidence for evidence in told if evidence is not None]


def evicting_tenant(facts: Facts) -> str | None:
    """The tenant, one of several, whose requests evicted most of what was computed again; None where there is no such, or nobody tells."""
    lineage = facts.lineage
    if lineage is None or lineage.evicted_by is None or len({t for t in facts.requests.tenant if t is not None}) < 2:
        return None
    found = shares(lineage.evicted_tokens, lineage.evicted_by)
    return str(found[0][0]) if found and found[0][1] >= MOST else None


def shares(tokens: F64, owner: Obj) -> list[tuple[Any, float]]:
    """(owner, its share of the tokens whose owner is told), the largest first; tokens and owner [n]."""
    total: dict[Any, float] = {}
    for i in np.flatnonzero(tokens > 0).tolist():
        if owner[i] is not None:
            total[owner[i]] = total.get(owner[i], 0.0) + float(tokens[i])
    whole = sum(total.values())
    return [(name, t / whole) for name, t in sorted(total.items(), key=lambda item: (-item[1], str(item[0])))]


def _by_whom(case: Case, lineage: LineageFacts) -> Evidence | None:
    if lineage.evicted_by is None:
        return None
    ago = lineage.evicted_ago_s
    when = "" if ago is None else f" (in the median {seconds(ago)} before they were asked for)"
    says = f"the blocks at which chains broke were evicted{when} for"
    return _ranked(case, says, "tenant", lineage.evicted_tokens, lineage.evicted_by)


def _ranked(case: Case, says: str, kind: str, tokens: F64, owner: Obj) -> Evidence | None:
    found = shares(tokens, owner)
    if not found:
        return None
    first, share = found[0]
    words = [f"{_name(kind, name)} {percent(part)}" for name, part in found[:SHOWN]]
    rest = len(found) - SHOWN
    more = [f"{number(rest)} more {percent(1.0 - sum(part for _, part in found[:SHOWN]))}"] if rest > 0 else []
    return Evidence(
        f"of what was computed again, {says} {listing([*words, *more])}",
        share,
        "ratio",
        None,
        _most(case, tokens, owner, first),
        BY_CHAINS,
    )


def _name(kind: str, name: Any) -> str:
    return f"prefix {int(name):016x}" if kind == "prefix" and not isinstance(name, str) else f"{kind} '{name}'"


def _most(case: Case, tokens: F64, owner: Obj, name: Any, limit: int = 5) -> Sequence[str]:
    """Requests of this owner that computed most of it again."""
    mine = np.where(np.array([told == name for told in owner], dtype=bool), tokens, 0.0)
    order = np.argsort(mine, kind="stable")[::-1][:limit]
    return [str(case.suspect.requests.request_id[i]) for i in order if mine[i] > 0]


def _avoidable(case: Case, lineage: LineageFacts) -> Evidence | None:
    """Prefill that was paid twice, and what requests lost to it in all."""
    cost = token_cost_s(case.model, suspect=not case.ended)
    if cost is None:
        return None
    paid = lineage.lost_tokens * cost
    lost = float(case.suspect_ledger.column("premature_eviction").sum()) / rate_of(case.suspect.requests)
    return Evidence(
        f"computing them again took {seconds(paid)} of prefill, and requests lost {seconds(lost)} to it, those who waited meanwhile among them: "
        "so much could have been avoided",
        lost,
        "s",
        None,
        case.worst_requests("premature_eviction"),
    )
