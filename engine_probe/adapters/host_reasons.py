"""Why a worker's machine may have been slow in an interval, from the numbers that hosts and GPUs told in it.

Pure. In come the `sample` rows of one worker's host, containers and GPUs over one interval, whatever exporter they are
from; out come reasons with their seconds and one sentence of evidence, the longest first. A worker on several GPUs goes at
the pace of its slowest, so the worst GPU speaks. Invariants: a reason needs numbers that say it (what was not told is in
nobody's list, and `observable` says which reasons these rows could tell at all); seconds never exceed the interval, and
are None where only the event is known. Thresholds are named below: they part what every machine does a little from what
slows a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from engine_probe.adapters.metric_names import Row, deltas
from engine_probe.digits import whole_number

MIN_THROTTLED: Final = 0.01
"""Share of the interval from which held-down clocks count. Power capping below that is how a GPU is driven."""
MIN_CPU_THROTTLED: Final = 0.05
MIN_CPU_PRESSURE: Final = 0.25
BUSY_CPU: Final = 0.95
MIN_MEMORY_PRESSURE: Final = 0.01
LITTLE_MEMORY: Final = 0.05
MIN_IO_PRESSURE: Final = 0.10
MIN_RESENT: Final = 0.01
MIN_SEGMENTS: Final = 100.0
MIN_DROPS_PER_S: Final = 10.0
FULL_LINK: Final = 0.9
MAX_XID: Final = 1_000_000

XID_WORDS: Final = {
    13: "graphics engine exception, mostly the program's fault",
    31: "memory page fault, mostly the program's fault",
    43: "the GPU stopped processing, mostly the program's fault",
    45: "work was cleaned up after another error",
    48: "double-bit ECC error",
    63: "a memory row was remapped",
    64: "a memory row could not be remapped",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "high rate of single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "the GPU's system processor timed out",
    120: "the GPU's system processor failed",
}
REASON_WORDS: Final = {
    "thermal": "heat",
    "power_cap": "the power limit",
    "power_brake": "the power supply's brake",
    "hw_slowdown": "the hardware's own protection",
}

Points = Sequence[tuple[float, float]]  # (s, value), ascending
Key = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class HostReason:
    """`reason`: thermal, power_cap, power_brake, hw_slowdown, xid, cpu_throttle, cpu_thermal, cpu_busy, memory_pressure,
    io_pressure or network. `seconds` of the interval in which it held; None: only that it happened is known."""

    reason: str
    seconds: float | None
    evidence: str


def host_reasons(rows: Iterable[Row]) -> list[HostReason]:
    """Reasons that these rows show, the longest first. Rows of other names are left aside; order does not matter."""
    numbers = Numbers(rows)
    found: list[HostReason] = []
    for look in (_gpus, _xids, _cpu_throttle, _cpu_busy, _memory, _io, _network):
        found += look(numbers)
    return sorted(found, key=lambda one: -1.0 if one.seconds is None else one.seconds, reverse=True)


def observable(rows: Iterable[Row]) -> frozenset[str]:
    """Reasons that these rows could have told, had they held."""
    names = {row[2] for row in rows}
    reasons: set[str] = set()
    for needed, told in (
        (("gpu_throttled", "gpu_throttled_seconds_total"), ("thermal", "power_cap", "hw_slowdown")),
        (("gpu_xid", "gpu_xid_errors_total"), ("xid",)),
        (("cpu_throttled_periods_total", "cpu_throttled_seconds_total"), ("cpu_throttle",)),
        (("cpu_thermal_throttles_total",), ("cpu_thermal",)),
        (("cpu_pressure_seconds_total", "cpu_util"), ("cpu_busy",)),
        (("memory_pressure_seconds_total", "memory_available_ratio"), ("memory_pressure",)),
        (("io_pressure_seconds_total",), ("io_pressure",)),
        (("network_errors_total", "tcp_resent_segments_total"), ("network",)),
    ):
        if names & set(needed):
            reasons |= set(told)
    return frozenset(reasons)


def concerning(rows: Iterable[Row], worker: str, *, host: str | None = None, gpus: Sequence[str] = ()) -> list[Row]:
    """Rows about one worker: those that name it, and nameless ones of its host (and of its GPUs, by index or UUID).

    host  the worker's machine (`worker.host`); gpus  its GPUs (`worker.gpu_id`); without them all GPUs of the host count
    """
    out = []
    for row in rows:
        labels = row[3]
        gpu = {labels.get("gpu"), labels.get("UUID")} - {None}
        is_mine = row[0] == worker
        if row[0] is None and host is not None and labels.get("host") == host:
            is_mine = not gpu or not gpus or bool(gpu & set(gpus))
        if is_mine:
            out.append(row)
    return out


class Numbers:
    """The rows as series by canonical name, and the interval that they span."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._series: dict[str, dict[Key, list[tuple[float, float]]]] = {}
        first = last = None
        for _, at_ns, name, labels, value in rows:
            at_s = at_ns / 1e9
            first = at_s if first is None else min(first, at_s)
            last = at_s if last is None else max(last, at_s)
            key = tuple(sorted((label, text) for label, text in labels.items() if label != "wire"))
            self._series.setdefault(name, {}).setdefault(key, []).append((at_s, value))
        for of_name in self._series.values():
            for points in of_name.values():
                points.sort()
        self.end_s = 0.0 if last is None else last
        self.elapsed_s = 0.0 if first is None or last is None else last - first

    def of(self, name: str) -> Mapping[Key, Points]:
        """Series of one name."""
        return self._series.get(name, {})

    def matching(self, name: str, **wanted: str | None) -> Points:
        """The first series of `name` whose labels are these; () where there is none."""
        for key, points in self.of(name).items():
            labels = dict(key)
            if all(labels.get(label) == text for label, text in wanted.items()):
                return points
        return ()


