"""What benchmarks, traces, logs and OpenTelemetry declare is what their files fill: no name too many, none too few."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from diagnosis.observability import judgeable
from engine_probe.adapters import benchmark_provides as declared_here
from engine_probe.adapters.provides import Provides, declared, names
from engine_probe.readers.detect import FORMATS, open_source
from engine_probe.readers.mapping import shipped
from engine_probe.readers.source import Notes, ReadOptions

DATA = Path(__file__).parents[1] / "data" / "benchmarks"


def rows(path: Path, mapping: str | None = None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for tables in open_source(path, mapping=mapping).chunks(ReadOptions(), Notes()):
        for kind, table in tables.items():
            for row in table.to_pylist():
                yield kind, row


def filled(found: Iterator[tuple[str, Mapping[str, Any]]], vantage: str | None = None) -> set[str]:
    return {
        f"{kind}.{column}"
        for kind, row in found
        if vantage is None or row.get("vantage") == vantage
        for column, value in row.items()
        if value is not None and not (column == "labels" and not value)
    }


CASES: list[tuple[Provides, list[str], str]] = [
    # The recorded releases and runs had none of what is listed last.
    (
        declared_here.VLLM_BENCH,
        ["vllm-0.32.0-detailed.json", "vllm-0.32.0-summary.json", "vllm-0.32.0-failed.json"],
        "request: queue_s prefill_s end_ns engine",  # from 0.33 on; of embeddings; of other engines' backends
    ),
    (
        declared_here.SGLANG_BENCH,
        ["sglang-0.5.23-details.jsonl"],
        # no cache report, and no SGLang to ask for its settings
        "request: error model cached_tokens cached_tokens_device cached_tokens_host cached_tokens_remote computed_tokens "
        "worker: at_ns role engine engine_version model dtype kv_dtype block_size num_blocks tp pp dp flags prefix_caching",
    ),
    (declared_here.AIPERF, ["aiperf-0.13.0"], "request: error"),
    (declared_here.GUIDELLM, ["guidellm-0.8.1.json.gz"], "request: error"),
    (declared_here.GENAI_PERF, ["genai-perf-0.0.16.json"], ""),
    (declared_here.SUMMARY, ["aiperf-0.13.0/profile_export_aiperf.json"], ""),
    (declared_here.AZURE, ["azure-llm-2023.csv", "azure-llm-2024.csv"], ""),
    (declared_here.BURSTGPT, ["burstgpt-1.csv", "burstgpt-2.csv"], ""),
    (declared_here.METRICS, ["genai-metrics.json"], ""),
]


@pytest.mark.parametrize(("source", "files", "rare"), CASES, ids=[case[0].source for case in CASES])
def test_a_format_fills_what_it_declares(source: Provides, files: list[str], rare: str) -> None:
    """Exactly the declared names are filled by files of the tool; what these files lack is listed one by one."""
    seen = set().union(*(filled(rows(DATA / name)) for name in files))
    assert seen == source.names - names(rare)


def test_mooncakes_trace_fills_what_it_declares() -> None:
    """The public trace that comes along; sessions stand only in AIPerf's extended lines."""
    trace = DATA.parents[2] / "examples" / "traces" / "mooncake_conversation.jsonl.gz"
    assert filled(rows(trace)) == declared_here.MOONCAKE.names - names("request: session_id")


@pytest.mark.parametrize(
    ("source", "vantage"), [(declared_here.CLIENT_SPANS, "client"), (declared_here.SERVER_SPANS, "engine")]
)
def test_spans_fill_what_they_declare(source: Provides, vantage: str) -> None:
    """By vantage: what an application saw, and what a server says of itself."""
    assert filled(rows(DATA / "genai-spans.jsonl"), vantage) == source.names


@pytest.mark.parametrize(
    ("source", "rare"),
    [
        (declared_here.NGINX, ""),
        (declared_here.COMBINED, ""),
        (declared_here.ENVOY, ""),
        (declared_here.LITELLM, ""),
        (declared_here.SGLANG_LOG, ""),
    ],
    ids=lambda case: case.source if isinstance(case, Provides) else "",
)
def test_a_shipped_mapping_fills_what_it_declares(source: Provides, rare: str) -> None:
    """Each mapping that comes along, over lines of its format."""
    seen = filled(rows(DATA / "logs" / f"{source.source}.log", source.source))
    assert seen == source.names - names(rare)


def test_every_shipped_mapping_and_format_is_declared() -> None:
    """A new mapping or benchmark format without a declaration is noticed here."""
    here = {one.source for one in declared_here.PROVIDES}
    assert set(shipped()) <= here
    summaries = {"aiperf-summary", "genai-perf-summary"}
    assert {one.name for one in FORMATS.values() if one.is_benchmark} - summaries <= here


def test_the_declarations_are_among_all() -> None:
    """`declared()` is what docs and doctor read."""
    assert [one for one in declared() if one in declared_here.PROVIDES] == list(declared_here.PROVIDES)


def test_assumed_arrivals_judge_nothing_that_needs_concurrency() -> None:
    """SGLang's file has no instants: what a step costs at equal concurrency is not judged from it, latency is."""
    seen = judgeable(declared_here.SGLANG_BENCH.judged)
    assert seen.metrics == ("ttft", "tpot", "e2e")
    assert not {"slow_steps", "decode_bandwidth"} & set(seen.causes)
    assert {"slow_steps", "decode_bandwidth"} <= set(judgeable(declared_here.AIPERF.judged).causes)


def test_traces_and_summaries_judge_nothing() -> None:
    """Arrivals and lengths are a load, means are no requests: no change of latency is judged from either."""
    for source in (declared_here.AZURE, declared_here.BURSTGPT, declared_here.MOONCAKE, declared_here.SUMMARY):
        assert judgeable(source.judged).metrics == ()
