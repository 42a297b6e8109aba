"""Containers by cAdvisor, alone or inside the kubelet (`/metrics/cadvisor`): CPU quota, memory limit, pressure, network.

Kept are the containers that run something: of a pod its named containers (its sandbox and the pod's own cgroup repeat
them; only the network stands on the sandbox), of Docker those with a name. A row is the worker's that has the pod's
name. Shares need two pages, and the share of CPU time is that of the container's quota, or of the machine without one.
Source: cAdvisor `docs/storage/prometheus.md`, Kubernetes 1.34.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from engine_probe.adapters.adapter import Client
from engine_probe.adapters.derived import Shares, Told
from engine_probe.adapters.hosts import HostAdapter
from engine_probe.adapters.metric_names import MetricNames
from engine_probe.adapters.prometheus import Page, PageParser, Sample
from engine_probe.adapters.provides import Provides, names
from engine_probe.adapters.worker_map import own_label
from engine_probe.errors import UnknownFormat

KUBELET_PATH: Final = "/metrics/cadvisor"
NO_LIMIT: Final = float(1 << 60)
"""A memory limit from here on is the kernel's word for none."""

PLAIN: Final = {
    "container_cpu_cfs_throttled_seconds_total": "cpu_throttled_seconds_total",
    "container_cpu_cfs_throttled_periods_total": "cpu_throttled_periods_total",
    "container_cpu_cfs_periods_total": "cpu_periods_total",
    "container_pressure_cpu_waiting_seconds_total": "cpu_pressure_seconds_total",
    "container_pressure_memory_waiting_seconds_total": "memory_pressure_seconds_total",
    "container_pressure_memory_stalled_seconds_total": "memory_stalled_seconds_total",
    "container_pressure_io_waiting_seconds_total": "io_pressure_seconds_total",
    "container_oom_events_total": "oom_kills_total",
}
NETWORK: Final = {
    "container_network_receive_bytes_total": ("network_received_bytes_total", None),
    "container_network_transmit_bytes_total": ("network_sent_bytes_total", None),
    "container_network_receive_errors_total": ("network_errors_total", "receive"),
    "container_network_transmit_errors_total": ("network_errors_total", "transmit"),
    "container_network_receive_packets_dropped_total": ("network_drops_total", "receive"),
    "container_network_transmit_packets_dropped_total": ("network_drops_total", "transmit"),
}
USAGE: Final = "container_cpu_usage_seconds_total"
PARTS: Final = frozenset(
    (
        USAGE,
        "container_spec_cpu_quota",
        "container_spec_cpu_period",
        "container_spec_memory_limit_bytes",
        "container_memory_working_set_bytes",
    )
)

Unit = tuple[str | None, str | None, str]  # namespace, pod, container


class ContainerNumbers:
    """The contract's numbers from pages of one cAdvisor."""

    def __init__(self) -> None:
        self._shares = Shares()
        self._labels: dict[object, Mapping[str, str]] = {}

    def told(self, samples: Sequence[Sample], at_ns: int) -> list[Told]:
        """Numbers of the page, container by container; the CPU share from the second page on."""
        out: list[Told] = []
        parts: dict[Unit, dict[str, float]] = {}
        seen_ns: dict[Unit, int] = {}
        machine: dict[str, float] = {}
        for series, value, stated_ns in samples:
            name, labels = series.name, series.labels
            if name in NETWORK:
                out += self._network(name, labels, value)
            elif name.startswith("machine_"):
                machine[name] = value
            elif name in PLAIN or name in PARTS:
                unit = unit_of(labels)
                if unit is None:
                    continue
                if name in PLAIN:
                    out.append(Told(PLAIN[name], self._named(name, unit), value))
                else:  # usage may stand once a CPU
                    mine = parts.setdefault(unit, {})
                    mine[name] = mine.get(name, 0.0) + value if name == USAGE else value
                    if name == USAGE:
                        seen_ns[unit] = at_ns if stated_ns is None else stated_ns
        for unit, mine in parts.items():
            out += self._shares_of(unit, mine, seen_ns.get(unit), machine)
        return out

    def _shares_of(
        self, unit: Unit, mine: Mapping[str, float], at_ns: int | None, machine: Mapping[str, float]
    ) -> list[Told]:
        out = []
        quota, period = mine.get("container_spec_cpu_quota", 0.0), mine.get("container_spec_cpu_period", 0.0)
        cores = quota / period if quota > 0 and period > 0 else machine.get("machine_cpu_cores", 0.0)
        if at_ns is not None and cores > 0:
            share = self._shares.share(unit, mine[USAGE], at_ns / 1e9 * cores)
            if share is not None:
                out.append(Told("cpu_util", self._named(USAGE, unit), share))
        limit, used = mine.get("container_spec_memory_limit_bytes", 0.0), mine.get("container_memory_working_set_bytes")
        if used is not None and 0 < limit < NO_LIMIT:
            wire = "container_memory_working_set_bytes"
            out.append(Told("memory_available_ratio", self._named(wire, unit), min(max(1.0 - used / limit, 0.0), 1.0)))
        return out

    def _network(self, name: str, labels: Mapping[str, str], value: float) -> list[Told]:
        pod, device = own_label(labels, "pod"), labels.get("interface", "")
        owner = pod or own_label(labels, "name")
        if owner is None or device == "lo":
            return []
        canonical, direction = NETWORK[name]
        namespace = own_label(labels, "namespace")
        return [Told(canonical, self._named(name, (namespace, pod, "" if pod else owner), device, direction), value)]

    def _named(
        self, wire: str, unit: Unit, device: str | None = None, direction: str | None = None
    ) -> Mapping[str, str]:
        key = (wire, unit, device, direction)
        if key not in self._labels:
            namespace, pod, container = unit
            pairs = {"namespace": namespace, "pod": pod, "container": container or None}
            pairs |= {"device": device, "direction": direction, "wire": wire}
            self._labels[key] = {label: text for label, text in pairs.items() if text is not None}
        return self._labels[key]


