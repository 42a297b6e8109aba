"""What goes back to the client, in OpenAI's shapes: whole answers and the chunks of a stream.

Source: OpenAI API reference (completions, chat completions, streaming); what vLLM adds is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Protocol

import msgspec

from engine_probe.engine.server.call import Call, Usage
from engine_probe.engine.server.ticket import Piece

DONE: Final = b"data: [DONE]\n\n"


def event(document: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


def usage_document(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class Answer(Protocol):
    """The shape of one kind of call."""

    def whole(self, texts: list[str], reasons: list[str | None]) -> dict[str, Any]:
        """The answer in one piece, without usage."""

    def chunks(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """The chunks that a piece becomes, none where it has nothing to say; without usage.

        A token whose text is not there yet (half a character, the beginning of a stop string) is a chunk with none, as in
        vLLM: who counts chunks, or waits for the first, sees when it was made.
        """

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk that holds the usage, which is added."""


class CompletionAnswer:
    """`/v1/completions`."""

    def __init__(self, call: Call, model: str) -> None:
        self._head = {
            "id": f"cmpl-{call.request_id}",
            "object": "text_completion",
            "created": call.created,
            "model": model,
        }

    def whole(self, texts: list[str], reasons: list[str | None]) -> dict[str, Any]:
        choices = [_text(index, text, reasons[index]) for index, text in enumerate(texts)]
        return {**self._head, "choices": choices}

    def chunks(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        if piece.num_tokens or piece.text or piece.finish_reason is not None:
            yield {**self._head, "choices": [_text(index, piece.text, piece.finish_reason)]}

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head, "choices": []}


class ChatAnswer:
    """`/v1/chat/completions`. A choice's first chunk tells the role, with its first token."""

    def __init__(self, call: Call, model: str) -> None:
        self._id = f"chatcmpl-{call.request_id}"
        self._created = call.created
        self._model = model
        self._begun: set[int] = set()

    def whole(self, texts: list[str], reasons: list[str | None]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": reasons[index],
            }
            for index, text in enumerate(texts)
        ]
        return {**self._head("chat.completion"), "choices": choices}

    def chunks(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        if index not in self._begun and piece.num_tokens:
            self._begun.add(index)
            yield self._chunk(index, {"role": "assistant", "content": ""}, None)
        elif piece.num_tokens and not piece.text and piece.finish_reason is None:
            yield self._chunk(index, {"content": ""}, None)
        if piece.text:
            yield self._chunk(index, {"content": piece.text}, None)
        if piece.finish_reason is not None:
            yield self._chunk(index, {}, piece.finish_reason)

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head("chat.completion.chunk"), "choices": []}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}


def _text(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
