"""vLLM's metric names from 0.8 to 0.33 under the contract's names: presence decides, nothing is counted twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_probe.adapters import vllm, vllm_stack
from engine_probe.adapters.metric_names import SampleMapper, deltas
from engine_probe.adapters.prometheus import parse_page
from engine_probe.adapters.registry import adapter, recognise, tables_for
from engine_probe.events import CANONICAL_SAMPLES

SAMPLES = Path(__file__).parents[1] / "data" / "samples"


def mapped(text: str, worker: str | None = "w") -> dict[str, tuple[str | None, dict[str, str], float]]:
    """name -> (worker, labels, value) of a page whose names are distinct."""
    rows = SampleMapper(worker, (vllm.NAMES,)).rows(parse_page(text), 7)
    assert all(row[1] == 7 for row in rows)
    return {name: (row_worker, dict(labels), value) for row_worker, _, name, labels, value in rows}


def test_every_mapped_name_is_canonical() -> None:
    """The left side of the alias map is the contract's list."""
    assert set(vllm.CANONICAL) <= set(CANONICAL_SAMPLES)


@pytest.mark.parametrize("wire", ["vllm:num_preemptions_total", "vllm_num_preemptions_total"])
def test_both_spellings_of_the_prefix_are_known(wire: str) -> None:
    """OpenTelemetry exporters rewrite the colon; the wire name stays in labels.wire."""
    rows = mapped(f'{wire}{{engine="0",model_name="m"}} 4\n')
    assert rows == {"preemptions_total": ("w", {"engine": "0", "model_name": "m", "wire": wire}, 4.0)}


def test_speculation_is_counted_under_the_names_of_every_engine() -> None:
    """Drafted and accepted tokens; what is told by position keeps its name, so that nothing is counted twice."""
    rows = mapped(
        'vllm:spec_decode_num_draft_tokens_total{engine="0"} 40\n'
        'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 30\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 10\n'
    )
    assert (rows["draft_tokens_total"][2], rows["accepted_tokens_total"][2]) == (40.0, 30.0)
    assert "vllm:spec_decode_num_accepted_tokens_per_pos_total" in rows


def test_names_of_0_8_are_known() -> None:
    """The old gpu_ names alone on a page take the canonical names."""
    rows = mapped(
        'vllm:gpu_cache_usage_perc{model_name="m"} 0.5\n'
        'vllm:gpu_prefix_cache_queries_total{model_name="m"} 100\n'
        'vllm:gpu_prefix_cache_hits_total{model_name="m"} 40\n'
    )
    assert {name: value for name, (_, _, value) in rows.items()} == {
        "kv_usage_ratio": 0.5,
        "prefix_queries_tokens_total": 100.0,
        "prefix_hits_tokens_total": 40.0,
    }


def test_an_old_name_beside_the_new_one_keeps_its_own() -> None:
    """0.9 to 0.11 show both: a sum over the canonical name must not count the tokens twice."""
    rows = mapped(
        'vllm:gpu_prefix_cache_hits_total{engine="0"} 40\nvllm:prefix_cache_hits_total{engine="0"} 40\n'
        'vllm:kv_offload_total_bytes_total{engine="0",transfer_type="CPU_to_GPU"} 9\n'
        'vllm:kv_offload_load_bytes_total{engine="0"} 9\n'
    )
    assert rows["prefix_hits_tokens_total"][1]["wire"] == "vllm:prefix_cache_hits_total"
    assert rows["tier_read_bytes_total"][1]["wire"] == "vllm:kv_offload_load_bytes_total"
    assert set(rows) == {
        "vllm:gpu_prefix_cache_hits_total",
        "prefix_hits_tokens_total",
        "vllm:kv_offload_total_bytes_total",
        "tier_read_bytes_total",
    }


def test_deprecated_offload_names_alone_are_known() -> None:
    """0.18 to 0.23 have one counter with transfer_type for both directions."""
    page = (
        'vllm:kv_offload_total_bytes_total{engine="0",transfer_type="CPU_to_GPU"} 9\n'
        'vllm:kv_offload_total_bytes_total{engine="0",transfer_type="GPU_to_CPU"} 5\n'
    )
    rows = mapped(page)
    assert rows["tier_read_bytes_total"][2] == 9.0
    assert rows["tier_written_bytes_total"][2] == 5.0


def test_aborts_and_errors_are_failures_not_finishes() -> None:
    """vLLM's request_success counts every end; the canonical names part them."""
    page = "".join(
        f'vllm:request_success_total{{engine="0",finished_reason="{reason}"}} {count}\n'
        for reason, count in (("stop", 5), ("length", 7), ("repetition", 1), ("abort", 2), ("error", 3))
    )
    rows = SampleMapper("w", (vllm.NAMES,)).rows(parse_page(page), 1)
    finished = {
        labels["finished_reason"]: value for _, _, name, labels, value in rows if name == "requests_finished_total"
    }
    failed = {labels["finished_reason"]: value for _, _, name, labels, value in rows if name == "requests_failed_total"}
    assert finished == {"stop": 5.0, "length": 7.0, "repetition": 1.0}
    assert failed == {"abort": 2.0, "error": 3.0}


