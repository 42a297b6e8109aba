"""What the proxy declares is what its rows fill, column by column."""

from __future__ import annotations

from typing import Any

from engine_probe.adapters.provides import all_names, declared
from engine_probe.adapters.proxy_provides import ANSWERS, PROVIDES, PROXY, TOKENIZE
from engine_probe.proxy.tokenizer import Tokenizer
from engine_probe.proxy.tokenizing import Tokenizing
from tests.contract.test_adapters_contract import filled
from tests.integration.test_proxy_rows import PROMPT, Record, ask, stream, whole
from tests.proxy_answers import chat, llama, usage
from tests.proxy_lab import post


class _Fixed(Tokenizer):
    """Every prompt is the same twenty tokens."""

    def tokens(self, head: Any, body: bytes) -> list[int]:
        return list(range(20))


def test_declared_names_are_of_the_contract_and_listed() -> None:
    """And nothing is declared twice."""
    for one in PROVIDES:
        assert one.names <= set(all_names())
        assert set(one.caveats) <= one.names
        assert one in declared()
    assert not PROXY.names & (ANSWERS.names | TOKENIZE.names)


def test_rows_fill_exactly_what_is_declared() -> None:
    """Requests that together have everything: a fall-back, an error, a misplaced piece, usage, times, named blocks."""
    tags = ("Tenant", "Workload", "Priority", "Session", "Cost-Center", "Product")
    headers = [
        *(f"X-Kvscope-{tag}: x" for tag in tags),
        "X-Kvscope-Turn: 1",
        "X-Stainless-Retry-Count: 1",
        "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ]
    told = {"queue_time_ms": 1.0, "time_to_first_token_ms": 2.0, "generation_time_ms": 3.0}
    counts = usage(prompt_tokens=20, completion_tokens=3, prompt_tokens_details={"cached_tokens": 16})
    misplaced = chat("c", id="chatcmpl-9")
    good = [chat("a"), chat("b"), misplaced, chat(finish="stop"), {**counts, "metrics": told}]
    speculative = llama("a", "b")
    speculative[-1]["timings"] |= {"draft_n": 4, "draft_n_accepted": 2}
    failing = [chat("a"), {"error": {"type": "internal_error"}}]
    found: set[str] = set()
    in_one_piece = whole({"generated_text": "hi"}, b"200 OK", b"x-validation-time: 3\r\nx-inference-time: 90\r\n")
    for answer in (stream(*good), stream(*speculative), stream(*failing), in_one_piece):
        tokenizing = Tokenizing(b"salt", lambda upstream: _Fixed(upstream))
        record = Record(tokenizing=tokenizing)
        ask(
            record,
            answer,
            post(PROMPT.encode(), "/v1/chat/completions", *headers),
            dead=1,
            policy="round_robin",
        )
        tokenizing.close()
        for kind in ("request", "route", "check", "mark"):
            found |= filled((kind, row) for row in record.rows(kind))
    assert found == PROXY.names | ANSWERS.names | TOKENIZE.names
