"""Sends calls when they are due, whatever came of those before (open loop), or as answers come (closed loop).

In an open loop latency counts from the instant at which the call was due, so a generator or a server that falls behind makes
requests slower and never rarer (no coordinated omission). How late each was really sent is told beside it.
Invariant: one row a call, in the order of the calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_probe.engine.traffic.call import Call
from engine_probe.load.openai_client import Answered, OpenAiClient

REJECTED = frozenset((429, 503))
LEAD_NS = 50_000_000
"""The first call is due so long after the loop begins: the loop itself takes a moment."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One call as it is sent. body: the request's fields but for the model."""

    call: Call
    path: str
    body: Mapping[str, Any]
    labels: Mapping[str, str] = field(default_factory=dict)


async def open_loop(
    client: OpenAiClient, asks: Sequence[Ask], tell: Callable[[int], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Send each call at its instant after the first's; rows of kind `request`. tell: is told after each answer."""
    if not asks:
        return []
    begin_ns = client.clock.monotonic_ns() + LEAD_NS - asks[0].call.at_ns

    async def at_its_time(ask: Ask) -> dict[str, Any]:
        due_ns = begin_ns + ask.call.at_ns
        await asyncio.sleep(max(0.0, (due_ns - client.clock.monotonic_ns()) / 1e9))
        answered = await client.ask(ask.path, ask.body, ask.call.request_id)
        tell(1)
        return request_row(client, ask, answered, due_ns)

    return list(await asyncio.gather(*(at_its_time(ask) for ask in asks)))


async def closed_loop(
    client: OpenAiClient, asks: Sequence[Ask], in_flight: int, tell: Callable[[int], None] = lambda _: None
) -> list[dict[str, Any]]:
    """So many clients, each asking for the next call when its answer is there."""
    rows: list[dict[str, Any]] = [{} for _ in asks]
    left = iter(range(len(asks)))

    async def one_client() -> None:
        for index in left:
            ask = asks[index]
            answered = await client.ask(ask.path, ask.body, ask.call.request_id)
            rows[index] = request_row(client, ask, answered, answered.sent_ns)
            tell(1)

    await asyncio.gather(*(one_client() for _ in range(min(in_flight, len(asks)))))
    return rows


def request_row(client: OpenAiClient, ask: Ask, answered: Answered, due_ns: int) -> dict[str, Any]:
    """The row of one call at the client's vantage, its arrival when it was due."""
    reading, utc = answered.reading, client.clock.to_utc_ns
    tokens, told = reading.tokens, dict(reading.columns)
    labels = {**ask.call.labels, **ask.labels, "sent_late_s": f"{max(0, answered.sent_ns - due_ns) / 1e9:.6f}"}
    for name in ("cache_created", "reasoning"):
        if name in told:
            labels[f"{name}_tokens"] = str(told.pop(name))
    if reading.answer_id is not None:
        labels["engine_request_id"] = reading.answer_id
    state = "finished" if answered.is_good else "rejected" if answered.status in REJECTED else "failed"
    instants = tokens.instants()
    counts = tokens.counts(told.get("output_tokens"))
    return {
        **told,
        "at_ns": utc(answered.end_ns),
        "request_id": ask.call.request_id,
        "attempt": 0,
        "vantage": "client",
        "state": state,
        "engine": reading.engine,
        "model": reading.model or client.model,
        "session_id": ask.call.session_id,
        "turn": ask.call.turn,
        "tenant": ask.call.tenant,
        "workload": ask.call.workload,
        "prefix_hash": ask.call.prefix_hash,
        "labels": labels,
        "arrival_ns": utc(due_ns),
        "first_token_ns": None if tokens.first_ns is None else utc(tokens.first_ns),
        "last_token_ns": None if tokens.last_ns is None else utc(tokens.last_ns),
        "end_ns": utc(answered.end_ns),
        "token_ns": None if instants is None else [utc(int(at)) for at in instants],
        "token_counts": None if counts is None else counts.tolist(),
        "finish_reason": reading.finish_reason,
        "http_status": answered.status,
        "error": answered.error,
        "retry_count": answered.num_retries,
    }
