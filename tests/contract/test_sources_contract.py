"""What caches, routers, hosts and metrics servers declare is what their rows fill; each page has exactly one maker.

Dynamo, Mooncake and node_exporter: pages and logs of the real ones; LMCache: made by its own code; the others are samples
written from their source (`tests/data/samples/README.md`). What a sample does not hold is named here, one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from engine_probe.adapters import dynamo, llm_d, lmcache
from engine_probe.adapters.adapter import Discovery
from engine_probe.adapters.hosts import advanced
from engine_probe.adapters.lmcache_log import LmcacheLog
from engine_probe.adapters.metric_names import SampleMapper
from engine_probe.adapters.prometheus import parse_page
from engine_probe.adapters.registry import adapter, adapters, recognise
from tests.contract.test_engines_contract import AT_NS, SAMPLES, Client, Told, asked, facts, holds, logged

PAGES = {
    "cadvisor_metrics.synthetic.prom": "cadvisor",
    "dcgm_metrics.synthetic.prom": "dcgm",
    "dynamo-1.6.1/frontend.prom": "dynamo",
    "dynamo-1.6.1/worker.prom": "dynamo",
    "llamacpp_metrics.synthetic.prom": "llamacpp",
    "llmd_epp_metrics.synthetic.prom": "llm-d",
    "lmcache-0.5.6/in_process.prom": "lmcache",
    "lmcache-0.5.6/multiprocess.prom": "lmcache",
    "mooncake-0.3.13/master.prom": "mooncake",
    "node_exporter-1.5.0.prom": "node",
    "nvidia_smi_metrics.synthetic.prom": "nvidia-smi",
    "sglang_metrics.synthetic.prom": "sglang",
    "sglang_router.prom": "sglang-router",
    "tgi_metrics.synthetic.prom": "tgi",
    "triton_trtllm_metrics.synthetic.prom": "triton-trtllm",
    "trtllm_metrics.synthetic.prom": "trtllm",
    "vllm_metrics.synthetic.prom": "vllm",
    "vllm_router.prom": "vllm-router",
}
INNER = {"dynamo-1.6.1/worker.prom": {"dynamo", "vllm"}}
"""Pages that two know: a worker of Dynamo repeats its engine's page. The registry's order decides."""


def text_of(name: str) -> str:
    return (SAMPLES / name).read_text()


def sampled(engine: str, text: str, worker: str | None = "w") -> Told:
    """`sample` rows of two scrapes of a page: shares of time need two."""
    mapper, page = SampleMapper(worker, adapter(engine).tables), parse_page(text)
    rows = mapper.rows(page, AT_NS) + mapper.rows(advanced(page), AT_NS + 1_000_000_000)
    return [
        ("sample", {"worker": named, "at_ns": at_ns, "name": name, "labels": labels, "value": value})
        for named, at_ns, name, labels, value in rows
    ]


def test_every_page_of_the_samples_has_a_maker() -> None:
    """No sample is forgotten in this table."""
    found = {str(path.relative_to(SAMPLES)) for path in SAMPLES.rglob("*.prom")}
    assert found == set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_exactly_one_maker(name: str) -> None:
    """Who made it is told, and nobody else claims it, but for the engine inside a worker of Dynamo."""
    page = parse_page(text_of(name))
    maker = recognise(page)
    assert maker is not None
    assert maker.engine == PAGES[name]
    assert {one.engine for one in adapters() if one.recognises(page)} == INNER.get(name, {maker.engine})


@pytest.mark.parametrize("text", ["", "# nothing\n", "up 1\n", "go_goroutines 5\nprocess_start_time_seconds 1\n"])
def test_nobodys_page_has_no_maker(text: str) -> None:
    """A page of a language's runtime alone is nobody's."""
    assert recognise(parse_page(text)) is None


@pytest.mark.parametrize(
    ("engine", "pages"),
    [
        ("dcgm", ["dcgm_metrics.synthetic.prom"]),
        ("node", ["node_exporter-1.5.0.prom"]),
        ("cadvisor", ["cadvisor_metrics.synthetic.prom"]),
        ("nvidia-smi", ["nvidia_smi_metrics.synthetic.prom"]),
        ("lmcache", ["lmcache-0.5.6/in_process.prom", "lmcache-0.5.6/multiprocess.prom"]),
        ("mooncake", ["mooncake-0.3.13/master.prom"]),
    ],
)
def test_pages_fill_what_is_declared(engine: str, pages: list[str]) -> None:
    """Exactly the declared numbers."""
    told = [row for name in pages for row in sampled(engine, text_of(name))]
    rare = {"node": "sample: cpu_thermal_throttles_total network_speed_bytes"}.get(
        engine, ""
    )  # recorded in a virtual machine
    holds(adapter(engine).provides[0], told, rare, ("sample", "worker"))


def test_dynamos_pages() -> None:
    """A frontend's beliefs, and what it says of itself. A mock worker has no KV gauge of Dynamo's own."""
    front = text_of("dynamo-1.6.1/frontend.prom")
    told = sampled("dynamo", front) + asked("dynamo", front, {"v1__models": {"data": [{"id": "tiny"}]}})
    holds(dynamo.METRICS, told, "sample: kv_usage_ratio", ("sample", "worker"))


def test_dynamos_log_and_trace() -> None:
    """The log of a real frontend, and its request trace, some of whose requests carried a session's header."""
    log = text_of("dynamo-1.6.1/frontend.log.jsonl").splitlines()
    holds(dynamo.LOG, [one for one in logged("dynamo", log) if one[0] == "route"])
    holds(dynamo.TRACE, logged("dynamo", text_of("dynamo-1.6.1/trace.jsonl").splitlines()))


