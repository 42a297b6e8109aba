"""Exporters of hosts and GPUs: their units, masks and sentinels under the contract's names, and whose each number is."""

from __future__ import annotations

import pytest

from engine_probe.adapters.adapter import Surroundings
from engine_probe.adapters.prometheus import parse_page
from engine_probe.adapters.registry import adapter, adapters
from engine_probe.adapters.worker_map import WorkerMap
from tests.host_pages import FILES, S, mapped, sample_text, values, with_values


@pytest.mark.parametrize("engine", FILES)
def test_exactly_one_adapter_recognises_each_exporter(engine: str) -> None:
    """A page has one maker."""
    page = parse_page(sample_text(engine))
    assert [one.engine for one in adapters() if one.recognises(page)] == [engine]


def test_dcgm_numbers_come_in_base_units() -> None:
    """Percent, MHz and MiB become ratio, Hz and bytes; W and degrees stay."""
    (rows,) = mapped("dcgm", sample_text("dcgm"))
    assert values(rows, "gpu_util", gpu="0") == [0.87]
    assert values(rows, "gpu_clock_hertz", gpu="1") == [1_215e6]
    assert values(rows, "gpu_memory_used_bytes", gpu="0") == [76_000 * 1024 * 1024]
    assert values(rows, "gpu_power_watts", gpu="1") == [698.9]
    assert values(rows, "gpu_power_limit_watts", gpu="1") == [700.0]
    assert values(rows, "gpu_temperature_celsius", gpu="1") == [89.0]


def test_a_number_that_dcgm_cannot_read_is_unknown() -> None:
    """The sentinel 9223372036854775794 is no temperature; the other GPU's 88 degrees are."""
    (rows,) = mapped("dcgm", sample_text("dcgm"))
    assert values(rows, "gpu_memory_temperature_celsius") == [88.0]


@pytest.mark.parametrize("sentinel", ["2147483632", "2147483635", "140737488355328.000000", "9223372036854775792"])
def test_every_sentinel_is_unknown(sentinel: str) -> None:
    """int32, double and int64 blanks."""
    (rows,) = mapped("dcgm", with_values(sample_text("dcgm"), {"DCGM_FI_DEV_GPU_TEMP": sentinel}))
    assert values(rows, "gpu_temperature_celsius") == []


def test_the_bit_mask_becomes_one_number_a_reason() -> None:
    """0x4 | 0x8 | 0x40: power cap, hardware slowdown and its cause, heat; the other four are known to be off."""
    (rows,) = mapped("dcgm", sample_text("dcgm"))
    on = {row[3]["reason"] for row in rows if row[2] == "gpu_throttled" and row[3]["gpu"] == "1" and row[4] == 1.0}
    off = {row[3]["reason"] for row in rows if row[2] == "gpu_throttled" and row[3]["gpu"] == "1" and row[4] == 0.0}
    assert on == {"power_cap", "hw_slowdown", "hw_thermal"}
    assert off == {"sw_thermal", "power_brake", "sync_boost", "clocks_setting"}
    assert set(values(rows, "gpu_throttled", gpu="0")) == {0.0}


def test_the_old_name_of_the_mask_is_read_and_counts_once() -> None:
    """DCGM 3's DCGM_FI_DEV_CLOCK_THROTTLE_REASONS; where both stand on the page the new one speaks."""
    old = sample_text("dcgm").replace("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS")
    (rows,) = mapped("dcgm", old)
    assert values(rows, "gpu_throttled", gpu="1", reason="power_cap") == [1.0]
    both = sample_text("dcgm") + 'DCGM_FI_DEV_CLOCK_THROTTLE_REASONS{gpu="1"} 0\n'
    (rows,) = mapped("dcgm", both)
    assert values(rows, "gpu_throttled", gpu="1", reason="power_cap") == [1.0]


def test_violations_are_nanoseconds_whatever_the_help_says() -> None:
    """7,250,000,000 is 7.25 s: the help text on the page says microseconds and is wrong."""
    (rows,) = mapped("dcgm", sample_text("dcgm"))
    assert values(rows, "gpu_throttled_seconds_total", gpu="1", reason="thermal") == [7.25]
    assert values(rows, "gpu_throttled_seconds_total", gpu="1", reason="power_cap") == [42.0]


def test_the_event_reason_counter_goes_before_the_violation() -> None:
    """DCGM 4 counts the power cap under a new name too: one row, the new one's."""
    new = 'DCGM_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP_NS{gpu="7"} 3000000000\n'
    old = 'DCGM_FI_DEV_POWER_VIOLATION{gpu="7"} 1000000000\n'
    for text in (old + new, new + old):
        (rows,) = mapped("dcgm", text)
        assert values(rows, "gpu_throttled_seconds_total", gpu="7", reason="power_cap") == [3.0]


