"""Requests of the messages and the responses API as the chat that an engine makes of them, so that its tokenizer can be asked.

Only what every engine turns into the same chat: instructions, and messages of one text each. Tools, images, earlier answers
by id and several parts are turned differently by each engine: then `None`, never a guess. Whoever uses it compares the
number of tokens with what the engine counted. Source: vLLM 0.32 `entrypoints/anthropic/serving.py`,
`entrypoints/openai/responses/utils.py`; llama.cpp `convert_anthropic_to_oai`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

PATHS: Final = (b"/messages", b"/responses")
_TEXTS: Final = frozenset(("text", "input_text", "output_text"))
_ROLES: Final = frozenset(("system", "developer", "user", "assistant"))
_ELSEWHERE: Final = ("tools", "previous_response_id", "conversation", "prompt", "thinking", "reasoning")
"""Each of them adds tokens in ways of the engine's own."""

Chat = list[dict[str, str]]


def chat_of(path: bytes, asked: Mapping[str, Any]) -> Chat | None:
    """Messages with role and text; None where the request holds more, or is none of these."""
    if any(asked.get(name) not in (None, [], {}) for name in _ELSEWHERE):
        return None
    if path.endswith(b"/messages"):
        first, rest = asked.get("system"), asked.get("messages")
    else:
        first, rest = asked.get("instructions"), asked.get("input")
        if isinstance(rest, str):
            rest = [{"role": "user", "content": rest}]
    if not isinstance(rest, list) or not rest:
        return None
    told = [] if first is None else [{"role": "system", "content": first}]
    chat = [_message(one) for one in (*told, *rest)]
    return None if any(one is None for one in chat) else [one for one in chat if one is not None]


def _message(message: Any) -> dict[str, str] | None:
    if not isinstance(message, dict) or message.get("type", "message") != "message":
        return None
    role, text = message.get("role"), _text(message.get("content"))
    return {"role": role, "content": text} if text is not None and role in _ROLES else None


def _text(content: Any) -> str | None:
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        content = content[0].get("text") if content[0].get("type") in _TEXTS else None
    return content if isinstance(content, str) else None
