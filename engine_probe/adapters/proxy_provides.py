"""What `kvscope proxy` shows of any engine or API behind it: its own instants, what answers say, what prompts are made of."""

from __future__ import annotations

from typing import Final

from engine_probe.adapters.provides import Provides, names

ENGINE: Final = "any"

PROXY: Final = Provides(
    engine=ENGINE,
    source="proxy",
    needs="clients talk to `kvscope proxy --upstream URL`; `stream_options.include_usage` for counts in OpenAI's streams",
    names=names(
        """request: worker at_ns request_id attempt vantage state engine model tenant workload priority_class session_id
        turn cost_center trace_id labels arrival_ns first_token_ns last_token_ns end_ns token_ns token_counts
        prompt_tokens output_tokens finish_reason http_status error retry_count fallback_reason
        route: worker at_ns request_id router policy chosen decision_s candidates
        check: worker at_ns batch_id check outcome sample_ids leakage_test_result
        mark: worker at_ns mark subject text attrs"""
    ),
    caveats={
        "request.first_token_ns": "of streams; the first token of an answer in one piece is seen by nobody",
        "request.token_counts": "where chunks say how many tokens they hold, or there are as many chunks as tokens",
        "request.prompt_tokens": "where the answer tells usage; output_tokens likewise",
        "request.engine": "`--engine`, or where the server says it itself (llama.cpp)",
        "request.tenant": "from `X-Kvscope-Tenant`, or the header of `--tag tenant=HEADER`; other tags likewise",
        "request.error": "kinds and codes; an engine's words are never kept",
        "check.outcome": "only `failed`: a piece of a stream that its protocol says is not there",
        "route.candidates": "`load` is the number of requests that the proxy itself has open there",
    },
)

ANSWERS: Final = Provides(
    engine=ENGINE,
    source="answers",
    needs="what the engine may put into its answers: cached tokens (vLLM `--enable-prompt-tokens-details`, SGLang "
    "`--enable-cache-report`; OpenAI, Anthropic, DeepSeek, llama.cpp always), times (vLLM `--enable-per-request-metrics`, "
    "llama.cpp always, TGI in the head of an answer in one piece)",
    names=names(
        "request: cached_tokens computed_tokens frontend_s queue_s prefill_s decode_s draft_tokens accepted_tokens"
    ),
    caveats={
        "request.cached_tokens": "vLLM leaves it out where it is 0, so that a miss is unknown",
        "request.frontend_s": "TGI alone, in whole milliseconds",
        "request.queue_s": "vLLM (0.28), and TGI in whole milliseconds",
        "request.prefill_s": "vLLM and llama.cpp; decode_s likewise",
        "request.draft_tokens": "llama.cpp with a draft model; accepted_tokens likewise",
    },
)

TOKENIZE: Final = Provides(
    engine=ENGINE,
    source="tokenize",
    needs="`kvscope proxy --tokenize` before vLLM, SGLang or llama.cpp",
    names=names("request: prompt_blocks"),
    caveats={
        "request.prompt_blocks": "text prompts of the chat, completions, messages and responses APIs; left out where it is behind, and where the engine counted other tokens",
    },
)

PROVIDES: Final = (PROXY, ANSWERS, TOKENIZE)
