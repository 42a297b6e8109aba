"""The engine's own flight recorder: what it decided and did, told to a `Recorder` in the words of the contract.

All the engine's instrumentation is here, so that the scheduler and the pool read as what they are. Every decision has its
row: why the queue waits (`step.waiting_on`, and per request the seconds by reason in its labels), who was preempted for
whom (label `preempted_for`), which block was evicted for which request (`block` rows).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from engine_probe.engine.block_pool import Evicted, Seconds
from engine_probe.engine.config import EngineConfig
from engine_probe.engine.executor import StepResult
from engine_probe.engine.kv_identity import extend
from engine_probe.engine.name_book import NameBook, Names
from engine_probe.engine.scheduler import REASONS, Schedule
from engine_probe.engine.sequence import Sequence
from engine_probe.recording.recorder import Recorder
from engine_probe.recording.step_ring import UNKNOWN

if TYPE_CHECKING:
    from engine_probe.engine.engine import Engine

ENGINE = "kvscope"
SAMPLE_EVERY_NS = 10**9
TOTALS = (
    "preemptions_total",
    "prefix_queries_tokens_total",
    "prefix_hits_tokens_total",
    "prompt_tokens_total",
    "prompt_tokens_computed_total",
    "output_tokens_total",
    "requests_finished_total",
    "requests_failed_total",
)


class Flight:
    """Tells `recorder` what one engine does."""

    def __init__(self, recorder: Recorder, config: EngineConfig, book: NameBook) -> None:
        self.recorder = recorder
        self.book = book
        self.recorder.constants["step"]["padding_side"] = "none"
        self._config = config
        self._size = config.block_size
        self._held_up_by: str | None = None
        self._held_up_since_ns = 0
        self._waited_ns = dict.fromkeys(REASONS, 0)
        self._waited_at_arrival: dict[str, dict[str, int]] = {}
        self._evicted_before = 0
        self._num_preempted = 0
        """Since the last step was told: where nothing else could be computed there is none."""
        self._begin_ns = 0
        self.next_sample_ns = 0
        self._totals = Counter[str]()

    # The engine

    def started(self, engine: Engine) -> None:
        """The engine is there."""
        self.announce(engine)
        worker = self._config.worker
        self.recorder.row("mark", mark="worker_up", subject=worker, text=f"{worker} started")

    def announce(self, engine: Engine) -> None:
        """Its slow facts, and its numbers now: where rows of a run begin."""
        config = self._config
        facts: dict[str, Any] = {
            "engine": ENGINE,
            "engine_version": _installed_version(),
            "role": config.role,
            "block_size": config.block_size,
            "num_blocks": engine.kv.pool.num_blocks,
            "max_context": engine.max_context,
            "prefix_caching": config.prefix_caching,
            "flags": config.flags(),
            **engine.executor.worker_facts,
        }
        self.recorder.row("worker", **facts)
        self._sample(engine, engine.clock.monotonic_ns())

    # Requests

    def arrived(self, sequence: Sequence, queued_ns: int) -> None:
        """It waits for the scheduler from now on."""
        self._count_wait(queued_ns)
        if self._config.scheduler.policy == "priority":
            sequence.columns.setdefault("priority_class", str(sequence.priority))
        sequence.slot = self.recorder.arrive(
            sequence.request_id,
            sequence.arrival_ns,
            queued_ns=queued_ns,
            prompt_tokens=sequence.num_prompt,
            tenant=sequence.tenant,
            **sequence.columns,
        )
        for phase, start_ns, end_ns in sequence.early_spans:
            self.recorder.span(sequence.slot, phase, start_ns, end_ns)
        self._waited_at_arrival[sequence.request_id] = dict(self._waited_ns)

    def rejected(self, sequence: Sequence, reason: str) -> None:
        """It can never run."""
        slot = self.recorder.arrive(
            sequence.request_id,
            sequence.arrival_ns,
            prompt_tokens=sequence.num_prompt,
            tenant=sequence.tenant,
            **sequence.columns,
        )
        self.recorder.finish(slot, "rejected", finish_reason="rejected", error=reason)

    def forked(self, sequence: Sequence, leader: Sequence, at_ns: int) -> None:
        """It begins from the blocks of the sibling that computed their prompt, for which it waited."""
        self._waited_at_arrival.pop(sequence.request_id, None)
        waited = {name: s for name, s in leader.columns.get("labels", {}).items() if name.startswith("waited_on_")}
        if leader.scheduled_ns is not None:
            waited["waited_on_dependency_s"] = f"{(at_ns - leader.scheduled_ns) / 1e9:.6f}"
        sequence.columns["labels"] = {**sequence.columns.get("labels", {}), **waited}
        self._count_look_up(sequence, sequence.num_computed)
        self._first_admission(sequence, sequence.num_computed, (at_ns, at_ns))

    def ended(self, sequence: Sequence, state: str, reason: str, end_ns: int | None = None) -> None:
        """It finished (its last token came in the step that ended just now), or was aborted, now or at this instant."""
        if self._waited_at_arrival.get(sequence.request_id) is not None:
            self._count_wait(self.recorder.clock.monotonic_ns())
            self._tell_wait(sequence)
        totals = self._totals
        totals["requests_finished_total" if state == "finished" else "requests_failed_total"] += 1
        totals["prompt_tokens_total"] += sequence.num_prompt
        totals["output_tokens_total"] += sequence.num_output
        columns = {} if self._config.prefix_caching else {"prompt_blocks": self._names(sequence)}
        self.recorder.finish(
            sequence.slot, state, end_ns, finish_reason=reason, output_tokens=sequence.num_output, **columns
        )

    # Steps

    def begin_step(self, at_ns: int) -> None:
        """An iteration begins."""
        self._begin_ns = at_ns
        self.recorder.begin_step(at_ns)

    def drafted(self, num_drafted: int, num_accepted: int) -> None:
        """Speculation proposed so many tokens in a step, and so many of them were kept."""
        self._totals["draft_tokens_total"] += num_drafted
        self._totals["accepted_tokens_total"] += num_accepted

    def skip_step(self, schedule: Schedule) -> None:
        """Nothing could be computed; what is held up stays so."""
        self._held_up(schedule.held_up_by)
        self._gave_way(schedule)

    def planned(self, schedule: Schedule) -> None:
        """The step is decided; the executor has not begun."""
        recorder = self.recorder
        self._held_up(schedule.held_up_by)
        self._gave_way(schedule)
        for admission in schedule.admitted:
            sequence = admission.sequence
            if sequence.num_preemptions == 0:
                self._first_admission(sequence, admission.found_tokens, admission.lookup_ns)
            elif admission.found_tokens and not admission.is_swapped:
                sequence.columns["self_hit_tokens"] = (
                    sequence.columns.get("self_hit_tokens", 0) + admission.found_tokens
                )
                recorder.note(sequence.slot, self_hit_tokens=sequence.columns["self_hit_tokens"])
        for chunk in schedule.plan.prefills:
            sequence = chunk.sequence
            sequence.is_decoding = False
            recorder.prefill(
                sequence.slot,
                chunk.num_tokens,
                emits=int(chunk.emits),
                recomputed=chunk.num_recomputed,
            )
        for sequence in schedule.plan.decodes:
            if not sequence.is_decoding:
                sequence.is_decoding = True
                recorder.decode(sequence.slot)

    def end_step(self, engine: Engine, schedule: Schedule, result: StepResult, schedule_s: float) -> None:
        """The step's tokens are there."""
        plan, pool, waiting = schedule.plan, engine.kv.pool, engine.scheduler.waiting
        now_ns = engine.clock.monotonic_ns()
        num_waiting = len(waiting)
        held_up_by = schedule.held_up_by
        awaiting = engine.scheduler.num_kept + engine.num_awaited  # siblings wait for their prompt
        oldest = waiting.oldest()
        batch = len(plan.decodes) + len(plan.prefills)
        evicted, self._evicted_before = pool.num_evicted - self._evicted_before, pool.num_evicted
        preempted, self._num_preempted = self._num_preempted, 0
        probe_s = engine.costs.probe()

        step = self.recorder.end_step(
            num_running=batch,
            num_waiting_prefill=waiting.num_new + awaiting,
            num_waiting_decode=waiting.num_again,
            prefill_tokens=sum([chunk.num_tokens for chunk in plan.prefills]),
            decode_tokens=len(plan.decodes) + sum(result.accepted),
            recomputed_tokens=sum([chunk.num_recomputed for chunk in plan.prefills]),
            num_preempted=preempted,
            blocks_total=pool.num_blocks,
            blocks_used=pool.num_referenced,
            blocks_reserved=engine.scheduler.watermark,
            blocks_cached=pool.num_cached,
            blocks_evicted=evicted,
            batch_size=batch,
            max_seq_len=UNKNOWN if result.max_seq_len is None else result.max_seq_len,
            wasted_slots=UNKNOWN if result.wasted_slots is None else result.wasted_slots,
            padding_ratio=0.0,  # batches are packed
            schedule_s=schedule_s,
            forward_s=result.forward_s,
            sample_s=result.sample_s,
            alloc_s=engine.kv.alloc_ns / 1e9,
            kv_load_s=result.load_s,
            oldest_wait_s=0.0 if oldest is None else (now_ns - oldest.waits_since_ns) / 1e9,
            at_ns=now_ns,
            probe_s=probe_s,
            waiting_on_blocks=num_waiting if held_up_by == "blocks" else 0,
            waiting_on_budget=num_waiting if held_up_by == "budget" else 0,
            waiting_on_seats=num_waiting if held_up_by == "seats" else 0,
            waiting_on_dependency=awaiting + (num_waiting if held_up_by == "dependency" else 0),
        )
        for columns in result.checks:
            self.recorder.row("check", now_ns, batch_id=f"{self.recorder.worker}-{step}", **columns)
        self._count(schedule)
        if now_ns >= self.next_sample_ns:
            self._sample(engine, now_ns)

    def decoding(self, sequences: Items[Sequence]) -> None:
        """From the next step on these give a token in each."""
        for sequence in sequences:
            if not sequence.is_decoding:
                sequence.is_decoding = True
                self.recorder.decode(sequence.slot)

    def owes(self, engine: Engine) -> bool:
        """Something happened since the last step, and is told with the next."""
        return bool(self._num_preempted) or engine.kv.pool.num_evicted > self._evicted_before

    def decoded(
        self,
        engine: Engine,
        batch: int,
        begin_ns: int,
        ends_ns: list[int],
        forward_s: list[float],
        schedule_ns: int,
        held_up_by: str | None,
        last_begin_ns: int,
        wasted_slots: int,
    ) -> None:
        """Steps that did nothing but decode `batch` sequences, and differ in their time and the slots they filled; see `DecodeRun`.

        wasted_slots   of the last of them
        """
        recorder, pool, waiting = self.recorder, engine.kv.pool, engine.scheduler.waiting
        recorder.begin_step(begin_ns)
        self._begin_ns = last_begin_ns
        self._held_up(held_up_by)
        now_ns = ends_ns[-1]
        num_waiting, awaiting = len(waiting), engine.num_awaited
        oldest = waiting.oldest() if num_waiting else None
        evicted, self._evicted_before = pool.num_evicted - self._evicted_before, pool.num_evicted
        preempted, self._num_preempted = self._num_preempted, 0
        recorder.end_step(
            num_running=batch,
            num_waiting_prefill=waiting.num_new + awaiting,
            num_waiting_decode=waiting.num_again,
            prefill_tokens=0,
            decode_tokens=batch,
            recomputed_tokens=0,
            num_preempted=preempted,
            blocks_total=pool.num_blocks,
            blocks_used=pool.num_referenced,
            blocks_reserved=engine.scheduler.watermark,
            blocks_cached=pool.num_cached,
            blocks_evicted=evicted,
            batch_size=batch,
            wasted_slots=wasted_slots,
            padding_ratio=0.0,
            schedule_s=schedule_ns / 1e9,
            forward_s=forward_s[-1],
            alloc_s=engine.kv.alloc_ns / 1e9,
            kv_load_s=0.0,
            oldest_wait_s=0.0 if oldest is None else (now_ns - oldest.waits_since_ns) / 1e9,
            at_ns=now_ns,
            probe_s=engine.costs.probe(),
            waiting_on_blocks=num_waiting if held_up_by == "blocks" else 0,
            waiting_on_budget=0,
            waiting_on_seats=num_waiting if held_up_by == "seats" else 0,
            waiting_on_dependency=awaiting,
            run=(ends_ns, forward_s) if len(ends_ns) > 1 else None,
        )
        if now_ns >= self.next_sample_ns:
            self._sample(engine, now_ns)

    def stopped(self, engine: Engine) -> None:
        """The last numbers."""
        self._sample(engine, engine.clock.monotonic_ns())

    # Blocks (KvListener)

    def stored(self, sequence: Sequence, hashes: Names, parents: Names, first: int, at_ns: int) -> None:
        self.recorder.block_events(
            "stored", hashes, slot=sequence.slot, at_ns=at_ns, parent_hash=parents, num_tokens=self._size
        )

    def hit(self, sequence: Sequence, hashes: Names, idle_s: Seconds, at_ns: int) -> None:
        reason = "self" if sequence.num_preemptions else None  # its own blocks, found again
        self.recorder.block_events(
            "hit", hashes, slot=sequence.slot, at_ns=at_ns, num_tokens=self._size, idle_s=idle_s, reason=reason
        )

    def evicted(self, hashes: Names, blocks: Evicted, cause: str | None, at_ns: int) -> None:
        self.recorder.block_events(
            "evicted",
            hashes,
            at_ns=at_ns,
            num_tokens=self._size,
            idle_s=blocks.idle_s,
            age_s=blocks.age_s,
            reuse_count=blocks.reuse_count,
            reason=blocks.reason,
            request_id=cause,
        )

    def cleared(self, at_ns: int) -> None:
        self.recorder.row("block", at_ns, change="cleared", tier="device", reason="reset")
        self.recorder.row(
            "mark", at_ns, mark="cache_reset", subject=self.recorder.worker, text="prefix cache was reset"
        )

    def _first_admission(self, sequence: Sequence, found_tokens: int, lookup_ns: tuple[int, int]) -> None:
        self._tell_wait(sequence)
        columns: dict[str, object] = {}
        if self._config.prefix_caching or found_tokens:
            loaded = min(sequence.columns.get("cached_tokens_host") or 0, found_tokens)
            columns["cached_tokens"], columns["cached_tokens_device"] = found_tokens, found_tokens - loaded
            if (
                "cached_tokens_host" in sequence.columns
            ):  # of what was loaded, some may have been evicted before its turn
                columns["cached_tokens_host"] = loaded
            columns["prompt_blocks"] = self.book.names(sequence.names[: sequence.num_prompt // self._size])
        columns["computed_tokens"] = sequence.num_prompt - found_tokens
        self.recorder.note(sequence.slot, **columns)
        if lookup_ns[1] > lookup_ns[0]:
            self.recorder.span(sequence.slot, "cache_lookup", *lookup_ns)

    def _names(self, sequence: Sequence) -> list[int]:
        """Its prompt's full blocks as a cache would name them: so that it can be told what one would have been good for.

        Where there is none nobody looks them up, and nobody should pay for their names before its first token: hence at its end.
        """
        count = sequence.num_prompt // self._size
        if not sequence.token_ids:
            return list(sequence.prompt_hashes[:count])
        names: list[int] = []
        extend(names, sequence.token_ids[: count * self._size], self._size, sequence.root, self._config.salt)
        return names

    def _gave_way(self, schedule: Schedule) -> None:
        """Who had to give its blocks back, and for whom."""
        for victim, cause in schedule.preempted:
            victim.columns.setdefault("labels", {})["preempted_for"] = cause
            self.recorder.note(victim.slot, labels=victim.columns["labels"])
            self.recorder.preempt(victim.slot)
        self._totals["preemptions_total"] += len(schedule.preempted)
        self._num_preempted += len(schedule.preempted)

    def _tell_wait(self, sequence: Sequence) -> None:
        """Seconds by reason that it waited for its first step, counted up to now, as labels."""
        before = self._waited_at_arrival.pop(sequence.request_id, None)
        labels = sequence.columns.setdefault("labels", {})
        if before is not None:
            waited = {name: self._waited_ns[name] - before[name] for name in REASONS}
            labels.update({f"waited_on_{name}_s": f"{ns / 1e9:.6f}" for name, ns in waited.items() if ns > 0})
        if labels:
            self.recorder.note(sequence.slot, labels=labels)

    def _count(self, schedule: Schedule) -> None:
        totals, plan = self._totals, schedule.plan
        for admission in schedule.admitted:
            if admission.sequence.num_preemptions == 0:
                self._count_look_up(admission.sequence, admission.found_tokens)
        for chunk in plan.prefills:
            totals["prompt_tokens_computed_total"] += chunk.num_tokens

    def _count_look_up(self, sequence: Sequence, found_tokens: int) -> None:
        if self._config.prefix_caching:
            self._totals["prefix_queries_tokens_total"] += sequence.num_prompt
            self._totals["prefix_hits_tokens_total"] += found_tokens

    def _sample(self, engine: Engine, now_ns: int) -> None:
        """The gauges and counters that an engine shows on its metrics page."""
        self.next_sample_ns = now_ns + SAMPLE_EVERY_NS
        for name, value in self.counters(engine).items():
            self.recorder.row("sample", now_ns, name=name, value=float(value))

    def counters(self, engine: Engine) -> dict[str, float]:
        """Canonical sample name -> value, now."""
        pool = engine.kv.pool
        totals = dict.fromkeys(TOTALS, 0) | self._totals
        return {
            **totals,
            "blocks_evicted_total": pool.num_evicted,
            "requests_running": engine.num_running,
            "requests_waiting": engine.num_waiting,
            "kv_usage_ratio": pool.num_referenced / pool.num_blocks,
        }

    def _held_up(self, reason: str | None) -> None:
        """From this step's begin on the head of the queue waits for `reason`."""
        self._count_wait(self._begin_ns)
        self._held_up_by = reason

    def _count_wait(self, at_ns: int) -> None:
        if self._held_up_by is not None:
            self._waited_ns[self._held_up_by] += max(0, at_ns - self._held_up_since_ns)
        self._held_up_since_ns = max(self._held_up_since_ns, at_ns)


def _installed_version() -> str | None:
    """None where it runs from its folder without being installed."""
    try:
        return version("kvscope")
    except PackageNotFoundError:
        return None
