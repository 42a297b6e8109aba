"""SGLang's page: names by release, ranks that repeat one another, geometry, settings, KV-event endpoints."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from engine_probe.adapters.adapter import Discovery
from engine_probe.adapters.metric_names import SampleMapper
from engine_probe.adapters.prometheus import Page, PageParser, parse_page
from engine_probe.adapters.registry import adapter, recognise
from engine_probe.adapters.sglang import (
    ALSO,
    CANONICAL,
    HISTOGRAMS,
    NAMES,
    binds,
    info_facts,
    kv_sources,
    page_geometry,
)

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "tests" / "data" / "samples" / "sglang_metrics.synthetic.prom"
LABELS = 'engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"'
AT_NS = 1_790_000_000_000_000_000


def mapped(text: str, worker: str = "w") -> dict[tuple[str | None, str], float]:
    """(worker, name) -> sum of the values."""
    sums: dict[tuple[str | None, str], float] = defaultdict(float)
    for who, _, name, _, value in SampleMapper(worker, (NAMES,)).rows(parse_page(text), AT_NS):
        sums[who, name] += value
    return dict(sums)


def test_the_sample_page_is_sglangs_and_gives_its_numbers() -> None:
    """The hit rate is that of the page: hits of all tiers over hits and computed tokens."""
    text = SAMPLE.read_text()
    found = recognise(parse_page(text))
    assert found is not None
    assert found.engine == "sglang"
    values = mapped(text)
    assert values["w", "requests_running"] == 24.0
    assert values["w", "requests_waiting"] == 3.0
    assert values["w", "kv_usage_ratio"] == 0.061347
    queries, hits = values["w", "prefix_queries_tokens_total"], values["w", "prefix_hits_tokens_total"]
    assert queries == hits + values["w", "prompt_tokens_computed_total"]
    assert values["w", "time_to_first_token_seconds_count"] == 424.0


def test_lookups_are_hits_and_computed_tokens_together() -> None:
    """30 + 5 + 2 tokens found, 63 computed: 100 were looked up. The wire's name and mode stay in the labels."""
    page = "".join(
        f'sglang:prefill_effective_tokens_total{{{LABELS},mode="{mode}"}} {value}\n'
        for mode, value in (("device_hit", 30), ("host_hit", 5), ("storage_hit", 2), ("input", 63))
    )
    values = mapped(page)
    assert values["w", "prefix_hits_tokens_total"] == 37.0
    assert values["w", "prompt_tokens_computed_total"] == 63.0
    assert values["w", "prefix_queries_tokens_total"] == 100.0
    rows = SampleMapper("w", (NAMES,)).rows(parse_page(page), AT_NS)
    assert {row[3]["wire"] for row in rows} == {"sglang:prefill_effective_tokens_total"}
    assert {row[3]["mode"] for row in rows if row[2] == "prefix_hits_tokens_total"} == {
        "device_hit",
        "host_hit",
        "storage_hit",
    }


def test_old_releases_count_at_the_end_of_requests() -> None:
    """0.4.10 and 0.5.10 have no effective tokens: prompt and cached tokens of finished requests stand in."""
    page = (
        'sglang:prompt_tokens_total{model_name="m"} 100\nsglang:cached_tokens_total{model_name="m"} 40\n'
        'sglang:total_retracted_reqs{model_name="m"} 3\nsglang:num_queue_reqs{model_name="m"} 2\n'
    )
    values = mapped(page)
    assert values["w", "prefix_queries_tokens_total"] == 100.0
    assert values["w", "prefix_hits_tokens_total"] == 40.0
    assert values["w", "prompt_tokens_cached_total"] == 40.0
    assert values["w", "preemptions_total"] == 3.0
    assert values["w", "requests_waiting"] == 2.0


