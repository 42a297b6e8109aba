"""Pages rebuilt from a server's samples: whose they are, in what order, what a target that is down leaves, and imports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_probe.adapters.worker_map import WorkerMap
from engine_probe.errors import UnknownFormat, UsageError
from engine_probe.readers.prometheus_server import ServerQuery, ServerSource, is_server
from engine_probe.readers.server_targets import ServerTargets
from engine_probe.readers.source import Notes, ReadOptions
from tests.host_pages import sample_text
from tests.prometheus_script import ScriptedPrometheus

S = 1_000_000_000
T0 = 1_795_976_000
VLLM = {
    'vllm:num_requests_running{engine="0",model_name="m"}': 3.0,
    'vllm:num_preemptions_total{engine="0",model_name="m"}': 5.0,
    'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="101",enable_prefix_caching="True"}': 1.0,
    "process_start_time_seconds": float(T0 - 50),
}
OPENMETRICS = {"vllm_num_requests_running": 2.0, "vllm_num_preemptions_total": 1.0}


@pytest.fixture
def server() -> Iterator[ScriptedPrometheus]:
    server = ScriptedPrometheus().start()
    yield server
    server.stop()


def read(
    server: ScriptedPrometheus, seconds: int = 600, **options: Any
) -> tuple[dict[str, list[dict[str, Any]]], Notes]:
    """Rows by kind of an import of this long from T0 on."""
    facts: dict[str, Any] = {"url": f"prometheus+{server.url}", "matches": ['{job="vllm"}']}
    facts |= {"start_ns": T0 * S, "end_ns": (T0 + seconds) * S}
    notes, rows = Notes(), dict[str, list[dict[str, Any]]]()
    for tables in ServerSource(ServerQuery(**(facts | options))).chunks(ReadOptions(), notes):
        for kind, table in tables.items():
            rows.setdefault(kind, []).extend(table.to_pylist(maps_as_pydicts="strict"))
    return rows, notes


def told(rows: dict[str, list[dict[str, Any]]], name: str) -> list[tuple[str | None, float, float]]:
    """(worker, s after T0, value) of one name."""
    return [(row["worker"], row["at_ns"] / S - T0, row["value"]) for row in rows["sample"] if row["name"] == name]


def test_a_past_becomes_the_rows_that_an_attach_would_have_written(server: ScriptedPrometheus) -> None:
    """Canonical names, the scrapes' own instants, one worker row with geometry, the start of the process as a mark."""
    for at in (0, 15, 30):
        server.page(T0 + at + 0.125, VLLM, job="vllm", instance="10.0.0.1:8000")
    rows, notes = read(server)
    instants = [0.125, 15.125, 30.125]
    assert told(rows, "requests_running") == [("10.0.0.1:8000", second, 3.0) for second in instants]
    (worker,) = rows["worker"]
    assert (worker["worker"], worker["num_blocks"], worker["block_size"]) == ("10.0.0.1:8000", 100, 16)
    assert [mark["mark"] for mark in rows["mark"]] == ["worker_up"]
    assert not [row for row in rows["sample"] if row["name"] == "up"]
    assert notes.facts["targets_vllm"] == 1
    assert [(window.start_ns, window.end_ns) for window in notes.windows] == [(T0 * S, (T0 + 600) * S)]


def test_names_that_an_exporter_rewrote_are_read(server: ScriptedPrometheus) -> None:
    """vllm_x for vllm:x, as OpenTelemetry and managed collectors write it."""
    server.page(T0 + 1, OPENMETRICS, job="vllm", instance="a:1")
    rows, _ = read(server)
    assert told(rows, "requests_running") == [("a:1", 1.0, 2.0)]


