"""Samples that come under an engine's own names (`vllm:...`, `sglang:...`) get the contract's names, as `attach` gives them.

Whoever sends samples to the collector need not know the contract's names. Each worker's rows of one batch are read as
one page: where an old and a new name of one thing stand in it, the new one takes the contract's name; a series that
counts under several names becomes several rows. The name on the wire stays in `labels.wire`. Rows that no table maps
are kept as they are, and so is a whole batch in which some row has a `wire` label: its sender mapped it already.
Invariant: no row is lost. A batch without such names costs a look at its distinct names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pyarrow as pa

    from engine_probe.adapters.metric_names import Mapped, SampleMapper

_Key = tuple[str | None, str, tuple[tuple[str, str], ...]]
"""(worker, name, labels) of a series"""
SLICE_ROWS: Final = 20_000
MAX_SERIES: Final = 200_000
"""A batch with more series keeps its names: no engine's page has so many."""


def canonical_samples(tables: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
    """The same tables, with the samples under the contract's names. Tables have the full schema."""
    table = tables.get("sample")
    if table is None or not _may_be_mapped(table):
        return dict(tables)
    return {**tables, "sample": _mapped(table)}


def _may_be_mapped(table: pa.Table) -> bool:
    """Some name is an engine's own, and no row has a `wire` label."""
    import pyarrow.compute as pc

    names = pc.unique(table["name"]).to_pylist()
    if _known().isdisjoint(names):
        return False
    return not any("wire" in pc.unique(chunk.keys).to_pylist() for chunk in table["labels"].chunks if len(chunk))


@cache
def _known() -> frozenset[str]:
    """Every wire name that some table maps, with each of its prefixes."""
    from engine_probe.adapters.metric_names import wires_of
    from engine_probe.adapters.registry import adapters

    tables = [table for one in adapters() if one.serves for table in one.tables]
    return frozenset(prefix + wire for table in tables for prefix in table.prefixes for wire in wires_of(table))


def _mapped(table: pa.Table) -> pa.Table:
    """Two passes in slices, so that memory follows the number of series and not that of rows."""
    import pyarrow as pa

    slices = [table.slice(start, SLICE_ROWS) for start in range(0, table.num_rows, SLICE_ROWS)]
    series: dict[str | None, dict[_Key, None]] = {}
    count = 0
    for part in slices:
        for key in _keys(part):
            own = series.setdefault(key[0], {})
            count += key not in own
            own[key] = None
        if count > MAX_SERIES:
            return table
    meaning: dict[_Key, tuple[Mapped, ...]] = {}
    for worker, found in series.items():
        meaning.update(_meaning(worker, list(found)))
    return pa.concat_tables([_renamed(part, meaning) for part in slices])


def _keys(part: pa.Table) -> Iterator[_Key]:
    columns = (part[name].to_pylist() for name in ("worker", "name", "labels"))
    for worker, name, pairs in zip(*columns, strict=True):
        yield worker, name, tuple(pairs or ())


def _renamed(part: pa.Table, meaning: Mapping[_Key, tuple[Mapped, ...]]) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    rows, told = [], []
    for index, key in enumerate(_keys(part)):
        for one in meaning[key]:
            rows.append(index)
            told.append(one)
    taken = part.take(pa.array(rows, pa.int64()))
    fields = part.schema
    new = {
        "name": pa.array([name for name, *_ in told], pa.string()),
        "labels": pa.array([list(labels.items()) for _, labels, *_ in told], fields.field("labels").type),
        "worker": pa.array([worker for _, _, worker, _ in told], pa.string()),
        "value": pc.multiply(taken["value"], pa.array([scale for *_, scale in told], pa.float64())),
    }
    for name, array in new.items():
        taken = taken.set_column(fields.get_field_index(name), fields.field(name), array)
    return taken


def _meaning(worker: str | None, keys: list[_Key]) -> dict[_Key, tuple[Mapped, ...]]:
    """What each series of one worker is called. One that `attach` would leave out keeps its own name here."""
    from engine_probe.adapters.prometheus import Page, Sample, Series

    page = Page([Sample(Series(name, dict(pairs)), 0.0, None) for _, name, pairs in keys], {}, {}, False)
    found: dict[_Key, tuple[Mapped, ...]] = {}
    for key, mapped in zip(keys, _mapper(worker, page).names_of(page), strict=True):
        own = (key[1], dict(key[2]), worker, 1.0)
        known = [one for one in mapped if one[0] != key[1]]
        found[key] = mapped if known else (own,)
    return found


def _mapper(worker: str | None, page: Any) -> SampleMapper:
    from engine_probe.adapters.metric_names import SampleMapper
    from engine_probe.adapters.registry import tables_for

    return SampleMapper(worker, [table for table in tables_for(page) if table.keeps_unknown], drop_prefixes=())