def test_a_series_is_not_counted_twice_where_both_sources_stand() -> None:
    """With effective tokens on the page the tokens of finished requests are no lookups."""
    page = (
        f'sglang:prefill_effective_tokens_total{{{LABELS},mode="input"}} 60\n'
        f'sglang:prefill_effective_tokens_total{{{LABELS},mode="device_hit"}} 40\n'
        'sglang:prompt_tokens_total{model_name="m",is_streaming="true"} 90\n'
        'sglang:cached_tokens_total{model_name="m",cache_source="device"} 35\n'
    )
    values = mapped(page)
    assert values["w", "prefix_queries_tokens_total"] == 100.0
    assert values["w", "prefix_hits_tokens_total"] == 40.0
    assert values["w", "prompt_tokens_total"] == 90.0


def test_streaming_and_other_requests_are_one_sum() -> None:
    """`is_streaming` splits the request counters since 0.5.10."""
    page = "".join(
        f'sglang:num_requests_total{{model_name="m",is_streaming="{kind}"}} {value}\n'
        for kind, value in (("true", 7), ("false", 2))
    )
    assert mapped(page)["w", "requests_finished_total"] == 9.0


def test_a_tensor_parallel_rank_repeats_the_lowest_one() -> None:
    """Token counts and gauges are taken once, whatever the order of the lines; bytes are shards and are summed."""
    lines = []
    for rank in (1, 0, 10):
        labels = LABELS.replace('tp_rank="0"', f'tp_rank="{rank}"')
        lines.append(f"sglang:num_running_reqs{{{labels}}} 5")
        lines.append(f'sglang:evicted_tokens_total{{cache_type="R",dp_rank="0",pp_rank="0",tp_rank="{rank}"}} 70')
        lines.append(f'sglang:load_back_bytes_total{{pp_rank="0",tp_rank="{rank}"}} 1000')
    values = mapped("\n".join(lines) + "\n")
    assert values["w", "requests_running"] == 5.0
    assert values["w", "sglang:evicted_tokens_total"] == 70.0
    assert values["w", "tier_read_bytes_total"] == 3000.0


def test_attention_dp_ranks_are_workers_although_their_tp_ranks_differ() -> None:
    """With --enable-dp-attention each data-parallel rank is another tensor-parallel rank: none repeats another."""
    page = "".join(
        f'sglang:num_running_reqs{{model_name="m",dp_rank="{rank}",tp_rank="{rank}"}} {rank + 1}\n' for rank in range(3)
    )
    values = mapped(page)
    assert [values[name, "requests_running"] for name in ("w", "w/dp1", "w/dp2")] == [1.0, 2.0, 3.0]


def test_a_lower_rank_that_comes_later_takes_over() -> None:
    """The first scrape shows rank 1 alone, the next both: nothing is counted twice."""
    mapper = SampleMapper("w", (NAMES,))
    one = 'sglang:num_running_reqs{model_name="m",tp_rank="1"} 5\n'
    two = one + 'sglang:num_running_reqs{model_name="m",tp_rank="0"} 5\n'
    parser = PageParser()
    assert len(mapper.rows(parser.parse(one), AT_NS)) == 1
    rows = mapper.rows(parser.parse(two), AT_NS)
    assert [row[3]["tp_rank"] for row in rows] == ["0"]


def test_the_parts_of_a_priority_are_not_added_to_the_total() -> None:
    """With priority scheduling the queue's total stands under the empty priority."""
    page = "".join(
        f'sglang:num_queue_reqs{{model_name="m",priority="{priority}"}} {value}\n'
        for priority, value in (("", 9), ("1", 4), ("5", 5))
    )
    values = mapped(page)
    assert values["w", "requests_waiting"] == 9.0
    assert values["w", "sglang:num_queue_reqs"] == 9.0


