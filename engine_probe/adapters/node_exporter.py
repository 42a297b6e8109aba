"""A host by Prometheus' node_exporter: CPU, memory, pressure (PSI), network, InfiniBand, in the contract's own names.

A page has a thousand series and more, most of them of no use here: only what `host_reasons` can read is kept, summed
over CPUs and without virtual network devices. The share of CPU time needs two pages. Every row carries `labels.host`, the
name that the host gives itself. Source: node_exporter 1.5 (a real page) to 1.9.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from engine_probe.adapters.derived import Shares, Told
from engine_probe.adapters.hosts import HostAdapter
from engine_probe.adapters.metric_names import MetricNames
from engine_probe.adapters.prometheus import Page, Sample
from engine_probe.adapters.provides import Provides, names

VIRTUAL: Final = re.compile(
    r"lo|veth.*|docker.*|br-.*|cni.*|cali.*|flannel.*|virbr.*|tunl.*|tap.*|kube.*|lxc.*|dummy.*|ifb.*"
)
"""Network devices that repeat what a real one carries."""

PLAIN: Final = {
    "node_pressure_cpu_waiting_seconds_total": "cpu_pressure_seconds_total",
    "node_pressure_memory_waiting_seconds_total": "memory_pressure_seconds_total",
    "node_pressure_memory_stalled_seconds_total": "memory_stalled_seconds_total",
    "node_pressure_io_waiting_seconds_total": "io_pressure_seconds_total",
    "node_vmstat_oom_kill": "oom_kills_total",
    "node_netstat_Tcp_OutSegs": "tcp_sent_segments_total",
    "node_netstat_Tcp_RetransSegs": "tcp_resent_segments_total",
}
DEVICES: Final = {
    "node_network_receive_bytes_total": ("network_received_bytes_total", None),
    "node_network_transmit_bytes_total": ("network_sent_bytes_total", None),
    "node_network_receive_errs_total": ("network_errors_total", "receive"),
    "node_network_transmit_errs_total": ("network_errors_total", "transmit"),
    "node_network_receive_drop_total": ("network_drops_total", "receive"),
    "node_network_transmit_drop_total": ("network_drops_total", "transmit"),
    "node_network_speed_bytes": ("network_speed_bytes", None),
    "node_infiniband_port_data_received_bytes_total": ("network_received_bytes_total", None),
    "node_infiniband_port_data_transmitted_bytes_total": ("network_sent_bytes_total", None),
    "node_infiniband_port_errors_received_total": ("network_errors_total", "receive"),
    "node_infiniband_port_discards_received_total": ("network_drops_total", "receive"),
    "node_infiniband_port_discards_transmitted_total": ("network_drops_total", "transmit"),
    "node_infiniband_rate_bytes_per_second": ("network_speed_bytes", None),
}
"""Wire name -> (canonical name, direction). An InfiniBand device is `mlx5_0/1`: with its port."""
THROTTLES: Final = "node_cpu_package_throttles_total"
IDLE: Final = frozenset(("idle", "iowait"))


class HostNumbers:
    """The contract's numbers from pages of one host."""

    def __init__(self) -> None:
        self._shares = Shares()
        self._labels: dict[object, Mapping[str, str]] = {}

    def told(self, samples: Sequence[Sample], at_ns: int) -> list[Told]:
        """Numbers of the page; the CPU share from the second page on."""
        out: list[Told] = []
        idle = whole = throttles = 0.0
        has_cpu = has_throttles = False
        single: dict[str, float] = {}
        host = next((s.series.labels.get("nodename") for s in samples if s.series.name == "node_uname_info"), None)
        for (name, labels), value in ((series_of(sample), sample.value) for sample in samples):
            if name == "node_cpu_seconds_total":
                has_cpu = True
                whole += value
                idle += value if labels.get("mode") in IDLE else 0.0
            elif name == THROTTLES:
                has_throttles = True
                throttles += value
            elif name in PLAIN:
                out.append(Told(PLAIN[name], self._named(name, host, None, None), value))
            elif name in DEVICES:
                out += self._device(name, host, labels, value)
            elif name.startswith("node_memory_Mem"):
                single[name] = value
        if has_cpu and (share := self._shares.share("cpu", whole - idle, whole)) is not None:
            out.append(Told("cpu_util", self._named("node_cpu_seconds_total", host, None, None), share))
        if has_throttles:
            out.append(Told("cpu_thermal_throttles_total", self._named(THROTTLES, host, None, None), throttles))
        available, total = single.get("node_memory_MemAvailable_bytes"), single.get("node_memory_MemTotal_bytes")
        if available is not None and total:
            wire = "node_memory_MemAvailable_bytes"
            out.append(Told("memory_available_ratio", self._named(wire, host, None, None), min(available / total, 1.0)))
        return out

    def _device(self, name: str, host: str | None, labels: Mapping[str, str], value: float) -> list[Told]:
        canonical, direction = DEVICES[name]
        device = labels.get("device", "")
        if VIRTUAL.fullmatch(device) or (canonical == "network_speed_bytes" and value <= 0):
            return []
        device = f"{device}/{labels['port']}" if "port" in labels else device
        return [Told(canonical, self._named(name, host, device, direction), value)]

    def _named(self, wire: str, host: str | None, device: str | None, direction: str | None) -> Mapping[str, str]:
        key = (wire, host, device, direction)
        if key not in self._labels:
            pairs = {"host": host, "device": device, "direction": direction, "wire": wire}
            self._labels[key] = {label: text for label, text in pairs.items() if text is not None}
        return self._labels[key]


