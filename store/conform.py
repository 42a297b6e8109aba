"""Batches and tables against the contract: what may be stored, and what comes back from DuckDB."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from engine_probe.errors import BatchRejected
from engine_probe.schema import arrow_schema
from store.interface import Batch
from store.tables import TABLES

_LONGEST_NAME: Final = 1000


def contract_types(kind: str, table: pa.Table) -> pa.Table:
    """The table with the contract's Arrow types where a column is the contract's (DuckDB names list items its way)."""
    return table.cast(_contract_schema(kind, table.schema))


def contract_stream(kind: str, reader: pa.RecordBatchReader) -> pa.RecordBatchReader:
    """`contract_types` batch by batch."""
    return reader.cast(_contract_schema(kind, reader.schema))


def _contract_schema(kind: str, found: pa.Schema) -> pa.Schema:
    """The schema found, with the contract's field wherever its type differs."""
    fields = {field.name: field for field in arrow_schema(kind)}
    return pa.schema(
        [field if field.type == (wanted := fields.get(field.name, field)).type else wanted for field in found],
        metadata=found.metadata,
    )


def check_batch(batch: Batch) -> None:
    """BatchRejected where the identity is none, or a table does not have exactly the columns of a known kind."""
    identity = batch.identity
    seq = 0 if identity is None else identity.seq
    names = (batch.source,) if identity is None else (identity.source, identity.epoch)
    if not 0 <= seq < 2**63 or not all(_is_name(name) for name in names):
        raise BatchRejected(
            f"The batch has no possible identity: seq {seq} must be from 0 and below 2^63, and source and epoch 1 to "
            f"{_LONGEST_NAME} characters of text without NUL.",
            seq=seq,
        )
    for kind, table in batch.tables.items():
        if kind not in TABLES:
            raise BatchRejected(f"There is no kind {kind!r}. The kinds are {', '.join(TABLES)}.", kind=kind)
        wanted = arrow_schema(kind)
        if not table.schema.equals(wanted, check_metadata=False):
            raise BatchRejected(
                f"The {kind} table does not have the contract's columns: {_difference(table.schema, wanted)}. "
                "Bring it there with engine_probe.schema.conform.",
                kind=kind,
            )


def _is_name(text: str) -> bool:
    return 0 < len(text) <= _LONGEST_NAME and "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text)


def _difference(found: pa.Schema, wanted: pa.Schema) -> str:
    """First difference of two schemas, in words."""
    for field in wanted:
        position = found.get_field_index(field.name)
        if position < 0:
            return f"{field.name} is absent"
        if found.field(position).type != field.type:
            return f"{field.name} is {found.field(position).type} and must be {field.type}"
    extra = [name for name in found.names if name not in wanted.names]
    return f"{extra[0]} is not in the contract" if extra else "their order differs"
