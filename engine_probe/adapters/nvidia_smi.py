"""GPUs by nvidia_gpu_exporter, which asks nvidia-smi: the same facts as DCGM's where DCGM is not installed.

Units are in the names (`_watts`, `_ratio`, `_hz`, `_bytes`). The reasons for lower clocks are one series each, called
`clocks_throttle_reasons_*` up to driver 535 and `clocks_event_reasons_*` after. GPUs are told by `uuid` alone; the index
stands on `nvidia_smi_index`. Source: utkuozdemir/nvidia_gpu_exporter 1.x.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from engine_probe.adapters.derived import Told
from engine_probe.adapters.hosts import HostAdapter
from engine_probe.adapters.metric_names import MetricNames
from engine_probe.adapters.prometheus import Page, Sample
from engine_probe.adapters.provides import Provides, names
from engine_probe.adapters.worker_map import own_label

CANONICAL: Final[dict[str, tuple[str, ...]]] = {
    "gpu_util": ("utilization_gpu_ratio",),
    "gpu_power_watts": ("power_draw_watts", "power_draw_average_watts"),
    "gpu_power_limit_watts": ("enforced_power_limit_watts", "power_limit_watts"),
    "gpu_clock_hertz": ("clocks_current_sm_clock_hz", "clocks_sm_hz"),
    "gpu_temperature_celsius": ("temperature_gpu",),
    "gpu_memory_temperature_celsius": ("temperature_memory",),
    "gpu_memory_used_bytes": ("memory_used_bytes",),
}
REASONS: Final = {
    "applications_clocks_setting": "clocks_setting",
    "sw_power_cap": "power_cap",
    "hw_slowdown": "hw_slowdown",
    "sync_boost": "sync_boost",
    "sw_thermal_slowdown": "sw_thermal",
    "hw_thermal_slowdown": "hw_thermal",
    "hw_power_brake_slowdown": "power_brake",
}
FAMILIES: Final = ("nvidia_smi_clocks_event_reasons_", "nvidia_smi_clocks_throttle_reasons_")


def relabel(labels: Mapping[str, str]) -> dict[str, str]:
    """The GPU in our words."""
    uuid = own_label(labels, "uuid")
    return {} if uuid is None else {"UUID": uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"}


class SmiReasons:
    """`gpu_throttled` by reason."""

    def told(self, samples: Sequence[Sample], at_ns: int) -> list[Told]:
        """One number a GPU and reason; the newer family where both stand on the page."""
        present = [family for family in FAMILIES if any(s.series.name.startswith(family) for s in samples)]
        out = []
        for series, value, _ in samples if present else ():
            reason = REASONS.get(series.name.removeprefix(present[0])) if series.name.startswith(present[0]) else None
            if reason is not None and value in (0.0, 1.0):
                labels = {**relabel(series.labels), "reason": reason, "wire": series.name}
                out.append(Told("gpu_throttled", labels, value))
        return out


NAMES: Final = MetricNames(
    "nvidia-smi", ("nvidia_smi_",), CANONICAL, keeps_unknown=False, derives=SmiReasons, relabels=relabel
)

PROVIDES: Final = (
    Provides(
        engine="nvidia-smi",
        source="metrics",
        needs="nvidia_gpu_exporter with its default query fields",
        names=names(
            """sample: worker at_ns name labels value gpu_util gpu_power_watts gpu_power_limit_watts gpu_throttled
            gpu_clock_hertz gpu_temperature_celsius gpu_memory_temperature_celsius gpu_memory_used_bytes
            mark: at_ns mark subject text attrs"""
        ),
        caveats={
            "sample.worker": "what `--map UUID:GPU-...=NAME` or `--worker` says; else unknown",
            "sample.gpu_memory_temperature_celsius": "not on every GPU",
        },
    ),
)


class NvidiaSmiAdapter(HostAdapter):
    """nvidia_gpu_exporter on port 9835."""

    engine = "nvidia-smi"
    title = "nvidia_gpu_exporter"
    tables = (NAMES,)
    provides = PROVIDES
    guide = "docs/engines/hosts.md"
    what = "GPUs"
    sights: ClassVar = {
        "load": (("gpu_util", "gpu_clock_hertz", "gpu_power_watts"), "nvidia-smi does not tell utilisation here"),
        "throttling": (("gpu_throttled",), "add clocks_event_reasons.* to --query-field-names"),
    }

    def told(self, page: Page) -> str:
        gpus = {sample.series.labels.get("uuid") for sample in page.samples} - {None}
        return f"{len(gpus)} of them"