def series_of(sample: Sample) -> tuple[str, Mapping[str, str]]:
    """Name and labels of a sample."""
    return sample.series.name, sample.series.labels


NAMES: Final = MetricNames("node", ("node_",), {}, keeps_unknown=False, derives=HostNumbers)

PROVIDES: Final = (
    Provides(
        engine="node",
        source="metrics",
        needs="node_exporter with its default collectors",
        names=names(
            """sample: worker at_ns name labels value cpu_util cpu_thermal_throttles_total cpu_pressure_seconds_total
            memory_pressure_seconds_total memory_stalled_seconds_total memory_available_ratio oom_kills_total
            io_pressure_seconds_total network_received_bytes_total network_sent_bytes_total network_errors_total
            network_drops_total network_speed_bytes tcp_sent_segments_total tcp_resent_segments_total
            mark: at_ns mark subject text attrs"""
        ),
        caveats={
            "sample.worker": "what `--map` or `--worker` says; else unknown, and `labels.host` is the host's own name",
            "sample.cpu_util": "busy is all but idle and waiting for a disk, over all CPUs; from the second scrape on",
            "sample.cpu_pressure_seconds_total": "only where the kernel has PSI switched on (`psi=1`); memory and io likewise",
            "sample.cpu_thermal_throttles_total": "only on real x86 machines, not in a virtual one",
            "sample.network_speed_bytes": "only where the driver tells it",
        },
    ),
)


class NodeAdapter(HostAdapter):
    """node_exporter on port 9100."""

    engine = "node"
    title = "node_exporter"
    tables = (NAMES,)
    provides = PROVIDES
    guide = "docs/engines/hosts.md"
    what = "a host"
    sights: ClassVar = {
        "cpu": (("cpu_util", "cpu_pressure_seconds_total"), "start node_exporter with --collector.cpu"),
        "pressure": (
            ("memory_pressure_seconds_total", "memory_available_ratio"),
            "memory is not told: start node_exporter with --collector.meminfo and --collector.pressure",
        ),
        "network": (
            ("network_errors_total", "tcp_resent_segments_total"),
            "start node_exporter with --collector.netdev and --collector.netstat",
        ),
    }

    def recognises(self, page: Page) -> bool:
        wanted = ("node_exporter_build_info", "node_uname_info", "node_cpu_seconds_total", "node_memory_MemTotal_bytes")
        return any(sample.series.name in wanted for sample in page.samples)

    def version_of(self, page: Page) -> str | None:
        infos = (s.series.labels for s in page.samples if s.series.name == "node_exporter_build_info")
        return next((labels.get("version") for labels in infos), None)

    def told(self, page: Page) -> str:
        names = (s.series.labels.get("nodename") for s in page.samples if s.series.name == "node_uname_info")
        return next((name for name in names if name), "")
