"""Outputs of benchmark tools become request rows: exact durations, honest instants, errors, ids that join."""

from __future__ import annotations

import gzip
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from engine_probe.errors import UnknownFormat
from engine_probe.readers.detect import open_source
from engine_probe.readers.mooncake import ANCHOR_NS
from engine_probe.readers.source import Notes, ReadOptions

DATA = Path(__file__).parents[1] / "data" / "benchmarks"
AT = 1_764_403_200_000_000_000
S = 1_000_000_000

Rows = dict[str, list[dict[str, Any]]]


def read(path: Path, options: ReadOptions | None = None) -> tuple[Rows, Notes]:
    notes = Notes()
    rows: Rows = {}
    for tables in open_source(path).chunks(options or ReadOptions(), notes):
        for kind, table in tables.items():
            rows.setdefault(kind, []).extend(table.to_pylist())
    return rows, notes


def ttft_ms(rows: list[dict[str, Any]]) -> list[float]:
    return [(row["first_token_ns"] - row["arrival_ns"]) / 1e6 for row in rows if row["first_token_ns"] is not None]


def figure(rows: Rows, name: str) -> float:
    return next(float(row["value"]) for row in rows["sample"] if row["name"] == name)


def write(tmp_path: Path, document: object, name: str = "result.json") -> Path:
    path = tmp_path / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


# --- vllm bench serve

VLLM: dict[str, Any] = {
    "date": "20251129-080010",
    "endpoint_type": "vllm",
    "backend": "vllm",
    "model_id": "m",
    "tokenizer_id": "m",
    "num_prompts": 2,
    "request_rate": "inf",
    "duration": 10.0,
    "completed": 2,
    "input_lens": [100, 60],
    "output_lens": [4, 3],
    "ttfts": [0.5, 0.25],
    "itls": [[0.125, 0.125, 0.25], [0.5]],
    "start_times": [1000.0, 1002.5],
    "errors": ["", ""],
}


def test_vllm_bench_keeps_what_the_tool_measured() -> None:
    """A real run: mean TTFT, ITL and E2E of the rows are the tool's own figures to the microsecond."""
    rows, _ = read(DATA / "vllm-0.32.0-detailed.json")
    requests = rows["request"]
    assert len(requests) == 24
    assert statistics.fmean(ttft_ms(requests)) == pytest.approx(figure(rows, "vllm-bench:mean_ttft_ms"), abs=1e-3)
    gaps = [(b - a) / 1e6 for r in requests for a, b in zip(r["token_ns"], r["token_ns"][1:], strict=False)]
    assert statistics.fmean(gaps) == pytest.approx(figure(rows, "vllm-bench:mean_itl_ms"), abs=1e-3)
    assert sum(row["prompt_tokens"] for row in requests) == figure(rows, "vllm-bench:total_input_tokens")
    assert sum(row["output_tokens"] for row in requests) == figure(rows, "vllm-bench:total_output_tokens")


def test_vllm_bench_lays_its_run_before_its_date(tmp_path: Path) -> None:
    """20251129-080010 read as UTC, 10 s long: it begins at 08:00:00; the second request 2.5 s later, and tokens follow."""
    rows, notes = read(write(tmp_path, VLLM))
    first, second = rows["request"]
    assert first["arrival_ns"] == AT
    assert second["arrival_ns"] == AT + 2_500_000_000
    assert [at - AT for at in first["token_ns"]] == [500_000_000, 625_000_000, 750_000_000, S]
    assert (first["token_counts"], second["token_counts"]) == ([1, 1, 1, 1], None)  # 3 tokens came in 2 chunks
    assert (first["last_token_ns"], first["end_ns"]) == (AT + S, None)
    assert "local time without zone" in notes.assumed[0]


def test_vllm_bench_begins_where_it_is_told_to(tmp_path: Path) -> None:
    """--start is the first request's arrival."""
    rows, _ = read(write(tmp_path, VLLM), ReadOptions(start_ns=AT + 7))
    assert [row["arrival_ns"] for row in rows["request"]] == [AT + 7, AT + 7 + 2_500_000_000]


def test_vllm_bench_ids_are_the_prefix_and_the_number(tmp_path: Path) -> None:
    """Where the metadata tell the prefix; else ids are ours, and that is said."""
    assert [row["request_id"] for row in read(write(tmp_path, VLLM | {"request_id_prefix": "x-"}))[0]["request"]] == [
        "x-0",
        "x-1",
    ]
    _, notes = read(write(tmp_path, VLLM))
    assert any("--metadata request_id_prefix=P" in text for text in notes.not_told)


