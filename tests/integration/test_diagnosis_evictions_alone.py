"""Agents that come back to a cache that gave their prompts up: told by engines that tell of every block, or of evictions alone.

Numbers are ours. Twenty agents ask in turn, each with 64 blocks of its own that it comes back with and 17 that are new.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.diagnosed import judged, stored
from tests.integration.test_diagnosis_reports_of_engines import NUM, names, ns, served, verdict_of
from tests.simulate import Rows

ALL, EVICTIONS = ("stored", "evicted"), ("evicted",)
FOREVER = 1e9


pytestmark = pytest.mark.usefixtures("few_replicates")


def agents(run: str, seed: int, *, kept_s: float, reason: str | None = "ttl", tells: tuple[str, ...] = ALL) -> Rows:
    """A block leaves the cache `kept_s` after it was last asked for; all were stored before the first request came."""
    who = np.random.default_rng(seed).integers(20, size=NUM)
    chains = [[1000 * (agent + 1) + place for place in range(64)] for agent in range(20)]
    changes = [(-2.0, "stored", block) for chain in chains for block in chain]
    last = dict.fromkeys(range(20), -1.0)

    def told(i: int, at: float) -> dict[str, Any]:
        agent = int(who[i])
        is_there = at - last[agent] <= kept_s
        if not is_there:
            changes.extend((last[agent] + kept_s, "evicted", block) for block in chains[agent])
            changes.extend((at + 0.2, "stored", block) for block in chains[agent])
        last[agent] = at
        new = [10**7 * seed + 100 * i + place for place in range(17)]
        return {"cached_tokens": 1024 if is_there else 0, "prompt_blocks": chains[agent] + new}

    rows = served(run, seed, told=told)
    fact = {"worker": "w0", "run_id": run}
    rows["block"] = [
        {**fact, "at_ns": ns(at), "change": change, "block_hash": block, "num_tokens": 16, "tier": "device"}
        | ({"reason": reason} if change == "evicted" else {})
        for at, change, block in sorted(changes)
        if change in tells
    ]
    rows["worker"] = [{**fact, "at_ns": ns(-3.0), "block_size": 16, "num_blocks": 8000}]
    return rows


@pytest.mark.parametrize("tells", [ALL, EVICTIONS], ids=["all", "evictions"])
@pytest.mark.parametrize(("reason", "cause"), [("ttl", "ttl_expiry"), (None, "premature_eviction")])
def test_a_baseline_in_which_nothing_was_evicted_is_the_healthy_one(
    tmp_path: Path, tells: tuple[str, ...], reason: str | None, cause: str
) -> None:
    """No block changed while the baseline's requests came: none was evicted, and that is told by the suspect window's worker."""
    base = agents("base", 1, kept_s=FOREVER, tells=tells)
    verdict = verdict_of(tmp_path, base, agents("suspect", 2, kept_s=15.0, reason=reason, tells=tells))
    assert (verdict.status, names(verdict)) == ("explained", [cause]), verdict.verdict


def test_what_evictions_alone_tell_is_counted_as_its_statement_counts(tmp_path: Path) -> None:
    """Tokens that were evicted before they were asked for, by arrays and by SQL."""
    parts = [
        agents("base", 1, kept_s=FOREVER, tells=EVICTIONS),
        agents("suspect", 2, kept_s=15.0, reason=None, tells=EVICTIONS),
    ]
    lost = sum(1024 for row in parts[1]["request"] if not row["cached_tokens"])
    with stored(tmp_path / "s.duckdb", parts) as store:
        evidence = judged(store, "base", "suspect", "ttft").causes[0].evidence[0]
        assert evidence["value"] == lost
        assert store.query(evidence["sql"]).column(0)[0].as_py() == lost


def test_evictions_alone_without_chains_are_no_reason(tmp_path: Path) -> None:
    """Whose blocks were evicted is not told, and that none was stored again neither."""
    parts = [agents("base", 1, kept_s=FOREVER, tells=EVICTIONS), agents("suspect", 2, kept_s=15.0, tells=EVICTIONS)]
    for rows in parts:
        for row in rows["request"]:
            del row["prompt_blocks"]
    verdict = verdict_of(tmp_path, *parts)
    assert (verdict.status, names(verdict)) == ("not_observable", []), verdict.verdict
    assert "premature_eviction" not in [out["cause"] for out in verdict.excluded]


def test_a_baseline_that_lost_as_much_was_only_not_looked_at(tmp_path: Path) -> None:
    """Both give prompts up after 15 s, and the baseline's events were not recorded: the machine is twice as slow, and that is all."""
    base = {**agents("base", 1, kept_s=15.0), "block": []}
    suspect = agents("suspect", 2, kept_s=15.0, tells=EVICTIONS)
    for row in suspect["request"]:
        row["prefill_s"] *= 2
        row["first_token_ns"] += round(row["prefill_s"] / 2 * 1e9)
        row["last_token_ns"] = row["end_ns"] = row["last_token_ns"] + round(row["prefill_s"] / 2 * 1e9)
    verdict = verdict_of(tmp_path, base, suspect)
    assert not {"premature_eviction", "ttl_expiry"} & set(names(verdict)), verdict.verdict


@pytest.mark.parametrize("tells", [ALL, EVICTIONS], ids=["all", "evictions"])
def test_as_many_evictions_as_before_are_no_change(tmp_path: Path, tells: tuple[str, ...]) -> None:
    verdict = verdict_of(
        tmp_path, agents("base", 1, kept_s=15.0, tells=tells), agents("suspect", 2, kept_s=15.0, tells=tells)
    )
    assert (verdict.status, names(verdict)) == ("no_change", []), verdict.verdict