def test_xid_is_a_code_and_a_count() -> None:
    """The last code is a gauge; the exporter's own count carries the code as a label."""
    (rows,) = mapped("dcgm", sample_text("dcgm"))
    assert values(rows, "gpu_xid") == [0.0, 79.0]
    assert values(rows, "gpu_xid_errors_total", xid="79") == [1.0]


def test_a_gpu_is_its_pods_unless_a_rule_says_otherwise() -> None:
    """GPU 0 runs pod vllm-0; GPU 1 is nobody's without --worker or --map; a rule goes before the pod."""
    (rows,) = mapped("dcgm", sample_text("dcgm"))
    owners = {(row[3]["gpu"], row[0]) for row in rows if row[2] == "gpu_util"}
    assert owners == {("0", "vllm-0"), ("1", None)}
    rules = WorkerMap.parse(["gpu:0=worker-a", "UUID:GPU-1f0ddc2a-*=worker-b"])
    (rows,) = mapped("dcgm", sample_text("dcgm"), worker="spare", names_worker=rules.worker)
    owners = {(row[3]["gpu"], row[0]) for row in rows if row[2] in ("gpu_util", "gpu_throttled")}
    assert owners == {("0", "worker-a"), ("1", "worker-b")}


def test_labels_say_gpu_and_host_and_no_more() -> None:
    """Driver versions and model names are not repeated in every row."""
    (rows,) = mapped("dcgm", sample_text("dcgm"))
    labels = next(row[3] for row in rows if row[2] == "gpu_util" and row[3]["gpu"] == "0")
    uuid = "GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52"
    told = {"gpu": "0", "UUID": uuid, "host": "gpu-node-3", "pod": "vllm-0", "namespace": "serving"}
    assert labels == told | {"container": "vllm", "wire": "DCGM_FI_DEV_GPU_UTIL"}


def test_names_of_the_first_exporter_are_read() -> None:
    """`--use-old-namespace` (1.x): lower case, percent."""
    (rows,) = mapped(
        "dcgm", 'dcgm_gpu_utilization{gpu="0",uuid="GPU-a"} 50\ndcgm_xid_errors{gpu="0",uuid="GPU-a"} 31\n'
    )
    assert values(rows, "gpu_util", UUID="GPU-a") == [0.5]
    assert values(rows, "gpu_xid") == [31.0]


CPU = """node_cpu_seconds_total{{cpu="0",mode="idle"}} {idle}
node_cpu_seconds_total{{cpu="0",mode="iowait"}} {iowait}
node_cpu_seconds_total{{cpu="0",mode="user"}} {user}
node_cpu_seconds_total{{cpu="1",mode="idle"}} {idle}
node_cpu_seconds_total{{cpu="1",mode="steal"}} {steal}
"""


def test_cpu_share_needs_two_pages_and_counts_all_but_idle_and_disk() -> None:
    """+2 idle twice, +1 iowait, +4 user, +1 steal of 10 in all: 5 of 10 were busy. A reboot gives no share."""
    pages = [
        CPU.format(idle=100, iowait=10, user=50, steal=0),
        CPU.format(idle=102, iowait=11, user=54, steal=1),
        CPU.format(idle=1, iowait=0, user=1, steal=0),
        CPU.format(idle=2, iowait=0, user=9, steal=0),
    ]
    rows = mapped("node", *pages)
    assert [values(of_page, "cpu_util") for of_page in rows] == [[], [0.5], [], [0.8]]


def test_a_real_page_of_node_exporter_is_read() -> None:
    """1.5.0: memory, pressure, network and TCP under the contract's names, with the host's own name; little else."""
    first, second = mapped("node", sample_text("node"), sample_text("node"))
    assert values(second, "cpu_util") == []  # the same page again: no time has passed on its CPUs
    assert len(values(first, "memory_available_ratio", host="gpu-node-3")) == 1
    assert 0.0 < values(first, "memory_available_ratio")[0] < 1.0
    assert values(first, "oom_kills_total") == [0.0]
    assert len(values(first, "network_errors_total", device="eth0")) == 2
    assert not [row for row in first if row[2].startswith("node_")]


