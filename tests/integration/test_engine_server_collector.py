"""The embedded engine, recorded into a real collector, alone and behind `kvscope proxy`."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx

from engine_probe.engine.server.assembly import ServerOptions
from store.interface import Window
from tests.attach_running import Attached
from tests.engine_server import ended, engine_server, launch
from tests.integration.collector_harness import running
from tests.proxy_running import running_proxy

ALL = Window()


def test_engine_and_proxy_tell_of_the_same_requests(tmp_path: Path) -> None:
    """Both write to one collector: each request has a row at the client's and one at the engine's vantage, under one id."""
    with running(tmp_path / "kv.duckdb") as collector:
        process, told = launch(
            "--collector", collector.url, "--salt-file", str(tmp_path / "salt"), "--num-blocks", "64"
        )
        try:
            with running_proxy(tmp_path, [f"w0={told['url']}"], to=collector.url) as proxy:
                for number in range(4):
                    body = {"prompt": "some words", "max_tokens": 6, "stream": number % 2 == 0, "ignore_eos": True}
                    headers = {"X-Request-Id": f"call-{number}", "X-Kvscope-Workload": "batch"}
                    status, answer, _ = proxy.post("/v1/completions", body, headers)
                    assert (status, answer["x-request-id"]) == (200, f"call-{number}")
            process.send_signal(signal.SIGINT)
            code, said = ended(process)
            assert code == 0, said
        finally:
            process.kill()
        rows = collector.store.rows("request", ALL, order_by="request_id, vantage").to_pylist()
        assert [(row["request_id"], row["vantage"]) for row in rows] == [
            (f"call-{number}", vantage) for number in range(4) for vantage in ("client", "engine")
        ]
        assert {row["worker"] for row in rows} == {"w0"}
        engine = [row for row in rows if row["vantage"] == "engine"]
        assert {row["output_tokens"] for row in engine} == {6}
        assert sorted(row["cached_tokens"] for row in engine) == [0, 0, 0, 0]  # eleven tokens fill no block of 16
        assert collector.store.rows("step", ALL).num_rows >= 24
        (worker,) = [r for r in collector.store.rows("worker", ALL).to_pylist() if r["engine"] == "kvscope"]
        assert (worker["num_blocks"], worker["block_size"]) == (64, 16)


def test_a_collector_that_is_away_costs_no_answer(tmp_path: Path) -> None:
    """Nobody listens there: requests are answered; without a spool the end says what was lost, with 3."""
    process, told = launch("--collector", "http://127.0.0.1:9", "--salt-file", str(tmp_path / "salt"))
    try:
        answer = httpx.post(f"{told['url']}/v1/completions", json={"prompt": "x", "max_tokens": 2}, trust_env=False)
        assert answer.status_code == 200
        process.send_signal(signal.SIGINT)
        code, said = ended(process)
    finally:
        process.kill()
    assert code == 3
    assert "Not delivered" in said


def test_attach_leaves_requests_to_an_engine_that_records_itself() -> None:
    """As to the plugin in vLLM: under the engine's own name, and it says from where."""
    with engine_server(options=ServerOptions(records=True)) as server:
        with Attached(server) as attached:  # type: ignore[arg-type]
            attached.until(lambda: bool(attached.sink.rows("worker")))
        assert attached.error is None
        assert {row["worker"] for row in attached.sink.rows("worker")} == {"w0"}
        assert any("from the plugin inside the engine (worker w0)" in line for line in attached.said)
