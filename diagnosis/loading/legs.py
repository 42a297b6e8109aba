"""One request, two legs: the worker that prefilled it and the one that decodes it tell a row each, and both are one request's.

Invariant: the row that stays is that of the worker that prefilled, and no token is counted twice.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.facts import HandoverFacts, RequestFacts
from diagnosis.loading.moves import BETWEEN, moves
from store.interface import Store, Window


def one_a_request(store: Store, window: Window, table: pa.Table) -> pa.Table:
    """Engine rows of which each request has one: that of the worker that prefilled it, with what the decode worker told of its end.

    A decode worker that was given the first token counts it to its prompt; one that was not gives the caller its first.
    """
    found = moves(store, window)
    if found is None:
        return table
    query, params = found
    sent = store.query(f"SELECT DISTINCT request_id, target_worker AS worker FROM ({query}) WHERE {BETWEEN}", params)
    if sent.num_rows == 0:
        return table
    is_leg = pc.is_in(_pairs(table), value_set=_pairs(sent).combine_chunks())
    firsts = table.filter(pc.invert(is_leg))
    legs = table.filter(pc.and_(is_leg, pc.is_in(table["request_id"], value_set=firsts["request_id"].combine_chunks())))
    if legs.num_rows == 0:
        return table
    place = pc.index_in(firsts["request_id"], value_set=legs["request_id"].combine_chunks())
    taken = legs.take(place.combine_chunks())
    moved = pc.is_valid(place)
    gives_first = pc.fill_null(pc.and_(moved, pc.less_equal(taken["prompt_tokens"], firsts["prompt_tokens"])), False)
    both = pc.add(pc.fill_null(firsts["output_tokens"], 0), taken["output_tokens"])
    first_ns = pc.if_else(gives_first, taken["first_token_ns"], firsts["first_token_ns"])
    columns = {name: pc.if_else(moved, taken[name], firsts[name]) for name in ("last_token_ns", "end_ns", "state")}
    columns |= {
        "first_token_ns": first_ns,
        "output_tokens": pc.if_else(
            moved, pc.if_else(gives_first, taken["output_tokens"], both), firsts["output_tokens"]
        ),
        "decode_s": pc.if_else(
            moved,
            pc.divide(pc.subtract(columns["last_token_ns"], first_ns).cast(pa.float64(), safe=False), 1e9),
            firsts["decode_s"],
        ),
    }
    for name in ("token_ns", "token_counts"):  # the gap of the hand-over itself is no step
        columns[name] = pa.chunked_array([_either(moved, taken[name], firsts[name])])
    for name, column in columns.items():
        at = firsts.schema.get_field_index(name)
        firsts = firsts.set_column(at, firsts.schema.field(at), column.cast(firsts.schema.field(at).type))
    return firsts


def _either(moved: pa.ChunkedArray, one: pa.ChunkedArray, other: pa.ChunkedArray) -> pa.Array:
    """`one` where `moved`, else `other`: lists, of which `if_else` takes none."""
    size = len(one)
    both = pa.concat_arrays([one.combine_chunks(), other.combine_chunks()])
    return both.take(pa.array(np.where(np.asarray(moved), np.arange(size), size + np.arange(size))))


def _pairs(table: pa.Table) -> pa.ChunkedArray:
    return pc.binary_join_element_wise(table["request_id"], table["worker"], "\x00")


def with_legs(requests: RequestFacts, moves: HandoverFacts) -> RequestFacts:
    """The requests with what both of their workers told of them: the joined row is that of the one who prefilled."""
    numbers = dict(requests.numbers)
    first = numbers.get("engine_output_tokens")
    if first is not None:
        given = moves.output_tokens + np.where(moves.before_first, 0.0, first)
        numbers["engine_output_tokens"] = np.where(moves.moved, given, first)
    whole = numbers.get("engine_e2e_s")
    if whole is not None:
        numbers["engine_e2e_s"] = np.where(moves.moved, moves.last_s - requests.engine_arrival_s, whole)
    return replace(requests, numbers=numbers)