def test_vllm_bench_errors_are_their_last_line(tmp_path: Path) -> None:
    """A traceback is kept as its end; a reason phrase is a status, 503 is a rejection; a failure has no output."""
    broken = VLLM | {
        "ttfts": [0.0, 0.25],
        "itls": [[], [0.5]],
        "output_lens": [0, 0],
        "errors": ["Service Unavailable", "Traceback (most recent call last):\n  File x\nTimeoutError: too slow\n"],
    }
    first, second = read(write(tmp_path, broken))[0]["request"]
    assert (first["state"], first["http_status"], first["error"]) == ("rejected", 503, "Service Unavailable")
    assert (second["state"], second["http_status"], second["error"]) == ("failed", None, "TimeoutError: too slow")
    assert (first["first_token_ns"], first["output_tokens"], first["at_ns"]) == (None, None, AT)
    assert second["token_ns"] == [AT + 2_750_000_000, AT + 3_250_000_000]  # what came before it broke off


def test_vllm_bench_without_details_says_which_flag_writes_them() -> None:
    """0.32 keeps latencies alone: E2E is known, arrivals are assumed, nothing else is made up."""
    rows, notes = read(DATA / "vllm-0.32.0-summary.json")
    row = rows["request"][0]
    assert (row["first_token_ns"], row["prompt_tokens"], dict(row["labels"])["arrival"]) == (None, None, "assumed")
    e2e = [(row["last_token_ns"] - row["arrival_ns"]) / 1e6 for row in rows["request"]]
    # The tool's E2EL percentile stands in the file only where it was asked for; its latencies are ours exactly.
    told = json.loads((DATA / "vllm-0.32.0-summary.json").read_text())["latencies"]
    assert e2e == pytest.approx([latency * 1e3 for latency in told], abs=1e-3)
    assert any("--save-detailed" in text for text in notes.not_told)


def test_vllm_bench_failures_of_a_real_run() -> None:
    """Four requests for a model that is not served."""
    rows, _ = read(DATA / "vllm-0.32.0-failed.json")
    assert {(row["state"], row["http_status"], row["error"]) for row in rows["request"]} == {
        ("failed", 404, "Not Found")
    }


def test_vllm_bench_server_times_are_phases(tmp_path: Path) -> None:
    """Lists of 0.33: queue and prefill by the server's own clock, null where it said nothing."""
    rows, _ = read(write(tmp_path, VLLM | {"server_queue_times": [0.125, None], "server_ttfts": [0.25, None]}))
    assert [(row["queue_s"], row["prefill_s"]) for row in rows["request"]] == [(0.125, 0.25), (None, None)]


def test_vllm_bench_appended_results_are_runs_of_one_file(tmp_path: Path) -> None:
    """--append-result: one object a line, each with its window."""
    text = json.dumps(VLLM) + "\n" + json.dumps(VLLM | {"label": "second", "date": "20251129-081010"})
    rows, notes = read(write(tmp_path, text))
    assert len(rows["request"]) == 4
    assert [window.name for window in notes.windows] == ["run-1", "second"]
    assert {row["mark"] for row in rows["mark"]} == {"experiment"}


