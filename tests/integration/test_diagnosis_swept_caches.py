"""A batch of many distinct prompts sweeps shared prefixes out of a small cache: what is computed again is the eviction's, whoever tells of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pyarrow as pa
import pytest

from diagnosis.diagnose import diagnose
from diagnosis.lab.play import play
from diagnosis.lab.scene import Scene, base_scene, with_fleet, with_traffic
from diagnosis.telling.verdict import Verdict
from engine_probe.engine.traffic.synthetic import Lengths, Traffic
from engine_probe.engine.virtual_clock import EPOCH_NS
from store.interface import Batch, Window
from store.open import open_store

Tables = Mapping[str, pa.Table]
NOW_NS = EPOCH_NS + 86_400 * 10**9


pytestmark = pytest.mark.usefixtures("few_replicates")


def scene(num_blocks: int) -> Scene:
    """300 chats of tenant 'chat', two a second, with one of 8 heads of 4,096 tokens; 8 prompts a second of tenant 'batch', all different."""
    healthy = with_fleet(base_scene(300, 31), num_workers=1, num_blocks=num_blocks)
    chat = with_traffic(
        healthy,
        rate=2.0,
        num_requests=300,
        groups=8,
        skew=0.0,
        shared_tokens=4096,
        shared_ratio=1.0,
        own_tokens=Lengths(32, 128),
        output_tokens=Lengths(16, 48),
        tenants=(("chat", 1.0),),
    )
    batch = Traffic(
        num_requests=1200,
        rate=8.0,
        groups=1,
        shared_tokens=0,
        shared_ratio=0.0,
        own_tokens=Lengths(150, 300),
        output_tokens=Lengths(8, 16),
        tenants=(("batch", 1.0),),
        prefix="b",
        seed=38,
    )
    return replace(chat, extra=(batch,))


@pytest.fixture(scope="module")
def swept() -> tuple[Tables, Tables]:
    """With room for the eight heads (2,048 blocks) and what passes through, and with too little of it."""
    return play(scene(6000), "base").tables, play(scene(2400), "suspect").tables


def without_chains(tables: Tables) -> Tables:
    requests = tables["request"]
    place = requests.schema.get_field_index("prompt_blocks")
    field = requests.schema.field(place)
    return {**tables, "request": requests.set_column(place, field, pa.nulls(requests.num_rows, field.type))}


def without_blocks(tables: Tables) -> Tables:
    return {kind: table for kind, table in tables.items() if kind != "block"}


def verdict_of(*runs: Tables) -> Verdict:
    with open_store(":memory:", max_threads=1) as store:
        for tables in runs:
            store.append(Batch(dict(tables)))
        return diagnose(store, Window(run_id="base"), Window(run_id="suspect"), metric="ttft", now_ns=NOW_NS)


def test_what_was_evicted_and_computed_again_is_told_with_tenants_and_prefixes(swept: tuple[Tables, Tables]) -> None:
    """The eviction is named alone; its evidence ranks for whom blocks were given up, whose they were, and what it cost in all."""
    verdict = verdict_of(*swept)
    assert [cause.cause for cause in verdict.causes] == ["premature_eviction"]
    told = {evidence["statement"]: evidence for evidence in verdict.causes[0].evidence}
    (by_whom,) = (
        evidence for said, evidence in told.items() if "before they were asked for) for tenant 'batch'" in said
    )
    assert 0.5 < by_whom["value"] < 0.8
    (whose,) = (evidence for said, evidence in told.items() if "they were prompts of tenant 'chat' 100 %" in said)
    assert whose["value"] == 1.0
    chats = {f"r{number:06d}" for number in range(300)}
    assert whose["request_ids"]
    assert set(whose["request_ids"]) <= chats
    (heads,) = (said for said in told if "they began with prefix" in said)
    assert "and 5 more" in heads
    (avoidable,) = (evidence for said, evidence in told.items() if "could have been avoided" in said)
    assert avoidable["unit"] == "s"
    assert avoidable["value"] > 1.0


def test_without_chains_they_are_still_no_long_prompts(swept: tuple[Tables, Tables]) -> None:
    """Events count the blocks that came back; requests of a kind that is usually found computed them, and not everybody alike."""
    verdict = verdict_of(*(without_chains(tables) for tables in swept))
    assert [cause.cause for cause in verdict.causes] == ["premature_eviction"]
    assert verdict.causes[0].mean_s == pytest.approx(verdict_of(*swept).causes[0].mean_s, rel=0.1)


def test_without_block_events_nobody_is_blamed_for_lost_reuse(swept: tuple[Tables, Tables]) -> None:
    """Only what each request found is known: 4,096 tokens are computed that this kind found before, and why cannot be seen."""
    verdict = verdict_of(*(without_blocks(tables) for tables in swept))
    assert verdict.causes == []
    assert max(verdict.attribution, key=lambda row: row.mean_s).cause == "reuse_lost"


def test_long_prompts_of_others_stay_long_prompts(swept: tuple[Tables, Tables]) -> None:
    """Documents of 12,000 tokens that were never there before are of no kind that is usually found, whoever tells of blocks."""
    calm = scene(6000)
    documents = replace(
        calm.extra[0], num_requests=30, rate=0.2, own_tokens=Lengths(12_000, 12_000), prefix="d", seed=40
    )
    loud = play(replace(calm, extra=(*calm.extra, documents)), "suspect").tables
    for less in (without_chains, without_blocks):
        verdict = verdict_of(less(swept[0]), less(loud))
        assert verdict.causes[0].cause == "long_prefill_interference", verdict.verdict
