"""Dynamo: its frontend's and workers' real pages, whose words win, and how its workers are named."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from engine_probe.adapters.adapter import Surroundings
from engine_probe.adapters.dynamo import instance_id
from engine_probe.adapters.kv_events import KvEventDecoder
from engine_probe.adapters.metric_names import Row, SampleMapper
from engine_probe.adapters.prometheus import Page, parse_page
from engine_probe.adapters.registry import adapter, recognise
from engine_probe.adapters.worker_map import WorkerMap

SAMPLES = Path(__file__).parents[1] / "data" / "samples" / "dynamo-1.6.1"
WORKERS = {"14580806587834164829", "2925391587267228647"}


class Client:
    """A Dynamo's HTTP side that knows one model."""

    url = "http://h"

    def metrics(self, path: str = "/metrics", *, hint: str = "") -> tuple[bytes, str | None]:
        raise AssertionError(path)

    def json(self, path: str) -> Any:
        return {"data": [{"id": "tiny"}]} if path == "/v1/models" else None


def page(name: str) -> Page:
    return parse_page((SAMPLES / f"{name}.prom").read_text())


def rows(of: Page, worker: str = "fe") -> list[Row]:
    return SampleMapper(worker, adapter("dynamo").tables).rows(of, 1)


def named(found: list[Row], name: str) -> list[tuple[str | None, float]]:
    return [(row[0], row[4]) for row in found if row[2] == name]


@pytest.mark.parametrize("name", ["frontend", "worker"])
def test_dynamo_is_asked_before_the_engine_that_it_repeats(name: str) -> None:
    """A worker's page has vLLM's names too: it is Dynamo's."""
    maker = recognise(page(name))
    assert maker is not None
    assert maker.engine == "dynamo"


def test_the_router_speaks_of_its_workers_by_their_decimal_ids() -> None:
    """router_load is the named worker's; what the frontend says of itself keeps its name and is the frontend's."""
    found = rows(page("frontend"))
    assert {worker for worker, _ in named(found, "router_load")} == WORKERS
    assert named(found, "dynamo_frontend_output_tokens_total") == [("fe", 720.0)]
    assert not {row[2] for row in found} & {"output_tokens_total", "requests_running", "prompt_tokens_total"}


def test_a_worker_has_the_name_that_its_router_uses() -> None:
    """Hex on its own page, decimal on the router's and in the log: one name."""
    assert instance_id("ca596e56d687e65d") == "14580806587834164829"
    assert instance_id("x") is instance_id("") is instance_id("1" * 20) is None
    seen = adapter("dynamo").discover(Client(), page("worker"))
    assert seen.worker in WORKERS


def test_on_a_worker_the_engines_own_words_win() -> None:
    """kv usage is vLLM's; Dynamo's own gauge speaks only where the engine's is missing. No number stands twice."""
    text = (SAMPLES / "worker.prom").read_text()
    own = 'dynamo_component_gpu_cache_usage_percent{dp_rank="0",worker_id="ca596e56d687e65d"} 0.25\n'
    old = 'dynamo_component_kvstats_gpu_cache_usage_percent{dp_rank="0"} 0.75\n'
    both = named(rows(parse_page(text + own), "w"), "kv_usage_ratio")
    assert both == [("w", 0.0)]
    alone = "\n".join(line for line in text.splitlines() if "vllm:" not in line) + "\n"
    assert named(rows(parse_page(alone + own + old), "w"), "kv_usage_ratio") == [("w", 0.25)]
    assert named(rows(parse_page(alone + old), "w"), "kv_usage_ratio") == [("w", 0.75)]
    assert named(rows(parse_page(alone), "w"), "kv_usage_ratio") == []


def test_ranks_of_a_worker_are_apart() -> None:
    """dp_rank 1 of a worker is ID/dp1, as a rank of vLLM is NAME/dp1."""
    text = 'dynamo_frontend_worker_active_decode_blocks{dp_rank="1",worker_id="14580806587834164829"} 7\n'
    assert named(rows(parse_page(text)), "router_load") == [("14580806587834164829/dp1", 7.0)]