def unit_of(labels: Mapping[str, str]) -> Unit | None:
    """The container that a series speaks of; None for a pod's sandbox, its cgroup and the machine's own slices."""
    pod, container = own_label(labels, "pod"), own_label(labels, "container")
    if pod is not None:
        return None if container in (None, "POD") else (own_label(labels, "namespace"), pod, str(container))
    name = own_label(labels, "name")
    return None if name is None else (None, None, name)


def worker_of(worker: str | None, labels: Mapping[str, str]) -> str | None:
    """The pod; of a Docker container its name."""
    return labels.get("pod") or labels.get("container") or worker


NAMES: Final = MetricNames(
    "cadvisor",
    ("container_", "machine_", "cadvisor_"),
    {},
    keeps_unknown=False,
    derives=ContainerNumbers,
    worker_of=worker_of,
)

PROVIDES: Final = (
    Provides(
        engine="cadvisor",
        source="metrics",
        needs="cAdvisor, or the kubelet's `/metrics/cadvisor` with a token that may read `nodes/metrics`",
        names=names(
            """sample: worker at_ns name labels value cpu_util cpu_throttled_seconds_total cpu_throttled_periods_total
            cpu_periods_total cpu_pressure_seconds_total memory_pressure_seconds_total memory_stalled_seconds_total
            memory_available_ratio oom_kills_total io_pressure_seconds_total network_received_bytes_total
            network_sent_bytes_total network_errors_total network_drops_total
            mark: at_ns mark subject text attrs"""
        ),
        caveats={
            "sample.worker": "the pod's (or the container's) name, or what `--map` says",
            "sample.cpu_util": "share of the CPU quota; without a quota of the machine; from the second scrape on",
            "sample.cpu_periods_total": "only for containers with a CPU quota",
            "sample.memory_available_ratio": "only for containers with a memory limit",
            "sample.cpu_pressure_seconds_total": "only with PSI (kubelet 1.34 or feature gate `KubeletPSI`)",
            "sample.oom_kills_total": "cAdvisor 0.40 and later",
        },
    ),
)


class CadvisorAdapter(HostAdapter):
    """cAdvisor on port 8080, or a kubelet on 10250."""

    engine = "cadvisor"
    title = "cAdvisor"
    tables = (NAMES,)
    provides = PROVIDES
    guide = "docs/engines/hosts.md"
    what = "containers"
    sights: ClassVar = {
        "cpu": (("cpu_throttled_periods_total", "cpu_util"), "no container here has a CPU quota"),
        "pressure": (
            ("memory_pressure_seconds_total", "memory_available_ratio", "oom_kills_total"),
            "no container here has a memory limit, and PSI is off (kubelet feature gate KubeletPSI)",
        ),
        "network": (("network_errors_total", "network_received_bytes_total"), "the network metrics are switched off"),
    }

    def recognises(self, page: Page) -> bool:
        wanted = ("container_cpu_usage_seconds_total", "container_memory_working_set_bytes", "cadvisor_version_info")
        return any(sample.series.name in wanted for sample in page.samples)

    def page(self, client: Client, parser: PageParser) -> Page:
        """The kubelet's path first where the port is a kubelet's, else cAdvisor's own."""
        paths = [KUBELET_PATH, "/metrics"] if ":10250" in client.url else ["/metrics", KUBELET_PATH]
        try:
            body, content_type = client.metrics(paths[0])
        except UnknownFormat:
            body, content_type = client.metrics(paths[1], hint=self.page_hint())
        return parser.parse(body, content_type)

    def version_of(self, page: Page) -> str | None:
        infos = (s.series.labels for s in page.samples if s.series.name == "cadvisor_version_info")
        return next((labels.get("cadvisorVersion") or None for labels in infos), None)

    def told(self, page: Page) -> str:
        units: set[Any] = {unit_of(s.series.labels) for s in page.samples if s.series.name == USAGE} - {None}
        return f"{len(units)} of them"