def test_a_file_that_was_made_pretty_is_the_same(tmp_path: Path) -> None:
    """Indented, with a BOM, or zstd: content is content."""
    import zstandard

    plain = read(write(tmp_path, VLLM))[0]
    pretty = json.dumps(VLLM, indent=2)
    assert read(write(tmp_path, "\ufeff" + pretty))[0] == plain
    (tmp_path / "packed").write_bytes(zstandard.compress(pretty.encode()))
    assert read(tmp_path / "packed")[0] == plain
    (tmp_path / "gzipped").write_bytes(gzip.compress(pretty.encode()))
    assert read(tmp_path / "gzipped")[0] == plain


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ttfts": [0.5]}, "output_lens has 2 entries for 1 requests|has 2 entries"),
        ({"ttfts": ["x", 0.25]}, r"ttfts is not what was expected there: .*\$\[0\]"),
        ({"itls": [[-1.0, 0.1, 0.1], [0.5]]}, "request 0: .*below zero"),
        ({"input_lens": [-3, 5]}, "request 0: input_lens is -3"),
        ({"start_times": [0.0, 1e300]}, "start_times are not instants"),
        ({"duration": -1.0}, "duration is -1.0"),
    ],
)
def test_a_wrong_number_names_file_request_and_key(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """Never a row made of it."""
    with pytest.raises(UnknownFormat, match=message) as caught:
        read(write(tmp_path, VLLM | change))
    assert "result.json" in caught.value.message


def test_vllm_bench_embeddings_have_an_end_and_no_tokens(tmp_path: Path) -> None:
    """A pooling task: latencies are ends; a failed one has none."""
    kept = {key: VLLM[key] for key in ("date", "endpoint_type", "backend", "model_id", "num_prompts", "duration")}
    told = {
        "input_lens": [12, 13],
        "latencies": [0.5, 0.0],
        "errors": ["", "Bad Request"],
        "input_sequence_throughput": 1.0,
    }
    first, second = read(write(tmp_path, kept | told))[0]["request"]
    assert (first["end_ns"] - first["arrival_ns"], first["last_token_ns"], first["state"]) == (
        500_000_000,
        None,
        "finished",
    )
    assert (second["end_ns"], second["state"], second["http_status"]) == (None, "failed", 400)


# --- SGLang

SGLANG: dict[str, Any] = {
    "tag": None,
    "backend": "sglang",
    "dataset_name": "random",
    "request_rate": 2.0,
    "random_range_ratio": 0.0,
    "server_info": {"served_model_name": "llama", "version": "0.5.23"},
    "duration": 4.0,
    "completed": 2,
    "input_lens": [100, 60],
    "output_lens": [4, 0],
    "ttfts": [0.5, 0.0],
    "itls": [[0.0625, 0.0625, 0.25], []],
    "errors": ["", "Too Many Requests: slow down"],
    "cached_tokens": [64, 0],
    "cached_tokens_details": [{"device": 48, "host": 16, "storage": 0}, None],
}


def test_sglang_requests_are_laid_evenly_and_say_so(tmp_path: Path) -> None:
    """Two requests in 4 s: 2 s apart, in the order of sending, from the anchor on; the label tells that it is assumed."""
    rows, notes = read(write(tmp_path, SGLANG))
    assert [row["arrival_ns"] for row in rows["request"]] == [ANCHOR_NS, ANCHOR_NS + 2 * S]
    assert {dict(row["labels"])["arrival"] for row in rows["request"]} == {"assumed"}
    assert any("arrivals are not in the file" in text for text in notes.assumed)


def test_sglang_equal_gaps_are_one_chunk(tmp_path: Path) -> None:
    """The native backend writes a chunk of two tokens as two gaps of half: put together again, with its count."""
    first, second = read(write(tmp_path, SGLANG))[0]["request"]
    assert [at - ANCHOR_NS for at in first["token_ns"]] == [500_000_000, 625_000_000, 875_000_000]
    assert first["token_counts"] == [1, 2, 1]
    assert (first["cached_tokens"], first["computed_tokens"]) == (64, 36)
    assert (first["cached_tokens_device"], first["cached_tokens_host"], first["cached_tokens_remote"]) == (48, 16, 0)
    assert (first["engine"], first["model"]) == ("sglang", "llama")
    assert (second["state"], second["http_status"]) == ("rejected", 429)
    assert (second["cached_tokens"], second["output_tokens"], second["at_ns"]) == (None, None, second["arrival_ns"])


def test_sglang_servers_settings_are_a_worker(tmp_path: Path) -> None:
    """/server_info in the file: 6,400 tokens in pages of 64 are 100 blocks; the radix cache is on."""
    info = {
        "version": "0.5.23",
        "served_model_name": "llama",
        "page_size": 64,
        "max_total_num_tokens": 6400,
        "disable_radix_cache": False,
        "tp_size": 2,
    }
    (worker,) = read(write(tmp_path, SGLANG | {"server_info": info}))[0]["worker"]
    assert (worker["num_blocks"], worker["block_size"], worker["tp"]) == (100, 64, 2)
    assert (worker["prefix_caching"], worker["engine_version"], worker["at_ns"]) == (True, "0.5.23", ANCHOR_NS)
    assert "worker" not in read(write(tmp_path, SGLANG | {"server_info": {"x": 1}}))[0]


def test_sglang_zero_cached_tokens_behind_another_backend_are_unknown(tmp_path: Path) -> None:
    """There 0 is also what a server that reports nothing leaves."""
    rows, _ = read(
        write(tmp_path, SGLANG | {"backend": "vllm", "cached_tokens": [0, 0], "cached_tokens_details": [None, None]})
    )
    assert rows["request"][0]["cached_tokens"] is None


def test_sglang_real_run_keeps_what_the_tool_measured() -> None:
    """Every TTFT and the sum of the output lengths of a real file."""
    rows, _ = read(DATA / "sglang-0.5.23-details.jsonl")
    timed = [row for row in rows["request"] if row["first_token_ns"] is not None]
    told = json.loads((DATA / "sglang-0.5.23-details.jsonl").read_text())
    assert ttft_ms(timed) == pytest.approx([t * 1e3 for t in told["ttfts"] if t], abs=1e-3)
    assert sum(row["output_tokens"] for row in rows["request"]) == figure(rows, "sglang-bench:total_output_tokens")
    assert {row["state"] for row in rows["request"]} == {"finished"}


def test_sglang_without_details_is_its_figures_alone(tmp_path: Path) -> None:
    """Samples, no requests, and the flag that writes them; `Infinity`, which Python writes, is no number."""
    kept = {key: value for key, value in SGLANG.items() if not isinstance(value, list)} | {"mean_ttft_ms": 12.5}
    text = json.dumps(kept).replace("2.0", "Infinity", 1)
    rows, notes = read(write(tmp_path, text, "r.jsonl"))
    assert "request" not in rows
    assert figure(rows, "sglang-bench:mean_ttft_ms") == 12.5
    assert any("--output-details" in text for text in notes.not_told)


# --- AIPerf


def record(**changes: Any) -> dict[str, Any]:
    metadata = {
        "session_num": 0,
        "x_request_id": "id-1",
        "x_correlation_id": "s-1",
        "conversation_id": "c-1",
        "turn_index": 2,
        "credit_issued_ns": AT - 5_000_000,
        "request_start_ns": AT,
        "request_end_ns": AT + 900_000_000,
        "worker_id": "w",
        "record_processor_id": "r",
        "benchmark_phase": "profiling",
        "was_cancelled": False,
    }
    metrics = {
        "time_to_first_token": {"value": 250.0, "unit": "ms"},
        "inter_chunk_latency": {"value": [125.0, 250.0], "unit": "ms"},
        "request_latency": {"value": 625.0, "unit": "ms"},
        "output_sequence_length": {"value": 3, "unit": "tokens"},
        "input_sequence_length": {"value": 99, "unit": "tokens"},
        "usage_prompt_tokens": {"value": 100, "unit": "tokens"},
        "usage_prompt_cache_read_tokens": {"value": 64, "unit": "tokens"},
    }
    base: dict[str, Any] = {"metadata": metadata, "metrics": metrics, "error": None}
    base["metadata"] = metadata | changes.pop("metadata", {})
    return base | changes


def test_aiperf_record_becomes_a_row(tmp_path: Path) -> None:
    """Instants in ns, gaps in ms, the id that was sent; 5 ms in the tool's own queue are a label."""
    (row,) = read(write(tmp_path, record(), "profile_export.jsonl"))[0]["request"]
    assert (row["request_id"], row["session_id"], row["turn"]) == ("id-1", "s-1", 2)
    assert [at - AT for at in row["token_ns"]] == [250_000_000, 375_000_000, 625_000_000]
    assert (row["token_counts"], row["end_ns"]) == ([1, 1, 1], AT + 900_000_000)
    assert (row["prompt_tokens"], row["cached_tokens"], row["computed_tokens"]) == (100, 64, 36)
    assert dict(row["labels"]) == {"phase": "profiling", "client_queue_s": "0.005000"}


def test_aiperf_cancelled_and_failed_requests(tmp_path: Path) -> None:
    """A cancelled request is aborted; an error keeps its code, its type and its last words."""
    cancelled = record(metadata={"was_cancelled": True, "cancellation_time_ns": AT + S}, metrics={})
    failed = record(metrics={}, error={"code": 429, "type": "RateLimit", "message": "slow down"})
    path = write(tmp_path, json.dumps(cancelled) + "\n" + json.dumps(failed), "profile_export.jsonl")
    first, second = read(path)[0]["request"]
    assert (first["state"], first["first_token_ns"], first["output_tokens"]) == ("aborted", None, None)
    assert (second["state"], second["http_status"], second["error"]) == ("rejected", 429, "RateLimit: slow down")


def test_aiperf_real_run_keeps_what_the_tool_measured() -> None:
    """Mean TTFT and latency of the profiling phase are the summary's; warm-up is told and not in the window."""
    rows, notes = read(DATA / "aiperf-0.13.0")
    measured = [row for row in rows["request"] if dict(row["labels"])["phase"] == "profiling"]
    assert (len(measured), len(rows["request"])) == (24, 26)
    assert statistics.fmean(ttft_ms(measured)) == pytest.approx(
        figure(rows, "aiperf:time_to_first_token.avg"), abs=1e-3
    )
    latency = [(row["last_token_ns"] - row["arrival_ns"]) / 1e6 for row in measured]
    assert statistics.fmean(latency) == pytest.approx(figure(rows, "aiperf:request_latency.avg"), abs=1e-3)
    assert {row["model"] for row in rows["request"]} == {"tiny"}
    assert notes.windows[0].start_ns == min(row["arrival_ns"] for row in measured)


def test_aiperf_units_are_read_not_guessed(tmp_path: Path) -> None:
    """Seconds are seconds; an unknown unit is refused with file, line and metric."""
    slow = record()
    slow["metrics"]["time_to_first_token"] = {"value": 0.25, "unit": "sec"}
    assert read(write(tmp_path, slow, "a.jsonl"))[0]["request"][0]["first_token_ns"] == AT + 250_000_000
    slow["metrics"]["time_to_first_token"] = {"value": 0.25, "unit": "fortnights"}
    with pytest.raises(UnknownFormat, match=r"a\.jsonl, line 1: time_to_first_token has the unit 'fortnights'"):
        read(write(tmp_path, slow, "a.jsonl"))


# --- GuideLLM


def test_guidellm_real_run_keeps_what_the_tool_measured() -> None:
    """Mean TTFT of the successful requests is the report's; instants are absolute; ids are the engine's."""
    rows, notes = read(DATA / "guidellm-0.8.1.json.gz")
    requests = rows["request"]
    assert (len(requests), notes.facts["guidellm"]) == (20, "0.8.1")
    assert statistics.fmean(ttft_ms(requests)) == pytest.approx(
        figure(rows, "guidellm:time_to_first_token_ms.mean"), abs=1e-2
    )
    report = json.loads(gzip.decompress((DATA / "guidellm-0.8.1.json.gz").read_bytes()))
    told = report["benchmarks"][0]["requests"]["successful"][0]
    assert requests[0]["request_id"] == told["response_id"].removeprefix("cmpl-")
    assert requests[0]["arrival_ns"] == pytest.approx(told["info"]["timings"]["request_start"] * 1e9, abs=1000)


def guidellm(**requests: list[dict[str, Any]]) -> dict[str, Any]:
    benchmark = {"scheduler_metrics": {"measure_start_time": AT / 1e9}, "requests": requests, "metrics": {}}
    return {"metadata": {"version": 2, "guidellm_version": "0.8.1"}, "config": {}, "benchmarks": [benchmark]}


def sent(start_s: float | None, **changes: Any) -> dict[str, Any]:
    timings = {
        "request_start": start_s,
        "resolve_start": start_s,
        "first_token_iteration": None,
        "resolve_end": start_s,
    }
    info = {"request_id": "g", "status": "completed", "timings": timings | changes.pop("timings", {})}
    return {
        "request_id": "g",
        "info": info | changes.pop("info", {}),
        "input_metrics": {},
        "output_metrics": {},
    } | changes


def test_guidellm_ends_are_states(tmp_path: Path) -> None:
    """Successful, incomplete and errored; what was never sent is no row; before the measured part it is warm-up."""
    start_s = AT / 1e9
    document = guidellm(
        successful=[sent(start_s - 1, timings={"first_token_iteration": start_s - 0.5, "request_end": start_s})],
        incomplete=[sent(start_s), sent(None)],
        errored=[sent(start_s, info={"error": "Traceback\nConnectError: refused"})],
    )
    rows, _ = read(write(tmp_path, document))
    told = [(row["state"], row["error"], dict(row["labels"] or []).get("phase")) for row in rows["request"]]
    assert told == [
        ("finished", None, "warmup"),
        ("aborted", None, None),
        ("failed", "ConnectError: refused", None),
    ]
    assert rows["request"][0]["first_token_ns"] == AT - 500_000_000


def test_guidellm_of_0_3_is_read_too(tmp_path: Path) -> None:
    """No metadata, instants in the request itself, -1 for what never came."""
    request = {
        "request_id": "a",
        "prompt_tokens": 12,
        "output_tokens": 3,
        "start_time": AT / 1e9,
        "first_token_time": AT / 1e9 + 0.5,
        "last_token_time": AT / 1e9 + 1,
        "end_time": AT / 1e9 + 1.25,
    }
    late = request | {"first_token_time": -1.0, "last_token_time": None, "error": "x"}
    document = {"benchmarks": [{"args": {}, "requests": {"successful": [request], "errored": [late]}}]}
    rows, notes = read(write(tmp_path, document))
    first, second = rows["request"]
    assert (first["first_token_ns"] - AT, first["end_ns"] - AT) == (500_000_000, 1_250_000_000)
    assert (second["state"], second["first_token_ns"]) == ("failed", None)
    assert notes.facts["guidellm"] == "0.3 or older"


def test_guidellm_of_the_future_is_refused_with_what_is_known(tmp_path: Path) -> None:
    """Another report version: the versions that are read."""
    with pytest.raises(UnknownFormat, match=r"version 3; known are the versions 1 \(0\.4 to 0\.7\), 2"):
        read(write(tmp_path, guidellm() | {"metadata": {"version": 3}}))


# --- GenAI-Perf and traces


def test_genai_perf_chunks_are_those_with_content() -> None:
    """Role, usage and [DONE] are no tokens; usage tells lengths and hits; an answer that never came failed."""
    rows, notes = read(DATA / "genai-perf-0.0.16.json")
    first, second, third = rows["request"]
    assert [at - AT for at in first["token_ns"]] == [250_000_000, 270_000_000, 290_000_000]
    assert (first["token_counts"], first["cached_tokens"], first["computed_tokens"]) == ([1, 1, 1], 96, 24)
    assert (first["model"], first["session_id"], first["end_ns"] - AT) == ("llama-3-8b", "s-1", 291_500_000)
    assert ([at - AT for at in second["token_ns"]], second["output_tokens"]) == ([400_000_000, 440_000_000], None)
    assert (third["state"], third["first_token_ns"]) == ("failed", None)
    assert any("usage" in text for text in notes.not_told)


def test_azure_instants_keep_their_digits() -> None:
    """Seven digits of a second, no zone: UTC. Lengths and arrivals, nothing else."""
    rows, notes = read(DATA / "azure-llm-2023.csv")
    first = rows["request"][0]
    assert first["arrival_ns"] == 1_700_158_623_979_960_000
    assert (first["prompt_tokens"], first["output_tokens"], first["first_token_ns"]) == (4808, 10, None)
    assert any("read as UTC" in text for text in notes.assumed)


def test_burstgpt_with_and_without_sessions() -> None:
    """Seconds from the anchor; elapsed time is the end; no response tokens is a failure."""
    old, _ = read(DATA / "burstgpt-1.csv")
    new, _ = read(DATA / "burstgpt-2.csv", ReadOptions(start_ns=AT))
    assert [row["arrival_ns"] - ANCHOR_NS for row in old["request"]] == [5 * S, 45 * S, 118 * S]
    assert [row["state"] for row in old["request"]] == ["finished", "finished", "failed"]
    first = new["request"][0]
    assert (first["arrival_ns"] - AT, first["end_ns"] - AT, first["session_id"]) == (5_250_000_000, 7_750_000_000, "17")
    assert first["workload"] == "Conversation log"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17,1\n", "line 2 has 2 cells and the header 3"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2: TIMESTAMP 'yesterday' is no instant"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,many,2\n", "line 2: ContextTokens is 'many'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "a header and no request"),
        ("Timestamp,Model,Request tokens,Response tokens\n-4,m,1,2\n", "line 2: Timestamp is '-4'"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(tmp_path: Path, text: str, message: str) -> None:
    """File, line and column."""
    with pytest.raises(UnknownFormat, match=message):
        read(write(tmp_path, text, "trace.csv"))
