"""The seconds up to the first token: what hotspots cost, the queue by what bound it, the prefill by what it computed, the rest.

Where the queue or the prefill was not observed nothing is split: the seconds stand in `ttft_unobserved` or `queue_unobserved`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from diagnosis.facts import F64, Facts
from diagnosis.ledger import timeline as timelines
from diagnosis.ledger.attempts import attempts_before
from diagnosis.ledger.handover import carve_handover
from diagnosis.ledger.others import others_decoding, shared_with
from diagnosis.ledger.overheads import lookup_parts
from diagnosis.ledger.rows import HOTSPOTS
from diagnosis.ledger.sheet import Sheet, known_or_0
from diagnosis.ledger.spent import Context
from diagnosis.ledger.timeline import Spent, Timeline
from diagnosis.ledger.values import metric_values
from diagnosis.ledger.ways import Ways, ways
from diagnosis.statistics.censored import at_least_s


def write_ttft(sheet: Sheet, facts: Facts, spent: Spent, lines: Mapping[int, Timeline], context: Context) -> None:
    """Give away the TTFT of every request that has one, or what it waited at least.

    lines: the timelines of those workers that have one, by the worker's position.
    """
    r = facts.requests
    at_least = at_least_s(facts)
    ttft = np.maximum(known_or_0(np.where(np.isfinite(at_least), at_least, metric_values(facts, "ttft"))), 0.0)
    slow = context.model.slow_share(suspect=context.suspect)
    queue, prefill, left_queue_s = _queue_and_prefill(facts, at_least)
    seen = np.isfinite(queue) & np.isfinite(prefill)
    retried = attempts_before(facts, ttft)
    unseen = Sheet(sheet.n)
    served = unseen.carve(np.where(seen, 0.0, ttft), "client_retries", retried)
    unseen.add("ttft_unobserved", served * (1.0 - slow))
    unseen.add("slow_steps", served * slow)
    sheet.join(unseen, context.model.spell_shares(r.arrival_s + ttft / 2, suspect=context.suspect))
    queue, prefill = np.where(seen, queue, 0.0), np.where(seen, prefill, 0.0)
    # durations of another vantage may exceed this one's TTFT by clock dust: never give away more than there is
    left = np.where(seen, ttft, 0.0)
    queue = np.minimum(queue, left)
    sheet.waits += queue
    prefill = np.minimum(prefill, left - queue)
    queue, prefill, hot = _carve_hotspots(sheet, facts, queue, prefill)
    stalled = np.clip(
        known_or_0(_stalled_before_first(r.get("stalled_s"), r.get("decode_s"))), 0.0, left - hot - queue - prefill
    )
    waited, prefilled = Sheet(sheet.n), Sheet(sheet.n)
    _write_wait(waited, facts, queue, left_queue_s, lines, slow)
    _write_prefill(prefilled, facts, spent, prefill, lines, slow, context)
    sheet.join(waited, context.model.spell_shares(left_queue_s - queue / 2, suspect=context.suspect))
    sheet.join(prefilled, context.model.spell_shares(left_queue_s + prefill / 2, suspect=context.suspect))
    sheet.add("preemption_recompute", stalled)
    rest = left - hot - queue - prefill - stalled
    rest = carve_handover(sheet, facts, rest, before_first=True)
    looked, locked = lookup_parts(r)
    rest = sheet.carve(rest, "lookup_overhead", looked)
    rest = sheet.carve(rest, "cache_lock_contention", locked)
    rest = sheet.carve(rest, "eviction_overhead", r.get("alloc_s"))
    rest = sheet.carve(rest, "tier_load", r.get("kv_load_s"))
    rest = sheet.carve(rest, "client_retries", retried)
    if context.pair.offset_s is not None:
        rest = sheet.carve(rest, "fixed_offset", context.pair.offset_s)
    _write_outside(sheet, facts, rest, context.pair.ways or ways(facts), retried)


def _write_outside(sheet: Sheet, facts: Facts, left: F64, way: Ways, retried: F64) -> None:
    """What is left [n] s by where it lies outside the engine's phases: before it, behind it, or either way; the rest is nobody's."""
    r = facts.requests
    front = known_or_0(r.get("frontend_s")) + known_or_0(r.get("tokenize_s"))
    (into, either, back), retried = _less((way.in_s, way.either_s, way.back_s), retried)
    if facts.handover is not None:  # between caller and prefill worker lies the hand-over too
        moved = timelines.sum_of(facts.handover.parts.values(), len(r))
        to_first = known_or_0(facts.handover.first_s - r.engine_first_s)
        handed = np.where(facts.handover.before_first, np.maximum(moved, to_first), 0.0)
        (back, either, into, front), _ = _less((back, either, into, front), handed)
    # a fixed time that was given away lies on one of the ways, too
    over = np.clip(front + into + either + back - left, 0.0, None)
    between = into + either + back
    kept = 1.0 - np.minimum(np.divide(over, between, out=np.zeros(len(r)), where=between > 0), 1.0)
    left = sheet.carve(left, "front_end", front + into * kept)
    left = sheet.carve(left, "behind_engine", back * kept)
    sheet.add("unexplained", sheet.carve(left, "either_way", either * kept))


def _less(parts: Sequence[F64], taken: F64) -> tuple[list[F64], F64]:
    """The parts [n] s without the seconds `taken`, which the first ones bear first; and what no part could bear."""
    kept = []
    for part in parts:
        kept.append(np.maximum(part - taken, 0.0))
        taken = np.maximum(taken - part, 0.0)
    return kept, taken


def _queue_and_prefill(facts: Facts, at_least: F64) -> tuple[F64, F64, F64]:
    """Queue and prefill (s, NaN unknown), and the instant at which the queue was left, on the engine's clock, [n] each.

    Without a first token: who was scheduled prefilled until its end, who was given up in the queue waited until its end.
    """
    r = facts.requests
    queue, prefill, left_queue = r.get("queue_s").copy(), r.get("prefill_s").copy(), r.scheduled_s.copy()
    censored = np.isfinite(at_least)
    scheduled = censored & np.isfinite(queue) & np.isfinite(r.scheduled_s)
    prefill[scheduled] = np.clip(at_least[scheduled] - queue[scheduled], 0.0, None)
    given_up = timelines.given_up(facts)
    queue[given_up], prefill[given_up] = at_least[given_up], 0.0
    left_queue[given_up] = r.engine_arrival_s[given_up] + at_least[given_up]
    return queue, prefill, left_queue


def _carve_hotspots(sheet: Sheet, facts: Facts, queue: F64, prefill: F64) -> tuple[F64, F64, F64]:
    """What is left of queue and prefill without what hotspots cost, and that, [n] each: waiting goes first, then prefill."""
    hot = np.zeros(sheet.n)
    if facts.routing is None:
        return queue, prefill, hot
    for name in HOTSPOTS:
        lost = facts.routing.slow * (queue + prefill) if name == "hotspot_straggler" else facts.routing.lost_s.get(name)
        if lost is None or not lost.any():
            continue
        waited = np.minimum(lost, queue)
        computed = np.minimum(lost - waited, prefill)
        sheet.add(name, waited + computed)
        queue, prefill, hot = queue - waited, prefill - computed, hot + waited + computed
    return queue, prefill, hot


def _stalled_before_first(stalled: F64, decode: F64) -> F64:
    """Stalls count before the first token only where the request never decoded (no engine splits them yet)."""
    return np.where(np.isfinite(decode), 0.0, stalled)


def _write_wait(
    sheet: Sheet, facts: Facts, queue: F64, left_queue_s: F64, lines: Mapping[int, Timeline], slow: float
) -> None:
    """The queue [n] s, left at `left_queue_s`, split by what bound it then; `slow`: the share that slower steps added."""
    r = facts.requests
    start_s = left_queue_s - queue
    sheet.add("slow_steps", queue * slow)
    queue = queue * (1.0 - slow)
    done = np.zeros(len(r), dtype=bool)
    waited = np.isfinite(left_queue_s) & np.isfinite(r.engine_arrival_s) & (queue > 0)
    for worker, mine in enumerate(r.by_worker()):
        rows = mine[waited[mine]]
        if worker not in lines or len(rows) == 0:
            continue
        line = lines[worker]
        shares = line.integrate(line.wait_shares(), start_s[rows], left_queue_s[rows])
        total = timelines.sum_of(shares.values(), len(rows))
        good = total > 0
        for name, share in shares.items():
            sheet.add(name, share[good] / total[good] * queue[rows[good]], rows[good])
        done[rows[good]] = True
    sheet.add("queue_unobserved", np.where(done, 0.0, queue))


def _write_prefill(
    sheet: Sheet, facts: Facts, spent: Spent, prefill: F64, lines: Mapping[int, Timeline], slow: float, context: Context
) -> None:
    """The prefill [n] s: what was computed again, what steps did for others, the rest its own; `slow` as in the queue."""
    sheet.add("slow_steps", prefill * slow)
    left = prefill * (1.0 - slow)
    rate = context.model.prefill_s_per_token
    if rate is not None:
        for name, tokens in spent.tokens.items():
            if name not in ("long_prefill_interference", "shared_prefill"):  # those of its own are its own work
                left = sheet.carve(left, name, tokens * rate)
    r = facts.requests
    shared = shared_with(facts, spent, lines, r.scheduled_s, r.engine_first_s, own=True)
    own = known_or_0(r.get("computed_tokens")) * (rate or 0.0)
    sharable = np.maximum(left - np.minimum(own, left), 0.0)
    before = sharable.copy()
    for name, seconds in shared.items():
        sharable = sheet.carve(sharable, name, seconds * (1.0 - slow))
    per_seq = context.model.decode_s_per_seq
    if per_seq is not None:
        chunks = r.get("prefill_chunks")
        steps = np.where(np.isfinite(chunks), chunks, 1.0)
        sharable = sheet.carve(sharable, "decode_bandwidth", steps * per_seq * others_decoding(facts, r.scheduled_s))
    sheet.add("own_prefill", left - before + sharable)
