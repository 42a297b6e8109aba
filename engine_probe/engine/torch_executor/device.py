"""Where tensors live, and in which type: what was asked for, or a clear word why not."""

from __future__ import annotations

from pathlib import Path

import torch

from engine_probe.engine.torch_executor.weights import DTYPES
from engine_probe.errors import DeviceMissing, UsageError

DEVICES = ("auto", "cpu", "cuda")


def choose_device(name: str) -> torch.device:
    """auto: cuda where there is one, else cpu. `cuda:1` names one of several. Raises DeviceMissing, UsageError."""
    kind, _, number = name.partition(":")
    if kind not in DEVICES or (number and (kind != "cuda" or not number.isdigit())):
        raise UsageError(f"no device '{name}' here; known: {', '.join(DEVICES)}, cuda:N", device=name)
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cpu" or (kind == "auto" and not there):
        return torch.device("cpu")
    if not there:
        why = "this torch is built without CUDA" if torch.version.cuda is None else "no CUDA device is visible"
        raise DeviceMissing(f"cuda was asked for and {why}; use --device cpu or auto", device=name)
    index = int(number or 0)
    if index >= there:
        raise DeviceMissing(f"there is no {name}: {there} CUDA devices are visible", device=name)
    return torch.device("cuda", index)


def choose_dtype(name: str, published: str, device: torch.device) -> torch.dtype:
    """auto: the type of the published weights; of float16 on a CPU, which few multiply fast, float32. Raises UsageError."""
    wanted = published if name == "auto" else name
    if name == "auto" and published == "float16" and device.type == "cpu":
        wanted = "float32"
    if wanted not in DTYPES:
        raise UsageError(f"no dtype '{wanted}' here; known: auto, {', '.join(DTYPES)}", dtype=wanted)
    return DTYPES[wanted]


def use_threads(num_threads: int) -> None:
    """How many threads this process computes with on a CPU."""
    torch.set_num_threads(num_threads)


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be given out; None where nobody can say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    known = [found for found in (_free_of_machine(), _free_of_container()) if found is not None]
    return min(known, default=None)


def _free_of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None


def _free_of_container(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Left of the memory that a control group (version 2) may take; None where it is not bounded."""
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return None if limit == "max" else max(0, int(limit) - int(used))
    except (OSError, ValueError):
        return None