def increase(points: Points) -> float:
    """What a counter counted over its points, resets counted from 0."""
    return sum(deltas(value for _, value in points))


def held(points: Points, holds: Callable[[float], bool]) -> float:
    """Seconds in which a state held: whole between two points that hold, half between one that does and one that not."""
    return sum((b[0] - a[0]) * (holds(a[1]) + holds(b[1])) / 2 for a, b in pairwise(points))


def _gpus(numbers: Numbers) -> list[HostReason]:
    seconds: dict[str, dict[Key, float]] = {}
    for name, measure in (
        ("gpu_throttled", lambda points: held(points, lambda value: value >= 0.5)),
        ("gpu_throttled_seconds_total", increase),
    ):
        for key, points in numbers.of(name).items():
            reason = dict(key).get("reason", "")
            gpu = tuple(pair for pair in key if pair[0] != "reason")
            told = min(measure(points), numbers.elapsed_s)
            if reason == "hw_slowdown":  # set together with what caused it, where that is known
                told -= max(_held_reason(numbers, gpu, cause) for cause in ("hw_thermal", "power_brake"))
            reason = "thermal" if reason.endswith("thermal") else reason
            mine = seconds.setdefault(reason, {})
            mine[gpu] = max(mine.get(gpu, 0.0), told)
    found = []
    for reason, words in REASON_WORDS.items():
        gpus = seconds.get(reason, {})
        worst = max(gpus, key=lambda gpu: gpus[gpu], default=None)
        if worst is None or not gpus[worst] > MIN_THROTTLED * numbers.elapsed_s:
            continue
        text = f"{_gpu_word(worst)}: clocks were held down by {words} for {_of(gpus[worst], numbers)}"
        found.append(HostReason(reason, gpus[worst], text + _gpu_state(numbers, worst)))
    return found


def _held_reason(numbers: Numbers, gpu: Key, reason: str) -> float:
    key = tuple(sorted((*gpu, ("reason", reason))))
    return held(numbers.of("gpu_throttled").get(key, ()), lambda value: value >= 0.5)


