"""What each source of TensorRT-LLM shows; settings are those of `trtllm-serve --config FILE`. Source: reference section 7."""

from __future__ import annotations

from typing import Final

from engine_probe.adapters.provides import Provides, names

METRICS: Final = Provides(
    engine="trtllm",
    source="metrics",
    needs="`return_perf_metrics: true` (page `/prometheus/metrics`); gauges with `enable_iter_perf_stats: true` as well",
    names=names(
        """sample: worker at_ns name labels value requests_running requests_waiting kv_usage_ratio
        prefix_queries_tokens_total prefix_hits_tokens_total prompt_tokens_total prompt_tokens_cached_total
        output_tokens_total requests_finished_total requests_failed_total tier_read_bytes_total tier_written_bytes_total
        worker: worker at_ns engine engine_version model dtype kv_dtype block_size num_blocks max_context tp pp flags
        prefix_caching
        mark: worker at_ns mark subject text attrs"""
    ),
    caveats={
        "sample.requests_running": "moves when a request finishes: the server feeds its gauges then; idle, it stands still",
        "sample.prefix_queries_tokens_total": "every prompt token; with `enable_block_reuse: false` none is looked up",
        "sample.prefix_hits_tokens_total": "releases of 2026; older ones count blocks only",
        "sample.prompt_tokens_total": "added when a request finishes; 1.1 has five series only",
        "sample.tier_read_bytes_total": "only with a host cache",
        "sample.tier_written_bytes_total": "only with a host cache",
        "sample.requests_failed_total": "timed out and cancelled requests; HTTP errors are `trtllm_request_error_total`",
    },
)

ITERATIONS: Final = Provides(
    engine="trtllm",
    source="iterations",
    needs="`enable_iter_perf_stats: true` and not `return_perf_metrics` (then the server reads its own records)",
    names=names(
        """step: worker at_ns step duration_s num_running num_waiting_prefill num_waiting_decode prefill_tokens
        decode_tokens blocks_total blocks_used batch_size
        sample: worker at_ns name labels value requests_running requests_waiting kv_usage_ratio requests_finished_total
        draft_tokens_total accepted_tokens_total
        mark: worker at_ns mark subject text attrs"""
    ),
    caveats={
        "step.step": "records go to whoever asks first: let nobody else read `/metrics`",
        "step.decode_tokens": "null with speculative decoding",
        "step.num_waiting_decode": "paused requests",
        "sample.requests_finished_total": "counted from the attach on",
        "sample.draft_tokens_total": "only with speculative decoding, counted from the attach on; accepted tokens likewise",
    },
)

REQUESTS: Final = Provides(
    engine="trtllm",
    source="perf_metrics",
    needs="`return_perf_metrics: true` and `perf_metrics_max_requests: 10000`",
    names=names(
        """request: worker at_ns request_id vantage state engine labels arrival_ns first_scheduled_ns first_token_ns
        last_token_ns end_ns frontend_s queue_s prefill_s decode_s draft_tokens accepted_tokens
        transfer: worker at_ns request_id num_bytes outcome wire_s"""
    ),
    caveats={
        "request.request_id": "the engine's own number with the worker's name: it does not join to the client's id",
        "request.arrival_ns": "a steady clock, placed by /steady_clock_offset at the attach: good to milliseconds; "
        "durations are exact",
        "request.labels": "blocks reused and missed; tokens are not told",
        "request.draft_tokens": "only with speculative decoding; accepted tokens likewise",
        "transfer.wire_s": "only in disaggregated serving",
    },
)

KV_EVENTS: Final = Provides(
    engine="trtllm",
    source="kv_events",
    needs="`kv_cache_config: {enable_block_reuse: true, event_buffer_max_size: 16384}`",
    names=names(
        """block: worker at_ns stored evicted offloaded loaded block_hash parent_hash num_tokens tier reason age_s
        sample_rate
        mark: worker at_ns mark subject text attrs"""
    ),
    caveats={
        "block.at_ns": "when the event was fetched (`attach --interval`); the events have no time of their own",
        "block.stored": "of the largest attention window; blocks that are not full are stored too",
        "block.reason": "only of blocks that moved to the host (`offloaded`); why one was evicted is not told",
        "block.sample_rate": "only where `attach --block-rate` is below 1",
    },
)

CLIENT: Final = Provides(
    engine="trtllm",
    source="client",
    needs="a client, load generator or `kvscope proxy` that keeps what it saw",
    names=names(
        """request: worker at_ns request_id vantage state engine model labels arrival_ns first_token_ns last_token_ns
        end_ns token_ns token_counts prompt_tokens cached_tokens computed_tokens output_tokens finish_reason
        http_status error prompt_blocks"""
    ),
    caveats={
        "request.cached_tokens": "recent releases tell it in `usage`",
        "request.prompt_blocks": "where the client knows the token ids and the deployment's salt",
    },
)

PROVIDES: Final = (METRICS, ITERATIONS, REQUESTS, KV_EVENTS, CLIENT)
