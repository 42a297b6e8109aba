"""What each source of vLLM shows. Needed flags are vLLM's own; `Source` is reference 4.2, 4.9, 4.10 and vLLM 0.32."""

from __future__ import annotations

from typing import Final

from engine_probe.adapters.provides import Provides, names

PLUGIN: Final = Provides(
    engine="vllm",
    source="plugin",
    needs="kvscope installed in the engine's environment and `KVSCOPE_URL` set",
    names=names(
        """request: worker at_ns request_id vantage state engine model labels arrival_ns first_scheduled_ns
        first_token_ns last_token_ns end_ns frontend_s queue_s prefill_s decode_s prompt_tokens cached_tokens
        cached_tokens_device computed_tokens output_tokens num_preemptions finish_reason
        step: worker at_ns step duration_s num_running num_waiting_prefill waiting_on prefill_tokens decode_tokens
        recomputed_tokens num_preempted blocks_total blocks_used kv_cache_bytes policy batch_size
        worker: worker at_ns host role engine engine_version model dtype kv_dtype block_size num_blocks
        kv_bytes_per_block max_context tp pp dp flags prefix_caching
        mark: worker at_ns mark subject text attrs"""
    ),
    caveats={
        "step.batch_size": "only with `--enable-logging-iteration-details`, which also makes `step.duration_s` exact",
        "step.recomputed_tokens": "only with prefix caching on",
        "request.num_preemptions": "from the release that has it in its finished-request statistics (0.30)",
        "request.prefill_s": "a preemption before the first token lies inside; vLLM does not tell it apart",
    },
)

OTLP: Final = Provides(
    engine="vllm",
    source="otlp",
    needs="`--otlp-traces-endpoint URL` and `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf`",
    names=names(
        """request: worker at_ns request_id vantage state engine model labels trace_id generation_id arrival_ns
        first_scheduled_ns first_token_ns last_token_ns end_ns frontend_s queue_s prefill_s decode_s prompt_tokens
        output_tokens error"""
    ),
    caveats={
        "request.worker": "`OTEL_SERVICE_NAME`, or the receiver's name for it; data-parallel ranks are not told apart",
        "request.model": "only where the span names it; vLLM 0.32 does not",
        "request.frontend_s": "the residue ttft - queue - prefill: HTTP, tokenisation, hand-over to the core and back",
        "request.error": "only on spans with an error status",
    },
)

METRICS: Final = Provides(
    engine="vllm",
    source="metrics",
    needs="nothing (`--disable-log-stats` closes it)",
    names=names(
        """sample: worker at_ns name labels value requests_running requests_waiting kv_usage_ratio
        prefix_queries_tokens_total prefix_hits_tokens_total external_queries_tokens_total
        external_hits_tokens_total preemptions_total prompt_tokens_total prompt_tokens_computed_total
        prompt_tokens_cached_total output_tokens_total requests_finished_total requests_failed_total
        tier_read_bytes_total tier_written_bytes_total draft_tokens_total accepted_tokens_total
        worker: worker at_ns engine block_size num_blocks kv_dtype flags prefix_caching
        mark: worker at_ns mark subject text attrs"""
    ),
    caveats={
        "sample.kv_usage_ratio": "a snapshot at a step's end; blocks that only hold reusable prefixes count as free",
        "sample.prefix_queries_tokens_total": "stays 0 with prefix caching off; counts a preempted request once",
        "sample.requests_finished_total": "ends stop, length, repetition; abort and error are `requests_failed_total`",
        "sample.draft_tokens_total": "only with speculative decoding; accepted tokens likewise",
        "sample.tier_read_bytes_total": "only with a KV connector that offloads (0.18)",
        "sample.tier_written_bytes_total": "only with a KV connector that offloads (0.18)",
        "worker.kv_dtype": "only where it is set; `auto` means the model's type and is left unknown",
    },
)

KV_EVENTS: Final = Provides(
    engine="vllm",
    source="kv_events",
    needs="`--kv-events-config '{\"enable_kv_cache_events\": true}'` and prefix caching on",
    names=names(
        """block: worker at_ns stored hit evicted cleared offloaded block_hash parent_hash num_tokens tier reason age_s
        reuse_count
        mark: worker at_ns mark subject text attrs"""
    ),
    caveats={
        "block.hit": "only for requests with `kv_cache_report_mode: full` (0.28); `block.reuse_count` likewise",
        "block.offloaded": "only with an offloading connector that reports its stores (0.26)",
        "block.reason": "only of `cleared` (reset, restart); why a block was evicted is not told",
    },
)

LOG: Final = Provides(
    engine="vllm",
    source="log",
    needs="the engine's start-up output",
    names=names(
        """worker: worker at_ns engine engine_version model dtype kv_dtype block_size num_blocks weights_bytes
        max_context tp pp dp flags prefix_caching"""
    ),
    caveats={"worker.weights_bytes": "not printed by the CPU build", "worker.kv_dtype": "only where it is set"},
)

CLIENT: Final = Provides(
    engine="vllm",
    source="client",
    needs="a client or load generator that keeps what it saw; `--enable-prompt-tokens-details`, "
    "`--enable-per-request-metrics` for the engine's own figures in its answers",
    names=names(
        """request: worker at_ns request_id vantage state engine model labels arrival_ns first_token_ns last_token_ns
        end_ns token_ns token_counts queue_s prefill_s decode_s prompt_tokens cached_tokens computed_tokens
        output_tokens finish_reason http_status error prompt_blocks"""
    ),
    caveats={
        "request.token_counts": "where there are as many chunks as tokens; else a chunk may hold several",
        "request.prompt_blocks": "where the client knows the token ids and the deployment's salt",
        "request.queue_s": "from the answer's `metrics` object (0.28); prefill_s and decode_s likewise",
    },
)

PROVIDES: Final = (PLUGIN, OTLP, METRICS, KV_EVENTS, LOG, CLIENT)
