"""OpenTelemetry's GenAI metrics on a page that was scraped mean what they mean when they are sent."""

from __future__ import annotations

from pathlib import Path

from engine_probe.adapters.metric_names import Row, SampleMapper
from engine_probe.adapters.prometheus import parse_page
from engine_probe.adapters.registry import tables_for
from engine_probe.readers.pages import PageFiles
from engine_probe.readers.source import Notes, ReadOptions

AT_NS = 1_790_000_000_000_000_000
PAGE = """\
# TYPE gen_ai_client_operation_duration_seconds histogram
gen_ai_client_operation_duration_seconds_bucket{gen_ai_operation_name="chat",le="0.5"} 3
gen_ai_client_operation_duration_seconds_bucket{gen_ai_operation_name="chat",le="+Inf"} 4
gen_ai_client_operation_duration_seconds_sum{gen_ai_operation_name="chat"} 2.5
gen_ai_client_operation_duration_seconds_count{gen_ai_operation_name="chat"} 4
gen_ai_client_token_usage_sum{gen_ai_token_type="input"} 900
gen_ai_client_token_usage_sum{gen_ai_token_type="output"} 70
gen_ai_server_time_to_first_token_seconds_sum{gen_ai_request_model="m"} 1.25
"""


def rows_of(text: str) -> dict[str, Row]:
    page = parse_page(text)
    return {row[2]: row for row in SampleMapper("app:9464", tables_for(page)).rows(page, AT_NS)}


def test_a_scraped_page_takes_the_names_that_otlp_takes() -> None:
    """What a server says of itself is canonical, what an application saw stands beside it, tokens by their kind."""
    found = rows_of(PAGE)
    assert found["client_request_latency_seconds_sum"][4] == 2.5
    assert found["client_request_prompt_tokens_sum"][4] == 900
    assert found["client_request_output_tokens_sum"][4] == 70
    assert found["time_to_first_token_seconds_sum"][4] == 1.25
    assert not [name for name in found if name.startswith("gen_ai_")]


def test_an_application_that_nothing_else_names_goes_by_whom_was_scraped() -> None:
    """Two of them must not become one; where labels name it, as OTLP's resource does, it is no worker."""
    assert {row[0] for row in rows_of(PAGE).values()} == {"app:9464"}
    named = rows_of('gen_ai_client_token_usage_sum{gen_ai_token_type="input",service="shop"} 1\n')
    assert named["client_request_prompt_tokens_sum"][0] is None


def test_an_engines_page_is_read_as_before() -> None:
    """GenAI series beside an engine's own take nothing from it."""
    found = rows_of('vllm:num_requests_running{engine="0"} 3\n' + PAGE)
    assert found["requests_running"][:1] == ("app:9464",)
    assert found["requests_running"][4] == 3.0


def test_a_page_is_imported_under_these_names(tmp_path: Path) -> None:
    """`kvscope import page.prom`."""
    path = tmp_path / "1795958453.prom"
    path.write_text(PAGE)
    names = set()
    for tables in PageFiles([path]).chunks(ReadOptions(worker="app"), Notes()):
        names |= set(tables["sample"].column("name").to_pylist())
    assert "client_request_latency_seconds_bucket" in names