def test_only_local_compute_is_computed_tokens() -> None:
    """Of prompt_tokens_by_source one source is canonical, the others keep the wire name."""
    rows = SampleMapper("w", (vllm.NAMES,)).rows(
        parse_page(
            'vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 6\n'
            'vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 4\n'
        ),
        1,
    )
    assert [(name, value) for _, _, name, _, value in rows] == [
        ("prompt_tokens_computed_total", 6.0),
        ("vllm:prompt_tokens_by_source_total", 4.0),
    ]


def test_time_per_output_token_changed_its_meaning() -> None:
    """Up to 0.18 the name without `request_` is the gap between outputs; with it, it is the mean of a request."""
    rows = mapped(
        'vllm:time_per_output_token_seconds_sum{engine="0"} 3\n'
        'vllm:request_time_per_output_token_seconds_sum{engine="0"} 2\n'
    )
    assert rows["inter_token_latency_seconds_sum"][2] == 3.0
    assert rows["time_per_output_token_seconds_sum"][2] == 2.0


def test_histograms_keep_le_and_a_histogram_named_like_a_counter_is_one() -> None:
    """`iteration_tokens_total` is a histogram: its parts become step_tokens_bucket, _sum, _count."""
    rows = SampleMapper("w", (vllm.NAMES,)).rows(
        parse_page(
            'vllm:iteration_tokens_total_bucket{engine="0",le="8.0"} 4\n'
            'vllm:iteration_tokens_total_bucket{engine="0",le="+Inf"} 5\n'
            'vllm:iteration_tokens_total_sum{engine="0"} 44\nvllm:iteration_tokens_total_count{engine="0"} 5\n'
        ),
        1,
    )
    assert [(name, labels.get("le"), value) for _, _, name, labels, value in rows] == [
        ("step_tokens_bucket", "8.0", 4.0),
        ("step_tokens_bucket", "+Inf", 5.0),
        ("step_tokens_sum", None, 44.0),
        ("step_tokens_count", None, 5.0),
    ]


def test_created_series_are_ignored_and_look_alikes_are_not() -> None:
    """`x_created` beside the family x is a creation time; a metric that merely ends so is kept."""
    rows = mapped(
        'vllm:num_preemptions_total{engine="0"} 1\nvllm:num_preemptions_created{engine="0"} 1.79e9\n'
        'vllm:time_to_first_token_seconds_count{engine="0"} 1\n'
        'vllm:time_to_first_token_seconds_created{engine="0"} 1.79e9\n'
        'vllm:sessions_created{engine="0"} 3\n'
    )
    assert set(rows) == {"preemptions_total", "time_to_first_token_seconds_count", "vllm:sessions_created"}


def test_nan_and_infinity_say_nothing_and_are_left_out() -> None:
    """A number that cannot be stored is no zero."""
    rows = mapped('vllm:num_requests_running{engine="0"} NaN\nvllm:num_requests_waiting{engine="0"} +Inf\na 1\n')
    assert set(rows) == {"a"}


def test_each_data_parallel_rank_is_a_worker() -> None:
    """Label `engine` is the rank: rank 0 keeps the instance's name, others are named after it."""
    page = 'vllm:num_requests_running{engine="0"} 1\nvllm:num_requests_running{engine="1"} 2\n'
    rows = SampleMapper("pod", (vllm.NAMES,)).rows(parse_page(page), 1)
    assert [(row[0], row[4]) for row in rows] == [("pod", 1.0), ("pod/dp1", 2.0)]
    assert vllm.worker_name("pod", None) == vllm.worker_name("pod", 0) == "pod"


def test_a_router_that_uses_vllm_names_is_not_an_engine() -> None:
    """production-stack re-exports `vllm:` names by `server`: what it believes is router_load, never the engine's."""
    page = parse_page(
        'vllm:num_requests_running{server="http://a"} 3\nvllm:gpu_prefix_cache_hits_total{server="http://a"} 8\n'
        'vllm:current_qps{server="http://a"} 1\n'
    )
    maker = recognise(page)
    assert maker is not None
    assert maker.engine == "vllm-stack"
    assert tables_for(page)[0] is vllm_stack.NAMES
    rows = SampleMapper("router", tables_for(page)).rows(page, 1)
    assert [(row[0], row[2]) for row in rows] == [
        ("a", "router_load"),
        ("a", "vllm:gpu_prefix_cache_hits_total"),
        ("a", "vllm:current_qps"),
    ]


def test_engines_are_detected_by_what_they_show() -> None:
    """A vLLM page is one, other engines' pages are not."""
    for engine in ("vllm", "sglang", "llamacpp"):
        page = parse_page((SAMPLES / f"{engine}_metrics.synthetic.prom").read_text())
        assert adapter("vllm").recognises(page) == (engine == "vllm")


