"""What is looked at in one JSON document of an answer, whatever its API: a chunk of a stream, or the whole of it.

Content is never decoded: it stays a slice of the wire's bytes (`Raw`) whose only question is whether it is empty, and goes with
the chunk. One decoder serves all APIs, since which one speaks shows only in the document. A field of an unexpected
type costs that field, not the document.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Raw

NOTHING: Final = frozenset((b"", b'""', b"null", b"[]", b"{}"))
"""What a piece of content looks like that holds no token."""
MAX_SMALL_BYTES: Final = 8192

_NONE = Raw(b"")


def holds(raw: Raw | bytes) -> bool:
    """Whether there is anything in this piece of an answer: not absent, not null, not an empty text, list or object."""
    length = len(raw)
    return length > 4 or (length > 0 and bytes(raw) not in NOTHING)


class Delta(msgspec.Struct):
    """What a chunk of a chat adds."""

    content: Raw = _NONE
    reasoning_content: Raw = _NONE
    reasoning: Raw = _NONE
    tool_calls: Raw = _NONE
    function_call: Raw = _NONE
    refusal: Raw = _NONE
    audio: Raw = _NONE

    @property
    def holds_tokens(self) -> bool:
        """Text, reasoning, a tool call, a refusal or sound."""
        return (
            holds(self.content)
            or holds(self.reasoning_content)
            or holds(self.tool_calls)
            or holds(self.reasoning)
            or holds(self.function_call)
            or holds(self.refusal)
            or holds(self.audio)
        )


class Choice(msgspec.Struct):
    """One of the answers of a chat or a completion."""

    index: int | None = None
    delta: Delta | None = None
    message: Delta | None = None
    text: Raw = _NONE
    finish_reason: Raw = _NONE
    logprobs: Raw = _NONE
    token_ids: Raw = _NONE


class Document(msgspec.Struct):
    """All that is looked at of any API."""

    id: str | None = None
    object: str | None = None
    type: str | None = None
    model: str | None = None
    choices: list[Choice] | None = None
    usage: Raw = _NONE
    timings: Raw = _NONE
    metrics: Raw = _NONE
    error: Raw = _NONE
    status: Raw = _NONE
    sequence_number: int | None = None
    index: Raw = _NONE
    delta: Raw = _NONE
    message: Raw = _NONE
    content_block: Raw = _NONE
    content: Raw = _NONE
    stop_reason: Raw = _NONE
    response: Raw = _NONE
    item: Raw = _NONE
    item_id: str | None = None
    incomplete_details: Raw = _NONE
    text: Raw = _NONE
    meta_info: Raw = _NONE
    token: Raw = _NONE
    details: Raw = _NONE
    generated_text: Raw = _NONE
    stop: Raw = _NONE
    stop_type: Raw = _NONE
    tokens: Raw = _NONE
    tokens_predicted: Raw = _NONE
    tokens_evaluated: Raw = _NONE
    truncated: Raw = _NONE


_decode = msgspec.json.Decoder(Document).decode
_decode_parts = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_any = msgspec.json.Decoder().decode


def read(data: Raw | bytes) -> Document | None:
    """The document, or None where the bytes are no JSON object."""
    try:
        return _decode(data)
    except msgspec.ValidationError:
        return _salvage(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def small(raw: Raw | bytes) -> Any:
    """A small value decoded whole; None where it is absent, large or no JSON."""
    if not raw or len(raw) > MAX_SMALL_BYTES:
        return None
    try:
        return _decode_any(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def small_dict(raw: Raw | bytes) -> dict[str, Any]:
    """A small object decoded whole; empty where it is anything else."""
    value = small(raw)
    return value if isinstance(value, dict) else {}


def count(value: Any) -> int | None:
    """A number of tokens, of milliseconds, of anything that is counted: a whole number from 0; None for all else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 0 <= value < 1 << 53 and value == int(value) else None


def _salvage(data: Raw | bytes) -> Document | None:
    try:
        parts = _decode_parts(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    document = Document()
    for field in msgspec.structs.fields(Document):
        raw = parts.get(field.name)
        if raw is not None:
            try:
                setattr(document, field.name, msgspec.json.decode(raw, type=field.type))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
    return document
