"""Where a fleet's engines are: files as Prometheus reads them, names, pods; what cannot be read changes nothing."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_probe.attach import targets
from engine_probe.attach.targets import (
    DnsTargets,
    FileTargets,
    KubernetesTargets,
    Target,
    kubernetes_of,
    read_file,
    targets_of,
)
from engine_probe.errors import EngineUnreachable, KvscopeError, UnknownFormat, UsageError

FILE_SD = [
    {"targets": ["10.0.0.1:8000", "10.0.0.2:8000"], "labels": {"job": "vllm", "engine": "vllm"}},
    {"targets": ["gpu7:8443"], "labels": {"__scheme__": "https", "worker": "blue", "__meta_x": "y"}},
    {"targets": ["http://10.0.0.1:8000/"]},
]


def test_a_prometheus_targets_file_works_as_it_is(tmp_path: Path) -> None:
    """Groups, labels and scheme are Prometheus'; an address that stands twice is one target; `__` labels stay behind."""
    path = tmp_path / "targets.json"
    path.write_text(json.dumps(FILE_SD))
    found = targets_of(f"file:{path}").read()
    assert [(t.url, t.engine, t.worker, dict(t.labels)) for t in found] == [
        ("http://10.0.0.1:8000", "vllm", None, {"job": "vllm"}),
        ("http://10.0.0.2:8000", "vllm", None, {"job": "vllm"}),
        ("https://gpu7:8443", None, "blue", {}),
    ]


def test_yaml_and_patterns(tmp_path: Path) -> None:
    """file_sd files may be YAML, and several may be named by a pattern."""
    (tmp_path / "a.yml").write_text("- targets: ['a:1']\n  labels: {engine: sglang}\n")
    (tmp_path / "b.yml").write_text("- targets: ['b:1']\n")
    assert [t.url for t in FileTargets(str(tmp_path / "*.yml")).read()] == ["http://a:1", "http://b:1"]
    assert read_file(tmp_path / "a.yml")[0].engine == "sglang"


def test_one_worker_name_for_several_addresses_is_not_taken(tmp_path: Path) -> None:
    """Their rows would be mixed."""
    path = tmp_path / "t.json"
    path.write_text(json.dumps([{"targets": ["a:1", "b:1"], "labels": {"worker": "w"}}]))
    assert [t.worker for t in read_file(path)] == [None, None]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.json", "[", "is no JSON"),
        ("t.json", '{"targets": []}', "expected a list of groups"),
        ("t.json", '[{"labels": {}}]', "group 1 has no list `targets`"),
        ("t.json", '[{"targets": ["a:1"]}, {"targets": [1]}]', "group 2"),
        ("t.json", '[{"targets": ["a:1"], "labels": []}, 3]', "group 2"),
        ("t.yml", "- targets: [a\n", "is no YAML"),
        ("t.yml", "&a [*a]", "group 1"),
        ("t.yml", "", "expected a list of groups"),
        ("t.yml", "- targets: ['a:1']\n  labels: {x: &a [1, *a]}", "labels` of group 1 hold more than words"),
    ],
)
def test_a_broken_file_names_the_place(tmp_path: Path, name: str, text: str, message: str) -> None:
    """File and group."""
    (tmp_path / name).write_text(text)
    with pytest.raises(UnknownFormat) as caught:
        read_file(tmp_path / name)
    assert message in caught.value.message


def test_an_absent_file_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    """Both are errors, not an empty fleet."""
    with pytest.raises(UnknownFormat, match="No targets file"):
        FileTargets(str(tmp_path / "none.json")).read()
    (tmp_path / "b.json").write_bytes(b"\xff\xfe[")
    with pytest.raises(UnknownFormat, match="cannot be read"):
        read_file(tmp_path / "b.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda c: st.lists(c, max_size=3) | st.dictionaries(st.sampled_from(["targets", "labels", "x"]), c, max_size=3),
    max_leaves=12,
)


@given(document=JSON)
def test_any_document_is_targets_or_an_error(document: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Never another exception."""
    path = tmp_path_factory.mktemp("t") / "t.json"
    path.write_text(json.dumps(document))
    with contextlib.suppress(KvscopeError):
        assert all(isinstance(t, Target) for t in read_file(path))


def test_a_name_has_all_its_addresses() -> None:
    """localhost is this machine; an unknown name is an error."""
    assert Target("http://127.0.0.1:8000") in DnsTargets("localhost", 8000).read()
    with pytest.raises(EngineUnreachable, match="is not known here"):
        DnsTargets("no-such-name.invalid", 1).read()


@pytest.mark.parametrize("name", ["a..b", "a" * 64, ".", "no-such-name.invalid"])
def test_a_name_that_has_no_address_is_an_error(name: str) -> None:
    """Also one that no resolver is asked about: its labels are empty or too long."""
    with pytest.raises(EngineUnreachable, match="is not known here"):
        DnsTargets(name, 1).read()


def test_a_file_that_is_being_written_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half of a YAML list reads like a smaller fleet: a file of just now is read a moment later."""
    path = tmp_path / "t.yml"
    path.write_text("- targets: ['a:1']\n")

    def the_rest_is_written(_: float) -> None:
        path.write_text("- targets: ['a:1']\n- targets: ['b:1']\n")
        os.utime(path, (1, 1))

    monkeypatch.setattr(targets, "time", SimpleNamespace(time=time.time, sleep=the_rest_is_written))
    assert [t.url for t in FileTargets(str(path)).read()] == ["http://a:1", "http://b:1"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "dns:vllm",
        "dns::80",
        "dns:a:99999",
        "dns:a:\u00b2",
        "dns:a:" + "9" * 5000,
        "kubernetes:",
        "nonsense:x",
        "file:",
    ],
)
def test_targets_that_are_none_are_misuse(text: str) -> None:
    """Exit 2, naming the forms."""
    with pytest.raises(UsageError):
        targets_of(text)


