"""Anthropic messages: content blocks that begin, go on and end; usage at the begin and completed at the end."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw

from engine_probe.proxy.reading import Reading
from engine_probe.proxy.shapes import Document, count, holds, read, small, small_dict

API: Final = "messages"


class _Piece(msgspec.Struct):
    """A delta, or a block as it begins."""

    type: str | None = None
    text: Raw = Raw(b"")
    thinking: Raw = Raw(b"")
    partial_json: Raw = Raw(b"")
    name: Raw = Raw(b"")
    stop_reason: Raw = Raw(b"")

    @property
    def holds_tokens(self) -> bool:
        return holds(self.text) or holds(self.thinking) or holds(self.partial_json) or holds(self.name)


_decode_piece = msgspec.json.Decoder(_Piece).decode


def chunk(reading: Reading, document: Document, now_ns: int) -> None:
    """One event."""
    order = reading.order
    kind = document.type
    if kind == "message_start":
        reading.recognise(API)
        message = read(document.message) if holds(document.message) else None
        if message is not None:
            if order.answer_id is not None:
                order.found("position", "a second message begins in the same answer", kind="message")
            order.see_id(message.id, has_tokens=True)
            reading.name_model(message.model)
            reading.use(message.usage)
    elif kind in ("content_block_start", "content_block_delta"):
        reading.recognise(API)
        index = count(small(document.index)) or 0
        if kind == "content_block_start":
            order.block_begins(index)
        else:
            order.block_goes_on(index)
        piece = _piece(document.content_block if kind == "content_block_start" else document.delta)
        if piece is not None and piece.holds_tokens:
            reading.token(now_ns)
    elif kind == "content_block_stop":
        order.block_ends(count(small(document.index)) or 0)
    elif kind == "message_delta":
        reading.recognise(API)
        reading.use(document.usage)
        reading.finish(small_dict(document.delta).get("stop_reason"))
    elif kind == "message_stop":
        reading.has_end = True


def whole(reading: Reading, document: Document) -> None:
    """An answer that is one document."""
    reading.recognise(API)
    reading.order.see_id(document.id, has_tokens=False)
    reading.name_model(document.model)
    reading.use(document.usage)
    reading.finish(small(document.stop_reason))


def _piece(raw: Raw) -> _Piece | None:
    try:
        return _decode_piece(raw) if raw else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
