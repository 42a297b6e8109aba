"""The pool of KV blocks: free, cached, or referenced, and never two of them.

A block is *free* (holds nothing), *referenced* (by one sequence or, where it has a hash, by several), or *cached*
(unreferenced, still holding a prefix that may be found again, next to be evicted when blocks run out).
Invariant: free + cached + referenced = all. Source: Kwon et al. 2023 (paged attention); vLLM v1 `block_pool.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine_probe.engine.eviction import EvictionOrder, eviction_order
from engine_probe.errors import UsageError

NO_HASH = -1


@dataclass(frozen=True, slots=True)
class Evicted:
    """Blocks that lost what they held, in the order in which they did; parallel lists.

    reason capacity | ttl; idle_s since their last use, age_s since they were stored, reuse_count hits while resident
    """

    reason: str
    hashes: list[int]
    idle_s: list[float]
    age_s: list[float]
    reuse_count: list[int]


class EvictionListener(Protocol):
    """Hears of evictions. cause: the request for which room was made; None for a TTL."""

    def evicted(self, blocks: Evicted, cause: str | None) -> None: ...


class BlockPool:
    """`num_blocks` blocks, numbered from 0.

    order   lru | lfu | fifo | length (`eviction.py`)
    ttl_ns  a cached block unused for longer is given up at the next `expire`; None: never
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        order: str = "lru",
        ttl_ns: int | None = None,
        listener: EvictionListener | None = None,
    ) -> None:
        if num_blocks < 1:
            raise UsageError(f"a pool of {num_blocks} blocks holds nothing; give 1 or more", num_blocks=num_blocks)
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: EvictionOrder = eviction_order(order)
        self._refs = [0] * num_blocks
        self._hash = [NO_HASH] * num_blocks
        self._depth = [0] * num_blocks
        self._uses = [0] * num_blocks
        self._stored = [0] * num_blocks
        self._stored_ns = [0] * num_blocks
        self._used_ns = [0] * num_blocks
        self._by_hash: dict[int, int] = {}
        self._num_stored = 0
        self._ttl_ns = ttl_ns
        self._released: OrderedDict[int, None] = OrderedDict()  # in order of release; kept for a TTL alone
        self._listener = listener
        self.num_evicted = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could give: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    def match(self, hashes: Sequence[int]) -> int:
        """How many leading blocks are resident. Changes nothing."""
        known = self._by_hash
        count = 0
        for block_hash in hashes:
            if block_hash not in known:
                break
            count += 1
        return count

    def num_cached_of(self, hashes: Sequence[int]) -> int:
        """How many of these resident blocks are unreferenced: taking them lowers what can be allocated."""
        refs, known = self._refs, self._by_hash
        return sum(not refs[known[block_hash]] for block_hash in hashes)

    def take(self, hashes: Sequence[int], now_ns: int) -> list[int]:
        """Reference the resident blocks with these hashes: a hit on each. KeyError where one is not resident."""
        known, refs, cached = self._by_hash, self._refs, self._cached
        blocks = [known[block_hash] for block_hash in hashes]
        for block in blocks:
            if not refs[block]:
                cached.remove(block)
                if self._ttl_ns is not None:
                    del self._released[block]
            refs[block] += 1
            self._uses[block] += 1
            self._used_ns[block] = now_ns
        return blocks

    def allocate(self, count: int, now_ns: int, cause: str | None = None) -> list[int] | None:
        """`count` blocks with one reference each, holding nothing; None (and nothing changed) where there are too few."""
        free = self._free
        missing = count - len(free)
        if missing > 0:
            if missing > len(self._cached):
                return None
            self._evict([self._cached.pop() for _ in range(missing)], "capacity", now_ns, cause)
        at = len(free) - count
        blocks = free[at:]
        del free[at:]
        blocks.reverse()
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def seal(self, blocks: Sequence[int], hashes: Sequence[int], depth: int, now_ns: int) -> list[int]:
        """Their KV is complete: others may find them. Returns the hashes that were new here.

        depth   position of the first of them in its chain. A hash that another block has already stays with that one.
        """
        new = []
        known = self._by_hash
        first = self._num_stored + len(blocks)
        for index, (block, block_hash) in enumerate(zip(blocks, hashes, strict=True)):
            if block_hash in known:
                continue
            known[block_hash] = block
            self._hash[block] = block_hash
            self._depth[block] = depth + index
            self._uses[block] = 0
            self._stored[block] = first - index  # the deepest counts as stored first
            self._stored_ns[block] = self._used_ns[block] = now_ns
            new.append(block_hash)
        self._num_stored = first
        return new

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference to each (a fork: another sequence with the same tokens)."""
        for block in blocks:
            self._refs[block] += 1

    def num_references(self, block: int) -> int:
        """How many sequences hold it."""
        return self._refs[block]

    def is_shared(self, block: int) -> bool:
        """More than one sequence reads it, or may find it: it must not be written."""
        return self._refs[block] > 1 or self._hash[block] != NO_HASH

    def release(self, blocks: Sequence[int], now_ns: int) -> None:
        """Give one reference to each back, the last of `blocks` first."""
        refs, free = self._refs, self._free
        for block in reversed(blocks):
            refs[block] -= 1
            if refs[block]:
                continue
            if self._hash[block] == NO_HASH:
                free.append(block)
                continue
            self._used_ns[block] = now_ns
            self._cached.add(block, stored=self._stored[block], depth=self._depth[block], uses=self._uses[block])
            if self._ttl_ns is not None:
                self._released[block] = None

    def expire(self, now_ns: int) -> None:
        """Give up what has been unused for longer than the TTL."""
        if self._ttl_ns is None:
            return
        old = []
        for block in self._released:
            if now_ns - self._used_ns[block] <= self._ttl_ns:
                break
            old.append(block)
        for block in old:
            self._cached.remove(block)
        if old:
            self._evict(old, "ttl", now_ns, None)

    def clear(self) -> int:
        """Forget every prefix: cached blocks become free, referenced ones can no longer be found. Returns the forgotten."""
        forgotten = len(self._by_hash)
        while len(self._cached):
            block = self._cached.pop()
            self._free.append(block)
        self._released.clear()
        for block in self._by_hash.values():
            self._hash[block] = NO_HASH
        self._by_hash.clear()
        return forgotten

    def check_integrity(self) -> None:
        """Raise AssertionError where free + cached + referenced are not all blocks, each once."""
        referenced = [block for block, refs in enumerate(self._refs) if refs > 0]
        cached = [block for block in range(self.num_blocks) if block in self._cached]
        assert all(refs >= 0 for refs in self._refs), "a block was released more often than referenced"
        assert len(self._free) + len(cached) + len(referenced) == self.num_blocks, "blocks were lost or doubled"
        assert len({*self._free, *cached, *referenced}) == self.num_blocks, "a block is in two places"
        assert len(cached) == len(self._cached)
        assert all(self._hash[block] != NO_HASH for block in cached), "a cached block holds nothing"
        assert all(self._hash[block] == NO_HASH for block in self._free), "a free block still has a hash"
        hashed = {h: b for b, h in enumerate(self._hash) if h != NO_HASH}
        assert hashed == self._by_hash, "a hash leads to another block"
        if self._ttl_ns is not None:
            assert set(self._released) == set(cached)

    def _evict(self, blocks: list[int], reason: str, now_ns: int, cause: str | None) -> None:
        hashes = [self._hash[block] for block in blocks]
        for block, block_hash in zip(blocks, hashes, strict=True):
            del self._by_hash[block_hash]
            self._hash[block] = NO_HASH
            if self._ttl_ns is not None:
                del self._released[block]
        self._free.extend(blocks)
        self.num_evicted += len(blocks)
        if self._listener is not None:
            evicted = Evicted(
                reason,
                hashes,
                [(now_ns - self._used_ns[block]) / 1e9 for block in blocks],
                [(now_ns - self._stored_ns[block]) / 1e9 for block in blocks],
                [self._uses[block] for block in blocks],
            )
            self._listener.evicted(evicted, cause)
