"""GPUs by NVIDIA's dcgm-exporter (1.x names to DCGM 4): utilisation, power, clocks, and why clocks were held down.

Units on the page are percent, W, MHz, MiB and, for the times of violations, ns: DCGM hands on what NVML counts, and the
help texts that say microseconds are wrong (NVIDIA/DCGM pull request 266). Numbers that DCGM cannot read arrive as huge
sentinels; they are unknown here. `DCGM_FI_DEV_XID_ERRORS` is the code of the last error, not a count. A row is the
worker's whose pod uses the GPU, where the exporter maps pods; else `--map gpu:0=NAME` says whose it is. Source:
dcgm-exporter `etc/default-counters.csv`, `dcgm_fields.h`.
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

PREFIXES: Final = ("DCGM_", "dcgm_")
KEPT_LABELS: Final = ("gpu", "UUID", "GPU_I_ID", "pod", "namespace", "container", "xid")

CANONICAL: Final[dict[str, tuple[str, ...]]] = {
    "gpu_util": ("FI_DEV_GPU_UTIL", "FI_PROF_GR_ENGINE_ACTIVE", "gpu_utilization"),
    "gpu_power_watts": ("FI_DEV_POWER_USAGE", "power_usage"),
    "gpu_power_limit_watts": ("FI_DEV_ENFORCED_POWER_LIMIT", "FI_DEV_POWER_MGMT_LIMIT"),
    "gpu_clock_hertz": ("FI_DEV_SM_CLOCK", "sm_clock"),
    "gpu_temperature_celsius": ("FI_DEV_GPU_TEMP", "gpu_temp"),
    "gpu_memory_temperature_celsius": ("FI_DEV_MEMORY_TEMP", "memory_temp"),
    "gpu_memory_used_bytes": ("FI_DEV_FB_USED", "fb_used"),
    "gpu_xid": ("FI_DEV_XID_ERRORS", "xid_errors"),
    "gpu_xid_errors_total": ("EXP_XID_ERRORS_TOTAL",),
}
SCALES: Final = {
    "FI_DEV_GPU_UTIL": 0.01,
    "gpu_utilization": 0.01,
    "FI_DEV_SM_CLOCK": 1e6,
    "sm_clock": 1e6,
    "FI_DEV_FB_USED": float(1 << 20),
    "fb_used": float(1 << 20),
}

MASKS: Final = ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS")
"""The bit mask of present reasons; the second is its name up to DCGM 3."""
REASONS: Final = {
    "clocks_setting": 0x02,
    "power_cap": 0x04,
    "hw_slowdown": 0x08,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "power_brake": 0x80,
}
"""Reason -> bit. 0x01 (idle) and 0x100 (display) hold nothing back. `hw_slowdown` is set with the two hardware reasons."""
VIOLATIONS: Final = {
    "DCGM_FI_DEV_POWER_VIOLATION": "power_cap",
    "DCGM_FI_DEV_THERMAL_VIOLATION": "thermal",
    "DCGM_FI_DEV_SYNC_BOOST_VIOLATION": "sync_boost",
    "DCGM_FI_DEV_BOARD_LIMIT_VIOLATION": "board_limit",
    "DCGM_FI_DEV_RELIABILITY_VIOLATION": "reliability",
    "DCGM_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP_NS": "power_cap",
    "DCGM_FI_DEV_CLOCKS_EVENT_REASON_SYNC_BOOST_NS": "sync_boost",
    "DCGM_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS": "sw_thermal",
    "DCGM_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS": "hw_thermal",
    "DCGM_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS": "power_brake",
}
"""Counter of ns -> reason. The same reason under an old and a new name is taken from the new one."""

_BLANKS: Final = frozenset(float(base + offset) for base in ((1 << 31) - 16, 1 << 47) for offset in range(4))


def is_blank(value: float) -> bool:
    """DCGM's sentinels for not supported, not found, not permitted: int32, double and int64."""
    return value in _BLANKS or value >= 9.2e18


def relabel(labels: Mapping[str, str]) -> dict[str, str]:
    """Which GPU of which host for which pod, in our words."""
    told = {label: value for label in KEPT_LABELS if (value := own_label(labels, label))}
    if host := own_label(labels, "Hostname") or own_label(labels, "hostname"):
        told["host"] = host
    if "UUID" not in told and (uuid := own_label(labels, "uuid")):
        told["UUID"] = uuid
    return told


