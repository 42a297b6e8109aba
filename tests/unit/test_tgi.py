"""TGI and Triton: names, logs, headers, facts."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_probe.adapters import tgi, triton, trtllm
from engine_probe.adapters.adapter import Discovery
from engine_probe.adapters.metric_names import MetricNames, SampleMapper
from engine_probe.adapters.prometheus import parse_page
from engine_probe.adapters.registry import adapter
from engine_probe.adapters.tgi_log import TgiLog, seconds
from engine_probe.schema import table_from_rows
from engine_probe.wire.validate import validate

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "tests" / "data" / "samples"
AT_NS = 1_790_000_000_000_000_000


def mapped(text: str, names: MetricNames) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for _, _, name, labels, value in SampleMapper("w", (names,)).rows(parse_page(text), AT_NS):
        if "le" not in labels:
            sums[name] += value
    return dict(sums)


def test_tgi_counters_without_suffix() -> None:
    """Ten finished; two overloaded and one invalid failed; token sums come from the histograms of lengths."""
    values = mapped((SAMPLES / "tgi_metrics.synthetic.prom").read_text(), tgi.NAMES)
    assert (values["requests_running"], values["requests_waiting"]) == (2.0, 4.0)
    assert (values["requests_finished_total"], values["requests_failed_total"]) == (10.0, 3.0)
    assert (values["prompt_tokens_total"], values["output_tokens_total"]) == (2000.0, 450.0)
    assert (values["queue_time_seconds_sum"], values["queue_time_seconds_count"]) == (1.5, 10.0)
    assert values["request_prompt_tokens_sum"] == 2000.0
    assert "kv_usage_ratio" not in values


def test_trtllm_names() -> None:
    """The page's own numbers under the contract's names; a timeout is a failure; blocks keep their names."""
    values = mapped((SAMPLES / "trtllm_metrics.synthetic.prom").read_text(), trtllm.NAMES)
    assert (values["requests_running"], values["requests_waiting"], values["kv_usage_ratio"]) == (3.0, 2.0, 0.25)
    assert (values["requests_finished_total"], values["requests_failed_total"]) == (3.0, 1.0)
    assert (values["prefix_queries_tokens_total"], values["prefix_hits_tokens_total"]) == (1000.0, 640.0)
    assert (values["tier_read_bytes_total"], values["tier_written_bytes_total"]) == (4194304.0, 8388608.0)
    assert values["trtllm_kv_cache_reused_blocks_total"] == 20.0
    assert values["queue_time_seconds_sum"] == 0.4


def test_triton_names_and_geometry() -> None:
    """Gauges by label; Triton's counters of each model keep their names. Two models: no one geometry."""
    text = (SAMPLES / "triton_trtllm_metrics.synthetic.prom").read_text()
    values = mapped(text, triton.NAMES)
    assert (values["requests_running"], values["requests_waiting"], values["kv_usage_ratio"]) == (3.0, 2.0, 0.3125)
    assert values["nv_inference_request_success"] == 160.0
    one = adapter("triton-trtllm")
    page = parse_page(text)
    facts = one.facts(page, Discovery(models=["tensorrt_llm"]))["0"]
    assert (facts["block_size"], facts["num_blocks"], facts["model"]) == (64, 320, "tensorrt_llm")
    both = one.facts(page, Discovery(models=["a", "b"]))["0"]
    assert "block_size" not in both


def test_tgi_facts_come_from_info() -> None:
    """Version, type without torch's name, the token budget; nothing else of the answer."""
    info = {
        "version": "3.3.6",
        "model_id": "org/m",
        "model_dtype": "torch.bfloat16",
        "max_total_tokens": 4096,
        "sha": "s",
    }
    info |= {"max_concurrent_requests": 128, "docker_label": "secret"}
    seen = Discovery("3.3.6", ["org/m"], 4096, details=info)
    facts = adapter("tgi").facts(parse_page("tgi_batch_max_total_tokens 98304\n"), seen)["0"]
    assert (facts["engine_version"], facts["model"], facts["dtype"], facts["max_context"]) == (
        "3.3.6",
        "org/m",
        "bfloat16",
        4096,
    )
    assert facts["flags"] == {
        "max_concurrent_requests": "128",
        "max_total_tokens": "4096",
        "max_batch_total_tokens": "98304",
    }


SPAN = {
    "name": "generate_stream",
    "parameters": 'GenerateParameters { stop: ["queue_time=\\"9s\\""] }',
    "total_time": "1.5s",
    "validation_time": "250ms",
    "queue_time": "250ms",
    "inference_time": "1s",
    "time_per_token": "50ms",
    "seed": "None",
}