def test_llm_ds_page_and_log() -> None:
    """The picker's own names and its role; its decisions."""
    text = text_of("llmd_epp_metrics.synthetic.prom")
    seen = adapter("llm-d").discover(Client({}), parse_page(text))
    holds(llm_d.METRICS, sampled("llm-d", text) + facts("llm-d", text, seen))
    log = text_of("llmd_epp_log.synthetic.jsonl").splitlines()
    holds(llm_d.LOG, logged("llm-d", log))


def test_lmcaches_log() -> None:
    """Loads and stores, one that fell short."""
    head = "[2026-11-29 13:20:53,500] LMCache INFO: [req_id=r]"
    lines = [
        f"{head} Retrieved 512 out of 1024 required tokens (from 2048 total tokens). size: 0.1250 gb, cost 12.5 ms",
        f"{head} Stored 256 out of total 256 tokens. size: 0.0625 gb, cost 3.0 ms",
    ]
    now_ns = int(datetime(2026, 11, 29, 13, 20, 54, tzinfo=UTC).timestamp()) * 1_000_000_000
    reader = LmcacheLog("w", clock=lambda: now_ns)
    told: Told = [("transfer", row) for line in lines for row in reader.feed(line)["transfer"]]
    holds(lmcache.PROVIDES[1], told)


@pytest.mark.parametrize("engine", ["dcgm", "node", "cadvisor", "nvidia-smi", "lmcache", "mooncake"])
def test_what_serves_nothing_tells_of_no_worker(engine: str) -> None:
    """No `worker` row comes of an exporter or a cache: it would be one more engine."""
    name = next(name for name, maker in PAGES.items() if maker == engine)
    page = parse_page(text_of(name))
    assert adapter(engine).facts(page, Discovery(series=frozenset(page.names()))) == {}
    declared_kinds: Iterable[str] = {one.split(".")[0] for source in adapter(engine).provides for one in source.names}
    assert "worker" not in declared_kinds


def test_a_sample_without_a_name_needs_a_rule() -> None:
    """Numbers of a host that nobody was named for have no worker, rather than the exporter's address."""
    rows: list[Mapping[str, Any]] = [row for _, row in sampled("node", text_of("node_exporter-1.5.0.prom"), None)]
    assert {row["worker"] for row in rows} == {None}
