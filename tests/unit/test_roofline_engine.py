"""The engine on virtual time: what the owner's arithmetic says of whole runs, measured on tokens as they come out."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from engine_probe.engine.config import EngineConfig
from engine_probe.engine.engine import Engine
from engine_probe.engine.fleet.build import FleetSettings, build_fleet, recorders
from engine_probe.engine.roofline.executor import RooflineExecutor
from engine_probe.engine.roofline.hardware import HARDWARE, find_hardware
from engine_probe.engine.roofline.model_shape import find_shape
from engine_probe.engine.sampling_params import SamplingParams
from engine_probe.engine.scheduler import SchedulerConfig
from engine_probe.engine.sequence import Sequence
from engine_probe.engine.traffic.synthetic import Traffic
from engine_probe.engine.virtual_clock import VirtualClock
from engine_probe.recording.recorder import Recorder
from engine_probe.sending.sink import MemorySink


@dataclass
class Run:
    """Instants (s) at which each request's tokens came, and the end of all."""

    tokens_s: dict[str, list[float]] = field(default_factory=dict)
    end_s: float = 0.0
    steps: int = 0

    def longest_gap_s(self, name: str) -> float:
        return max(later - earlier for earlier, later in itertools.pairwise(self.tokens_s[name]))


def run(requests: list[tuple[str, float, int, int]], scheduler: SchedulerConfig) -> Run:
    """Serve (name, arrival s, prompt tokens, output tokens) with Llama-3-8B on an H100."""
    clock, done = VirtualClock(), Run()
    recorder = Recorder(MemorySink(), worker="w0", clock=clock, flush_s=0)
    engine = Engine(
        EngineConfig(scheduler=scheduler),
        RooflineExecutor(find_shape("llama-3-8b"), HARDWARE["h100"], clock),
        recorder,
    )
    waiting = sorted(requests, key=lambda request: request[1])
    while waiting or engine.has_work:
        while waiting and round(waiting[0][1] * 1e9) <= clock.monotonic_ns():
            name, arrival_s, prompt, output = waiting.pop(0)
            engine.submit(Sequence(name, prompt, SamplingParams(max_tokens=output), round(arrival_s * 1e9)))
        next_ns = round(waiting[0][1] * 1e9) if waiting else 1 << 62
        outputs = engine.step()
        done.steps += 1
        if not outputs and not engine.has_work and waiting:
            clock.advance_to(next_ns)
        for produced in outputs or ():
            done.tokens_s.setdefault(produced.sequence.request_id, []).extend(
                [clock.monotonic_ns() / 1e9] * len(produced.tokens)
            )
    engine.check_integrity()
    done.end_s = clock.monotonic_ns() / 1e9
    engine.close()
    recorder.close()
    return done


DECODING = [(f"d{i}", 0.0, 200, 300) for i in range(8)]
LONG = [(f"p{i}", 0.4 + 0.4 * i, 8000, 1) for i in range(3)]


def test_chunking_flattens_itl_spikes_at_a_small_cost_in_total_time() -> None:
    """Three prompts of 8,000 tokens beside eight decodes: whole, each stops all tokens for 0.2 s; in chunks of 512, for 0.02 s."""
    whole_prompts = SchedulerConfig(chunked_prefill=False, max_num_batched_tokens=16_384)
    chunks = SchedulerConfig(max_chunk_tokens=512)
    whole, chunked = run(DECODING + LONG, whole_prompts), run(DECODING + LONG, chunks)
    # 8,000 tokens are 0.174 s of linears (2 * 6.98e9 * 8,000 / 643e12) and 0.026 s of attention; the decodes add 0.006.
    assert whole.longest_gap_s("d0") == pytest.approx(0.207, abs=0.01)
    assert chunked.longest_gap_s("d0") < whole.longest_gap_s("d0") / 8
    # What it costs: each of 16 chunks has the host's part and reads the keys before it again.
    alone_whole, alone_chunked = run(LONG, whole_prompts), run(LONG, chunks)
    assert alone_whole.end_s - 1.2 < alone_chunked.end_s - 1.2 < 1.06 * (alone_whole.end_s - 1.2)
    assert whole.tokens_s["p0"][0] < chunked.tokens_s["p0"][0]
    # Beside decodes it even gains, since their tokens ride along with the chunks (Agrawal et al. 2024).
    assert chunked.end_s < 1.02 * whole.end_s


def test_a_batch_of_32_multiplies_decode_throughput_of_the_engine() -> None:
    """32 requests at once take a little longer than one alone, so tokens a second are more than 25 times as many."""
    alone = run([("a", 0.0, 100, 200)], SchedulerConfig())
    together = run([(f"r{i}", 0.0, 100, 200) for i in range(32)], SchedulerConfig())
    assert 25 < 32 * alone.end_s / together.end_s < 32


def test_decode_alone_stays_above_its_floor() -> None:
    """Llama-3-8B at 16 bit: 15.0 GB a token at 2.78 TB/s are 5.4 ms, with the host's 0.5 about 5.9 ms."""
    gaps = run([("a", 0.0, 100, 50)], SchedulerConfig())
    assert gaps.longest_gap_s("a") == pytest.approx(5.9e-3, abs=0.1e-3)


def test_without_a_cache_prompts_are_named_as_a_cache_would() -> None:
    """Cache on and off: the same calls have the same block names, and only the one with a cache says what it found."""
    calls = list(Traffic(num_requests=20, groups=2, shared_tokens=64, seed=3).calls())
    told = []
    for is_on in (True, False):
        sink = MemorySink()
        engine = EngineConfig(prefix_caching=is_on)
        built = build_fleet(FleetSettings(find_shape("llama-3-8b"), find_hardware("H100"), engine=engine), sink)
        built.run(calls)
        for recorder in recorders(built):
            recorder.close()
        told.append({row["request_id"]: row for row in sink.table("request").to_pylist()})
    for call in calls:
        on, off = (rows[call.request_id] for rows in told)
        assert on["prompt_blocks"] == off["prompt_blocks"] == list(call.blocks)
        assert off["cached_tokens"] is None
        assert off["computed_tokens"] == call.prompt_tokens


def test_hits_in_virtual_time_tell_how_long_their_blocks_lay_unused() -> None:
    """The second of two equal prompts comes 5 s after the first ended: each of its hits tells that, and its steps what is unfilled."""
    clock, sink = VirtualClock(), MemorySink()
    recorder = Recorder(sink, worker="w0", clock=clock, flush_s=0)
    executor = RooflineExecutor(find_shape("llama-3-8b"), HARDWARE["h100"], clock)
    engine = Engine(EngineConfig(block_size=16), executor, recorder)
    for number in range(2):
        engine.submit(
            Sequence(f"r{number}", 70, SamplingParams(max_tokens=1), clock.now, prompt_hashes=(11, 12, 13, 14))
        )
        while engine.has_work:
            engine.step()
        clock.advance(5.0)
    recorder.close()
    hits = [row for row in sink.table("block").to_pylist() if row["change"] == "hit"]
    assert [(row["request_id"], row["block_hash"]) for row in hits] == [("r1", name) for name in (11, 12, 13, 14)]
    assert [row["idle_s"] for row in hits] == [pytest.approx(5.0)] * 4
    # 70 tokens in five blocks of 16 leave 10 slots.
    assert [(row["wasted_slots"], row["alloc_s"], row["gpu_util"]) for row in sink.table("step").to_pylist()] == [
        (10, 0.0, None)
    ] * 2
