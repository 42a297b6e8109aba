"""The embedded engine's own cost: how fast virtual time goes by, and what recording adds to a step.

Run: kvscope bench virtual [--json]. Virtual time: 8 workers at 20 requests/s, 8,192-token prompts (70 % begin with one of ten
shared 5,734 tokens), 64 tokens out, every event recorded into columnar tables that nobody keeps; virtual seconds over CPU
seconds of this process. Workers sleep through steps that are known ahead, whose rows are kept as runs until they are written;
once more with every step for itself, which leaves the same rows. Recording: the scheduler, pool
and loop with 256 sequences that decode, with and without their flight recorder, in turns; CPU a step, the smallest of the
rounds. The step of 5 ms that its share refers to is the budget's. Memory: the same requests in paged blocks and in contiguous
reservations. Gates and stretches: design section 11.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import pyarrow as pa

from engine_probe.engine.config import EngineConfig
from engine_probe.engine.engine import Engine
from engine_probe.engine.fleet.build import FleetSettings, RouterSettings, build_fleet
from engine_probe.engine.flight import Flight
from engine_probe.engine.memory_use import compare
from engine_probe.engine.roofline.executor import RooflineExecutor
from engine_probe.engine.roofline.hardware import find_hardware
from engine_probe.engine.roofline.model_shape import find_shape
from engine_probe.engine.sampling_params import SamplingParams
from engine_probe.engine.scheduler import SchedulerConfig
from engine_probe.engine.sequence import Sequence
from engine_probe.engine.traffic.synthetic import Lengths, Traffic
from engine_probe.engine.virtual_clock import VirtualClock
from engine_probe.recording.recorder import Recorder

REQUESTS: Final = 3000
RUNNING: Final = 256
STEP_S: Final = 0.005
STEPS: Final = 400
SPEED_GATE, RUN_LENGTH_GATE, SPEED_STRETCH = 50.0, 200.0, 1000.0
PROBE_GATE, PROBE_STRETCH = 0.005, 0.002


class _Nowhere:
    """Takes rows and keeps none."""

    def write(self, tables: Mapping[str, pa.Table]) -> None: ...

    def close(self) -> None: ...


class _Silent(Flight):
    """An engine's flight recorder, switched off."""

    def started(self, *_: Any) -> None: ...

    # Verbs of other signatures that do nothing either.
    arrived = begin_step = skip_step = planned = end_step = ended = stored = hit = evicted = started  # type: ignore[assignment]  # a recorder that takes anything


class _SilentEngine(Engine):
    flight_class = _Silent


def run(json: bool, tell: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measure; the same keys whatever `json` is (the verb prints them).

    virtual      speed: x real time on one core, ms_a_request; virtual_run_length: the same figure beside the gate of run-length
                 steps; virtual_single_steps: every step for itself
    recording    us_a_step added, share of a 5 ms step, engine_us_a_step without it
    memory       share of KV memory that holds tokens: paged, contiguous
    """
    tell("virtual time")
    speed = _speed(equal_steps=True)
    tell("virtual time, every step for itself")
    single = _speed(equal_steps=False)
    tell(f"{RUNNING} sequences that decode, recorded and not, in turns")
    recorded, silent = _recording()
    added = max(recorded - silent, 0.0)
    return {
        "virtual": {**speed, "gate": SPEED_GATE, "met": speed["speed"] >= SPEED_GATE},
        "virtual_run_length": {
            "speed": speed["speed"],
            "gate": RUN_LENGTH_GATE,
            "stretch": SPEED_STRETCH,
            "met": speed["speed"] >= RUN_LENGTH_GATE,
        },
        "virtual_single_steps": single,
        "recording": {
            "us_a_step": added * 1e6,
            "share_of_step": added / STEP_S,
            "engine_us_a_step": silent * 1e6,
            "gate": PROBE_GATE,
            "stretch": PROBE_STRETCH,
            "met": added / STEP_S <= PROBE_GATE,
        },
        "memory": _memory(),
    }


def _speed(*, equal_steps: bool) -> dict[str, float]:
    traffic = Traffic(
        num_requests=REQUESTS,
        rate=20.0,
        groups=10,
        shared_tokens=5734,
        own_tokens=Lengths(2458, 2458),
        output_tokens=Lengths(64, 64),
    )
    settings = FleetSettings(
        find_shape("llama-3-8b"),
        find_hardware("H100"),
        num_workers=8,
        router=RouterSettings(policy="affinity_with_load"),
        equal_steps=equal_steps,
    )
    calls = list(traffic.calls())
    fleet = build_fleet(settings, _Nowhere())
    began = time.process_time()
    tally = fleet.run(calls)
    cpu_s = time.process_time() - began
    return {
        "speed": tally.virtual_s / cpu_s,
        "ms_a_request": cpu_s / REQUESTS * 1e3,
        "virtual_s": tally.virtual_s,
        "steps": tally.steps,
    }


def _recording(rounds: int = 5) -> tuple[float, float]:
    """(CPU s a step recorded, not recorded)."""
    best = {Engine: float("inf"), _SilentEngine: float("inf")}
    for _ in range(rounds):
        for kind in best:
            engine = _decoding(kind)
            began = time.process_time()
            for _ in range(STEPS):
                engine.step()
            best[kind] = min(best[kind], (time.process_time() - began) / STEPS)
            engine.flight.recorder.close()
    return best[Engine], best[_SilentEngine]


def _decoding(kind: type[Engine]) -> Engine:
    """An engine whose sequences all decode."""
    clock = VirtualClock()
    executor = RooflineExecutor(find_shape("llama-3-8b"), find_hardware("H100"), clock)
    config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=RUNNING, max_num_batched_tokens=1 << 16))
    engine = kind(config, executor, Recorder(_Nowhere(), clock=clock, flush_s=0))
    for number in range(RUNNING):
        prompt = 64 + number % 16
        engine.submit(Sequence(f"r{number}", prompt, SamplingParams(max_tokens=4 * STEPS), 0))
    engine.step()
    return engine


def _memory() -> dict[str, Any]:
    order = random.Random(1)
    lengths = [
        (
            min(1024, max(4, round(order.lognormvariate(4.8, 1.1)))),
            min(1024, max(4, round(order.lognormvariate(5.8, 1.0)))),
        )
        for _ in range(500)
    ]
    found = compare(lengths, num_slots=2048 * 40, max_context=2048)
    return {
        "paged": found.paged_ratio,
        "contiguous": found.contiguous_ratio,
        "running_paged": found.paged_running,
        "running_contiguous": found.contiguous_running,
        "published_contiguous": "0.20 to 0.38 (Kwon et al. 2023, figure 2)",
        "met": found.paged_ratio >= 0.9,
    }