def test_kubernetes_outside_of_a_pod_asks_for_its_api() -> None:
    """In a pod the environment tells it; elsewhere the sentence says how to get one."""
    with pytest.raises(UsageError, match="kubectl proxy"):
        kubernetes_of("default", env={})
    inside = kubernetes_of("default?selector=app%3Dvllm&port=8000", env={"KUBERNETES_SERVICE_HOST": "10.96.0.1"})
    assert (inside.api, inside.selector, inside.port) == ("https://10.96.0.1:443", "app=vllm", 8000)
    with pytest.raises(UsageError, match="colour"):
        kubernetes_of("default?colour=blue", env={"KUBERNETES_SERVICE_HOST": "h"})


def pod(name: str, ip: str | None, *, phase: str = "Running", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"nodeName": "n1", **spec}, "status": {"phase": phase, "podIP": ip}}


class Api:
    """A Kubernetes API of one list of pods."""

    def __init__(self) -> None:
        self.status, self.body = 200, b"{}"
        self.asked: list[tuple[str, str | None]] = []
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                api.asked.append((self.path, self.headers.get("Authorization")))
                self.send_response(api.status)
                self.send_header("Content-Length", str(len(api.body)))
                self.end_headers()
                self.wfile.write(api.body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def api() -> Iterator[Api]:
    api = Api()
    yield api
    api.server.shutdown()
    api.server.server_close()


def test_running_pods_are_targets_by_their_names(api: Api, tmp_path: Path) -> None:
    """Pending and leaving pods are not; the port is the option's, the annotation's, or the container's first."""
    (tmp_path / "token").write_text("secret\n")
    leaving = pod("d", "10.1.0.4", containers=[{"ports": [{"containerPort": 8000}]}])
    leaving["metadata"]["deletionTimestamp"] = "now"
    annotated = pod("b", "10.1.0.2")
    annotated["metadata"]["annotations"] = {"prometheus.io/port": "9000"}
    pods = [pod("a", "10.1.0.1", containers=[{"ports": [{"containerPort": 8000}]}]), annotated, leaving]
    pods += [pod("c", None, phase="Pending"), pod("e", "fd00::5", containers=[])]
    api.body = json.dumps({"items": pods}).encode()
    source = KubernetesTargets("serving", api.url, "app=vllm", account=tmp_path)
    assert [(t.url, t.worker) for t in source.read()] == [("http://10.1.0.1:8000", "a"), ("http://10.1.0.2:9000", "b")]
    path, authorization = api.asked[0]
    assert path.startswith("/api/v1/namespaces/serving/pods?")
    assert "labelSelector=app%3Dvllm" in path
    assert authorization == "Bearer secret"
    with_port = KubernetesTargets("serving", api.url, port=7, account=tmp_path / "none").read()
    assert [t.url for t in with_port] == ["http://10.1.0.1:7", "http://10.1.0.2:7", "http://[fd00::5]:7"]


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (403, b"", "needs `list` on pods"),
        (500, b"x", "answers 500"),
        (200, b"[]", "expected a list"),
        (200, b"<", "expected"),
    ],
)
def test_an_api_that_refuses_is_an_error(api: Api, tmp_path: Path, status: int, body: bytes, message: str) -> None:
    """Not an empty fleet: nobody is taken down because the API server is away."""
    api.status, api.body = status, body
    with pytest.raises(EngineUnreachable) as caught:
        KubernetesTargets("default", api.url, account=tmp_path).read()
    assert message in caught.value.message


@pytest.mark.parametrize(
    "item",
    [
        {"metadata": [], "spec": 3, "status": "Running"},
        {
            "metadata": {"annotations": []},
            "spec": {"containers": {"a": 1}},
            "status": {"phase": "Running", "podIP": "10.1.0.1"},
        },
        {
            "status": {"phase": "Running", "podIP": "10.1.0.1"},
            "spec": {"containers": [[], {"ports": 1}, {"ports": [3]}]},
        },
        {
            "status": {"phase": "Running", "podIP": "10.1.0.1"},
            "metadata": {"annotations": {"prometheus.io/port": "9" * 5000}},
        },
        [],
    ],
)
def test_a_pod_of_another_shape_is_no_target(api: Api, tmp_path: Path, item: Any) -> None:
    """What is no map is passed over; a port that is none is not taken."""
    api.body = json.dumps({"items": [item]}).encode()
    assert KubernetesTargets("default", api.url, account=tmp_path).read() == []


def test_an_answer_that_is_too_deep_is_an_error(api: Api, tmp_path: Path) -> None:
    """As any other that is no list of pods."""
    api.body = b"[" * 200_000
    with pytest.raises(EngineUnreachable, match="expected a list of pods"):
        KubernetesTargets("default", api.url, account=tmp_path).read()
