"""Why a machine was slow: each reason fires on what shows it, stays quiet on what every machine does, and is never guessed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_probe.adapters.host_reasons import HostReason, concerning, host_reasons, observable
from engine_probe.adapters.metric_names import Row
from engine_probe.events import HOST_SAMPLES
from tests.host_pages import S, mapped, sample_text, with_values


def series(
    name: str, numbers: Sequence[float], *, every_s: int = 10, worker: str | None = None, **labels: str
) -> list[Row]:
    """One series, a number each `every_s` seconds from 1,000 s on."""
    return [(worker, (1_000 + at * every_s) * S, name, labels, number) for at, number in enumerate(numbers)]


def only(rows: list[Row]) -> HostReason:
    (found,) = host_reasons(rows)
    return found


def test_heat_is_told_with_its_seconds_and_what_it_did() -> None:
    """On at 10, 20 and 30 s of 60: 20 s whole and two halves of 10. Both kinds of heat are one reason."""
    rows = series("gpu_throttled", [0, 1, 1, 1, 0, 0, 0], gpu="0", reason="hw_thermal")
    rows += series("gpu_throttled", [0, 0, 1, 0, 0, 0, 0], gpu="0", reason="sw_thermal")
    rows += series("gpu_temperature_celsius", [70, 80, 91, 90, 84, 80, 78], gpu="0")
    rows += series("gpu_clock_hertz", [1.98e9, 1.2e9, 1.2e9, 1.2e9, 1.98e9, 1.98e9, 1.98e9], gpu="0")
    found = only(rows)
    assert (found.reason, found.seconds) == ("thermal", 30.0)
    assert found.evidence == (
        "GPU 0: clocks were held down by heat for 30.0 of 60.0 s; up to 91 °C, clock down to 1,200 MHz"
    )


def test_the_counter_knows_what_the_samples_missed() -> None:
    """Never on at a scrape, but 4.5 s by the counter."""
    rows = series("gpu_throttled", [0, 0, 0], gpu="1", reason="power_cap")
    rows += series("gpu_throttled_seconds_total", [100.0, 102.0, 104.5], gpu="1", reason="power_cap")
    rows += series("gpu_power_watts", [690, 699, 700], gpu="1") + series(
        "gpu_power_limit_watts", [700, 700, 700], gpu="1"
    )
    found = only(rows)
    assert (found.reason, found.seconds) == ("power_cap", 4.5)
    assert "up to 700 W of 700 W allowed" in found.evidence


def test_a_worker_goes_at_the_pace_of_its_slowest_gpu() -> None:
    """8 s on one and 3 s on another are 8 s, not 11."""
    rows = series("gpu_throttled_seconds_total", [0, 8], gpu="0", reason="thermal")
    rows += series("gpu_throttled_seconds_total", [0, 3], gpu="1", reason="thermal")
    assert only(rows).seconds == 8.0
    assert "GPU 0" in only(rows).evidence


def test_power_capping_for_a_moment_is_how_a_gpu_is_driven() -> None:
    """0.05 s of 10 is no reason."""
    assert host_reasons(series("gpu_throttled_seconds_total", [0, 0.05], gpu="0", reason="power_cap")) == []


def test_a_hardware_slowdown_with_a_known_cause_is_told_once() -> None:
    """The slowdown bit is set with heat: only what heat does not explain remains."""
    rows = series("gpu_throttled", [1, 1, 1], gpu="0", reason="hw_slowdown")
    alone = [one.reason for one in host_reasons(rows)]
    rows += series("gpu_throttled", [1, 1, 1], gpu="0", reason="hw_thermal")
    assert alone == ["hw_slowdown"]
    assert [one.reason for one in host_reasons(rows)] == ["thermal"]


def test_only_an_xid_that_comes_within_the_interval_counts() -> None:
    """79 appears at 20 s of 40; the 31 of another GPU was there before."""
    rows = series("gpu_xid", [0, 0, 79, 79, 79], gpu="3") + series("gpu_xid", [31, 31, 31, 31, 31], gpu="4")
    found = only(rows)
    assert (found.reason, found.seconds) == ("xid", 20.0)
    assert found.evidence == "GPU 3: XID 79 (the GPU has fallen off the bus)"


def test_an_xid_told_twice_is_one_error() -> None:
    """By the gauge and by the counter with its code."""
    rows = series("gpu_xid", [0, 48], gpu="0") + series("gpu_xid_errors_total", [0, 1], gpu="0", xid="48")
    assert "more" not in only(rows).evidence


def test_cpu_quota_is_told_by_periods() -> None:
    """60 of 200 periods throttled: 30 % of the 20 s."""
    rows = series("cpu_periods_total", [0, 100, 200], pod="vllm-0", container="vllm")
    rows += series("cpu_throttled_periods_total", [0, 10, 60], pod="vllm-0", container="vllm")
    found = only(rows)
    assert found.reason == "cpu_throttle"
    assert found.seconds == pytest.approx(6.0)
    assert found.evidence == "vllm-0 used up its CPU quota in 30% of its periods (60)"


def test_pressure_is_wall_clock_time() -> None:
    """PSI: 3 s of 20 waiting for memory, 6 for a CPU, 1 for a disk (5 %: quiet)."""
    rows = series("memory_pressure_seconds_total", [5, 6, 8], host="h")
    rows += series("cpu_pressure_seconds_total", [0, 3, 6], host="h") + series(
        "io_pressure_seconds_total", [0, 0, 1], host="h"
    )
    assert [(one.reason, one.seconds) for one in host_reasons(rows)] == [("cpu_busy", 6.0), ("memory_pressure", 3.0)]


def test_where_the_kernel_tells_no_pressure_the_levels_speak() -> None:
    """CPU at 96 % for 20 s and 3 % of memory left for 15 s; with PSI there, they would not be asked."""
    rows = series("cpu_util", [0.96, 0.97, 0.99]) + series("memory_available_ratio", [0.5, 0.03, 0.03])
    assert [(one.reason, one.seconds) for one in host_reasons(rows)] == [("cpu_busy", 20.0), ("memory_pressure", 15.0)]
    rows += series("memory_pressure_seconds_total", [0, 0, 0])
    assert [one.reason for one in host_reasons(rows)] == ["cpu_busy"]


def test_a_killed_process_is_memory_even_without_a_duration() -> None:
    """The event is known, its seconds are not."""
    found = only(series("oom_kills_total", [2, 3], host="h"))
    assert (found.reason, found.seconds) == ("memory_pressure", None)


def test_network_errors_drops_and_segments_sent_again() -> None:
    """Errors in one of three stretches: 10 s. Two drops a second are quiet. 2 % of segments sent again: all 30 s."""
    errors = series("network_errors_total", [0, 0, 7, 7], device="eth0", direction="receive")
    drops = series("network_drops_total", [0, 20, 40, 60], device="eth0", direction="receive")
    assert (only(errors + drops).reason, only(errors + drops).seconds) == ("network", 10.0)
    tcp = series("tcp_sent_segments_total", [0, 1000, 2000, 3000]) + series(
        "tcp_resent_segments_total", [0, 20, 40, 60]
    )
    assert only(tcp).evidence == "2.0% of TCP segments were sent again in 30.0 of 30.0 s"
    assert host_reasons(drops) == []


def test_a_full_link_is_a_reason() -> None:
    """1.2 GB/s on a link of 1.25 GB/s for 10 of 20 s."""
    rows = series("network_sent_bytes_total", [0, 1.2e10, 1.3e10], device="eth0")
    rows += series("network_speed_bytes", [1.25e9] * 3, device="eth0")
    assert only(rows).evidence == "eth0 carried more than 90% of what it can in 10.0 of 20.0 s"


def test_a_counter_reset_is_no_reason() -> None:
    """A reboot or a reload of the driver: counters begin at 0, and nothing is negative or huge."""
    rows = series("gpu_throttled_seconds_total", [500.0, 0.01], gpu="0", reason="thermal")
    rows += series("network_errors_total", [90, 0], device="eth0", direction="receive")
    assert host_reasons(rows) == []


def test_what_is_not_told_is_not_observable() -> None:
    """DCGM's default counters show XID errors; why clocks were low is told by nobody there."""
    plain = "\n".join(
        line for line in sample_text("dcgm").splitlines() if "EVENT_REASONS" not in line and "VIOLATION" not in line
    )
    (rows,) = mapped("dcgm", plain + "\n")
    assert observable(rows) == {"xid"}
    (rows,) = mapped("node", sample_text("node"))
    assert observable(rows) == {"cpu_busy", "memory_pressure", "io_pressure", "network"}
    (rows,) = mapped("cadvisor", sample_text("cadvisor"))
    assert observable(rows) == {"cpu_busy", "cpu_throttle", "memory_pressure", "io_pressure", "network"}


