"""A prefix cache of KV blocks, replayed: which requested blocks are resident under LRU, LFU and FIFO.

A request is the list of its prompt's chain hashes, first block first. Requests come in order of arrival; on each the
*hit* is the contiguous run of resident blocks from the first one, then every block is touched or stored, the deepest
first, so that tails are evicted before heads.

Invariant: under LRU one pass gives every size at once. A cache of C blocks holds exactly the C blocks used last: block
i of a request hits iff the largest stack distance of its blocks 0..i is below C, whatever C is (Mattson et al. 1970).
LFU (counts kept only while resident, ties broken by LRU) and FIFO have no such order and are simulated size by size.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

NEVER = int(np.iinfo(np.int64).max)
"""Needed size of a block that hits in no cache: it, or a block before it, was never asked for before."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """The blocks that requests asked for, in order of arrival.

    ids       [num_blocks] int64, block numbered 0..num_unique-1, request after request, first block first
    offsets   [num_requests + 1] int64, request r owns ids[offsets[r]:offsets[r + 1]]
    """

    ids: Ints
    offsets: Ints
    num_unique: int

    @property
    def num_requests(self) -> int:
        return len(self.offsets) - 1

    def lists(self) -> Iterator[list[int]]:
        """The blocks of each request."""
        ids = self.ids.tolist()
        for start, end in itertools.pairwise(self.offsets.tolist()):
            yield ids[start:end]

    @property
    def request_of_block(self) -> Ints:
        """[num_blocks] request that asked for each block."""
        return np.repeat(np.arange(self.num_requests), np.diff(self.offsets))


def block_trace(requests: Any) -> BlockTrace:
    """Number the blocks of `requests`: an iterable of hash lists (None: nothing known), or an Arrow list column.

    A hash named twice in one request is one block: chain hashes cannot repeat, so the second is left out.
    """
    hashes, lengths = _flatten(requests)
    unique, ids = np.unique(hashes, return_inverse=True)
    ids = ids.astype(np.int64, copy=False)
    request = np.repeat(np.arange(len(lengths)), lengths)
    _, first = np.unique(request * np.int64(max(len(unique), 1)) + ids, return_index=True)
    if len(first) < len(ids):
        keep = np.sort(first)
        ids, lengths = ids[keep], np.bincount(request[keep], minlength=len(lengths))
    return BlockTrace(ids, np.concatenate(([0], np.cumsum(lengths))).astype(np.int64), len(unique))


def needed_sizes(trace: BlockTrace) -> Ints:
    """[num_blocks] smallest LRU cache (blocks) in which each requested block hits; NEVER where none does."""
    # Positions in the order of touching: within a request the deepest block first.
    start = np.repeat(trace.offsets[:-1], np.diff(trace.offsets))
    end = np.repeat(trace.offsets[1:], np.diff(trace.offsets))
    position = start + end - 1 - np.arange(len(trace.ids))
    touched = np.empty_like(trace.ids)
    touched[position] = trace.ids
    previous = _previous_use(touched)
    # Distinct blocks used after the previous use p and before this request, whose first touch is at s: the touches in
    # (p, s) that have no earlier one after p, so #{j < s: previous[j] <= p} - #{j <= p}. One block more: a hit.
    p = previous[position]
    needed = np.full(len(p), NEVER)
    seen = p >= 0
    used_since = _count_at_most(previous + 1, start[seen], p[seen] + 1) - (p[seen] + 1)
    needed[seen] = used_since + 1
    return _running_maximum(needed, trace.offsets)


def simulate_fifo(trace: BlockTrace, size: int, counted: Sequence[bool]) -> int:
    """Hit blocks of a cache that evicts what it stored first."""
    resident: set[int] = set()
    queue: deque[int] = deque()
    hits = 0
    for blocks, counts in zip(trace.lists(), counted, strict=True):
        if counts:
            for block in blocks:
                if block not in resident:
                    break
                hits += 1
        for block in reversed(blocks):
            if block not in resident:
                if len(resident) == size:
                    resident.discard(queue.popleft())
                resident.add(block)
                queue.append(block)
    return hits


def simulate_lfu(trace: BlockTrace, size: int, counted: Sequence[bool]) -> int:
    """Hit blocks of a cache that evicts the block used least while resident; of several, the one used longest ago."""
    uses: dict[int, int] = {}
    by_uses: dict[int, OrderedDict[int, None]] = {1: OrderedDict()}
    fewest = 1
    hits = 0
    for blocks, counts in zip(trace.lists(), counted, strict=True):
        if counts:
            for block in blocks:
                if block not in uses:
                    break
                hits += 1
        for block in reversed(blocks):
            count = uses.get(block, 0)
            if count:
                bucket = by_uses[count]
                del bucket[block]
                if not bucket and count == fewest:
                    fewest += 1
            else:
                if len(uses) == size:
                    victim, _ = by_uses[fewest].popitem(last=False)
                    del uses[victim]
                fewest = 1
            uses[block] = count + 1
            by_uses.setdefault(count + 1, OrderedDict())[block] = None
    return hits


def _flatten(requests: Any) -> tuple[npt.NDArray[np.uint64], Ints]:
    """All hashes in one array, and how many each request has."""
    if hasattr(requests, "combine_chunks"):
        requests = requests.combine_chunks()
    if hasattr(requests, "value_lengths"):
        lengths = requests.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        return np.asarray(requests.flatten().to_numpy(zero_copy_only=False)).astype(np.uint64), lengths
    lists = [() if blocks is None else blocks for blocks in requests]
    lengths = np.array([len(blocks) for blocks in lists], dtype=np.int64)
    arrays = [np.asarray(blocks).astype(np.uint64) for blocks in lists if len(blocks)]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.uint64), lengths


def _previous_use(touched: Ints) -> Ints:
    """[n] position of the previous touch of the same block, -1 where there is none."""
    order = np.argsort(touched, kind="stable")
    same = touched[order][1:] == touched[order][:-1]
    previous = np.full(len(touched), -1, dtype=np.int64)
    previous[order[1:][same]] = order[:-1][same]
    return previous


def _count_at_most(values: Ints, lengths: Ints, limits: Ints) -> Ints:
    """For each query q: how many of the first `lengths[q]` values are at most `limits[q]`.

    values [n] >= 0, lengths and limits [num_queries]. A wavelet matrix (Claude and Navarro 2012), all queries at once.
    """
    limits = limits + 1  # the walk below counts values strictly below
    num_bits = max(int(max(values.max(initial=0), limits.max(initial=0))).bit_length(), 1)
    left, right, count = np.zeros_like(lengths), lengths.copy(), np.zeros_like(lengths)
    for bit in range(num_bits - 1, -1, -1):
        ones = (values >> bit) & 1
        zeros_before = np.concatenate(([0], np.cumsum(1 - ones)))
        left0, right0 = zeros_before[left], zeros_before[right]
        above = ((limits >> bit) & 1).astype(bool)
        count += np.where(above, right0 - left0, 0)
        num_zeros = zeros_before[-1]
        left = np.where(above, num_zeros + left - left0, left0)
        right = np.where(above, num_zeros + right - right0, right0)
        values = np.concatenate((values[ones == 0], values[ones == 1]))
    return count


def _running_maximum(values: Ints, offsets: Ints) -> Ints:
    """Largest value so far inside each segment."""
    # Doubling: after round k each place knows the maximum of the 2^k places that end there, cut at its segment's start.
    first = np.repeat(offsets[:-1], np.diff(offsets))
    place = np.arange(len(values))
    longest = int(np.diff(offsets).max(initial=0))
    result, reach = values.copy(), 1
    while reach < longest:
        result = np.where(place - reach >= first, np.maximum(result, result[place - reach]), result)
        reach *= 2
    return result
