"""Real routers before two real llama-servers: what their pages and logs tell, checked against what the servers served."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from engine_probe.attach.follower import AttachOptions
from engine_probe.attach.session import AttachSession, Summary
from tests.attach_engine import ListSink
from tests.servers import require, running_llama_server, running_router

NUM_REQUESTS = 6


@pytest.fixture(scope="module")
def engines() -> Iterator[list[str]]:
    """URLs of two llama-servers."""
    require("routers")
    with running_llama_server() as first, running_llama_server() as second:
        yield [first, second]


def served(url: str) -> float:
    """Prompt tokens that a llama-server computed so far."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("llamacpp:prompt_tokens_total"))


def ask(url: str, request_id: str) -> None:
    """One short completion through the router; each has a prompt of its own."""
    body = json.dumps({"model": "m", "prompt": f"{request_id} counts to ten:", "max_tokens": 2}).encode()
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    request = urllib.request.Request(f"{url}/v1/completions", data=body, headers=headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        assert response.status == 200


def follow(
    engine: str, kind: str, policy: str, engines: Sequence[str], folder: Path
) -> tuple[ListSink, Summary, Counter[str]]:
    """Attach to a router while it routes; what was written, the summary, and which server each request really reached."""
    truth: Counter[str] = Counter()
    with running_router(kind, engines, policy, folder) as (url, page, log):
        sink = ListSink()
        options = AttachOptions(url=page, salt=b"s", engine=engine, worker="router", interval_s=0.2, log=log)
        session, stop, said = AttachSession(options, sink, lambda _: None, flush_s=0.05), threading.Event(), []
        thread = threading.Thread(target=lambda: said.append(session.run(stop)))
        ask(url, "before-attach")  # some series appear with the first request
        thread.start()
        time.sleep(0.5)
        for number in range(NUM_REQUESTS):
            before = [served(engine) for engine in engines]
            ask(url, f"live-{number}")
            reached = [name for name, old in zip(engines, before, strict=True) if served(name) > old]
            assert len(reached) == 1
            truth[reached[0].partition("://")[2]] += 1
        time.sleep(0.6)
        stop.set()
        thread.join(30)
    return sink, said[0], truth


@pytest.mark.server
def test_sglang_router_tells_each_decision(engines: list[str], tmp_path: Path) -> None:
    """At debug level each request's worker is a `route` row, and the rows say what the servers really served."""
    sink, _, truth = follow("sglang-router", "sglang", "round_robin", engines, tmp_path)
    routes = sink.rows("route")
    assert [row["request_id"] for row in routes] == [f"live-{number}" for number in range(NUM_REQUESTS)]
    assert Counter(row["chosen"] for row in routes) == truth
    assert len(truth) == 2, "round robin reaches both"
    assert {row["router"] for row in routes} == {"router"}
    now = time.time_ns()
    assert all(0 <= now - row["at_ns"] < 120e9 for row in routes)


@pytest.mark.server
def test_vllm_router_tells_decisions_of_consistent_hash(engines: list[str], tmp_path: Path) -> None:
    """Where it hashes the request's id its log names it; the page counts decisions under every policy."""
    sink, _, truth = follow("vllm-router", "vllm", "consistent_hash", engines, tmp_path)
    routes = sink.rows("route")
    assert [row["request_id"] for row in routes] == [f"live-{number}" for number in range(NUM_REQUESTS)]
    assert Counter(row["chosen"] for row in routes) == truth
    assert {row["policy"] for row in routes} == {"consistent_hash"}


@pytest.mark.server
@pytest.mark.parametrize(
    ("engine", "kind", "counter"),
    [
        ("sglang-router", "sglang", "smg_worker_selection_total"),
        ("vllm-router", "vllm", "vllm_router_policy_decisions_total"),
    ],
)
def test_pages_tell_load_and_policy(engine: str, kind: str, counter: str, engines: list[str], tmp_path: Path) -> None:
    """router_load by the names that `attach` gives the engines, the policy as a flag of a worker with role router.

    Both routers count the open requests of a worker only under a policy that looks at load, once it was chosen.
    """
    sink, _, _ = follow(engine, kind, "cache_aware", engines, tmp_path)
    loads = {row["worker"] for row in sink.rows("sample") if row["name"] == "router_load"}
    assert loads
    assert loads <= {url.partition("://")[2] for url in engines}
    worker = sink.rows("worker")[-1]
    assert (worker["role"], worker["engine"], dict(worker["flags"])["policy"]) == ("router", engine, "cache_aware")
    counts = [row["value"] for row in sink.rows("sample") if row["name"] == counter]
    assert max(counts) >= 3
