"""Whether a window's KV pool holds less than the other window's, by the blocks that its workers tell.

For windows in which neither events nor preemptions could be seen: a pool that was made smaller is then the only trace of a shortage, and
what running requests want of it says when it was short. A KV type of more bytes, or a smaller share of the memory, is no such trace by
itself: without the number of blocks a slower machine and a busier one look the same.
"""

from __future__ import annotations

from typing import Final

from diagnosis.facts import Facts

FULL: Final = 0.9
"""Scraped usage that stays below this shows room, whatever the pool."""
SMALLER: Final = 0.95
"""Blocks over those of the other window up to which a pool was made smaller: less is another profile of one setting."""


def smaller_pool(facts: Facts, other: Facts) -> tuple[int, int] | None:
    """(blocks of the smallest pool now, then); None where it is no smaller, somebody does not tell, or scraped usage shows room."""
    used = facts.samples.get("kv_usage_ratio:max")
    if facts.block_size() is None or not facts.requests.has("prompt_tokens") or (used is not None and used < FULL):
        return None
    now, then = _least(facts), _least(other)
    return (now, then) if now is not None and then is not None and now <= SMALLER * then else None


def _least(facts: Facts) -> int | None:
    """Blocks of the smallest pool; None where a worker does not tell its own."""
    told = [worker.num_blocks for worker in facts.workers if worker.num_blocks is not None]
    return min(told) if told and len(told) == len(facts.workers) else None
