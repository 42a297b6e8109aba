"""Virtual fleets whose KV moves: from a host tier before a request runs, or from a prefill worker to a decode worker.

Meanwhile a request holds reserved blocks where its KV will land, and counts there as waiting on a dependency. Every move is a
`transfer` row, its blocks `loaded` rows, its time the spans `kv_load`, or `handover` and `kv_transfer`. A request that two workers
serve has a row of each, with the same id. Who goes away while its KV is under way has a row of the worker that it was on its way to,
aborted, and the KV lands all the same: nobody calls a transfer back.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine_probe.engine.engine import Engine, Output
from engine_probe.engine.fleet.kv_moves import HandoverSettings, Link, Move, Tier, block_bytes, land
from engine_probe.engine.fleet.prefix_index import EventFeed
from engine_probe.engine.fleet.router import Router
from engine_probe.engine.fleet.virtual_fleet import Ask, VirtualFleet
from engine_probe.engine.name_book import NOBODY
from engine_probe.engine.sequence import Sequence as EngineSequence
from engine_probe.engine.traffic.call import Call
from engine_probe.engine.virtual_clock import VirtualClock


class TieredFleet(VirtualFleet):
    """Each worker has a tier for what its pool gives up; what a prompt finds there is loaded before it waits for its turn.

    feed   of the router's index, which hears of loaded blocks too (None: it reads none)
    """

    def __init__(
        self, engines: Sequence[Engine], router: Router, tiers: Sequence[Tier], feed: EventFeed | None, **others: Any
    ) -> None:
        super().__init__(engines, router, **others)
        self._tiers = tiers
        for tier, engine in zip(tiers, engines, strict=True):
            tier.belongs_to(engine)
        self._feed = feed
        self._loading: dict[str, tuple[int, int]] = {}
        """Requests whose KV is on its way: (arrival, begin of the load)."""

    def _submit(
        self, call: Call, at_ns: int, queued_ns: int, attempt: int, engine: Engine, clock: VirtualClock
    ) -> None:
        ask = self._asks.get(call.request_id)
        move = None if ask is None else self._load(call, queued_ns, engine, ask.worker)
        if ask is None or move is None:
            super()._submit(call, at_ns, queued_ns, attempt, engine, clock)
            return
        engine.num_awaited += 1
        self._loading[call.request_id] = (at_ns, queued_ns)
        self._wait_patiently(call, at_ns, queued_ns, attempt)
        self.at(move.end_ns, lambda now_ns: self._loaded(ask, move, at_ns, queued_ns, now_ns))

    def _abort(self, ask: Ask, at_ns: int, reason: str) -> bool:
        begun = self._loading.pop(ask.call.request_id, None)
        if begun is None:
            return super()._abort(ask, at_ns, reason)
        self._wake(ask.worker, at_ns)
        self._gone(ask, self._loaded_sequence(ask, *begun, at_ns), at_ns, reason)
        return True

    def _load(self, call: Call, queued_ns: int, engine: Engine, worker: int) -> Move | None:
        tier = self._tiers[worker]
        usable = call.blocks[: (call.prompt_tokens - 1) // engine.kv.block_size]
        names = self._asks[call.request_id].names
        engine.kv.expire(_now(engine, queued_ns))
        first = len(engine.kv.pool.match(names[: len(usable)]))
        count = tier.match(usable, first)
        if count < tier.settings.min_blocks:
            return None
        blocks = engine.kv.reserve(count, call.request_id, _now(engine, queued_ns))
        if blocks is None:
            return None
        num_bytes = count * block_bytes(engine)
        begin_ns, end_ns = tier.link.carry(num_bytes, queued_ns + round(tier.settings.latency_s * 1e9))
        there = slice(first, first + count)
        return Move(blocks, names[there], usable[there], first, num_bytes, begin_ns, end_ns)

    def _loaded(self, ask: Ask, move: Move, at_ns: int, queued_ns: int, now_ns: int) -> None:
        engine, clock, call = self.engines[ask.worker], self._clocks[ask.worker], ask.call
        engine.num_awaited -= 1
        clock.advance_to(now_ns)
        land(engine, move, call.request_id, "host", _now(engine, now_ns))
        self._tiers[ask.worker].loaded(len(move.hashes), _now(engine, now_ns))
        if self._feed is not None:
            above = ask.names[move.first - 1 : move.first] if move.first else np.array([NOBODY])
            self._feed.stored(now_ns, ask.worker, move.names, np.concatenate((above, move.names[:-1])))
        engine.flight.recorder.row(
            "transfer",
            now_ns,
            request_id=call.request_id,
            source_worker=f"{engine.config.worker}/host",
            target_worker=engine.config.worker,
            num_bytes=move.num_bytes,
            attempts=1,
            outcome="ok",
            wait_s=(move.begin_ns - queued_ns) / 1e9,
            wire_s=(move.end_ns - move.begin_ns) / 1e9,
        )
        if self._asks.get(call.request_id) is not ask:
            return  # its caller went away meanwhile
        del self._loading[call.request_id]
        sequence = self._loaded_sequence(ask, at_ns, queued_ns, now_ns)
        sequence.columns["cached_tokens_host"] = len(move.hashes) * engine.kv.block_size
        self._enter(sequence, now_ns, engine, clock)

    def _loaded_sequence(self, ask: Ask, at_ns: int, queued_ns: int, now_ns: int) -> EngineSequence:
        spans = [("frontend", at_ns, queued_ns), ("kv_load", queued_ns, now_ns)]
        return self._made(ask.call, at_ns, ask.attempt, spans, self._tokens_here(ask.call))


class SplitFleet(VirtualFleet):
    """The router's workers prefill and give the first token; the least busy of the others decodes the rest."""

    def __init__(
        self, engines: Sequence[Engine], router: Router, handover: HandoverSettings, *, seed: int = 0, **others: Any
    ) -> None:
        super().__init__(engines, router, **others)
        self._handover = handover
        self._links = [Link(handover.bytes_per_s) for _ in engines]
        self._random = random.Random(f"handover/{seed}")
        self._handing: dict[str, tuple[int, int | None]] = {}
        """Requests that no worker has: (end of their prefill, begin of their transfer)."""

    def _tokens_here(self, call: Call) -> int:
        return 1

    def _left(self, worker: int) -> None:
        if worker < self._handover.prefill_workers:
            super()._left(worker)

    def _note(self, output: Output, now_ns: int) -> None:
        ask = self._asks.get(output.sequence.request_id)
        is_handed_over = (
            ask is not None
            and output.finish_reason == "length"
            and ask.worker < self._handover.prefill_workers
            and ask.call.output_tokens > 1
        )
        if ask is None or not is_handed_over:
            super()._note(output, now_ns)
            return
        ask.has_token = True
        self._left(ask.worker)
        source = self.engines[ask.worker].config.worker
        ask.worker = self._decoder()
        self._wake(ask.worker, self._now_ns)
        self.engines[ask.worker].num_awaited += 1
        self._handing[ask.call.request_id] = (now_ns, None)
        may_go_ns = now_ns + round(self._handover.orchestration_s * 1e9)
        self.at(may_go_ns, lambda at_ns: self._send(ask, source, now_ns, at_ns))

    def _abort(self, ask: Ask, at_ns: int, reason: str) -> bool:
        handed = self._handing.pop(ask.call.request_id, None)
        if handed is None:
            return super()._abort(ask, at_ns, reason)
        self._wake(ask.worker, at_ns)
        begun_ns, sent_ns = handed
        self._gone(ask, self._handed_sequence(ask, begun_ns, sent_ns, at_ns), at_ns, reason)
        return True

    def _handed_sequence(self, ask: Ask, begun_ns: int, sent_ns: int | None, now_ns: int) -> EngineSequence:
        """As the decode worker gets it."""
        on_wire_ns = now_ns if sent_ns is None else min(sent_ns, now_ns)
        spans = [("handover", begun_ns, on_wire_ns), ("kv_transfer", on_wire_ns, now_ns)]
        sequence = self._made(ask.call, begun_ns, ask.attempt, spans, ask.call.output_tokens - 1)
        sequence.num_prompt += 1  # the first token came from elsewhere, and is known
        return sequence

    def _decoder(self) -> int:
        """Index of the decode worker with the fewest requests."""
        first = self._handover.prefill_workers

        def busy(worker: int) -> int:
            engine = self.engines[worker]
            return engine.num_running + engine.num_waiting + engine.num_awaited

        return min(range(first, len(self.engines)), key=busy)

    def _send(self, ask: Ask, source: str, begun_ns: int, now_ns: int) -> None:
        """Its KV goes when there is room for it; until then room is asked for again and again."""
        engine, call = self.engines[ask.worker], ask.call
        if self._asks.get(call.request_id) is not ask:
            engine.num_awaited -= 1
            return
        self._clocks[ask.worker].advance_to(now_ns)
        pool, size = engine.kv.pool, engine.kv.block_size
        full = call.blocks[: call.prompt_tokens // size]
        engine.kv.expire(_now(engine, now_ns))
        names = ask.names[: len(full)]
        first = len(pool.match(names))
        count = len(full) - first
        needed = engine.kv.blocks_for(call.prompt_tokens + 1) - first + engine.scheduler.watermark
        can_ever_fit = needed <= pool.num_blocks
        if can_ever_fit and needed > pool.num_available:
            again_ns = now_ns + round(self._handover.retry_s * 1e9)
            self.at(again_ns, lambda at_ns: self._send(ask, source, begun_ns, at_ns))
            return
        blocks = engine.kv.reserve(count, call.request_id, _now(engine, now_ns)) or []
        num_bytes = count * block_bytes(engine)
        if self._random.random() < self._handover.failure_ratio:
            end_ns = now_ns + round(self._handover.timeout_s * 1e9)
            move = Move(blocks, names[first:], full[first:], first, num_bytes, now_ns, end_ns)
            self._handing[call.request_id] = (begun_ns, now_ns)
            self.at(end_ns, lambda at_ns: self._sent(ask, source, move, begun_ns, at_ns, is_broken=True))
            return
        begin_ns, end_ns = self._links[ask.worker].carry(num_bytes, now_ns)
        self._handing[call.request_id] = (begun_ns, begin_ns)
        move = Move(blocks, names[first:], full[first:], first, num_bytes, begin_ns, end_ns)
        self.at(end_ns, lambda at_ns: self._sent(ask, source, move, begun_ns, at_ns, is_broken=False))

    def _sent(self, ask: Ask, source: str, move: Move, begun_ns: int, now_ns: int, *, is_broken: bool) -> None:
        engine, clock, call = self.engines[ask.worker], self._clocks[ask.worker], ask.call
        engine.num_awaited -= 1
        clock.advance_to(now_ns)
        if is_broken or not move.blocks:
            engine.kv.pool.release(move.blocks, _now(engine, now_ns))
        else:
            land(engine, move, call.request_id, "remote", _now(engine, now_ns))
        engine.flight.recorder.row(
            "transfer",
            now_ns,
            request_id=call.request_id,
            source_worker=source,
            target_worker=engine.config.worker,
            num_bytes=move.num_bytes,
            attempts=1,
            outcome="fell_back" if is_broken else "ok",
            reason="timeout" if is_broken else None,
            wait_s=(move.begin_ns - begun_ns) / 1e9,
            wire_s=(move.end_ns - move.begin_ns) / 1e9,
        )
        if self._asks.get(call.request_id) is not ask:
            return  # its caller went away meanwhile
        del self._handing[call.request_id]
        self._enter(self._handed_sequence(ask, begun_ns, move.begin_ns, now_ns), now_ns, engine, clock)


def _now(engine: Engine, at_ns: int) -> int:
    """This instant, or the end of the step that the worker is in: its pool is never told of anything that came before."""
    return max(at_ns, engine.clock.monotonic_ns())
