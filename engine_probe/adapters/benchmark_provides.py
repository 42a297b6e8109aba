"""What load generators, public traces, logs and OpenTelemetry show, whatever engine serves: `import` and `/v1/*` read them.

The engines of these declarations are families of sources: `benchmarks`, `traces`, `logs`, `opentelemetry`. None of them
sees a scheduler or a KV cache, and only those with a request id of the engine's join its own rows.
"""

from __future__ import annotations

from typing import Final

from engine_probe.adapters.provides import Provides, names

_ASSUMED: Final = "assumed: the file has no instants; requests are laid evenly over the run in the order of sending"
_ROW: Final = "request: at_ns request_id vantage state labels arrival_ns"
_STREAM: Final = (
    f"{_ROW} first_token_ns last_token_ns token_ns token_counts prompt_tokens output_tokens http_status error"
)
_WINDOW: Final = " mark: at_ns mark subject text attrs"
_FIGURES: Final = " sample: at_ns name labels value"

VLLM_BENCH: Final = Provides(
    engine="benchmarks",
    source="vllm-bench",
    needs="`vllm bench serve --save-result --save-detailed --request-id-prefix P --metadata request_id_prefix=P`",
    names=names(_STREAM + " end_ns engine model queue_s prefill_s" + _WINDOW + _FIGURES),
    caveats={
        "request.request_id": "P0, P1, ... where the prefix was told in the metadata, and then it joins the engine's rows",
        "request.arrival_ns": "distances are exact; the run is laid to end at its `date`, a local time read as UTC, or to "
        "begin at `--start`. Without `--save-detailed` arrivals are assumed",
        "request.token_counts": "where there are as many chunks as tokens; else a chunk may hold several",
        "request.end_ns": "of embeddings; the end of a stream is not told",
        "request.engine": "by the backend, where that is one of another engine",
        "request.queue_s": "from 0.33 on, with the server's `--enable-per-request-metrics`; prefill_s likewise",
    },
)
SGLANG_BENCH: Final = Provides(
    engine="benchmarks",
    source="sglang-bench",
    needs="`python -m sglang.bench_serving --output-file FILE --output-details`",
    names=names(
        _STREAM + " engine model cached_tokens cached_tokens_device cached_tokens_host cached_tokens_remote "
        "computed_tokens"
        + _WINDOW
        + _FIGURES
        + " worker: at_ns role engine engine_version model dtype kv_dtype block_size "
        "num_blocks tp pp dp flags prefix_caching"
    ),
    caveats={
        "worker.prefix_caching": "with the native backend against SGLang; the other columns of `worker` likewise",
        "request.arrival_ns": _ASSUMED,
        "request.token_ns": "distances within a request are the tool's; instants are laid with the arrival",
        "request.cached_tokens": "with `--cache-report`; by tier where the server tells `cached_tokens_details`",
        "request.model": "from the server's information, which the native backend asks for",
        "request.engine": "by the backend that was chosen",
    },
    unjudged=names("request: token_ns token_counts"),
)
AIPERF: Final = Provides(
    engine="benchmarks",
    source="aiperf",
    needs="`aiperf profile ...` (`profile_export.jsonl`, and `profile_export_aiperf.json` beside it)",
    names=names(_STREAM + " end_ns model session_id turn cached_tokens computed_tokens" + _WINDOW + _FIGURES),
    caveats={
        "request.request_id": "sent as X-Request-Id: joins the engine's rows",
        "request.model": "from the summary beside the records",
        "request.cached_tokens": "where the server reports it in its usage",
        "request.token_counts": "where there are as many chunks as tokens; else a chunk may hold several",
    },
)
GUIDELLM: Final = Provides(
    engine="benchmarks",
    source="guidellm",
    needs="`guidellm run ... --output kind=json,path=FILE`",
    names=names(
        f"{_ROW} first_token_ns last_token_ns end_ns model session_id turn prompt_tokens cached_tokens computed_tokens "
        "output_tokens http_status error" + _WINDOW + _FIGURES
    ),
    caveats={
        "request.request_id": "the engine's own response id, which joins its rows; GuideLLM's where there is none",
        "request.cached_tokens": "where the server reports it in its usage (reports of 0.8 on)",
    },
)
GENAI_PERF: Final = Provides(
    engine="benchmarks",
    source="genai-perf",
    needs="`genai-perf profile ...` (`profile_export.json`)",
    names=names(
        "request: at_ns request_id vantage state arrival_ns first_token_ns last_token_ns end_ns token_ns token_counts model "
        "session_id prompt_tokens cached_tokens computed_tokens output_tokens http_status" + _WINDOW
    ),
    caveats={
        "request.prompt_tokens": "from the answer's usage object, where it was asked for; output and cached tokens likewise",
        "request.request_id": "a number: perf_analyzer keeps no ids, nothing joins the engine's rows",
    },
)
SUMMARY: Final = Provides(
    engine="benchmarks",
    source="summary",
    needs="a summary of AIPerf or GenAI-Perf alone, without the file of its requests",
    names=names("sample: at_ns name labels value"),
)
MOONCAKE: Final = Provides(
    engine="traces",
    source="mooncake",
    needs="JSON lines with `timestamp`, `input_length`, `output_length`, `hash_ids`",
    names=names(f"{_ROW} session_id prompt_tokens output_tokens prompt_blocks"),
    caveats={"request.prompt_blocks": "blocks of 512 tokens", "request.session_id": "only in AIPerf's extended lines"},
)
AZURE: Final = Provides(
    engine="traces",
    source="azure-llm",
    needs="CSV with `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`",
    names=names("request: at_ns request_id vantage state arrival_ns prompt_tokens output_tokens"),
)
BURSTGPT: Final = Provides(
    engine="traces",
    source="burstgpt",
    needs="CSV with `Timestamp`, `Model`, `Request tokens`, `Response tokens`",
    names=names(
        "request: at_ns request_id vantage state arrival_ns end_ns prompt_tokens output_tokens model workload session_id"
    ),
    caveats={
        "request.end_ns": "only in files with `Elapsed time`; session_id only in those with `Session ID`",
        "request.arrival_ns": "seconds from the trace's first day, laid from 2025-01-01 or `--start`",
    },
)
_LOG: Final = f"{_ROW} end_ns http_status"
NGINX: Final = Provides(
    engine="logs",
    source="nginx",
    needs="the `log_format` in the head of the shipped mapping; `--mapping nginx`",
    names=names(f"{_LOG} last_token_ns retry_count"),
    caveats={
        "request.last_token_ns": "the last byte of the answer; a header's arrival is no first token, so none is told"
    },
)
COMBINED: Final = Provides(
    engine="logs",
    source="combined",
    needs="the combined (or common) log format; `--mapping combined`",
    names=names(f"{_ROW} http_status"),
    caveats={
        "request.arrival_ns": "assumed: the one instant of a line, to the second. There is no latency in such a log"
    },
)
ENVOY: Final = Provides(
    engine="logs",
    source="envoy",
    needs="the JSON format in the head of the shipped mapping; `--mapping envoy`",
    names=names(f"{_LOG} last_token_ns retry_count error"),
    caveats={
        "request.last_token_ns": "the last byte of the answer; a header's arrival is no first token, so none is told"
    },
)
LITELLM: Final = Provides(
    engine="logs",
    source="litellm",
    needs="StandardLoggingPayload as JSON lines; `--mapping litellm`",
    names=names(
        f"{_LOG} first_token_ns last_token_ns model prompt_tokens cached_tokens output_tokens tenant session_id "
        "generation_id billable_units cost_center error"
    ),
    caveats={
        "request.first_token_ns": "of streamed calls, at the proxy",
        "request.cached_tokens": "where the provider's usage tells it",
    },
)
SGLANG_LOG: Final = Provides(
    engine="logs",
    source="sglang",
    needs="`--log-requests --log-requests-format json --enable-metrics`; `--mapping sglang`",
    names=names(
        "request: at_ns request_id vantage state engine arrival_ns first_scheduled_ns first_token_ns last_token_ns end_ns queue_s "
        "prompt_tokens cached_tokens cached_tokens_device cached_tokens_host output_tokens num_preemptions finish_reason"
    ),
)
CLIENT_SPANS: Final = Provides(
    engine="opentelemetry",
    source="client-spans",
    needs="spans of kind CLIENT by the GenAI conventions to `POST /v1/traces`, or OTLP JSON lines to `import`",
    names=names(
        f"{_ROW} first_token_ns last_token_ns end_ns token_ns token_counts engine model trace_id generation_id session_id "
        "prompt_tokens cached_tokens computed_tokens output_tokens finish_reason http_status error"
    ),
    caveats={
        "request.first_token_ns": "from `gen_ai.response.time_to_first_chunk`, or events of single chunks; else unknown",
        "request.last_token_ns": "of an answer that was not streamed the end of the span; of a stream only with events",
        "request.engine": "where the provider is a serving engine; others are the label `provider`",
        "request.request_id": "from `gen_ai.response.id`, which joins an engine that was given no id; else the span's",
    },
)
SERVER_SPANS: Final = Provides(
    engine="opentelemetry",
    source="server-spans",
    needs="spans of kind SERVER with `gen_ai.*` to `POST /v1/traces`, or OTLP JSON lines to `import`",
    names=names(
        f"{_ROW} worker first_token_ns last_token_ns end_ns decode_s engine model trace_id generation_id session_id "
        "prompt_tokens cached_tokens computed_tokens output_tokens finish_reason http_status error"
    ),
    caveats={
        "request.first_token_ns": "from `gen_ai.server.time_to_first_token`",
        "request.decode_s": "`gen_ai.server.time_per_output_token` times the tokens after the first; last_token_ns likewise",
        "request.worker": "the resource's service.name",
    },
)
METRICS: Final = Provides(
    engine="opentelemetry",
    source="metrics",
    needs="`gen_ai.*` metrics to `POST /v1/metrics`, OTLP JSON lines or a Prometheus page that has them to `import`",
    names=names("sample: worker at_ns name labels value"),
)

PROVIDES: Final = (
    VLLM_BENCH,
    SGLANG_BENCH,
    AIPERF,
    GUIDELLM,
    GENAI_PERF,
    SUMMARY,
    MOONCAKE,
    AZURE,
    BURSTGPT,
    NGINX,
    COMBINED,
    ENVOY,
    LITELLM,
    SGLANG_LOG,
    CLIENT_SPANS,
    SERVER_SPANS,
    METRICS,
)
