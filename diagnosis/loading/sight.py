"""Bring two windows to what both of them saw: what only one window observed says nothing about the change between them.

Idea: phases that only the suspect window knows would look like seconds that came into being, and the baseline's would look
like seconds that nobody can see. So the richer window is read at the level of the poorer, and that is said.

Invariant: afterwards both windows know queue and prefill, or neither; the same for decoding and for the life of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from diagnosis.facts import F64, BlockTotals, Facts, LineageFacts
from diagnosis.quality import caching_is_off

KNOWN = 0.05
"""Share of requests that have to know a phase before the window counts as having seen it."""
MOST_OF = 0.5
"""Share of the other window's losses that a window has to have missed less, before no word of evictions means that there were none."""


def equal_sight(base: Facts, suspect: Facts) -> tuple[Facts, Facts, list[str]]:
    """Both windows with only what both saw, and a sentence for each thing that had to be left aside."""
    notes: list[str] = []
    pair = [*with_none_evicted(base, suspect)]
    for what, sees, blind in (
        ("queue and prefill", _sees_phases, _without_phases),
        ("decode times", _sees_decode, _without_decode),
        ("KV block events", _sees_blocks, _without_blocks),
    ):
        seen = [sees(facts) for facts in pair]
        if seen[0] == seen[1]:
            continue
        richer = seen.index(True)
        left = blind(pair[richer])
        if left is pair[richer]:
            continue
        pair[richer] = left
        name, other = pair[richer].name, pair[1 - richer].name
        notes.append(f"{what} were seen in the window {name} only, not in {other}, so they are left aside in both")
    return pair[0], pair[1], notes


def _sees_phases(facts: Facts) -> bool:
    return facts.requests.has("queue_s", KNOWN) and facts.requests.has("prefill_s", KNOWN)


def _without_phases(facts: Facts) -> Facts:
    return _hide(facts, ("queue_s", "prefill_s"), instants=("scheduled_s",))


def _sees_decode(facts: Facts) -> bool:
    return facts.requests.gaps is not None or facts.requests.has("decode_s", KNOWN)


def _without_decode(facts: Facts) -> Facts:
    hidden = _hide(facts, ("decode_s", "stalled_s"))
    visible = hidden.visible - {"request.token_ns"}
    return replace(hidden, requests=replace(hidden.requests, gaps=None), visible=visible)


def with_none_evicted(base: Facts, suspect: Facts) -> tuple[Facts, Facts]:
    """A window without a word of blocks beside one whose workers, the same ones, tell of evictions alone: nothing was evicted in it.

    Told where prompts name their blocks, and where requests missed so much less that there is no room in it for losses like the other's.
    """
    pair = [base, suspect]
    for mine, other in ((0, 1), (1, 0)):
        facts, there = pair[mine], pair[other]
        lost, misses = there.lineage, _misses(facts)
        if facts.blocks is not None or facts.sharing is None or misses is None:
            continue
        if there.blocks is None or lost is None or not lost.by_evictions or caching_is_off(facts)[0]:
            continue
        if not set(facts.requests.worker_names) <= set(there.requests.worker_names):
            continue
        again = float(lost.evicted_tokens.mean()) + lost.apart_tokens / len(there.requests)
        missed_there = again + float(lost.new_tokens.mean() + lost.cleared_tokens.mean())
        if again == 0.0 or missed_there - float(misses.mean()) < MOST_OF * again:
            continue
        none = np.zeros(len(misses))
        lineage = LineageFacts(none, misses, none, 0, None, (), lost.by_worker, by_evictions=True)
        visible = facts.visible | {"block.evicted", "request.prompt_blocks"}
        pair[mine] = replace(facts, blocks=BlockTotals(0, 0, None, 0), lineage=lineage, visible=visible)
    return pair[0], pair[1]


def _misses(facts: Facts) -> F64 | None:
    """[n] prompt tokens of full blocks that each request missed; None where that is not told."""
    size, r = facts.block_size(), facts.requests
    if size is None or not r.has("prompt_tokens") or not r.has("cached_tokens"):
        return None
    full = np.floor(np.nan_to_num(r.get("prompt_tokens")) / size) * size
    missed: F64 = np.maximum(full - np.nan_to_num(r.get("cached_tokens")), 0.0)
    return missed


def _sees_blocks(facts: Facts) -> bool:
    # with caching off there is nothing to store and nothing to evict: no event is the whole truth then
    return facts.blocks is not None or caching_is_off(facts)[0]


def _without_blocks(facts: Facts) -> Facts:
    if facts.blocks is None:
        return facts
    hidden = {"block.evicted"} if facts.sharing is not None else {"block.evicted", "request.prompt_blocks"}
    return replace(facts, blocks=None, lineage=None, visible=facts.visible - hidden)


def _hide(facts: Facts, numbers: Sequence[str], instants: Sequence[str] = ()) -> Facts:
    r = facts.requests
    unknown = np.full(len(r), np.nan)
    requests = replace(
        r,
        numbers={name: values for name, values in r.numbers.items() if name not in numbers},
        **dict.fromkeys(instants, unknown),  # type: ignore[arg-type]  # the names are those of arrays
    )
    return replace(facts, requests=requests, visible=facts.visible - {f"request.{name}" for name in numbers})