def test_an_exporters_spelling_is_read_too() -> None:
    """OpenTelemetry exporters and /v1/loads write `sglang_`; the name kept is SGLang's own."""
    values = mapped('sglang_num_running_reqs{dp_rank="0"} 4\nsglang_gen_throughput{dp_rank="0"} 12\n')
    assert values == {("w", "requests_running"): 4.0, ("w", "sglang:gen_throughput"): 12.0}


@pytest.mark.parametrize(
    ("page", "geometry"),
    [
        (
            'sglang:page_size{tp_rank="0"} 64\nsglang:num_pages{tp_rank="0"} 100\nsglang:context_len{} 4096\n'
            "sglang:max_total_num_tokens{} 6400\n",
            {"block_size": 64, "num_blocks": 100, "max_context": 4096},
        ),
        ('sglang:cache_config_info{page_size="1",num_pages="5000"} 1\n', {"block_size": 1, "num_blocks": 5000}),
        # 512 bytes a token; the pool has one page more than is usable: 65,537 * 512 bytes = 0.0312504768... GiB
        (
            "sglang:page_size{} 1\nsglang:max_total_num_tokens{} 65536\n"
            "sglang:kv_cache_memory_usage_gb{} 0.0312504768371582\n",
            {"block_size": 1, "num_blocks": 65536, "kv_bytes_per_block": 512},
        ),
        # another pool shares the memory: bytes of a page are unknown
        (
            "sglang:page_size{} 64\nsglang:max_total_num_tokens{} 6400\nsglang:kv_cache_memory_usage_gb{} 0.123456\n",
            {"block_size": 64, "num_blocks": 100},
        ),
    ],
)
def test_geometry_by_release(page: str, geometry: dict[str, Any]) -> None:
    """Gauges since 0.5.11, an info series in 0.5.10."""
    assert page_geometry(parse_page(page)) == {"0": geometry}


def test_settings_become_facts_without_secrets() -> None:
    """`auto` is unknown; a path or a key never leaves the answer."""
    info = {"tp_size": 2, "dp_size": 1, "dtype": "auto", "kv_cache_dtype": "fp8_e5m2", "page_size": 64}
    info |= {
        "disaggregation_mode": "prefill",
        "api_key": "secret",
        "model_path": "/secret/model",
        "max_running_requests": 16,
    }
    facts = info_facts(info)
    assert facts == {
        "role": "prefill",
        "kv_dtype": "fp8_e5m2",
        "tp": 2,
        "dp": 1,
        "block_size": 64,
        "flags": {
            "disaggregation_mode": "prefill",
            "dp_size": "1",
            "dtype": "auto",
            "kv_cache_dtype": "fp8_e5m2",
            "max_running_requests": "16",
            "page_size": "64",
            "tp_size": "2",
        },
    }


class Answers:
    """An engine's JSON endpoints."""

    url = "http://engine:30000"

    def __init__(self, **paths: Any) -> None:
        self._paths = {"/" + name.replace("__", "/"): value for name, value in paths.items()}

    def metrics(self, path: str = "/metrics", *, hint: str = "") -> tuple[bytes, str | None]:
        raise AssertionError(path)

    def json(self, path: str) -> Any:
        return self._paths.get(path)


def page(text: str = "sglang:num_running_reqs 1\n") -> Page:
    return parse_page(text)


def test_discovery_reads_server_info_and_models() -> None:
    """Version, model, context, ranks, caching; 0.4.10 answers under the old name."""
    info = {"version": "0.5.23", "dp_size": 2, "disable_radix_cache": False, "context_length": 4096, "tp_size": 1}
    models = {"data": [{"id": "tiny", "parent": None, "max_model_len": 2048}]}
    for name in ("server_info", "get_server_info"):
        seen = adapter("sglang").discover(Answers(**{name: info, "v1__models": models}), page())
        assert (seen.version, seen.models, seen.max_context, seen.ranks) == ("0.5.23", ["tiny"], 4096, ["0", "1"])
        assert seen.prefix_caching is True
        assert seen.kv_sources == {}
        facts = adapter("sglang").facts(page(), seen)
        assert facts["1"]["engine_version"] == "0.5.23"
        assert facts["1"]["dp"] == 2


