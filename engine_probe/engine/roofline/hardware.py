"""What an accelerator can do at best, and how much of that good kernels reach.

Peaks are NVIDIA's datasheets (dense, without structured sparsity; one direction of a link); memory is the total that
`nvidia-smi` shows of such a board. Efficiencies are what is published of well-tuned kernels, not of this project's own
measuring: attention reaches 50 to 73 % of an A100's peak (Dao 2023, FlashAttention-2) and up to 75 % of an H100's (Shah
et al. 2024, FlashAttention-3); reading weights reaches about 1,700 of an A100's 2,039 GB/s (gpt-fast, README). Where
nothing is published for a part, `measured` says whose figure was taken in its place. Give your own with
`dataclasses.replace`, `from_fields` or a JSON file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from engine_probe.errors import UsageError
from engine_probe.models.config_file import read_object

MIB = 1 << 20
LARGEST = 1e30
"""No figure of a machine is larger; sums and products of such stay numbers."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator, and what joins it to the host and to its neighbours.

    peak_flops, peak_fp8_flops   FLOP/s, dense, 16 bit and fp8; None: it computes fp8 at the pace of 16 bit
    memory_bandwidth             bytes/s; memory_bytes: all of it
    host_bandwidth               bytes/s to host memory, one direction
    link_bandwidth               bytes/s to the others of a tensor-parallel group, one direction; None: by way of the host
    compute_efficiency, memory_efficiency, link_efficiency   share of the peak that is reached, above 0, at most 1
    link_latency_s               of one all-reduce, before its bytes
    host_overhead_s              of each step: scheduling, launching, sampling
    source, measured             where the peaks and where the efficiencies come from
    """

    name: str
    peak_flops: float
    peak_fp8_flops: float | None
    memory_bandwidth: float
    memory_bytes: int
    host_bandwidth: float
    link_bandwidth: float | None = None
    compute_efficiency: float = 0.7
    memory_efficiency: float = 0.83
    link_efficiency: float = 0.8
    link_latency_s: float = 10e-6
    host_overhead_s: float = 0.5e-3
    source: str = "the user"
    measured: str = "the user"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("name", "source", "measured") or value is None:
                continue
            lowest = 0 if field.name.endswith("_s") else math.ulp(0.0)
            highest = 1.0 if field.name.endswith("_efficiency") else LARGEST
            fits = isinstance(value, int | float) and not isinstance(value, bool)
            if not fits or not lowest <= value <= highest:
                expected = "above 0, at most 1" if highest == 1.0 else ("0 or more" if lowest == 0 else "above 0")
                raise UsageError(f"hardware {field.name} is {value!r}; expected a number {expected}", field=field.name)

    def flops(self, element_bytes: float) -> float:
        """Reached FLOP/s where weights take `element_bytes` an element."""
        peak = self.peak_flops if element_bytes > 1 or self.peak_fp8_flops is None else self.peak_fp8_flops
        return peak * self.compute_efficiency

    @property
    def bytes_per_s(self) -> float:
        """Reached bytes/s of its memory."""
        return self.memory_bandwidth * self.memory_efficiency

    @property
    def link_bytes_per_s(self) -> float:
        """Reached bytes/s to the others of a tensor-parallel group."""
        return (self.link_bandwidth or self.host_bandwidth) * self.link_efficiency

    @property
    def host_bytes_per_s(self) -> float:
        """Reached bytes/s to host memory."""
        return self.host_bandwidth * self.link_efficiency


HARDWARE: dict[str, Hardware] = {
    "a100": Hardware(
        "a100", 312e12, None, 2.039e12, 81_920 * MIB, 32e9, 300e9, compute_efficiency=0.7, memory_efficiency=0.83,
        source="NVIDIA A100 80GB SXM datasheet: 312 TFLOPS, 2,039 GB/s, NVLink 600 GB/s both ways, PCIe 4 x16; no fp8",
        measured="FlashAttention-2: 50 to 73 % of peak; gpt-fast: about 1,700 of 2,039 GB/s",
    ),
    "h100": Hardware(
        "h100", 989.4e12, 1978.9e12, 3.35e12, 81_559 * MIB, 64e9, 450e9, compute_efficiency=0.65,
        source="NVIDIA H100 SXM datasheet: 989.4 and 1,978.9 TFLOPS dense, 3.35 TB/s, NVLink 900 GB/s both ways, PCIe 5 x16",
        measured="FlashAttention-3: up to 75 % of peak, less at short lengths; memory: as A100",
    ),
    "h200": Hardware(
        "h200", 989.4e12, 1978.9e12, 4.8e12, 143_771 * MIB, 64e9, 450e9, compute_efficiency=0.65,
        source="NVIDIA H200 SXM datasheet: compute of the H100, 4.8 TB/s, NVLink 900 GB/s both ways, PCIe 5 x16",
        measured="as H100 and A100",
    ),
    "b200": Hardware(
        "b200", 2250e12, 4500e12, 8e12, 183_359 * MIB, 64e9, 900e9, compute_efficiency=0.65,
        source="NVIDIA HGX B200 datasheet: 2.25 and 4.5 PFLOPS dense, 8 TB/s, NVLink 1.8 TB/s both ways, PCIe 5 x16",
        measured="none published that we could use: as H100 and A100",
    ),
    "l40s": Hardware(
        "l40s", 362.05e12, 733e12, 0.864e12, 46_068 * MIB, 32e9, None, compute_efficiency=0.65, link_latency_s=25e-6,
        source="NVIDIA L40S datasheet: 362.05 and 733 TFLOPS dense, 864 GB/s, PCIe 4 x16, no NVLink",
        measured="none published that we could use: as H100 and A100",
    ),
}  # fmt: skip
"""By name. `host_overhead_s` is an assumption (CUDA graphs, scheduler beside the GPU's work), nobody's published figure."""


def find_hardware(name: str) -> Hardware:
    """The accelerator called `name`, in any case, or that of a JSON file (`from_fields`); UsageError names the known ones."""
    if name.endswith(".json"):
        path = Path(name)
        return from_fields({"name": path.stem, "source": path.name, **read_object(path, "description of hardware")})
    return _named(name)


def from_fields(values: Mapping[str, Any]) -> Hardware:
    """Hardware of your own from named figures. `base` may name a known one whose figures stand where none is given.

    Raises UsageError naming a field that is unknown, missing, or not a number.
    """
    known = {field.name for field in fields(Hardware)}
    if unknown := sorted(set(values) - known - {"base"}):
        raise UsageError(f"hardware has no {', '.join(unknown)}; known: base, {', '.join(sorted(known))}")
    given = {key: value for key, value in values.items() if key != "base"}
    if "base" in values:
        base = _named(str(values["base"]))
        start = {field.name: getattr(base, field.name) for field in fields(Hardware)}
        given = start | {"source": f"{base.name}, changed: {', '.join(sorted(given))}"} | given
    missing = sorted({"name", "peak_flops", "memory_bandwidth", "memory_bytes", "host_bandwidth"} - set(given))
    if missing:
        raise UsageError(f"hardware needs {', '.join(missing)}, or a base that has them", field=missing[0])
    return Hardware(**{"peak_fp8_flops": None, **given})


def _named(name: str) -> Hardware:
    key = name.strip().lower().removeprefix("nvidia").strip(" -_")
    if key not in HARDWARE:
        raise UsageError(
            f"no hardware '{name}' here; known: {', '.join(HARDWARE)}. Or give a JSON file that describes yours",
            hardware=name,
        )
    return HARDWARE[key]
