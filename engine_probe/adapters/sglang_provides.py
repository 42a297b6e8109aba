"""What each source of SGLang shows. Needed flags are SGLang's own; source: reference section 5 and SGLang 0.5.23."""

from __future__ import annotations

from typing import Final

from engine_probe.adapters.provides import Provides, names

METRICS: Final = Provides(
    engine="sglang",
    source="metrics",
    needs="`--enable-metrics`",
    names=names(
        """sample: worker at_ns name labels value requests_running requests_waiting kv_usage_ratio
        prefix_queries_tokens_total prefix_hits_tokens_total preemptions_total prompt_tokens_total
        prompt_tokens_computed_total prompt_tokens_cached_total output_tokens_total requests_finished_total
        requests_failed_total tier_read_bytes_total tier_written_bytes_total
        worker: worker at_ns engine block_size num_blocks kv_bytes_per_block max_context flags
        mark: worker at_ns mark subject text attrs"""
    ),
    caveats={
        "sample.requests_running": "most gauges move every `--decode-log-interval` (40) decode steps only",
        "sample.kv_usage_ratio": "the fullest pool; tokens that only hold a reusable prefix count as free",
        "sample.prefix_queries_tokens_total": "hits and computed tokens together; before 0.5.18 the prompt tokens of "
        "finished requests",
        "sample.prefix_hits_tokens_total": "of all tiers (label `mode`); before 0.5.18 cached tokens of finished requests",
        "sample.preemptions_total": "retracted requests; absent until the first one",
        "sample.prompt_tokens_total": "added when a request finishes; output and cached tokens likewise",
        "sample.requests_failed_total": "aborted requests; absent until the first one",
        "sample.tier_read_bytes_total": "only with `--enable-hierarchical-cache`; shards of all ranks",
        "sample.tier_written_bytes_total": "only with `--enable-hierarchical-cache`; shards of all ranks",
        "worker.kv_bytes_per_block": "where one pool alone fills the KV memory",
    },
)

SERVER_INFO: Final = Provides(
    engine="sglang",
    source="server_info",
    needs="nothing",
    names=names(
        """worker: worker at_ns role engine engine_version model dtype kv_dtype block_size num_blocks max_context tp pp dp
        flags prefix_caching"""
    ),
    caveats={
        "worker.dtype": "only where it is set; `auto` means the checkpoint's type and is left unknown",
        "worker.kv_dtype": "only where it is set; `auto` means the model's type and is left unknown",
    },
)

KV_EVENTS: Final = Provides(
    engine="sglang",
    source="kv_events",
    needs='`--kv-events-config \'{"publisher": "zmq", "endpoint": "tcp://*:5557"}\'` and the radix cache on',
    names=names(
        """block: worker at_ns stored evicted cleared offloaded block_hash parent_hash num_tokens tier reason age_s
        sample_rate
        mark: worker at_ns mark subject text attrs"""
    ),
    caveats={
        "block.stored": "one row a page; with `--page-size 1` (the default) one a token: `attach --block-rate` thins them",
        "block.offloaded": "only with `--enable-hierarchical-cache`; a page that is loaded back is `stored` again",
        "block.reason": "only of `cleared` (reset, restart); why a page was evicted is not told",
        "block.sample_rate": "only where `attach --block-rate` is below 1",
    },
)

LOG: Final = Provides(
    engine="sglang",
    source="log",
    needs="`--log-requests --log-requests-level 0 --enable-metrics`, its output in a file that `attach --log` reads "
    "(without the flags: the start-up lines only)",
    names=names(
        """request: worker at_ns request_id vantage state engine model labels arrival_ns first_scheduled_ns first_token_ns
        last_token_ns end_ns frontend_s queue_s prefill_s decode_s prompt_tokens cached_tokens cached_tokens_device
        cached_tokens_host cached_tokens_remote computed_tokens output_tokens draft_tokens accepted_tokens
        num_preemptions finish_reason http_status error
        worker: worker at_ns role engine model dtype kv_dtype block_size num_blocks weights_bytes max_context tp pp dp
        flags prefix_caching"""
    ),
    caveats={
        "request.request_id": "SGLang's own (`rid`): it is the id of the answer, and not the client's `X-Request-Id`",
        "request.first_token_ns": "of a request that is not streamed: when the scheduler had it",
        "request.prefill_s": "from the first schedule; a retraction before the first token lies inside",
        "request.cached_tokens_device": "only where the release splits them; host and remote likewise",
        "request.draft_tokens": "only with speculative decoding; accepted tokens likewise",
        "request.http_status": "only of requests that the engine refused or aborted with a status; `error` likewise",
        "worker.weights_bytes": "not printed by the CPU build",
    },
)

OTLP: Final = Provides(
    engine="sglang",
    source="otlp",
    needs="`--enable-trace --otlp-traces-endpoint URL` and `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf`",
    names=names(
        """request: worker at_ns request_id vantage state engine model labels trace_id generation_id arrival_ns
        first_token_ns last_token_ns end_ns frontend_s decode_s prompt_tokens cached_tokens computed_tokens
        output_tokens finish_reason"""
    ),
    caveats={
        "request.worker": "`--otlp-service-name` or `OTEL_SERVICE_NAME` (default: `sglang`, whichever instance), or the "
        "receiver's name for it; data-parallel ranks are not told apart",
        "request.first_token_ns": "queue and prefill are told as one time and are not split",
    },
)

CLIENT: Final = Provides(
    engine="sglang",
    source="client",
    needs="a client or load generator that keeps what it saw; `--enable-cache-report` for cached tokens in its answers",
    names=names(
        """request: worker at_ns request_id vantage state engine model labels arrival_ns first_token_ns last_token_ns
        end_ns token_ns token_counts prompt_tokens cached_tokens computed_tokens output_tokens finish_reason
        http_status error prompt_blocks"""
    ),
    caveats={
        "request.token_counts": "where there are as many chunks as tokens; else a chunk may hold several",
        "request.prompt_blocks": "where the client knows the token ids and the deployment's salt",
    },
)

PROVIDES: Final = (METRICS, SERVER_INFO, KV_EVENTS, LOG, OTLP, CLIENT)
