"""How far prompts begin alike, by their block chains: what a prefix cache could find at all, whatever it did find.

A chain hash names a block and all before it, so a block that two prompts name is a beginning that they have in common.

Invariant: requests that are neighbours in time are looked at, and of two windows as many of each kind: more of them would share more.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.calibration import threshold
from diagnosis.facts import F64, I64, Facts, SharingFacts, rows_by_code

LOOKED_AT: Final = 2000
"""Requests of a window whose chains are compared."""
FEWEST: Final = 50
"""Prompts of either window, of all kinds that share less, before it is said: of fewer, it is chance which text is asked for twice."""
FELL = threshold(
    "prompt_uncacheable.fell",
    least=0.3,
    unit="relative",
    says="fall of the tokens that prompts have in common",
    why="what prompts share differs so much between two hours of one traffic",
)


def sharing(prompt_blocks: pa.ChunkedArray, block_size: int) -> SharingFacts | None:
    """Of requests in arrival order; None where none tells its blocks."""
    first = prompt_blocks.slice(0, LOOKED_AT).combine_chunks()
    if isinstance(first, pa.ChunkedArray):  # a table without rows
        return None
    known = np.flatnonzero(np.asarray(first.is_valid()))
    if len(known) == 0:
        return None
    lengths = np.asarray(pc.list_value_length(first))[known].astype(np.int64)
    blocks = np.asarray(first.flatten())
    owner = np.repeat(np.arange(len(known)), lengths)
    _, position, count = np.unique(blocks, return_inverse=True, return_counts=True)
    is_alone = count[position] < 2
    second = _second_owner(position, owner, len(count))[position]
    # leading blocks before the first that nobody else names
    first_alone = lengths.copy()
    place = np.arange(len(blocks)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    np.minimum.at(first_alone, owner[is_alone], place[is_alone])
    leading = place < first_alone[owner]
    tokens = first_alone.astype(np.float64) * block_size
    return SharingFacts(known, tokens, owner[leading], np.maximum(second, owner)[leading], block_size)


def _second_owner(position: I64, owner: I64, num_blocks: int) -> I64:
    """[num_blocks] the second request that names each block, by `position` and `owner` [m] of each mention; the first where none is."""
    order = np.lexsort((owner, position))
    start = np.searchsorted(position[order], np.arange(num_blocks))
    after = np.minimum(start + 1, len(order) - 1)
    has_two = position[order[after]] == np.arange(num_blocks)
    return np.where(has_two, owner[order[after]], owner[order[start]])


def no_longer_shared(facts: Facts, other: Facts) -> F64:
    """[n] tokens that each prompt of `facts` would have found cached, did prompts begin alike as they do in `other`.

    Compared within each tenant and workload, so that more of those who never shared anything are no change of their prompts, and at
    the length that prompts have here, so that histories that are still short are none either. As many tokens as the cache served
    less there, at most: what nobody found nobody lost.
    """
    out = np.zeros(len(facts.requests))
    if facts.sharing is None or other.sharing is None:
        return out
    cached, cached_there = (f.requests.get("cached_tokens") for f in (facts, other))
    served, served_there = _mean_known(cached), _mean_known(cached_there)
    if served is None or served_there is None or served >= served_there:
        return out
    here, there = _classes(facts), _classes(other)
    compared = 0
    for kind in set(here) & set(there):
        rows, rows_there = here[kind], there[kind]
        common, common_there = _mean_shared(facts.sharing, rows, other.sharing, rows_there)
        found, found_there = (_mean_known(c[mine]) for c, mine in ((cached, rows), (cached_there, rows_there)))
        if common is None or common_there is None or found is None or found_there is None:
            continue
        # the shorter a prompt, the less of it can be shared: what prompts have in common fell as a share of them too
        prompt, prompt_there = (
            _mean_known(f.requests.get("prompt_tokens")[m]) for f, m in ((facts, rows), (other, rows_there))
        )
        expected = common_there * prompt / prompt_there if prompt and prompt_there else common_there
        least = min(common_there, expected)
        if least > 0 and FELL.is_reached(1.0 - common / least):
            out[rows] = max(min(least - common, found_there - found), 0.0)
            compared += min(len(rows), len(rows_there))
    return out if compared >= FEWEST else np.zeros_like(out)


def _classes(facts: Facts) -> dict[tuple[str | None, str | None], I64]:
    """Rows of each (tenant, workload)."""
    r = facts.requests
    found = [pa.array(column, pa.string()).dictionary_encode("encode") for column in (r.tenant, r.workload)]
    codes, names = ([np.asarray(f.indices).astype(np.int64) for f in found], [f.dictionary.to_pylist() for f in found])
    width = len(names[1])
    rows = rows_by_code(codes[0] * width + codes[1], len(names[0]) * width)
    return {(names[0][code // width], names[1][code % width]): mine for code, mine in enumerate(rows) if len(mine)}


def _mean_shared(one: SharingFacts, rows: I64, other: SharingFacts, theirs: I64) -> tuple[float | None, float | None]:
    """Mean tokens that requests of a kind have in common with others, of as many of them in either window."""
    places = [np.flatnonzero(np.isin(each.rows, mine)) for each, mine in ((one, rows), (other, theirs))]
    num = min(len(place) for place in places)
    if num == 0:
        return None, None
    means = [
        float(each.among(int(place[num - 1]) + 1)[place[:num]].mean())
        for each, place in zip((one, other), places, strict=True)
    ]
    return means[0], means[1]


def _mean_known(values: F64) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None
