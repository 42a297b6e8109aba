"""Which engine row is of which request of the judged vantage: by id, and where several requests have one id by worker, lengths and arrival.

Ids are told apart by whoever made them: two workers (or two clients) that number their requests use each id twice. Rows of one request under
one id, its attempts and its hand-over, compute the same prompt; rows that do not are different requests.

Invariant: of an id that several requests have, an engine row is given to one of them at most. Who finds none stays without.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
Bool = NDArray[np.bool_]

MOST: Final = 10_000
"""Pairs of rows under one id that are looked at; an id that more have tells nobody apart, and nothing is joined by it."""


def pair(table: pa.Table, engine: pa.Table) -> tuple[pa.Array, int]:
    """(row of `engine` for each row of `table`, null where there is none; ids that several requests have).

    table, engine   rows of the kind `request`, those of the engine in the order in which they are taken where an id says enough
    """
    mine, theirs = (_plain(each["request_id"]) for each in (table, engine))
    names, position = pc.unique(mine), _first(table, engine, mine, theirs)
    if len(names) == len(mine) and len(pc.unique(theirs)) == len(theirs):
        return position, 0
    codes, their_codes = (_codes(ids, names) for ids in (mine, theirs))
    shared = _several(codes, _numbers(table["attempt"]), len(names))
    shared |= _differ(their_codes, _numbers(engine["prompt_tokens"]), len(names))
    shared |= _differ(their_codes, _answers(engine), len(names)) & ~_attempts(their_codes, engine, len(names))
    if not shared.any():
        return position, 0
    out = np.asarray(pc.fill_null(position, -1)).astype(np.int64)
    rows = np.flatnonzero(shared[codes])
    out[rows] = _matched(table, engine, codes, their_codes, shared)[rows]
    return pa.array(out, mask=out < 0), int(shared.sum())


def _first(table: pa.Table, engine: pa.Table, mine: pa.Array, theirs: pa.Array) -> pa.Array:
    """The engine's row of the same request and attempt, else its first of the same request."""
    position = pc.index_in(mine, value_set=theirs)
    if pc.max(table["attempt"]).as_py():
        keys = [
            _plain(pc.binary_join_element_wise(each["request_id"], each["attempt"].cast(pa.string()), "\x00"))
            for each in (table, engine)
        ]
        position = pc.coalesce(pc.index_in(keys[0], value_set=keys[1], skip_nulls=True), position)
    return position


def _several(codes: I64, attempt: F64, num: int) -> Bool:
    """[num] ids that several rows have which are not attempts of one request."""
    count = np.bincount(codes, minlength=num)
    if count.max(initial=0) < 2:
        return np.zeros(num, dtype=bool)
    told = np.isfinite(attempt)
    attempts = np.unique(np.stack([codes[told].astype(np.float64), attempt[told]]), axis=1)[0].astype(np.int64)
    several: Bool = (count > 1) & (np.bincount(attempts, minlength=num) < count)
    return several


def _differ(codes: I64, tokens: F64, num: int) -> Bool:
    """[num] ids whose rows tell prompts of different lengths."""
    known = (codes >= 0) & np.isfinite(tokens)
    low, high = np.full(num, np.inf), np.full(num, -np.inf)
    np.minimum.at(low, codes[known], tokens[known])
    np.maximum.at(high, codes[known], tokens[known])
    return low < high


def _answers(engine: pa.Table) -> F64:
    """[n] tokens of the answers that were finished, NaN else, and where a worker only prefilled (one token)."""
    tokens, state = _numbers(engine["output_tokens"]), _plain(engine["state"])
    done = np.asarray(pc.fill_null(pc.equal(state, "finished"), False)).astype(bool)
    return np.where(done & (tokens > 1), tokens, np.nan)


def _attempts(codes: I64, engine: pa.Table, num: int) -> Bool:
    """[num] ids whose rows name different attempts."""
    return _differ(codes, _numbers(engine["attempt"]), num)


def _matched(table: pa.Table, engine: pa.Table, codes: I64, their_codes: I64, shared: Bool) -> I64:
    """Row of the engine for each row under a shared id, -1 where there is none: the likeliest pairs first, each row once."""
    left, right = _pairs(codes, their_codes, shared)
    rank = [
        _unlike(table["worker"], engine["worker"], left, right),
        _unlike(table["attempt"], engine["attempt"], left, right),
        _unlike(table["prompt_tokens"], engine["prompt_tokens"], left, right),
        # a worker that only prefills gives one token of an answer
        _unlike(table["output_tokens"], engine["output_tokens"], left, right)
        & (_numbers(engine["output_tokens"])[right] > 1),
    ]
    came, seen = (np.asarray(each["arrival_ns"].fill_null(0)).astype(np.int64) for each in (table, engine))
    order = np.lexsort((right, left, np.abs(seen[right] - came[left]), *reversed(rank)))
    out = np.full(len(codes), -1, dtype=np.int64)
    taken = np.zeros(len(their_codes), dtype=bool)
    for i, j in zip(left[order].tolist(), right[order].tolist(), strict=True):
        if out[i] < 0 and not taken[j]:
            out[i], taken[j] = j, True
    return out


def _pairs(codes: I64, their_codes: I64, shared: Bool) -> tuple[I64, I64]:
    """Rows of both sides [m] that have a shared id in common, of ids that not too many have."""
    rows = np.flatnonzero(shared[codes])
    among = np.flatnonzero((their_codes >= 0) & shared[np.maximum(their_codes, 0)])
    among = among[np.argsort(their_codes[among], kind="stable")]
    begin, end = (np.searchsorted(their_codes[among], codes[rows], side) for side in ("left", "right"))
    num = end - begin
    num = np.where(np.bincount(codes, minlength=len(shared))[codes[rows]] * num <= MOST, num, 0)
    left = np.repeat(rows, num)
    place = np.arange(int(num.sum())) - np.repeat(np.cumsum(num) - num, num) + np.repeat(begin, num)
    return left, among[place]


def _unlike(mine: pa.ChunkedArray, theirs: pa.ChunkedArray, left: I64, right: I64) -> Bool:
    """[m] whether both rows of a pair know this and differ in it."""
    differ = pc.not_equal(_plain(mine).take(pa.array(left)), _plain(theirs).take(pa.array(right)))
    return np.asarray(pc.fill_null(differ, False)).astype(bool)


def _codes(ids: pa.Array, names: pa.Array) -> I64:
    return np.asarray(pc.fill_null(pc.index_in(ids, value_set=names), -1)).astype(np.int64)


def _numbers(column: pa.ChunkedArray) -> F64:
    return np.asarray(_plain(column).cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), dtype=np.float64)


def _plain(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """One array, not dictionary-encoded."""
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(whole, pa.ChunkedArray):  # nothing in it
        return pa.array([], column.type)
    return whole.dictionary_decode() if pa.types.is_dictionary(whole.type) else whole