def test_virtual_devices_and_unknown_speeds_are_left_out() -> None:
    """A bridge repeats its members' bytes; -125000 is the driver's word for no idea."""
    page = (
        'node_network_receive_bytes_total{device="eth0"} 5\nnode_network_receive_bytes_total{device="veth1"} 5\n'
        'node_network_speed_bytes{device="eth0"} -125000\nnode_network_speed_bytes{device="eth1"} 1.25e+09\n'
        'node_infiniband_port_data_received_bytes_total{device="mlx5_0",port="1"} 7\n'
    )
    (rows,) = mapped("node", page)
    got = [(row[2], row[3]["device"], row[4]) for row in rows]
    assert got == [
        ("network_received_bytes_total", "eth0", 5.0),
        ("network_speed_bytes", "eth1", 1.25e9),
        ("network_received_bytes_total", "mlx5_0/1", 7.0),
    ]


def test_containers_are_counted_once_and_by_pod() -> None:
    """Of pod, sandbox and container only the named container speaks; the network is the pod's."""
    (rows,) = mapped("cadvisor", sample_text("cadvisor"))
    assert values(rows, "cpu_periods_total") == [600_000.0]
    assert values(rows, "cpu_throttled_periods_total", pod="vllm-0", container="vllm") == [1_200.0]
    assert {row[0] for row in rows} == {"vllm-0", "exporter-x"}
    assert values(rows, "network_errors_total", device="eth0", direction="transmit") == [3.0]
    assert values(rows, "oom_kills_total", pod="exporter-x") == [2.0]


def test_a_container_share_is_of_its_quota_and_a_limit_is_a_limit() -> None:
    """8 CPUs of quota, +40 s in 10 s: half. 56 of 64 GiB used: 12.5 % left. No limit, no ratio. Stated times count."""
    later = with_values(
        sample_text("cadvisor"), {'container_cpu_usage_seconds_total{cpu="total",container="vllm"': 5040.5}
    )
    later = later.replace(" 1795976600000", " 1795976610000")
    rows = mapped("cadvisor", sample_text("cadvisor"), later, every_s=99)
    assert values(rows[0], "cpu_util") == []
    assert values(rows[1], "cpu_util", pod="vllm-0") == [pytest.approx(0.5)]
    assert values(rows[0], "memory_available_ratio") == [0.125]


def test_docker_containers_go_by_their_name() -> None:
    """Without Kubernetes the name is what there is; the machine's slices have none."""
    page = (
        'container_cpu_usage_seconds_total{id="/docker/a",name="vllm-a"} 1\n'
        'container_cpu_cfs_periods_total{id="/docker/a",name="vllm-a"} 10\n'
        'container_cpu_cfs_periods_total{id="/system.slice"} 10\n'
    )
    (rows,) = mapped("cadvisor", page)
    assert [(row[0], row[2]) for row in rows] == [("vllm-a", "cpu_periods_total")]


def test_nvidia_smi_reasons_are_those_of_dcgm() -> None:
    """One series a reason; the UUID gets nvidia-smi's own prefix, so that both exporters name one GPU alike."""
    (rows,) = mapped("nvidia-smi", sample_text("nvidia-smi"))
    uuid = "GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52"
    assert values(rows, "gpu_throttled", reason="power_cap", UUID=uuid) == [1.0]
    assert values(rows, "gpu_throttled", reason="hw_thermal", UUID=uuid) == [0.0]
    assert len(values(rows, "gpu_throttled")) == 7
    assert values(rows, "gpu_util", UUID=uuid) == [0.87]
    assert not [row for row in rows if row[2].startswith("nvidia_smi_")]


@pytest.mark.parametrize("engine", FILES)
def test_equal_series_keep_equal_labels(engine: str) -> None:
    """The thinner keys on the labels' identity: the same series has the same object in every page."""
    first, second = mapped(engine, sample_text(engine), sample_text(engine))
    known = {(row[2], tuple(row[3].items())): id(row[3]) for row in first}
    assert all(known[(row[2], tuple(row[3].items()))] == id(row[3]) for row in second if row[2] != "cpu_util")
    assert all(row[1] >= 1_000 * S for row in first)


def test_the_lines_name_the_setting_that_shows_more() -> None:
    """Default counters tell no reason: the line says which field to add, and where."""
    lines = sample_text("dcgm").splitlines()
    text = "\n".join(line for line in lines if "EVENT_REASONS" not in line and "VIOLATION" not in line) + "\n"
    dcgm = adapter("dcgm")
    page = parse_page(text)
    told = [str(line) for line in dcgm.lines(dcgm.discover(None, page), Surroundings())]  # type: ignore[arg-type]
    assert told[0].startswith("metrics    seen      dcgm-exporter: GPUs (2 of them)")
    assert any(line.startswith("throttling not seen") and "DCGM_FI_DEV_CLOCKS_EVENT_REASONS" in line for line in told)
    assert "xid        seen      gpu_xid, gpu_xid_errors_total" in told
