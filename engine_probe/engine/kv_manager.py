"""Which blocks a sequence holds: finds its prefix in the cache, makes room, gives back, keeps shared blocks unwritten.

Invariant: blocks [0, num_sealed) of a sequence are complete and may be found by others; the block that is written next is
its own alone. Source: vLLM v1 `kv_cache_manager.py`; hash names as in `kv_identity.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Protocol

import numpy as np

from engine_probe.chain_hash import ROOT
from engine_probe.engine.block_pool import BlockPool, Evicted, Seconds
from engine_probe.engine.eviction import Blocks
from engine_probe.engine.host_costs import HostCosts, MeasuredCosts
from engine_probe.engine.kv_identity import extend
from engine_probe.engine.name_book import NOBODY, NameBook, Names, Numbers
from engine_probe.engine.sequence import Sequence

NO_BLOCKS: Blocks = np.empty(0, dtype=np.int64)
_NO_PARENT: Numbers = np.array([NOBODY])


class KvListener(Protocol):
    """Hears what happens to blocks. hashes: their names, [n] uint64."""

    def stored(self, sequence: Sequence, hashes: Names, parents: Names, first: int, at_ns: int) -> None:
        """Blocks of `sequence` can be found from now on.

        parents   names of the blocks before them; ROOT where there is none
        first     logical index of the first of them
        """

    def hit(self, sequence: Sequence, hashes: Names, idle_s: Seconds, at_ns: int) -> None:
        """`sequence` found these blocks resident and uses them; idle_s: how long nobody had used each, 0 where somebody does."""

    def evicted(self, hashes: Names, blocks: Evicted, cause: str | None, at_ns: int) -> None:
        """Cached blocks were given up, for `cause`."""

    def cleared(self, at_ns: int) -> None:
        """The whole cache was forgotten."""


class PrefixFeed(Protocol):
    """Hears of the same blocks by the numbers of their names, [n]."""

    def stored(self, numbers: Numbers, parents: Numbers, at_ns: int) -> None:
        """parents: NOBODY for a first block."""

    def evicted(self, numbers: Numbers, at_ns: int) -> None:
        """They were given up."""

    def cleared(self, at_ns: int) -> None:
        """All were."""


class KvManager:
    """Blocks of one engine.

    min_reuse_tokens   a shorter match is not used (the smallest reusable unit)
    clock_ns           the engine's clock: what making room takes is read from it
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        salt: bytes = b"",
        prefix_caching: bool = True,
        eviction: str = "lru",
        ttl_s: float | None = None,
        min_reuse_tokens: int = 0,
        costs: HostCosts | None = None,
        listener: KvListener | None = None,
        book: NameBook,
        feed: PrefixFeed | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        ttl_ns = None if ttl_s is None else round(ttl_s * 1e9)
        self.pool = BlockPool(num_blocks, order=eviction, ttl_ns=ttl_ns, listener=self)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._salt = salt
        self._min_reuse_blocks = -(-min_reuse_tokens // block_size)
        self._costs = costs or MeasuredCosts()
        self._listener = listener
        self.book = book
        self._feed = feed
        self._now_ns = 0
        self._clock_ns = clock_ns
        self.alloc_ns = 0
        """Spent on allocating and evicting blocks since somebody set it to 0."""

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def find(self, sequence: Sequence) -> Blocks:
        """The resident blocks that hold its beginning and can be reused now. At least one token is left to compute."""
        if not self.prefix_caching:
            return NO_BLOCKS
        usable = self._names(sequence)[: (sequence.num_known - 1) // self.block_size]
        self._costs.lookup(len(usable))
        found = self.pool.match(usable)
        return found if len(found) >= self._min_reuse_blocks else NO_BLOCKS

    def admit(self, sequence: Sequence, found: Blocks, num_tokens: int, spare: int, now_ns: int) -> bool:
        """Give it the found blocks and room for `num_tokens` in all; False (nothing changed) where room is lacking.

        spare   blocks that must stay available beside
        """
        missing = self.blocks_for(num_tokens) - len(found)
        if missing + spare + self.pool.num_cached_of(found) > self.pool.num_available:
            return False
        idle_s = self.pool.take(found, now_ns)
        fresh = self._allocate(missing, sequence, now_ns)
        if fresh is None:
            self.pool.release(found, now_ns)
            return False
        sequence.blocks = [*found.tolist(), *fresh]
        sequence.num_sealed = len(found)
        sequence.num_computed = len(found) * self.block_size
        if len(found) and self._listener is not None:
            self._listener.hit(sequence, self.book.names(sequence.names[: len(found)]), idle_s, now_ns)
        return True

    def grow(self, sequence: Sequence, num_tokens: int, now_ns: int) -> list[tuple[int, int]] | None:
        """Room for `num_tokens` in all, the block written next its own alone; None where no block is to be had.

        Returns (from, to) of blocks to copy first.
        """
        writes = sequence.num_computed // self.block_size
        copies_one = writes < len(sequence.blocks) and self.pool.is_shared(sequence.blocks[writes])
        missing = max(0, self.blocks_for(num_tokens) - len(sequence.blocks)) + copies_one
        if not missing:
            return []
        fresh = self._allocate(missing, sequence, now_ns)
        if fresh is None:
            return None
        copies = []
        if copies_one:
            shared, own = sequence.blocks[writes], fresh.pop()
            copies.append((shared, own))
            sequence.blocks[writes] = own
            self.pool.release([shared], now_ns)
        sequence.blocks += fresh
        return copies

    def append_block(self, sequence: Sequence, now_ns: int) -> None:
        """One more block for it, of which there is one; none that it writes is shared."""
        blocks = self._allocate(1, sequence, now_ns)
        assert blocks is not None, "a block that was foreseen is not there"
        sequence.blocks += blocks

    def fork(self, sequence: Sequence, sibling: Sequence) -> None:
        """`sibling` shares the blocks that `sequence` has computed; whoever writes a shared one first copies it."""
        shared = sequence.blocks[: self.blocks_for(sequence.num_computed)]
        self.pool.share(shared)
        sibling.blocks = shared
        sibling.hashes = list(sequence.hashes)
        sibling.names = sequence.names
        sibling.num_sealed = sequence.num_sealed
        sibling.num_computed = sequence.num_computed
        sequence.is_forked = sibling.is_forked = True

    def seal(self, sequence: Sequence, now_ns: int) -> None:
        """Blocks that are complete by now may be found by others."""
        full = sequence.num_computed // self.block_size
        if not self.prefix_caching or full <= sequence.num_sealed:
            return
        names = self._names(sequence)
        full = min(full, len(names))
        first = sequence.num_sealed
        if full <= first:
            return
        new = self.pool.seal(sequence.blocks[first:full], names[first:full], first, now_ns)
        sequence.num_sealed = full
        if not len(new):
            return
        if len(new) == full - first:
            numbers = names[first:full]
            parents = np.concatenate((_NO_PARENT, names[: full - 1])) if first == 0 else names[first - 1 : full - 1]
        else:
            new = first + new
            numbers, parents = names[new], names[new - 1]
            if new[0] == 0:
                parents[0] = NOBODY
        if self._listener is not None:
            above = self.book.names(parents)
            if parents[0] == NOBODY:
                above[0] = ROOT
            self._listener.stored(sequence, self.book.names(numbers), above, first, now_ns)
        if self._feed is not None:
            self._feed.stored(numbers, parents, now_ns)

    def free(self, sequence: Sequence, now_ns: int) -> None:
        """It needs its blocks no more."""
        self.pool.release(sequence.blocks, now_ns)
        sequence.blocks = []
        sequence.num_sealed = 0

    def reserve(self, count: int, request_id: str, now_ns: int) -> list[int] | None:
        """Blocks for KV that is on its way here; None where there are too few."""
        self._now_ns = now_ns
        return self.pool.allocate(count, now_ns, request_id)

    def restore(self, blocks: Items[int], names: Numbers, first: int, now_ns: int) -> None:
        """The KV has come into these reserved blocks, and can be found from now on. first: logical index of the first of them."""
        self.pool.seal(blocks, names, first, now_ns)
        self.pool.release(blocks, now_ns)

    def clear(self, now_ns: int) -> int:
        """Forget every prefix. Returns how many blocks were forgotten."""
        forgotten = self.pool.clear()
        if self._listener is not None:
            self._listener.cleared(now_ns)
        if self._feed is not None:
            self._feed.cleared(now_ns)
        return forgotten

    def expire(self, now_ns: int) -> None:
        """Give up what is past its TTL."""
        self._now_ns = now_ns
        began_ns = self._clock_ns()
        self.pool.expire(now_ns)
        self.alloc_ns += self._clock_ns() - began_ns

    def evicted(self, blocks: Evicted, cause: str | None) -> None:
        """From the pool: what it evicted (EvictionListener)."""
        if self._listener is not None:
            self._listener.evicted(self.book.names(blocks.numbers), blocks, cause, self._now_ns)
        if self._feed is not None:
            self._feed.evicted(blocks.numbers, self._now_ns)

    def check_integrity(self, sequences: Items[Sequence]) -> None:
        """Blocks of these (all that are under way) are the referenced ones, each as often as it is held."""
        self.pool.check_integrity()
        held: dict[int, int] = {}
        for sequence in sequences:
            assert sequence.num_computed <= len(sequence.blocks) * self.block_size or sequence.host_blocks, (
                f"{sequence.request_id} computed more than it holds"
            )
            for block in sequence.blocks:
                held[block] = held.get(block, 0) + 1
        for block, count in held.items():
            assert self.pool.num_references(block) == count, f"block {block} is held {count} times"
        assert len(held) == self.pool.num_referenced, "a block is referenced by nobody"

    def _names(self, sequence: Sequence) -> Numbers:
        """[n] numbers of the names of its complete blocks."""
        if sequence.token_ids:
            extend(sequence.hashes, sequence.token_ids, self.block_size, sequence.root, self._salt)
            if len(sequence.names) < len(sequence.hashes):
                sequence.names = self.book.number(sequence.hashes)
        elif not len(sequence.names):
            sequence.names = self.book.number(sequence.prompt_hashes)
        return sequence.names

    def _allocate(self, count: int, sequence: Sequence, now_ns: int) -> list[int] | None:
        self._now_ns = now_ns
        began_ns = self._clock_ns()
        before, cached = self.pool.num_evicted, self.pool.num_cached
        blocks = self.pool.allocate(count, now_ns, sequence.request_id)
        if self.pool.num_evicted > before:
            self._costs.evict(self.pool.num_evicted - before, cached)
        self.alloc_ns += self._clock_ns() - began_ns
        return blocks
