"""What each source of llama.cpp's server shows; source: reference section 6 and xllamacpp 2026.10.11549."""

from __future__ import annotations

from typing import Final

from engine_probe.adapters.provides import Provides, names

METRICS: Final = Provides(
    engine="llamacpp",
    source="metrics",
    needs="`--metrics`",
    names=names(
        """sample: worker at_ns name labels value requests_running requests_waiting kv_usage_ratio
        prefix_queries_tokens_total prefix_hits_tokens_total prompt_tokens_total prompt_tokens_computed_total
        prompt_tokens_cached_total output_tokens_total draft_tokens_total accepted_tokens_total
        mark: worker at_ns mark subject text attrs"""
    ),
    caveats={
        "sample.kv_usage_ratio": "only in builds before mid 2025",
        "sample.prefix_queries_tokens_total": "only in builds that count cached tokens; every prompt is looked up in its slot",
        "sample.prefix_hits_tokens_total": "only in builds that count cached tokens; prompt tokens found in the slot's cache",
        "sample.prompt_tokens_total": "only in builds that count cached tokens: computed and cached together",
        "sample.prompt_tokens_cached_total": "only in builds of 2026",
        "sample.output_tokens_total": "added when a request finishes",
        "sample.draft_tokens_total": "only in builds that count drafts; accepted tokens likewise",
    },
)

PROPS: Final = Provides(
    engine="llamacpp",
    source="props",
    needs="nothing",
    names=names("worker: worker at_ns role engine engine_version model dtype max_context flags"),
    caveats={"worker.dtype": "the file's quantisation", "worker.max_context": "of one slot"},
)

SLOTS: Final = Provides(
    engine="llamacpp",
    source="slots",
    needs="nothing (`--no-slots` closes it)",
    names=names("sample: worker at_ns name labels value"),
    caveats={
        "sample.value": "KV tokens a slot holds now; whether slots share one pool is not told, so no usage ratio is made of it"
    },
)

LOG: Final = Provides(
    engine="llamacpp",
    source="log",
    needs="its output in a file that `attach --log` reads",
    names=names("worker: worker at_ns engine engine_version kv_dtype block_size num_blocks max_context flags"),
    caveats={
        "worker.num_blocks": "KV cells; a cell is one token. Where the line tells whether slots share them",
        "worker.kv_dtype": "only where its verbosity prints the cache; the build likewise",
    },
)

TIMINGS: Final = Provides(
    engine="llamacpp",
    source="client",
    needs="a client, load generator or `kvscope proxy` that keeps what it saw; the engine's own figures are in its answers",
    names=names(
        """request: worker at_ns request_id vantage state engine model labels arrival_ns first_token_ns last_token_ns
        end_ns token_ns token_counts prefill_s decode_s prompt_tokens cached_tokens computed_tokens output_tokens
        draft_tokens accepted_tokens finish_reason http_status error prompt_blocks"""
    ),
    caveats={
        "request.prefill_s": "from the slot's start: the wait for a slot is not told, so `queue_s` is null",
        "request.token_counts": "where there are as many chunks as tokens; else a chunk may hold several",
        "request.draft_tokens": "only with speculative decoding; accepted tokens likewise",
        "request.prompt_blocks": "where the client knows the token ids and the deployment's salt",
    },
)

PROVIDES: Final = (METRICS, PROPS, SLOTS, LOG, TIMINGS)