def test_rows_of_a_worker_are_its_own_and_its_hosts() -> None:
    """By name, by host, and by GPU where its GPUs are known; another worker's rows never."""
    rows = series("gpu_util", [1], worker="a", gpu="0", host="h")
    rows += series("gpu_util", [1], gpu="1", host="h") + series("gpu_util", [1], gpu="2", UUID="GPU-x", host="h")
    rows += series("cpu_util", [1], host="h") + series("cpu_util", [1], host="other")
    rows += series("gpu_util", [1], worker="b", gpu="3", host="h")
    assert [row[3].get("gpu", "cpu") for row in concerning(rows, "a", host="h")] == ["0", "1", "2", "cpu"]
    assert [row[3].get("gpu", "cpu") for row in concerning(rows, "a", host="h", gpus=["GPU-x"])] == ["0", "2", "cpu"]
    assert [row[3].get("gpu") for row in concerning(rows, "a")] == ["0"]


def test_from_pages_to_the_reason() -> None:
    """A GPU that runs hot between two scrapes of dcgm-exporter, and an XID 79 that comes with it."""
    quiet = {"DCGM_FI_DEV_CLOCKS_EVENT_REASONS": 0, "DCGM_FI_DEV_XID_ERRORS": 0, "DCGM_EXP_XID_ERRORS_TOTAL": 0}
    hot = {"DCGM_FI_DEV_THERMAL_VIOLATION": 13_250_000_000}
    text = sample_text("dcgm")
    both = [row for rows in mapped("dcgm", with_values(text, quiet), with_values(text, hot)) for row in rows]
    found = {one.reason: one.seconds for one in host_reasons(both)}
    assert found == {"thermal": 10.0, "power_cap": 5.0, "xid": 0.0}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(HOST_SAMPLES)),
            st.integers(0, 60),
            st.floats(0, 1e15),
            st.sampled_from(["0", "1"]),
            st.sampled_from(["thermal", "hw_slowdown", "power_cap", "79"]),
        ),
        max_size=60,
    )
)
def test_seconds_never_exceed_the_interval(drawn: list[tuple[str, int, float, str, str]]) -> None:
    """Whatever the numbers: 0 <= seconds <= interval, each reason once, no crash."""
    rows: list[Row] = [
        (None, at * S, name, {"gpu": gpu, "reason": word, "xid": word, "device": "eth0"}, value)
        for name, at, value, gpu, word in drawn
    ]
    found = host_reasons(rows)
    span = (max(row[1] for row in rows) - min(row[1] for row in rows)) / S if rows else 0.0
    assert len({one.reason for one in found}) == len(found)
    assert all(one.seconds is None or 0.0 <= one.seconds <= span * 1.000001 for one in found)
    assert {one.reason for one in found} <= observable(rows) | {
        "power_brake",
        "memory_pressure",
        "cpu_thermal",
        "network",
    }