def _gpu_state(numbers: Numbers, gpu: Key) -> str:
    """Temperature, power and clock of the GPU, as far as they are told."""
    wanted = {label: text for label, text in gpu if label in ("gpu", "UUID", "host", "GPU_I_ID")}
    parts = []
    if heat := numbers.matching("gpu_temperature_celsius", **wanted):
        parts.append(f"up to {max(value for _, value in heat):.0f} °C")
    if power := numbers.matching("gpu_power_watts", **wanted):
        limit = numbers.matching("gpu_power_limit_watts", **wanted)
        of = f" of {limit[-1][1]:.0f} W allowed" if limit else ""
        parts.append(f"up to {max(value for _, value in power):.0f} W{of}")
    if clock := numbers.matching("gpu_clock_hertz", **wanted):
        parts.append(f"clock down to {min(value for _, value in clock) / 1e6:,.0f} MHz")
    return f"; {', '.join(parts)}" if parts else ""


def _xids(numbers: Numbers) -> list[HostReason]:
    """Errors that came within the interval; the code of an old one stays on the page and says nothing."""
    events: list[tuple[float, Key, int]] = []
    for gpu, points in numbers.of("gpu_xid").items():
        for (_, before), (at_s, value) in pairwise(points):
            if value not in (before, 0.0):
                events.append((at_s, gpu, int(value)))
    for key, points in numbers.of("gpu_xid_errors_total").items():
        xid = dict(key).get("xid", "")
        gpu = tuple(pair for pair in key if pair[0] != "xid")
        code = whole_number(xid, MAX_XID)
        if code is None or any(event[1:] == (gpu, code) for event in events):
            continue
        steps = zip(points[1:], deltas(value for _, value in points), strict=True)
        events += [(at_s, gpu, code) for (at_s, _), step in steps if step > 0]
    if not events:
        return []
    at_s, gpu, code = min(events)
    words = XID_WORDS.get(code, "see NVIDIA's list of XID errors")
    more = f", and {len(events) - 1} more" if len(events) > 1 else ""
    return [HostReason("xid", max(numbers.end_s - at_s, 0.0), f"{_gpu_word(gpu)}: XID {code} ({words}){more}")]


def _cpu_throttle(numbers: Numbers) -> list[HostReason]:
    found = []
    worst: tuple[float, str] | None = None
    for key, points in numbers.of("cpu_periods_total").items():
        periods = increase(points)
        throttled = increase(numbers.of("cpu_throttled_periods_total").get(key, ()))
        share = min(throttled / periods, 1.0) if periods else 0.0
        if share >= MIN_CPU_THROTTLED and (worst is None or share > worst[0]):
            text = f"{_unit_word(key)} used up its CPU quota in {share:.0%} of its periods ({throttled:,.0f})"
            worst = share, text
    if worst is not None:
        found.append(HostReason("cpu_throttle", worst[0] * numbers.elapsed_s, worst[1]))
    elif not numbers.of("cpu_periods_total"):
        for key, points in numbers.of("cpu_throttled_seconds_total").items():
            seconds = min(increase(points), numbers.elapsed_s)
            if seconds > MIN_CPU_THROTTLED * numbers.elapsed_s:
                text = f"{_unit_word(key)}: threads were held back by the CPU quota for {seconds:.1f} s"
                found.append(HostReason("cpu_throttle", seconds, text))
    heat = sum(increase(points) for points in numbers.of("cpu_thermal_throttles_total").values())
    if heat > 0:
        found.append(HostReason("cpu_thermal", None, f"CPU packages lowered their clock for heat {heat:,.0f} times"))
    return found


def _cpu_busy(numbers: Numbers) -> list[HostReason]:
    pressed = _pressure(numbers, "cpu_pressure_seconds_total", MIN_CPU_PRESSURE, "cpu_busy", "waited for a CPU")
    if pressed or numbers.of("cpu_pressure_seconds_total"):
        return pressed
    busy = max((held(points, lambda v: v >= BUSY_CPU) for points in numbers.of("cpu_util").values()), default=0.0)
    if busy <= MIN_CPU_PRESSURE * numbers.elapsed_s:
        return []
    return [HostReason("cpu_busy", busy, f"the CPUs were {BUSY_CPU:.0%} busy or more for {_of(busy, numbers)}")]


