"""The founding case on the embedded engine: the prefix cache is switched on, mean TTFT falls, P99 TTFT rises.

At full size in virtual time: eight H100s, an 8k system prompt that 70 % of the calls share, 64-token answers; with the cache comes
routing by prefix, as people switch it on, and one worker gets nearly everything (`experiments/scenarios.py`). Then live, where
torch is there: four workers that compute on this machine, a system prompt of 8,192 tokens on a GPU and a quarter of that on a CPU.
The load is set by what the machine can do: the rate at which one worker alone, its cache warm, would have `BUSY` of its seats
taken; where that is low there are fewer calls, so that it ends in about a minute all the same, starts of six fleets included. What the tail does there depends on the
machine; on two cores four workers are in each other's way with the cache off.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from collector.experiments.processes import ProcessRunner, serving_s
from collector.experiments.running import Plan, run_experiment
from collector.experiments.scenarios import find_scenario
from collector.experiments.virtual import VirtualRunner
from collector.experiments.workload import Workload
from diagnosis.experiments.design import Arm
from engine_probe.engine.traffic.synthetic import Lengths, Traffic
from store.metrics import PRESET_SLOS

OFF = Arm("off", {"cache": "off", "routing": "round_robin"})
ON = Arm("on", {"cache": "on", "routing": "prefix_affinity"})
NAME = "founding case, live"
WORKERS = 4
REPEATS = 3
REQUESTS, FEWEST = 60, 12
"""Of each repeat of the live case: where the machine is fast enough, and anywhere."""
LIVE_S = 30.0
"""What all calls of the live case together may take to come."""
BUSY = 0.33
PROMPT_CPU, PROMPT_GPU = 2048, 8192


def is_possible() -> bool:
    """Torch is installed."""
    import importlib.util

    return importlib.util.find_spec("torch") is not None


def run_full_size(out: Path | None, talk: Callable[[str], None]) -> dict[str, Any]:
    """The built-in experiment `founding`, warm: its document. The same numbers on every machine. Rows go to `out`."""
    scenario = find_scenario("founding")
    arms = (
        Arm("off", {**scenario.common, **scenario.off}),
        Arm("on", {**scenario.common, **scenario.on}),
    )
    talk("the founding case at full size: 8 H100s in virtual time, the cache off and on")
    slo = PRESET_SLOS["interactive"]
    plan = Plan(scenario.name, arms, scenario.workload, scenario.repeats, 0, slo, out)
    return run_experiment(plan, VirtualRunner(keep_blocks=False), lambda _: None)


def run_live(out: Path | None, talk: Callable[[str], None], *, repeats: int = REPEATS) -> dict[str, Any]:
    """Run both arms on this machine and judge them; the experiment's document with `seconds` and `rate`. Rows go to `out`, a folder a run."""
    began = time.perf_counter()
    runner = ProcessRunner(workers=WORKERS)
    traffic = Traffic(
        groups=1,
        shared_tokens=PROMPT_GPU if _has_gpu() else PROMPT_CPU,
        shared_ratio=0.7,
        own_tokens=Lengths(64, 64),
        output_tokens=Lengths(64, 64),
    )
    talk("starting the embedded engine and finding out how fast it is here")
    alone_s = serving_s(replace(runner, workers=1), {"miss": OFF, "hit": ON}, Workload(traffic))
    mean_s = traffic.shared_ratio * alone_s["hit"] + (1 - traffic.shared_ratio) * alone_s["miss"]
    rate = max(round(BUSY * runner.seats / mean_s, 1), 0.1)
    count = requests_within(LIVE_S, rate, 2 * repeats)
    workload = Workload(replace(traffic, rate=rate), num_requests=count, num_warmup=4, warmup_gap_s=4 * mean_s)
    talk(
        f"a call takes {alone_s['miss'] * 1e3:.0f} ms alone, {alone_s['hit'] * 1e3:.0f} ms with its prompt cached: "
        f"{rate:g} calls/s, {count} of them a run, about {2 * repeats * count / rate:.0f} s"
    )
    plan = Plan(NAME, (OFF, ON), workload, repeats, 0, PRESET_SLOS["interactive"], out)
    document = run_experiment(plan, runner, talk)
    return {**document, "rate": rate, "seconds": time.perf_counter() - began}


def requests_within(budget_s: float, rate: float, runs: int) -> int:
    """Calls of each of so many runs that come within the time at that rate; FEWEST to REQUESTS."""
    return min(max(int(budget_s * rate / runs), FEWEST), REQUESTS)


def _has_gpu() -> bool:
    import shutil

    return shutil.which("nvidia-smi") is not None
