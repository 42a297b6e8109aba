"""OpenAI responses: named events with a sequence number, the answer itself at the begin and at the end."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw

from engine_probe.proxy.reading import Reading
from engine_probe.proxy.shapes import Document, holds, read, small, small_dict

API: Final = "responses"
_CALLS: Final = frozenset(("function_call", "custom_tool_call", "mcp_call"))
_ENDS: Final = frozenset(("response.completed", "response.incomplete", "response.failed", "response.cancelled"))


class _Item(msgspec.Struct):
    type: str | None = None


_decode_item = msgspec.json.Decoder(_Item).decode


def chunk(reading: Reading, document: Document, now_ns: int) -> None:
    """One event. Every `.delta` that is not empty holds tokens, and so does the name of a function to call."""
    reading.recognise(API)
    kind = document.type or ""
    order = reading.order
    order.see_sequence(document.sequence_number)
    if kind.endswith(".delta"):
        if holds(document.delta):
            reading.token(now_ns)
    elif kind == "response.output_item.added":
        if _item_type(document.item) in _CALLS:
            reading.token(now_ns)
    elif holds(document.response):
        answer = read(document.response)
        if answer is not None:
            # The whole answer names itself in several events: each must be the same.
            order.see_id(answer.id, has_tokens=True)
            _take(reading, answer)
        reading.time(document.timings)
        if kind in _ENDS:
            reading.has_end = True


def whole(reading: Reading, document: Document) -> None:
    """An answer that is one document."""
    reading.recognise(API)
    reading.order.see_id(document.id, has_tokens=False)
    _take(reading, document)


def _take(reading: Reading, answer: Document) -> None:
    reading.name_model(answer.model)
    reading.use(answer.usage)
    status = small(answer.status)
    if status == "incomplete":
        reading.finish(small_dict(answer.incomplete_details).get("reason"))
    elif status == "failed":
        reading.finish("error")
        reading.fail(answer.error if holds(answer.error) else b'"failed"')
    elif status in ("completed", "cancelled"):
        reading.finish(status)


def _item_type(raw: Raw) -> str | None:
    try:
        return _decode_item(raw).type if raw else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
