"""The store keeps to the contract: its tables are the event contract's, its views the owner's evidence nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_probe.events import KIND_DOC, KINDS
from engine_probe.schema import arrow_schema
from store.conform import contract_types
from store.interface import Store
from store.migrate import load
from store.open import open_store
from store.statements import create_statement
from store.tables import RELATIONAL, STORE_COLUMNS, TABLES
from store.upkeep.retention import RetentionPolicy
from store.views import markdown, views

ROOT = Path(__file__).parents[2]

EVIDENCE = {
    "evidence_prefill": "input_tokens, sequence_length, prefill_ms, prompt_cache_hit, attention_backend",
    "evidence_kv_watermark": "kv_cache_bytes, block_usage, eviction_count, reuse_rate, max_context",
    "evidence_batch": "batch_size, active_sequences, waiting_queue, priority_class, scheduler_policy",
    "evidence_decode": "output_tokens, tokens_per_second, decode_ms, speculative_accept_rate",
    "evidence_cost": "gpu_id, pool, gpu_util, memory_util, billable_units, cost_center",
    "evidence_lineage": "request_id, generation_id, route_id, engine_version, trace_id",
    "evidence_batch_shape": "batch_id, batch_size, max_seq_len, padding_side, padding_ratio",
    "evidence_sample_boundary": "sample_ids, segment_ids, document_boundary, eos_policy, packing_version",
    "evidence_mask_integrity": "attention_mask_hash, causal_mask_mode, loss_mask_hash, ignore_index",
    "evidence_position": "position_ids_strategy, truncation_side, chat_template_version, leakage_test_result",
}


@pytest.fixture(scope="module")
def store():
    """An empty store in memory."""
    with open_store(":memory:") as opened:
        yield opened


def test_the_embedded_store_has_the_interface(store):
    """Every verb of `Store` exists on what `open_store` returns."""
    as_interface: Store = store
    for verb in ("append", "rows", "query", "runs", "sources", "stats", "verify", "close"):
        assert callable(getattr(as_interface, verb))


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_kinds_table_has_the_columns_of_the_contract(store, kind):
    """Names, order, types and required columns follow events.py; the store adds `source` and `received_ns`."""
    described = store.query(
        "SELECT column_name, is_nullable FROM duckdb_columns() WHERE table_name = ? ORDER BY column_index", [kind]
    ).to_pylist()
    expected = [(c.name, not c.required) for c in KINDS[kind]] + [(name, False) for name in STORE_COLUMNS]
    assert [(row["column_name"], row["is_nullable"]) for row in described] == expected
    found = contract_types(kind, store.query(f'SELECT * EXCLUDE (source, received_ns) FROM "{kind}"'))
    stored = store.query(f'SELECT * EXCLUDE (source, received_ns) FROM "{kind}"')
    assert found.schema.equals(arrow_schema(kind), check_metadata=False)
    for ours, contract in zip(stored.schema, arrow_schema(kind), strict=True):
        assert ours.type.id == contract.type.id, ours.name


def test_the_first_migration_is_what_the_metadata_says():
    """0001 was written from the metadata, which follows events.py: a new column needs a new migration."""
    text = "".join(load()[0].sql.split("\n\n", 1)[1])
    assert text == "\n".join(f"-- {KIND_DOC[kind]}\n{create_statement(TABLES[kind])}" for kind in KINDS)


def test_the_migrations_create_the_relational_side():
    """Every relational table is created as its metadata says."""
    texts = "".join(migration.sql for migration in load())
    for table in RELATIONAL:
        assert create_statement(table) in texts, table.name


@pytest.mark.parametrize("name", list(EVIDENCE))
def test_an_evidence_view_has_exactly_the_fields_asked_for(store, name):
    """The owner's source documents list the fields of each evidence node; the view has these and no other, in order."""
    assert store.query(f"SELECT * FROM {name}").schema.names == EVIDENCE[name].split(", ")


def test_every_view_says_what_each_field_is():
    """A view's comment names its fields in order, and there is no evidence view that nobody asked for."""
    with open_store(":memory:") as store:
        for view in views():
            names = [name for name, _ in view.fields]
            assert names == store.query(f"SELECT * FROM {view.name}").schema.names, view.name
            assert view.doc.endswith("."), view.name
    assert {view.name for view in views() if view.name.startswith("evidence_")} == set(EVIDENCE)


def test_the_page_about_views_is_current():
    """docs/evidence-views.md is what `python -m store.views` prints."""
    assert (ROOT / "docs" / "evidence-views.md").read_text(encoding="utf-8") == markdown()


def test_the_page_about_the_store_names_what_there_is():
    """docs/store.md names every table, every verb, and the limits that are the defaults."""
    page = (ROOT / "docs" / "store.md").read_text(encoding="utf-8")
    for table in [*KINDS, *(table.name for table in RELATIONAL)]:
        assert f"`{table}`" in page, table
    for verb in ("migrate", "export", "prune", "verify", "backup"):
        assert f"kvscope store {verb}" in page, verb
    policy = RetentionPolicy()
    assert f"more than {policy.seal_after_s:g} s ago" in page
    assert f"more than {policy.max_age_s / 3600:g} h ago" in page
    assert f"older than {policy.parquet_max_age_s / 86400:g} days" in page
    assert f"more than {policy.max_bytes / 1e9:g} GB" in page
    assert f"after {policy.key_age_s / 86400:g} days" in page