def test_facts_are_the_routers_or_the_engines() -> None:
    """The frontend is a router with its model and settings; a worker is what runs in it, served by Dynamo."""
    dynamo = adapter("dynamo")
    front = page("frontend")
    (facts,) = dynamo.facts(front, dynamo.discover(Client(), front)).values()
    assert (facts["role"], facts["engine"], facts["model"]) == ("router", "dynamo", "tiny")
    assert facts["flags"]["kv_cache_block_size"] == "16"
    config = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="201"} 1\n'
    for text, engine, blocks in (
        ((SAMPLES / "worker.prom").read_text() + config, "vllm", 200),
        ("dynamo_component_uptime_seconds 1\ndynamo_component_total_blocks 99\n", "dynamo", 99),
    ):
        worker = parse_page(text)
        (facts,) = dynamo.facts(worker, dynamo.discover(Client(), worker)).values()
        assert (facts["engine"], facts["num_blocks"], facts["flags"]["served_by"]) == (engine, blocks, "dynamo")


def test_the_lines_say_what_the_router_expected_and_what_is_not_reported() -> None:
    """20,272 tokens expected, no worker reports reuse: said so, instead of a hit rate."""
    dynamo = adapter("dynamo")
    lines = [str(line) for line in dynamo.lines(dynamo.discover(Client(), page("frontend")), Surroundings())]
    assert lines[0] == "metrics    seen      Dynamo frontend serving tiny; 2 workers registered; 88 series every 1 s"
    assert any(line.startswith("overlap    not seen  the router expected 20,272 cached tokens") for line in lines)
    told = page("frontend")
    text = (SAMPLES / "frontend.prom").read_text().replace("router_kv_worker_reused_tokens_total{", "x{")
    reported = 'dynamo_component_router_kv_worker_reused_tokens_total{model="tiny"} 18000\n'
    told = parse_page(text + reported)
    lines = [str(line) for line in dynamo.lines(dynamo.discover(Client(), told), Surroundings(log_path="f"))]
    assert any(line.startswith("overlap    seen") and "18,000" in line for line in lines)
    worker = [str(line) for line in dynamo.lines(dynamo.discover(Client(), page("worker")), Surroundings())]
    assert worker[0].startswith("metrics    seen      Dynamo worker 14580806587834164829 on vLLM")


def test_kv_events_that_dynamo_relays_are_decoded() -> None:
    """35 messages of a real worker on its ZMQ port: none refused, none lost, blocks of 16 tokens stored and evicted."""
    decoder = KvEventDecoder(b"s")
    changes: dict[str, int] = {}
    for line in (SAMPLES / "worker_kv_events.jsonl").read_text().splitlines():
        message = json.loads(line)
        topic, seq, payload = (base64.b64decode(frame) for frame in message["frames"])
        decoder.feed("w", int.from_bytes(seq, "big"), payload, message["at_ns"])
        assert topic == b""
    for row in decoder.drain()["block"].to_pylist():
        changes[row["change"]] = changes.get(row["change"], 0) + 1
        assert row["num_tokens"] in (16, None)
    assert set(changes) == {"stored", "evicted"}
    assert (decoder.counts.messages, decoder.counts.lost_messages, decoder.counts.unknown_events) == (35, 0, 0)


def test_signed_hashes_as_trtllms_publisher_writes_them_are_the_same_blocks() -> None:
    """Dynamo's TensorRT-LLM publisher sends vLLM's map shape with signed hashes."""
    import msgspec

    def batch(*hashes: int, removed: bool = False) -> bytes:
        event: dict[str, Any] = {"type": "BlockRemoved" if removed else "BlockStored", "block_hashes": list(hashes)}
        if not removed:
            event |= {"parent_block_hash": None, "token_ids": [1] * 4, "block_size": 4}
        return msgspec.msgpack.encode([1.0, [event], 0])

    decoder = KvEventDecoder(b"s")
    decoder.feed("w", 0, batch(-3), 10**18)
    decoder.feed("w", 1, batch((1 << 64) - 3, removed=True), 10**18)
    stored, evicted = decoder.drain()["block"].to_pylist()
    assert stored["block_hash"] == evicted["block_hash"]
    assert decoder.counts.unknown_removed == 0


def test_rules_name_the_workers_of_a_routers_log_too() -> None:
    """--map worker_id:ID=NAME: chosen, candidates and the request's worker."""
    rules = WorkerMap.parse(["worker_id:145*=a"])
    row = {
        "chosen": "14580806587834164829",
        "candidates": [{"worker": "14580806587834164829", "score": 1.0}, {"worker": "2"}],
    }
    renamed = rules.renamed(row)
    assert renamed["chosen"] == "a"
    assert renamed["candidates"] == [{"worker": "a", "score": 1.0}, {"worker": "2"}]
    assert WorkerMap().renamed(row) is row
