"""What each source of TGI shows; source: reference section 8 and `router/src/server.rs`."""

from __future__ import annotations

from typing import Final

from engine_probe.adapters.provides import Provides, names

METRICS: Final = Provides(
    engine="tgi",
    source="metrics",
    needs="nothing",
    names=names(
        """sample: worker at_ns name labels value requests_running requests_waiting prompt_tokens_total
        output_tokens_total requests_finished_total requests_failed_total
        mark: worker at_ns mark subject text attrs"""
    ),
    caveats={
        "sample.requests_running": "size of the batch in flight",
        "sample.prompt_tokens_total": "sum of the histogram of input lengths; truncated inputs count as truncated",
        "sample.requests_failed_total": "what was refused (overloaded, validation) as well as what broke",
    },
)

INFO: Final = Provides(
    engine="tgi",
    source="info",
    needs="nothing",
    names=names("worker: worker at_ns role engine engine_version model dtype max_context flags"),
    caveats={"worker.max_context": "prompt and output together"},
)

LOG: Final = Provides(
    engine="tgi",
    source="log",
    needs="its output in a file that `attach --log` reads (better with `--json-output`)",
    names=names(
        """request: worker at_ns request_id vantage state engine arrival_ns first_scheduled_ns last_token_ns end_ns
        frontend_s queue_s output_tokens"""
    ),
    caveats={
        "request.request_id": "TGI names no request: worker and instant; rows do not join to a client's",
        "request.state": "requests that succeeded; a failed one leaves no times",
        "request.frontend_s": "validation: HTTP and tokenisation",
    },
)

CLIENT: Final = Provides(
    engine="tgi",
    source="client",
    needs="a client, load generator or `kvscope proxy` that keeps what it saw",
    names=names(
        """request: worker at_ns request_id vantage state engine model labels arrival_ns first_token_ns last_token_ns
        end_ns token_ns token_counts frontend_s queue_s prompt_tokens output_tokens finish_reason http_status error
        prompt_blocks"""
    ),
    caveats={
        "request.frontend_s": "whole milliseconds, from the headers of an answer that is not streamed; queue_s likewise",
        "request.prompt_blocks": "where the client knows the token ids and the deployment's salt",
    },
)

PROVIDES: Final = (METRICS, INFO, LOG, CLIENT)