def json_line(**span: str) -> str:
    told = {"timestamp": "2026-11-29T12:44:31.500000Z", "level": "INFO", "message": "Success", "span": SPAN | span}
    return json.dumps(told)


def text_line(**span: str) -> str:
    fields = " ".join(f'{key}="{value}"' for key, value in (SPAN | span).items() if key not in ("name", "parameters"))
    head = '2026-11-29T12:44:31.500000Z  INFO generate_stream{parameters=GenerateParameters { stop: ["queue_time=\\"9s\\""] } '
    return head + fields + "}: text_generation_router::server: router/src/server.rs:500: Success"


END_NS = 1_795_956_271_500_000_000


@pytest.mark.parametrize("form", [json_line, text_line, lambda: f"\x1b[2m{text_line()}\x1b[0m"])
def test_a_success_is_a_row(form: Any) -> None:
    """0.25 s of validation, 0.25 s queued, 1 s of inference at 50 ms a token: 20 tokens."""
    (row,) = TgiLog("w").feed(form())["request"]
    validate("request", table_from_rows("request", [row]), END_NS)
    assert (row["end_ns"], row["arrival_ns"]) == (END_NS, END_NS - 1_500_000_000)
    assert row["first_scheduled_ns"] == END_NS - 1_000_000_000
    assert (row["frontend_s"], row["queue_s"], row["output_tokens"]) == (0.25, 0.25, 20)
    assert "first_token_ns" not in row
    assert row["request_id"] == f"w@{END_NS}"


def test_two_requests_of_one_instant_are_two() -> None:
    """Their ids differ, and the third of another instant counts anew."""
    log = TgiLog("w")
    ids = [log.feed(json_line())["request"][0]["request_id"] for _ in range(2)]
    ids.append(log.feed(json_line().replace("31.500000", "32.500000"))["request"][0]["request_id"])
    assert ids == [f"w@{END_NS}", f"w@{END_NS}-1", f"w@{END_NS + 1_000_000_000}"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.5s", 1.5),
        ("12.25ms", 0.01225),
        ("45µs", 4.5e-05),
        ("45us", 4.5e-05),
        ("7ns", 7e-09),
        ("1m", None),
        ("", None),
        (3, None),
    ],
)
def test_rusts_durations(text: Any, value: float | None) -> None:
    """As `{:?}` prints a Duration."""
    assert seconds(text) == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        '{"message": "Success"}',
        '{"message": "Success", "span": {}}',
        "INFO Success",
        json_line(total_time="soon"),
    ],
)
def test_lines_that_tell_no_request(line: str) -> None:
    """Half lines, other messages, times that are none."""
    assert TgiLog("w").feed(line) == {}


@given(st.text(max_size=200), st.integers(0, 200))
def test_no_line_raises(noise: str, cut: int) -> None:
    """Whatever is cut off or written over."""
    for line in (json_line(), text_line()):
        for damaged in (noise, line[:cut] + noise, line[:cut] + noise + line[cut:]):
            TgiLog("w").feed(damaged)


def test_headers_of_an_answer() -> None:
    """Whole milliseconds; what is no number is unknown."""
    headers = {"x-validation-time": "2", "x-queue-time": "150", "x-inference-time": "900", "x-prompt-tokens": "12"}
    headers |= {"x-generated-tokens": "30", "x-total-time": "1052"}
    assert tgi.timing_columns(headers) == {
        "frontend_s": 0.002,
        "queue_s": 0.15,
        "prompt_tokens": 12,
        "output_tokens": 30,
    }
    assert tgi.timing_columns({"x-queue-time": "soon", "x-prompt-tokens": "-1"}) == {}


@pytest.mark.parametrize(
    ("guide", "table"),
    [
        ("tgi", tgi.CANONICAL),
        ("tgi", tgi.HISTOGRAMS),
        ("trtllm", trtllm.CANONICAL),
        ("trtllm", trtllm.HISTOGRAMS),
        ("trtllm", triton.CANONICAL),
    ],
)
def test_the_guide_names_every_mapped_series(guide: str, table: dict[str, tuple[str, ...]]) -> None:
    """Each contract name with each wire name it stands for."""
    text = (ROOT / "docs" / "engines" / f"{guide}.md").read_text().replace("\\|", "|")
    for canonical, wires in table.items():
        assert f"| `{canonical}` | " + ", ".join(f"`{wire}`" for wire in wires) + " |" in text
