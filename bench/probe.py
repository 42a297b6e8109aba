"""What the recorder costs the engine's step: time in its verbs as a share of the step (gate 0.5 %, stretch 0.2 %).

A loop of the embedded engine's shape, with nothing but the recorder's calls in it: 256 running requests that decode one
token a step, one of them ending and one arriving (with a prompt chunk and block events) in every step. Timed is what
the engine's thread spends between two instants around the calls of a step; the share is of a step of 5 ms, which is
what such a step takes. The median of a run, and the best of several runs, since another process on the machine only
adds. The flush's CPU is told beside it: it runs on another thread, but shares the interpreter.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

NUM_RUNNING = 256
STEP_S = 0.005
BLOCKS_A_REQUEST = 16
NUM_STEPS, REPEATS = 1_000, 7
FLUSH_EVERY = int(0.5 / STEP_S)
GATE, STRETCH = 0.005, 0.002


class NullSink:
    """Takes rows and forgets them."""

    def write(self, tables: Any) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class Loop:
    """Seconds a step: in the verbs (median), in the verbs as the recorder says (median), in flushes (CPU, mean)."""

    verbs_s: float
    probe_s: float
    flush_s: float


def run(json: bool) -> dict[str, Any]:
    """Measure; the same keys whatever `json` is (the verb prints them).

    share_of_step   time of the engine's thread in the recorder's verbs, over 5 ms
    gate, stretch   what that share may be
    verbs_us        the same in microseconds a step;  probe_us   as the recorder itself reports it in `step.probe_s`
    flush_us        CPU of the flush (tables, judging, a sink that keeps nothing) a step
    """
    loops = [measure(NUM_STEPS) for _ in range(REPEATS)]
    share = min(loop.verbs_s for loop in loops) / STEP_S
    return {
        "bench": "probe",
        "num_running": NUM_RUNNING,
        "step_s": STEP_S,
        "share_of_step": share,
        "gate": GATE,
        "stretch": STRETCH,
        "passed": share <= GATE,
        "verbs_us": min(loop.verbs_s for loop in loops) * 1e6,
        "probe_us": min(loop.probe_s for loop in loops) * 1e6,
        "flush_us": min(loop.flush_s for loop in loops) * 1e6,
    }


def measure(num_steps: int) -> Loop:
    """One run of the loop."""
    from engine_probe.clock import Clock
    from engine_probe.recording.recorder import Recorder

    now = [10**9]  # steps of 5 ms pass without being waited for
    clock = Clock(lambda: now[0], lambda: 1_764_000_000 * 10**9 + now[0])
    recorder = Recorder(NullSink(), worker="w0", clock=clock, flush_s=0)
    hashes = np.arange(BLOCKS_A_REQUEST, dtype=np.uint64)
    slots = [recorder.arrive(f"request-{i}", prompt_tokens=256) for i in range(NUM_RUNNING)]
    for slot in slots:
        recorder.prefill(slot, 256, emits=1)
    recorder.end_step()
    for slot in slots:
        recorder.decode(slot)
    verbs_ns, probe_s, flush_s = [], [], 0.0
    for step in range(num_steps):
        now[0] += int(STEP_S * 1e9)
        turn = step % NUM_RUNNING
        before = time.perf_counter_ns()
        recorder.begin_step()
        recorder.decode(slots[turn - 1])  # the one whose prompt was computed in the last step
        recorder.finish(slots[turn], finish_reason="length")
        slots[turn] = recorder.arrive(f"request-{step}-{turn}", prompt_tokens=256, tenant="t")
        recorder.note(slots[turn], cached_tokens=128, prompt_blocks=hashes)
        recorder.prefill(slots[turn], 128, emits=1)
        recorder.block_events("hit", hashes[:8], slot=slots[turn], num_tokens=16)
        recorder.block_events("stored", hashes[8:], slot=slots[turn], parent_hash=hashes[7:15], num_tokens=16)
        probe_s.append(recorder.probe_s)
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
        verbs_ns.append(time.perf_counter_ns() - before)
        if step % FLUSH_EVERY == FLUSH_EVERY - 1:
            started = time.process_time()
            recorder.flush()
            flush_s += time.process_time() - started
    recorder.close()
    return Loop(statistics.median(verbs_ns) / 1e9, statistics.median(probe_s), flush_s / num_steps)