def test_the_reference_page_maps_its_known_numbers() -> None:
    """Figures read off the 0.33-like sample by hand."""
    page = parse_page((SAMPLES / "vllm_metrics.synthetic.prom").read_text())
    rows = SampleMapper("w", (vllm.NAMES,)).rows(page, 1)
    values: dict[str, float] = {}
    for _, _, name, _, value in rows:
        values[name] = values.get(name, 0.0) + value
    assert values["requests_running"] == 24.0
    assert values["requests_waiting"] == 3.0
    assert values["prefix_queries_tokens_total"] == 1_102_645.0
    assert values["prefix_hits_tokens_total"] == values["prompt_tokens_cached_total"] == 413_040.0
    assert values["prompt_tokens_computed_total"] == 689_605.0
    assert values["requests_finished_total"] == 331.0 + 58.0
    assert values["requests_failed_total"] == 11.0
    assert values["time_to_first_token_seconds_count"] == 424.0


def test_a_mapper_follows_a_page_that_changes_its_names() -> None:
    """After an upgrade in place the new name appears: the old one gives the canonical name back."""
    mapper = SampleMapper("w", (vllm.NAMES,))
    old = mapper.rows(parse_page('vllm:gpu_cache_usage_perc{engine="0"} 0.5\n'), 1)
    both = mapper.rows(
        parse_page('vllm:gpu_cache_usage_perc{engine="0"} 0.5\nvllm:kv_cache_usage_perc{engine="0"} 0.6\n'), 2
    )
    assert [row[2] for row in old] == ["kv_usage_ratio"]
    assert [row[2] for row in both] == ["vllm:gpu_cache_usage_perc", "kv_usage_ratio"]


def test_cache_config_gives_usable_blocks() -> None:
    """One block is the null block; "None" is unknown; "auto" is no type."""
    page = parse_page((SAMPLES / "vllm_metrics.synthetic.prom").read_text())
    facts = vllm.cache_config_facts(vllm.cache_config(page)["0"])
    assert (facts["block_size"], facts["num_blocks"]) == (16, 27_391)
    assert facts["prefix_caching"] is True
    assert facts["kv_dtype"] is None
    assert facts["flags"]["gpu_memory_utilization"] == "0.92"
    assert "num_gpu_blocks_override" not in facts["flags"]


def test_blocks_of_data_parallel_ranks_are_shared_out() -> None:
    """vLLM shows the sum of all ranks' blocks under each rank: 400 over 2 ranks are 200 each, 199 usable."""
    page = parse_page(
        "".join(
            f'vllm:cache_config_info{{engine="{rank}",block_size="16",num_gpu_blocks="400"}} 1\n' for rank in (0, 1)
        )
    )
    configs = vllm.cache_config(page)
    assert [vllm.cache_config_facts(labels, len(configs))["num_blocks"] for labels in configs.values()] == [199, 199]
    assert vllm.cache_config_facts({"num_gpu_blocks": "401"}, 2)["num_blocks"] is None


def test_cache_config_with_odd_values_is_unknown() -> None:
    """Labels of another release that cannot be read are null, not an error."""
    facts = vllm.cache_config_facts({"block_size": "?", "num_gpu_blocks": "None", "enable_prefix_caching": "maybe"})
    assert facts["block_size"] is facts["num_blocks"] is facts["prefix_caching"] is None


@pytest.mark.parametrize(
    ("values", "increments"),
    [([], []), ([5.0], []), ([5.0, 8.0, 8.0], [3.0, 0.0]), ([5.0, 8.0, 2.0, 3.0], [3.0, 2.0, 1.0])],
)
def test_a_counter_that_falls_was_restarted(values: list[float], increments: list[float]) -> None:
    """After a restart the counter's value is the increment: never negative, never lost."""
    assert deltas(values) == increments


@pytest.mark.parametrize(
    ("engine_id", "sent"),
    [
        ("cmpl-abc-0", "abc"),
        ("cmpl-req-0042-3", "req-0042"),
        ("chatcmpl-req-0042", "req-0042"),
        ("cmpl-abc", "abc"),
        ("cmpl--0", "-0"),
        ("abc-0", "abc-0"),
        ("chatcmpl-cmpl-x-1", "cmpl-x-1"),
        ("", ""),
    ],
)
def test_the_clients_id_is_found_in_the_engines(engine_id: str, sent: str) -> None:
    """Completions append the prompt's number, chat completions do not: a number of the client's own is kept."""
    assert vllm.normalise_request_id(engine_id) == sent


@pytest.mark.parametrize(
    "engine_id",
    [
        "chatcmpl-{}",
        "chatcmpl-{}-1f2e3d4c",
        "cmpl-{}",
        "cmpl-{}-0",
        "cmpl-{}-12",
        "cmpl-{}-0-00000000",
    ],
)
@pytest.mark.parametrize("sent", ["0af7651916cd43dd8448eb211c80319c", "0af76519-16cd-43dd-8448-eb211c80319c"])
def test_a_uuid_is_found_in_every_form_that_vllm_gives_it(engine_id: str, sent: str) -> None:
    """Route prefix, number of the prompt, and the random digits that 0.33 appends inside the engine are taken off."""
    assert vllm.normalise_request_id(engine_id.format(sent)) == sent