def test_an_engine_that_tells_nothing_is_followed_all_the_same() -> None:
    """No /server_info, no models: the page alone; KV events are unknown, not off."""
    seen = adapter("sglang").discover(Answers(), page())
    assert (seen.version, seen.models, seen.kv_sources) == (None, [], None)
    facts = adapter("sglang").facts(page("sglang:page_size{} 32\nsglang:num_pages{} 10\n"), seen)
    assert (facts["0"]["block_size"], facts["0"]["num_blocks"], facts["0"]["engine"]) == (32, 10, "sglang")


def test_capacity_of_server_info_stands_in_for_the_page() -> None:
    """0.4.10 tells max_total_num_tokens there, in tokens: 6400 tokens in pages of 64 are 100."""
    seen = Discovery(details={"page_size": 64, "max_total_num_tokens": 6400})
    assert adapter("sglang").facts(page(), seen)["0"]["num_blocks"] == 100


@pytest.mark.parametrize(
    ("info", "sources"),
    [
        ({"dp_size": 1}, {}),
        ({"kv_events_config": '{"publisher": "null"}'}, {}),
        ({"kv_events_config": "not json"}, {}),
        (
            {
                "kv_events": {
                    "publisher": "zmq",
                    "endpoint_host": "*",
                    "endpoint_port_base": 5557,
                    "topic": "t",
                    "dp_size": 2,
                }
            },
            {
                "0": {"endpoint": "tcp://*:5557", "replay_endpoint": None, "topic": "t", "bind": True},
                "1": {"endpoint": "tcp://*:5558", "replay_endpoint": None, "topic": "t", "bind": True},
            },
        ),
        (
            {
                "kv_events": {
                    "endpoint_host": "127.0.0.1",
                    "endpoint_port_base": 15710,
                    "replay_endpoint_port_base": 15720,
                },
                "kv_events_config": '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:15710", "bind": true}',
            },
            {
                "0": {
                    "endpoint": "tcp://127.0.0.1:15710",
                    "replay_endpoint": "tcp://*:15720",
                    "topic": "",
                    "bind": True,
                }
            },
        ),
        (
            {"dp_size": 2, "kv_events_config": '{"publisher": "zmq", "endpoint": "tcp://10.0.0.9:5557"}'},
            {
                "0": {"endpoint": "tcp://10.0.0.9:5557", "replay_endpoint": None, "topic": "", "bind": False},
                "1": {"endpoint": "tcp://10.0.0.9:5558", "replay_endpoint": None, "topic": "", "bind": False},
            },
        ),
    ],
)
def test_kv_endpoints_by_rank(info: dict[str, Any], sources: dict[str, Any]) -> None:
    """From `kv_events` where the release has it, else from the setting; rank r has port + r; `bind` goes before the rule."""
    assert kv_sources(info) == sources


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://*:1", True),
        ("tcp://0.0.0.0:1", True),
        ("tcp://[::]:1", True),
        ("ipc:///x", True),
        ("tcp://10.0.0.1:1", False),
    ],
)
def test_sglang_binds_wildcards(endpoint: str, expected: bool) -> None:
    """Also 0.0.0.0, which vLLM connects to."""
    assert binds(endpoint) is expected


def test_the_guide_names_every_mapped_series() -> None:
    """docs/engines/sglang.md lists each contract name with each wire name it stands for."""
    guide = (ROOT / "docs" / "engines" / "sglang.md").read_text().replace("\\|", "|")
    for table in (CANONICAL, HISTOGRAMS):
        for canonical, wires in table.items():
            assert f"| `{canonical}` | " + ", ".join(f"`{wire}`" for wire in wires) + " |" in guide
    for canonical in ALSO:
        assert f"`{canonical}`" in guide
