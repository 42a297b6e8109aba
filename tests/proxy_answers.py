"""Answers as engines and APIs really write them, word for word but for their content; and a reader that takes them in.

`read(events)` feeds a stream into a `Reading` the way the proxy does, one event an instant (1 s apart).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engine_probe.proxy.dialects import read_event, read_whole
from engine_probe.proxy.order import OpenAnswers, Order
from engine_probe.proxy.reading import Reading

S = 1_000_000_000
DONE = "[DONE]"

Event = dict[str, Any] | str


def chat(
    content: str | None = None, /, *, id: str = "chatcmpl-1", finish: str | None = None, **more: Any
) -> dict[str, Any]:
    """One chunk of a chat as vLLM writes it. more: into the choice; `_top`: into the chunk."""
    top = more.pop("_top", {})
    index = more.pop("index", 0)
    delta = more.pop("delta", {} if content is None else {"content": content})
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish, **more}
    return {
        "id": id,
        "object": "chat.completion.chunk",
        "created": 1764000000,
        "model": "m",
        "choices": [choice],
        **top,
    }


def usage(**counts: Any) -> dict[str, Any]:
    """The last chunk, with `stream_options.include_usage`."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1764000000,
        "model": "m",
        "choices": [],
        "usage": counts,
    }


def completion(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    """One chunk of a completion as vLLM writes it."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None, **more}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1764000000, "model": "m", "choices": [choice]}


def responses(*words: str, cached: int = 0) -> list[dict[str, Any]]:
    """A stream of OpenAI's responses API."""
    made: list[dict[str, Any]] = []

    def add(kind: str, **fields: Any) -> None:
        made.append({"type": f"response.{kind}", "sequence_number": len(made), **fields})

    answer = {"id": "resp_1", "object": "response", "model": "gpt-x", "status": "in_progress", "usage": None}
    add("created", response=answer)
    add("in_progress", response=answer)
    add("output_item.added", output_index=0, item={"id": "msg_1", "type": "message", "content": []})
    for word in words:
        add("output_text.delta", item_id="msg_1", output_index=0, content_index=0, delta=word)
    add("output_text.done", item_id="msg_1", output_index=0, content_index=0, text="".join(words))
    told = {
        "input_tokens": 30,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": len(words),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 30 + len(words),
    }
    add("completed", response={**answer, "status": "completed", "usage": told})
    return made


def messages(*words: str) -> list[dict[str, Any]]:
    """A stream of Anthropic's messages API."""
    begun = {"input_tokens": 10, "cache_creation_input_tokens": 5, "cache_read_input_tokens": 100, "output_tokens": 1}
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-x",
        "content": [],
        "usage": begun,
    }
    return [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        *({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}} for word in words),
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": len(words)},
        },
        {"type": "message_stop"},
    ]


def sglang(*totals: int) -> list[dict[str, Any]]:
    """A stream of SGLang's /generate: text and counts so far; the last ends it."""
    return [
        {
            "text": "x" * total,
            "meta_info": {
                "id": "rid-1",
                "finish_reason": {"type": "length", "length": total} if total == totals[-1] else None,
                "prompt_tokens": 12,
                "completion_tokens": total,
                "cached_tokens": 8,
            },
        }
        for total in totals
    ]


def llama(*words: str) -> list[dict[str, Any]]:
    """A stream of llama.cpp's /completion."""
    made = [
        {
            "index": 0,
            "content": word,
            "tokens": [7],
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": number,
            "tokens_evaluated": 9,
        }
        for number, word in enumerate(words, 1)
    ]
    timings = {"cache_n": 4, "prompt_n": 5, "prompt_ms": 50.0, "predicted_n": len(words), "predicted_ms": 80.0}
    made.append(
        {
            "index": 0,
            "content": "",
            "tokens": [],
            "stop": True,
            "stop_type": "limit",
            "model": "/models/small.gguf",
            "tokens_predicted": len(words),
            "tokens_evaluated": 9,
            "truncated": False,
            "timings": timings,
        }
    )
    return made


def wire(events: Sequence[Event], *, names: bool = False) -> list[bytes]:
    """The events as a server writes them."""
    made = []
    for event in events:
        name = f"event: {event['type']}\n" if names and isinstance(event, dict) else ""
        data = event if isinstance(event, str) else json.dumps(event, separators=(",", ":"))
        made.append(f"{name}data: {data}\n\n".encode())
    return made


def new_reading(request_id: str = "r", open_answers: OpenAnswers | None = None) -> Reading:
    """An answer of which nothing was read yet."""
    return Reading(Order(request_id, open_answers or OpenAnswers()))


def read(events: Sequence[Event], reading: Reading | None = None) -> Reading:
    """Take a stream in, event k at instant k seconds (from 1)."""
    reading = reading or new_reading()
    for number, event in enumerate(events, 1):
        data = event if isinstance(event, str) else json.dumps(event)
        name = str(event.get("type", "")) if isinstance(event, dict) else ""
        read_event(reading, name.encode(), data.encode(), number * S)
    return reading


def read_json(document: Any) -> Reading:
    """Take an answer in one piece in."""
    reading = new_reading()
    read_whole(reading, json.dumps(document).encode())
    return reading


def seconds(reading: Reading) -> list[int]:
    """The instants of its entries, s."""
    instants = reading.tokens.instants()
    return [] if instants is None else [int(at) // S for at in instants]


def counts(reading: Reading) -> list[int] | None:
    """Tokens of its entries."""
    found = reading.tokens.counts(reading.columns.get("output_tokens"))
    return None if found is None else [int(number) for number in found]