def test_a_worker_is_named_by_rule_label_pod_or_instance(server: ScriptedPrometheus) -> None:
    """In this order."""
    server.page(T0 + 1, OPENMETRICS, job="vllm", instance="a:1", pod="vllm-0", replica="r7")
    for options, name in (
        ({}, "vllm-0"),
        ({"worker_label": "replica"}, "r7"),
        ({"worker_label": "replica", "worker_map": WorkerMap.parse(["instance:a:*=mine"])}, "mine"),
    ):
        rows, _ = read(server, **options)
        assert {worker for worker, _, _ in told(rows, "requests_running")} == {name}


def test_a_restart_and_an_absence_become_marks(server: ScriptedPrometheus) -> None:
    """up 0 at 30 s, a new process at 45 s: down, what was not seen, up again; the counter is stored as it is."""
    server.page(T0 + 0, VLLM, job="vllm", instance="a:1")
    server.page(T0 + 15, VLLM, job="vllm", instance="a:1")
    server.page(T0 + 30, {"up": 0.0}, job="vllm", instance="a:1")
    again = VLLM | {"process_start_time_seconds": float(T0 + 40)}
    again['vllm:num_preemptions_total{engine="0",model_name="m"}'] = 1.0
    server.page(T0 + 45, again, job="vllm", instance="a:1")
    rows, _ = read(server)
    marks = [(row["mark"], row["at_ns"] // S - T0) for row in rows["mark"]]
    assert marks == [("worker_up", -50), ("worker_down", 30), ("gap", 30), ("worker_up", 45)]
    assert [value for _, _, value in told(rows, "preemptions_total")] == [5.0, 5.0, 1.0]


def test_two_targets_are_two_workers_and_a_gpu_is_its_pods(server: ScriptedPrometheus) -> None:
    """DCGM behind the same server: the pod that uses the GPU, under the name that the server gave the label."""
    server.page(T0 + 1, OPENMETRICS, job="vllm", instance="a:1", pod="vllm-0")
    server.page(T0 + 2, OPENMETRICS, job="vllm", instance="a:2", pod="vllm-1")
    gpu = {'DCGM_FI_DEV_GPU_UTIL{gpu="0",exported_pod="vllm-1"}': 50.0, 'DCGM_FI_DEV_GPU_UTIL{gpu="1"}': 10.0}
    server.page(T0 + 3, gpu, job="vllm", instance="n:9400", pod="dcgm-exporter-x")
    rows, notes = read(server)
    assert {worker for worker, _, _ in told(rows, "requests_running")} == {"vllm-0", "vllm-1"}
    assert told(rows, "gpu_util") == [("vllm-1", 3.0, 0.5), (None, 3.0, 0.1)]
    assert (notes.facts["targets_vllm"], notes.facts["targets_dcgm"]) == (2, 1)


def test_shares_of_time_come_from_the_servers_own_scrapes(server: ScriptedPrometheus) -> None:
    """node_exporter every 15 s: the second page gives the share."""
    for at, idle, user in ((0, 100.0, 10.0), (15, 109.0, 16.0)):
        numbers = {
            'node_cpu_seconds_total{cpu="0",mode="idle"}': idle,
            'node_cpu_seconds_total{cpu="0",mode="user"}': user,
        }
        server.page(T0 + at, numbers, job="vllm", instance="n:9100")
    rows, _ = read(server)
    ((worker, at_s, share),) = told(rows, "cpu_util")
    assert (worker, at_s) == (None, 15.0)
    assert share == pytest.approx(0.4)


def test_pieces_meet_without_a_seam(server: ScriptedPrometheus) -> None:
    """A sample every 10 s over 25 minutes, asked for in pieces of five: each once."""
    for at in range(0, 1500, 10):
        server.page(T0 + at, OPENMETRICS | {"vllm_num_requests_running": float(at)}, job="vllm", instance="a:1")
    rows, notes = read(server, seconds=1500)
    assert [value for _, _, value in told(rows, "requests_running")] == [float(at) for at in range(0, 1500, 10)]
    assert not [text for text in notes.left_out if "twice" in text]


def test_what_is_missing_or_partial_is_said(server: ScriptedPrometheus) -> None:
    """Empty pieces, the server's warnings, native histograms."""
    server.page(T0 + 1, OPENMETRICS, job="vllm", instance="a:1")
    server.warnings = ["partial answer"]
    server.native = [{"__name__": "h", "job": "vllm"}]
    _, notes = read(server, seconds=900)
    assert notes.left_out == ["1 native histograms are not read"]
    assert notes.not_told == [
        "2 of 3 pieces of five minutes are empty: the server has nothing there",
        "the server warned: partial answer",
    ]


def test_nothing_at_all_is_an_error(server: ScriptedPrometheus) -> None:
    """A selector that matches nothing makes no empty run."""
    with pytest.raises(UnknownFormat, match=r"has no samples of .*job=.*vllm"):
        read(server)


@pytest.mark.parametrize(
    ("start_s", "end_s", "said"), [(10, 10, "before"), (10, 5, "before"), (0, 40 * 86_400, "30 days")]
)
def test_a_stretch_that_makes_no_sense_is_refused(start_s: int, end_s: int, said: str) -> None:
    """Backwards, empty, or more than a server should be asked for."""
    query = ServerQuery("prometheus+http://h:1", ["x"], start_s * S, end_s * S)
    with pytest.raises(UsageError, match=said):
        ServerSource(query)


def test_samples_that_come_late_are_counted() -> None:
    """A page of an instant that has passed is not taken again."""
    targets = ServerTargets()
    one = {frozenset({("__name__", "vllm:num_requests_running"), ("instance", "a"), ("engine", "0")}): [(5 * S, 1.0)]}
    targets.take(one)
    targets.take(one)
    assert (targets.num_samples, targets.num_late) == (1, 1)
    assert targets.kinds() == {"vllm": 1}


def test_only_a_servers_address_is_one() -> None:
    """A file may have any name."""
    assert is_server("prometheus+http://h:9090")
    assert not is_server("http://h:9090")
    assert not is_server("prometheus.txt")


def test_the_command_imports_a_past_once(
    server: ScriptedPrometheus, tmp_path: Path, kvscope: Callable[..., Any]
) -> None:
    """`kvscope import prometheus+http://...`: a run; the same again adds nothing; no password in what is printed."""
    server.page(T0 + 1, OPENMETRICS, job="vllm", instance="a:1")
    address = f"prometheus+http://me:geheim@127.0.0.1:{server.port}"
    words: list[object] = ["import", address, "--match", '{job="vllm"}', "--start", T0 * S, "--end", (T0 + 60) * S]
    words += ["--run", "past", "--store", tmp_path / "s.duckdb", "--json"]
    for already in (False, True):
        ended = kvscope(*words)
        assert ended.code == 0, ended.err
        summary = json.loads(ended.out)
        assert (summary["already_imported"], summary["rows"]["sample"]) == (already, 2)
        assert summary["path"] == server.url
        assert "geheim" not in ended.out + ended.err
    for wrong, said in (
        (["import", address, "--run", "x", "--match", "y"], "--start"),
        (["import", tmp_path, "--run", "x", "--match", "y"], "for a server"),
        (["import", address, "--run", "x", "--match", "y", "--start", "2h", "--header", "bad"], "X-Scope-OrgID"),
        (["import", address, "--run", "x", "--start", "2h"], "--match"),
        (["attach", "vllm", server.url, "--match", "x"], "for a Prometheus server"),
        (["attach", "prometheus", server.url], "--match"),
    ):
        ended = kvscope(*wrong)
        assert ended.code == 2
        assert said in ended.err


def test_a_page_of_the_servers_own_is_told_apart() -> None:
    """Somebody attaches an engine's adapter to the server: the sentence names the right word."""
    from engine_probe.adapters.prometheus import parse_page
    from engine_probe.adapters.registry import recognise

    maker = recognise(parse_page('prometheus_build_info{version="2.42.0"} 1\n'))
    assert maker is not None
    assert maker.engine == "prometheus"
    assert sample_text("node").count("prometheus_build_info") == 0
