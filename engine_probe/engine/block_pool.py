"""The pool of KV blocks: free, cached, or referenced, and never two of them.

A block is *free* (holds nothing), *referenced* (by one sequence or, where it has a hash, by several), or *cached*
(unreferenced, still holding a prefix that may be found again, next to be evicted when blocks run out).
Invariant: free + cached + referenced = all. Source: Kwon et al. 2023 (paged attention); vLLM v1 `block_pool.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine_probe.engine.eviction import Blocks, EvictionOrder, LeastRecentlyUsed, eviction_order
from engine_probe.engine.name_book import NOBODY, Numbers
from engine_probe.errors import UsageError

Seconds = npt.NDArray[np.float64]
"""[n] durations."""
NO_SECONDS: Seconds = np.empty(0)


@dataclass(frozen=True, slots=True)
class Evicted:
    """Blocks that lost what they held, in the order in which they did; [n] each.

    reason capacity | ttl; numbers: of their names (`name_book.py`); idle_s since their last use, age_s since they were stored,
    reuse_count hits while resident
    """

    reason: str
    numbers: Numbers
    idle_s: Seconds
    age_s: Seconds
    reuse_count: Numbers


class EvictionListener(Protocol):
    """Hears of evictions. cause: the request for which room was made; None for a TTL."""

    def evicted(self, blocks: Evicted, cause: str | None) -> None: ...


class BlockPool:
    """`num_blocks` blocks, numbered from 0; what they hold has a number too, that of its name (`name_book.py`).

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
        self._cached: EvictionOrder = eviction_order(order, num_blocks)
        self._block_of: Blocks = np.full(1 << 10, NOBODY)
        """[number of a name] the block that holds it."""
        self._name = np.zeros(num_blocks, dtype=np.int64)
        self._is_hashed = np.zeros(num_blocks, dtype=np.bool_)
        self._refs, self._depth, self._uses, self._stored, self._stored_ns, self._used_ns = (
            np.zeros(num_blocks, dtype=np.int64) for _ in range(6)
        )
        self._num_stored = 0
        self._ttl_ns = ttl_ns
        self._by_release = None if ttl_ns is None else LeastRecentlyUsed(num_blocks)
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

    def match(self, names: Sequence[int] | Numbers) -> Blocks:
        """The blocks that hold the leading ones of these names, up to the first that is not resident. Changes nothing."""
        if not len(names):
            return _array(())
        wanted = _array(names)
        self._reach(wanted)
        blocks = self._block_of[wanted]
        is_missing = blocks < 0
        first = int(is_missing.argmax())
        return blocks[:first] if is_missing[first] else blocks

    def num_cached_of(self, blocks: Sequence[int] | Blocks) -> int:
        """How many of these are cached: taking them lowers what can be allocated."""
        return int((self._refs[_array(blocks)] == 0).sum()) if len(blocks) else 0

    def take(self, blocks: Sequence[int] | Blocks, now_ns: int) -> Seconds:
        """Reference these resident blocks, each once: a hit on each. Returns how long each had been unused; 0: it is in use."""
        if not len(blocks):
            return NO_SECONDS
        taken = _array(blocks)
        is_cached = self._refs[taken] == 0
        idle_s: Seconds = (now_ns - self._used_ns[taken]) * is_cached / 1e9
        cached = taken[is_cached]
        if len(cached):
            self._cached.remove(cached)
            if self._by_release is not None:
                self._by_release.remove(cached)
        self._refs[taken] += 1
        self._uses[taken] += 1
        self._used_ns[taken] = now_ns
        return idle_s

    def allocate(self, count: int, now_ns: int, cause: str | None = None) -> list[int] | None:
        """`count` blocks with one reference each, holding nothing; None (and nothing changed) where there are too few."""
        free = self._free
        missing = count - len(free)
        if missing > 0:
            if missing > len(self._cached):
                return None
            victims = self._cached.pop(missing)
            if self._by_release is not None:
                self._by_release.remove(victims)
            self._evict(victims, "capacity", now_ns, cause)
        at = len(free) - count
        blocks = free[at:]
        del free[at:]
        blocks.reverse()
        self._refs[blocks] = 1
        return blocks

    def seal(self, blocks: Sequence[int], names: Sequence[int] | Numbers, depth: int, now_ns: int) -> Numbers:
        """Their KV is complete: others may find them. Returns which of them were new here, as positions in `names`.

        depth   position of the first of them in its chain. A name that another block has already stays with that one.
        """
        sealed, wanted = _array(blocks), _array(names)
        if not len(wanted):
            return wanted
        self._reach(wanted)
        is_new = self._block_of[wanted] < 0
        fresh = np.flatnonzero(is_new)
        if len(fresh) < len(wanted):
            if not len(fresh):
                return fresh
            sealed, wanted = sealed[fresh], wanted[fresh]
        self._block_of[wanted] = sealed
        self._name[sealed] = wanted
        self._is_hashed[sealed] = True
        self._depth[sealed] = depth + fresh
        self._uses[sealed] = 0
        # The deepest counts as stored first.
        self._stored[sealed] = np.arange(self._num_stored + len(sealed), self._num_stored, -1)
        self._num_stored += len(sealed)
        self._stored_ns[sealed] = self._used_ns[sealed] = now_ns
        return fresh

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference to each (a fork: another sequence with the same tokens)."""
        self._refs[_array(blocks)] += 1

    def num_references(self, block: int) -> int:
        """How many sequences hold it."""
        return int(self._refs[block])

    def is_shared(self, block: int) -> bool:
        """More than one sequence reads it, or may find it: it must not be written."""
        return bool(self._refs[block] > 1 or self._is_hashed[block])

    def release(self, blocks: Sequence[int] | Blocks, now_ns: int) -> None:
        """Give one reference to each back, the last of `blocks` first."""
        if not len(blocks):
            return
        released = _array(blocks)[::-1]
        self._refs[released] -= 1
        unused = released[self._refs[released] == 0]
        is_hashed = self._is_hashed[unused]
        self._free += unused[~is_hashed].tolist()
        kept = unused[is_hashed]
        if not len(kept):
            return
        self._used_ns[kept] = now_ns
        self._cached.add(kept, stored=self._stored[kept], depth=self._depth[kept], uses=self._uses[kept])
        if self._by_release is not None:
            self._by_release.append(kept)

    def expire(self, now_ns: int) -> None:
        """Give up what has been unused for longer than the TTL."""
        if self._by_release is None or self._ttl_ns is None:
            return
        old = []
        while (first := self._by_release.first()) is not None and now_ns - self._used_ns[first] > self._ttl_ns:
            old.append(self._by_release.pop(1))
        if old:
            victims = np.concatenate(old)
            self._cached.remove(victims)
            self._evict(victims, "ttl", now_ns, None)

    @property
    def next_expiry_ns(self) -> int | None:
        """From when on `expire` gives something up; None where nothing will."""
        if self._by_release is None or self._ttl_ns is None or (first := self._by_release.first()) is None:
            return None
        return int(self._used_ns[first]) + self._ttl_ns + 1

    def clear(self) -> int:
        """Forget every prefix: cached blocks become free, referenced ones can no longer be found. Returns the forgotten."""
        forgotten = int(self._is_hashed.sum())
        cached = self._cached.pop(len(self._cached)) if len(self._cached) else _array(())
        if self._by_release is not None:
            self._by_release.remove(cached)
        self._free += cached.tolist()
        self._is_hashed[:] = False
        self._block_of[:] = NOBODY
        return forgotten

    def holds(self, num_names: int) -> npt.NDArray[np.bool_]:
        """[num_names] whether a block holds the name of this number."""
        self._reach(np.array([num_names - 1]))
        return self._block_of[:num_names] >= 0

    def check_integrity(self) -> None:
        """Raise AssertionError where free + cached + referenced are not all blocks, each once."""
        referenced = np.flatnonzero(self._refs > 0).tolist()
        cached = self._cached.held()
        hashed = np.flatnonzero(self._is_hashed).tolist()
        assert (self._refs >= 0).all(), "a block was released more often than referenced"
        assert len(self._free) + len(cached) + len(referenced) == self.num_blocks, "blocks were lost or doubled"
        assert len({*self._free, *cached, *referenced}) == self.num_blocks, "a block is in two places"
        assert len(cached) == len(self._cached)
        assert cached <= set(hashed), "a cached block holds nothing"
        assert not self._is_hashed[self._free].any(), "a free block still has a hash"
        held = np.flatnonzero(self._block_of >= 0)
        assert sorted(self._block_of[held].tolist()) == hashed, "a name leads to a block that holds nothing"
        assert (self._name[self._block_of[held]] == held).all(), "a name leads to another block"
        assert self._by_release is None or self._by_release.held() == cached

    def _evict(self, victims: Blocks, reason: str, now_ns: int, cause: str | None) -> None:
        names = self._name[victims]
        self._block_of[names] = NOBODY
        self._is_hashed[victims] = False
        self._free += victims.tolist()
        self.num_evicted += len(victims)
        if self._listener is not None:
            evicted = Evicted(
                reason,
                names,
                (now_ns - self._used_ns[victims]) / 1e9,
                (now_ns - self._stored_ns[victims]) / 1e9,
                self._uses[victims],
            )
            self._listener.evicted(evicted, cause)

    def _reach(self, names: Numbers) -> None:
        """Numbers up to the largest of these can be looked up."""
        most = int(names.max())
        if most >= len(self._block_of):
            grown = np.full(2 * most + 2, NOBODY)
            grown[: len(self._block_of)] = self._block_of
            self._block_of = grown


def _array(blocks: Sequence[int] | Blocks) -> Blocks:
    return np.asarray(blocks, dtype=np.int64)
