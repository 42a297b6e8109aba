"""What the recorder costs the engine's step: time in its verbs as a share of the step (gate 0.5 %, stretch 0.2 %).

A loop of the embedded engine's shape, with nothing but the recorder's calls in it: 256 running requests that decode one
token a step, one of them ending and one arriving (with a prompt chunk and block events) in every step; compared with
the same loop without a recorder. The share is of a step of 5 ms, which is what such a step takes. The flush thread's
CPU is told beside it: it runs on another core, but shares the interpreter.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

NUM_RUNNING = 256
STEP_S = 0.005
BLOCKS_A_REQUEST = 16
NUM_STEPS, REPEATS = 1_000, 7
GATE, STRETCH = 0.005, 0.002


class NullSink:
    """Takes rows and forgets them."""

    def write(self, tables: Any) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held."""


def run(json: bool) -> dict[str, Any]:
    """Measure; the same keys whatever `json` is (the verb prints them).

    share_of_step   time inside the recorder's verbs a step, over 5 ms: what the engine's thread pays
    gate, stretch   what that share may be
    verbs_us        the same in microseconds a step;  probe_us   as the recorder itself reports it in `step.probe_s`
    flush_us        CPU of the flush (tables, judging, a sink that keeps nothing) a step, on another thread
    """
    with_recorder = [_loop(NUM_STEPS, True) for _ in range(REPEATS)]
    without = [_loop(NUM_STEPS, False) for _ in range(REPEATS)]
    verbs_s = min(loop.verbs_s for loop in with_recorder) - min(loop.verbs_s for loop in without)
    share = verbs_s / STEP_S
    return {
        "bench": "probe",
        "num_running": NUM_RUNNING,
        "step_s": STEP_S,
        "share_of_step": share,
        "gate": GATE,
        "stretch": STRETCH,
        "passed": share <= GATE,
        "verbs_us": verbs_s * 1e6,
        "probe_us": min(loop.probe_s for loop in with_recorder) * 1e6,
        "flush_us": min(loop.flush_s for loop in with_recorder) * 1e6,
    }


@dataclass(frozen=True, slots=True)
class Loop:
    """CPU seconds a step: of the loop without its flushes, of the flushes; and what the recorder says of itself."""

    verbs_s: float
    flush_s: float
    probe_s: float


def _loop(num_steps: int, is_recorded: bool) -> Loop:
    from engine_probe.clock import Clock
    from engine_probe.recorder import Recorder

    now = [10**9]  # steps of 5 ms pass without being waited for
    clock = Clock(lambda: now[0], lambda: 1_764_000_000 * 10**9 + now[0])
    recorder = Recorder(NullSink(), worker="w0", clock=clock, flush_s=0) if is_recorded else None
    hashes = np.arange(BLOCKS_A_REQUEST, dtype=np.uint64)
    slots = [recorder.arrive(f"request-{i}", prompt_tokens=256) if recorder else i for i in range(NUM_RUNNING)]
    if recorder:
        for slot in slots:
            recorder.prefill(slot, 256, emits=1)
        recorder.end_step()
        for slot in slots:
            recorder.decode(slot)
    flush_every = int(0.5 / STEP_S)
    probe_s, flush_s, started = 0.0, 0.0, time.process_time()
    for step in range(num_steps):
        now[0] += int(STEP_S * 1e9)
        turn = step % NUM_RUNNING
        if recorder is None:
            continue
        recorder.begin_step()
        recorder.decode(slots[turn - 1])  # the one whose prompt was computed in the last step
        recorder.finish(slots[turn], finish_reason="length")
        slots[turn] = recorder.arrive(f"request-{step}-{turn}", prompt_tokens=256, tenant="t")
        recorder.note(slots[turn], cached_tokens=128, prompt_blocks=hashes)
        recorder.prefill(slots[turn], 128, emits=1)
        recorder.block_events("hit", hashes[:8], slot=slots[turn], num_tokens=16)
        recorder.block_events("stored", hashes[8:], slot=slots[turn], parent_hash=hashes[7:15], num_tokens=16)
        recorder.end_step(
            num_running=NUM_RUNNING,
            num_waiting_prefill=3,
            num_waiting_decode=0,
            prefill_tokens=128,
            decode_tokens=255,
            blocks_total=8192,
            blocks_used=5000,
            blocks_cached=3000,
            blocks_evicted=8,
            batch_size=NUM_RUNNING,
            max_seq_len=512,
            schedule_s=0.0002,
            forward_s=0.0045,
            sample_s=0.0002,
            alloc_s=0.0001,
            oldest_wait_s=0.01,
        )
        probe_s += recorder.probe_s
        if step % flush_every == flush_every - 1:
            before = time.process_time()
            recorder.flush()
            flush_s += time.process_time() - before
    verbs_s = time.process_time() - started - flush_s
    if recorder:
        recorder.close()
    return Loop(verbs_s / num_steps, flush_s / num_steps, probe_s / num_steps)
