"""The candidates of decisions, as the store lists them, and the grids [N, K] of what the router believed of each."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.facts import I64, Bool
from diagnosis.hotspots.columns import codes, floats
from diagnosis.hotspots.observed import F32
from diagnosis.hotspots.rows import route_rows
from store.interface import Store, Window

BELIEFS = {"matched": "matched_tokens", "load": "load", "score": "score"}


def candidates(store: Store, window: Window) -> tuple[pa.Table, I64, pa.StructArray | None, pa.DictionaryArray | None]:
    """(decisions, their order, their candidates one after the other, whom these name)."""
    routes, order = route_rows(store, window)
    if not len(order):
        return routes, order, None, None
    flat = pc.list_flatten(routes["candidates"])
    # what is in one piece is not copied
    flat = flat.chunk(0) if flat.num_chunks == 1 else flat.combine_chunks()
    return routes, order, flat, encoded(pc.struct_field(flat, "worker"), len(routes))


def encoded(names: pa.Array, num: int) -> pa.DictionaryArray:
    """As `dictionary_encode`, of the names in `num` lists. Most routers tell the same in each: then one list is read and the rest compared, as bytes."""
    size = len(names) // num
    if (
        names.type != pa.string()
        or names.null_count
        or not size
        or size * num != len(names)
        or names.buffers()[2] is None
    ):
        return names.dictionary_encode()
    first = names[:size].dictionary_encode()
    if len(first.dictionary) < size:
        return names.dictionary_encode()
    _, offsets, data = names.buffers()
    bounds = np.frombuffer(offsets, np.int32)[names.offset : names.offset + len(names) + 1]
    letters = np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]]
    lengths = np.diff(bounds).reshape(num, size)
    if len(letters) % num or (lengths != lengths[0]).any():
        return names.dictionary_encode()
    letters = letters.reshape(num, -1)
    if (letters != letters[0]).any():
        return names.dictionary_encode()
    return pa.DictionaryArray.from_arrays(np.tile(np.arange(size, dtype=np.int32), num), first.dictionary)


def beliefs_of(
    lists: pa.ChunkedArray, flat: pa.StructArray, named: pa.DictionaryArray, workers: tuple[str, ...], order: I64
) -> dict[str, F32]:
    """[N, K] of each belief, decisions in this order; a worker that was no candidate has none. named: the candidates' workers."""
    return {name: grid[order] for name, grid in _grids(lists, flat, named, workers).items()}


def listed_in(lists: pa.ChunkedArray, named: pa.DictionaryArray, workers: tuple[str, ...], order: I64) -> Bool | None:
    """[N, K] the worker stood among the candidates, decisions in this order; None where everybody did every time, or nobody is named."""
    if not len(named) or len(named) == len(lists) * len(workers):
        return None
    columns = np.append(codes(named.dictionary, workers), -1)[
        np.asarray(pc.fill_null(named.indices, len(named.dictionary)))
    ]
    rows = np.asarray(pc.list_parent_indices(lists).combine_chunks()).astype(np.int64)
    listed = np.zeros((len(lists), len(workers)), dtype=np.bool_)
    listed[rows[columns >= 0], columns[columns >= 0]] = True
    return listed[order]


def _grids(
    lists: pa.ChunkedArray, flat: pa.StructArray, named: pa.DictionaryArray, workers: tuple[str, ...]
) -> dict[str, F32]:
    """The same in the order of the lists. named: the candidates' workers [len(flat)]."""
    num, size = len(lists), len(workers)
    places = np.append(codes(named.dictionary, workers), -1)
    columns = places[np.asarray(pc.fill_null(named.indices, len(places) - 1))]
    if len(flat) == num * size and num and (columns.reshape(num, size) == columns[:size]).all():
        # everybody was a candidate every time, in one order: nothing is to be placed
        order = np.argsort(columns[:size])
        if (columns[:size][order] == np.arange(size)).all():
            grids = {name: floats(pc.struct_field(flat, field)).reshape(num, size) for name, field in BELIEFS.items()}
            in_order = bool((order == np.arange(size)).all())
            return grids if in_order else {name: grid[:, order] for name, grid in grids.items()}
    rows = np.asarray(pc.list_parent_indices(lists).combine_chunks()).astype(np.int64)
    known = columns >= 0
    beliefs: dict[str, F32] = {}
    for name, field in BELIEFS.items():
        values = np.full((num, size), np.nan, dtype=np.float32)
        values[rows[known], columns[known]] = floats(pc.struct_field(flat, field))[known]
        beliefs[name] = values
    return beliefs
