"""What holds on a GPU: kernels against oracles, memory, probe overhead, the roofline against measured steps. `make gpu-check`.

    .venv/bin/python -m bench.gpu_check             # writes bench/gpu.md; where there is no GPU, says why it did not run
    .venv/bin/python -m bench.gpu_check --rehearse FILE   # the same code on a CPU, tiny, in Triton's interpreter

At most six minutes: a part that finds no time left says so in its place, and nothing is claimed that was not measured.
Exit code: 0; 1 where a kernel disagrees with its oracle.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.gpu_parts import Bench, Row

BUDGET_S = 330.0
"""Of the six minutes; the rest is for starting, and for the row that is under way when time is up."""
RESULT = Path(__file__).with_name("gpu.md")


def why_not() -> str | None:
    """What is missing for a run in earnest."""
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed"
    import torch

    if not torch.cuda.is_available():
        built = "built without CUDA" if torch.version.cuda is None else "built for CUDA, but no device is visible"
        return f"torch {torch.__version__} is {built}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", type=Path, metavar="FILE", help="tiny, on the CPU; the figures mean nothing")
    rehearsal: Path | None = parser.parse_args().rehearse
    if rehearsal is not None:
        os.environ["TRITON_INTERPRET"] = "1"
    elif reason := why_not():
        print(f"GPU check did not run: {reason}. {RESULT.name} is as it was.")
        return 0
    deadline = time.monotonic() + BUDGET_S
    text, failures = report(deadline, rehearsal is not None)
    (rehearsal or RESULT).write_text(text)
    print(text)
    for failure in failures:
        print(f"disagrees: {failure}", file=sys.stderr)
    return 1 if failures else 0


def report(deadline: float, is_rehearsal: bool) -> tuple[str, list[str]]:
    """The page, and the rows that say NO."""
    from bench import gpu_parts as parts
    from engine_probe.engine.torch_executor.executor import TorchExecutor, TorchOptions
    from engine_probe.engine.torch_executor.model_config import read_config

    bench = find_bench(is_rehearsal)
    lines = [*heading(bench), ""]
    failures: list[str] = []

    def part(title: str, rows: Iterator[Row], header: str, note: str = "") -> None:
        written, disagreeing = table(title, rows, header, note, deadline)
        lines.extend(written)
        failures.extend(disagreeing)

    part(
        "Kernels against oracles",
        parts.kernels_against_oracles(bench),
        _header(parts.kernels_against_oracles),
        "Oracle: the same attention in plain torch, float32. An error is over 1 + |value|; allowed: 5e-5 and 2e-2.",
    )
    part("The same tokens", parts.same_tokens(bench), _header(parts.same_tokens))
    part(
        "Speed of the kernels",
        parts.kernel_speed(bench),
        _header(parts.kernel_speed),
        "bfloat16, 32 query heads over 8 KV heads of 128, blocks of 16; medians.",
    )
    if time.monotonic() < deadline:
        dtype = "float32" if is_rehearsal else "bfloat16"
        options = TorchOptions(device=str(bench.device), dtype=dtype, num_blocks=200 if is_rehearsal else None)
        config = read_config(bench.fields)
        source = parts.DeviceTensors(bench.device, getattr(parts.torch, dtype))
        executor = TorchExecutor("bench", config, source, options)
        model = (
            f"{config.num_parameters / 1e9:.2f} B parameters, random, {dtype}; the model's steps, launched one by one"
        )
        part("Memory of a step", parts.activations(bench, executor), _header(parts.activations), model)
        part(
            "The roofline against measured steps",
            parts.roofline_against_measured(bench, executor),
            _header(parts.roofline_against_measured),
            f"{model} (no CUDA graphs).",
        )
        part("What the recorder costs", parts.probe_overhead(bench, executor), _header(parts.probe_overhead), model)
    else:
        lines.append("Memory, roofline and recorder: not measured, the time was up.\n")
    return "\n".join(lines), failures


def _header(part: Callable[..., Iterator[Row]]) -> str:
    assert part.__doc__ is not None
    return part.__doc__


def find_bench(is_rehearsal: bool) -> Bench:
    """The first GPU, what the roofline knows of it, and a model that fits; or the CPU, tiny."""
    import torch

    from bench.gpu_parts import LLAMA_8B, TINY, Bench
    from engine_probe.engine.roofline.hardware import HARDWARE

    if is_rehearsal:
        return Bench(torch.device("cpu"), HARDWARE["h100"], TINY, True)
    device = torch.device("cuda", 0)
    name = torch.cuda.get_device_name(device).lower()
    known = next((hardware for key, hardware in HARDWARE.items() if key in name), None)
    fields = dict(LLAMA_8B)
    if torch.cuda.mem_get_info(device)[0] < 40e9:
        fields |= {"num_hidden_layers": 8}
    return Bench(device, known, fields, False)


def heading(bench: Bench) -> list[str]:
    """What was measured, on what, when."""
    import torch
    import triton

    if bench.is_rehearsal:
        return ["# Rehearsal of the GPU check on a CPU", "", "These figures mean nothing; only that the code runs."]
    facts = torch.cuda.get_device_properties(bench.device)
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        driver = "unknown"
    today = datetime.datetime.now(datetime.UTC).date()
    known = "not in the roofline's table" if bench.hardware is None else f"the roofline's `{bench.hardware.name}`"
    return [
        "# The embedded engine on a GPU",
        "",
        f"Measured on {today} by `make gpu-check` on one {facts.name} ({known}; {facts.total_memory / 2**30:.0f} GiB, "
        f"compute capability {facts.major}.{facts.minor}), driver {driver}, torch {torch.__version__}, triton "
        f"{triton.__version__}. Everything below was measured in that one run.",
    ]


def table(title: str, rows: Iterator[Row], header: str, note: str, deadline: float) -> tuple[list[str], list[str]]:
    """A part as Markdown; rows that say NO. It stops between two rows when the time is up, and says so."""
    columns = [column.strip() for column in header.split("|")]
    lines = [f"## {title}", "", *([note, ""] if note else [])]
    lines += [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    failures = []
    while True:
        if time.monotonic() >= deadline:
            lines.append(f"\nThe time was up: further rows of '{title}' were not measured.")
            break
        row = next(rows, None)
        if row is None:
            break
        lines.append(f"| {' | '.join(row)} |")
        if "NO" in row:
            failures.append(f"{title}: {row[0]}")
    return [*lines, ""], failures


if __name__ == "__main__":
    sys.exit(main())
