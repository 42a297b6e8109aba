"""The founding case, live: the prefix cache is switched on, mean TTFT falls, P99 TTFT rises - on the embedded engine, computing.

Four workers, each a process; 70 % of the calls share a long system prompt; answers of 64 tokens. With the cache comes routing by
prefix, as people switch it on: all who share the prompt, and everyone whose prompt begins like it, go to one worker. Hits are
fast, so the mean falls; the one worker's seats fill, so the tail waits. The load is set by what this machine can do: the rate
at which one worker alone, with its cache warm, has `BUSY` of its seats taken. On a GPU the system prompt has 8,192 tokens, on a CPU
a quarter of that, so that the case takes about a minute on either.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from collector.experiments.processes import ProcessRunner, serving_s
from collector.experiments.running import Plan, run_experiment
from collector.experiments.workload import Workload
from diagnosis.experiments.design import Arm
from engine_probe.engine.traffic.synthetic import Lengths, Traffic
from store.metrics import PRESET_SLOS

OFF = Arm("off", {"cache": "off", "routing": "round_robin"})
ON = Arm("on", {"cache": "on", "routing": "prefix_affinity"})
NAME = "founding case, live"
WORKERS = 4
REPEATS = 5
REQUESTS = 60
"""Of each repeat: 300 an arm, one more than a bound of P99 needs."""
BUSY = 0.33
PROMPT_CPU, PROMPT_GPU = 2048, 8192


def is_possible() -> bool:
    """Torch is installed."""
    import importlib.util

    return importlib.util.find_spec("torch") is not None


def run_founding(out: Path | None, talk: Callable[[str], None], *, repeats: int = REPEATS) -> dict[str, Any]:
    """Run both arms and judge them; the experiment's document with `seconds` and `rate`. Rows go to `out`, a folder a run."""
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
    rate = round(BUSY * runner.seats / mean_s, 1)
    workload = Workload(replace(traffic, rate=rate), num_requests=REQUESTS, num_warmup=4, warmup_gap_s=4 * mean_s)
    talk(
        f"a call takes {alone_s['miss'] * 1e3:.0f} ms alone, {alone_s['hit'] * 1e3:.0f} ms with its prompt cached: "
        f"{rate:g} calls/s, about {2 * repeats * REQUESTS / rate:.0f} s"
    )
    plan = Plan(NAME, (OFF, ON), workload, repeats, 0, PRESET_SLOS["interactive"], out)
    document = run_experiment(plan, runner, talk)
    return {**document, "rate": rate, "seconds": time.perf_counter() - began}


def _has_gpu() -> bool:
    import shutil

    return shutil.which("nvidia-smi") is not None