def _memory(numbers: Numbers) -> list[HostReason]:
    name = "memory_pressure_seconds_total"
    found = _pressure(numbers, name, MIN_MEMORY_PRESSURE, "memory_pressure", "waited for memory")
    kills = sum(increase(points) for points in numbers.of("oom_kills_total").values())
    told = f"{kills:,.0f} processes were killed for want of memory" if kills else ""
    if found and told:
        found = [HostReason(one.reason, one.seconds, f"{one.evidence}; {told}") for one in found]
    elif not found and not numbers.of(name):
        short = [held(p, lambda v: v <= LITTLE_MEMORY) for p in numbers.of("memory_available_ratio").values()]
        if short and max(short) > MIN_MEMORY_PRESSURE * numbers.elapsed_s:
            text = f"less than {LITTLE_MEMORY:.0%} of memory was available for {_of(max(short), numbers)}"
            found = [HostReason("memory_pressure", max(short), text + (f"; {told}" if told else ""))]
    if not found and told:
        found = [HostReason("memory_pressure", None, told)]
    return found


def _io(numbers: Numbers) -> list[HostReason]:
    return _pressure(numbers, "io_pressure_seconds_total", MIN_IO_PRESSURE, "io_pressure", "waited for a disk")


def _pressure(numbers: Numbers, name: str, least: float, reason: str, what: str) -> list[HostReason]:
    """PSI: wall-clock seconds in which somebody waited."""
    worst = max(((increase(points), key) for key, points in numbers.of(name).items()), default=None)
    if worst is None or not worst[0] > least * numbers.elapsed_s:
        return []
    seconds = min(worst[0], numbers.elapsed_s)
    return [HostReason(reason, seconds, f"{_unit_word(worst[1])}: tasks {what} for {_of(seconds, numbers)}")]


def _network(numbers: Numbers) -> list[HostReason]:
    seconds: dict[str, float] = {}
    words: dict[str, str] = {}
    for name, kind, least in (
        ("network_errors_total", "errors", 0.0),
        ("network_drops_total", "drops", MIN_DROPS_PER_S),
    ):
        for key, points in numbers.of(name).items():
            device = dict(key).get("device", "a network device")
            bad = _seconds_above(points, least)
            if bad > seconds.get(device, 0.0):
                words[device] = f"{device}: {increase(points):,.0f} {kind} ({dict(key).get('direction', 'both ways')})"
                seconds[device] = bad
    for way in ("network_received_bytes_total", "network_sent_bytes_total"):
        for key, points in numbers.of(way).items():
            speed = numbers.of("network_speed_bytes").get(key)
            device = dict(key).get("device", "a network device")
            full = _seconds_above(points, FULL_LINK * speed[-1][1]) if speed else 0.0
            if full > seconds.get(device, 0.0):
                words[device] = f"{device} carried more than {FULL_LINK:.0%} of what it can"
                seconds[device] = full
    for key, points in numbers.of("tcp_resent_segments_total").items():
        sent = increase(numbers.of("tcp_sent_segments_total").get(key, ()))
        share = increase(points) / sent if sent >= MIN_SEGMENTS else 0.0
        if share > MIN_RESENT:
            words["tcp"] = f"{share:.1%} of TCP segments were sent again"
            seconds["tcp"] = _seconds_above(points, 0.0)
    worst = max(seconds, key=lambda device: seconds[device], default=None)
    if worst is None:
        return []
    return [HostReason("network", seconds[worst], f"{words[worst]} in {_of(seconds[worst], numbers)}")]


def _seconds_above(points: Points, per_s: float) -> float:
    """Seconds of the stretches between two points in which the counter rose faster than `per_s`."""
    steps = deltas(value for _, value in points)
    spans = [b[0] - a[0] for a, b in pairwise(points)]
    return sum(dt for step, dt in zip(steps, spans, strict=True) if dt > 0 and step > per_s * dt)


def _gpu_word(key: Key) -> str:
    labels = dict(key)
    name = labels.get("gpu") or labels.get("UUID") or "?"
    return f"GPU {name}" + (f" of {labels['host']}" if "host" in labels else "")


def _unit_word(key: Key) -> str:
    labels = dict(key)
    return labels.get("pod") or labels.get("container") or labels.get("host") or "the host"


def _of(seconds: float, numbers: Numbers) -> str:
    return f"{seconds:.1f} of {numbers.elapsed_s:.1f} s"