def worker_of(worker: str | None, labels: Mapping[str, str]) -> str | None:
    """The pod that uses the GPU, where the exporter tells it (a pod of the exporter itself is not meant)."""
    pod = own_label(labels, "pod")
    return pod if pod and "dcgm" not in pod else worker


class ThrottleReasons:
    """`gpu_throttled` by reason from the bit mask, and `gpu_throttled_seconds_total` from the counters of ns."""

    def told(self, samples: Sequence[Sample], at_ns: int) -> list[Told]:
        """Every reason of the mask, those that do not hold too: 0 is known then."""
        seconds: dict[tuple[tuple[str, str], ...], Told] = {}
        out = []
        masks = {sample.series.name for sample in samples} & set(MASKS)
        for series, value, _ in samples:
            if series.name in masks and series.name == min(masks, key=MASKS.index):
                if is_blank(value) or not value >= 0 or value >= 1 << 53:
                    continue
                labels = relabel(series.labels)
                for reason, bit in REASONS.items():
                    told = {**labels, "reason": reason, "wire": series.name}
                    out.append(Told("gpu_throttled", told, float(bool(int(value) & bit))))
            elif (name := VIOLATIONS.get(series.name)) and value >= 0 and not is_blank(value):
                told = {**relabel(series.labels), "reason": name}
                key = tuple(told.items())
                if key not in seconds or series.name.endswith("_NS"):
                    wired = {**told, "wire": series.name}
                    seconds[key] = Told("gpu_throttled_seconds_total", wired, value / 1e9)
        return [*out, *seconds.values()]


NAMES: Final = MetricNames(
    "dcgm",
    PREFIXES,
    CANONICAL,
    scales=SCALES,
    worker_of=worker_of,
    derives=ThrottleReasons,
    relabels=relabel,
    is_blank=is_blank,
)

PROVIDES: Final = (
    Provides(
        engine="dcgm",
        source="metrics",
        needs="dcgm-exporter; `DCGM_FI_DEV_CLOCKS_EVENT_REASONS` and the violation fields in its counters file (`-f`)",
        names=names(
            """sample: worker at_ns name labels value gpu_util gpu_power_watts gpu_power_limit_watts gpu_throttled
            gpu_throttled_seconds_total gpu_clock_hertz gpu_temperature_celsius gpu_memory_temperature_celsius
            gpu_memory_used_bytes gpu_xid gpu_xid_errors_total
            mark: at_ns mark subject text attrs"""
        ),
        caveats={
            "sample.worker": "the pod that uses the GPU, what `--map` says, or `--worker`; else unknown",
            "sample.gpu_throttled": "only with `DCGM_FI_DEV_CLOCKS_EVENT_REASONS` (not in the default counters)",
            "sample.gpu_throttled_seconds_total": "only with the violation or event-reason counters (not in the default)",
            "sample.gpu_power_limit_watts": "only with `DCGM_FI_DEV_ENFORCED_POWER_LIMIT` (not in the default counters)",
            "sample.gpu_xid": "the code of the last error since the driver was loaded; an old one stays",
            "sample.gpu_xid_errors_total": "only with `DCGM_EXP_XID_ERRORS_TOTAL` (dcgm-exporter of 2026)",
        },
    ),
)


class DcgmAdapter(HostAdapter):
    """dcgm-exporter on port 9400."""

    engine = "dcgm"
    title = "dcgm-exporter"
    tables = (NAMES,)
    provides = PROVIDES
    guide = "docs/engines/hosts.md"
    what = "GPUs"
    sights: ClassVar = {
        "load": (("gpu_util", "gpu_clock_hertz", "gpu_power_watts"), "add DCGM_FI_DEV_GPU_UTIL to the counters file"),
        "throttling": (
            ("gpu_throttled", "gpu_throttled_seconds_total"),
            "why clocks were held down is not told: add `DCGM_FI_DEV_CLOCKS_EVENT_REASONS, gauge, reasons` to the "
            "counters file and start the exporter with -f FILE",
        ),
        "xid": (("gpu_xid", "gpu_xid_errors_total"), "add DCGM_FI_DEV_XID_ERRORS to the counters file"),
    }

    def recognises(self, page: Page) -> bool:
        wanted = ("DCGM_FI_", "DCGM_EXP_", "dcgm_gpu_", "dcgm_power_usage", "dcgm_sm_clock")
        return any(sample.series.name.startswith(wanted) for sample in page.samples)

    def told(self, page: Page) -> str:
        gpus = {own_label(sample.series.labels, "gpu") for sample in page.samples} - {None}
        return f"{len(gpus)} of them"
