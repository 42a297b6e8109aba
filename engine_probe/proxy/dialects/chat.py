"""OpenAI chat completions and completions, as OpenAI, vLLM, SGLang, llama.cpp, TGI, TensorRT-LLM and gateways speak them."""

from __future__ import annotations

from typing import Any

from engine_probe.proxy.pattern import learn
from engine_probe.proxy.reading import Reading
from engine_probe.proxy.shapes import Choice, Document, holds, small, small_dict

_CHAT, _COMPLETIONS = "chat", "completions"


def chunk(reading: Reading, document: Document, data: bytes, now_ns: int) -> None:
    """One event: tokens of any of its choices, their ends, usage where it is told. data: its bytes."""
    order = reading.order
    choices = document.choices or []
    held = [choice for choice in choices if _holds_tokens(choice)]
    has_tokens = bool(held)
    order.see_id(document.id, has_tokens=has_tokens)
    order.see_model(document.model, has_tokens=has_tokens)
    if not reading.is_recognised:
        reading.recognise(_api(choices))
        reading.name_model(document.model)
    elif reading.model is None:
        reading.name_model(document.model)
    gained: int | None = None
    # Running counts are of the one choice that a chunk holds; without a choice they are the sum of all.
    only = (choices[0].index or 0) if len(choices) == 1 else None
    if holds(document.usage):
        usage = reading.use(document.usage)
        if only is not None:
            gained = reading.gained("usage", only, usage.get("completion_tokens"))
    if holds(document.timings):
        timings = reading.time(document.timings)
        if only is not None:
            gained = reading.gained("timings", only, timings.get("predicted_n"))
    if holds(document.metrics):
        reading.measure(document.metrics)
    told: int | None = None
    for choice in held:
        index = choice.index or 0
        order.choice_tokens(index)
        told = _told(choice)
        if told is None and len(held) == 1:
            told = gained or None
        reading.token(now_ns, index, told)
    for choice in choices:
        if holds(choice.finish_reason):
            _finish(reading, choice)
            order.choice_end(choice.index or 0)
    # A plain chunk of text is what the next one will look like, but for the text.
    is_plain = len(choices) == 1 and has_tokens and told is None and not holds(choices[0].finish_reason)
    is_plain = is_plain and not holds(document.usage) and reading.tokens.follows(choices[0].index or 0)
    reading.pattern = learn(data) if is_plain else None


def whole(reading: Reading, document: Document) -> None:
    """An answer that is one document."""
    choices = document.choices or ()
    reading.recognise(_api(choices))
    reading.order.see_id(document.id, has_tokens=False)
    reading.name_model(document.model)
    reading.use(document.usage)
    reading.time(document.timings)
    reading.measure(document.metrics)
    for choice in choices:
        _finish(reading, choice)


def _api(choices: Any) -> str:
    is_text = any(choice.delta is None and choice.message is None and choice.text for choice in choices)
    return _COMPLETIONS if is_text else _CHAT


def _holds_tokens(choice: Choice) -> bool:
    delta = choice.delta
    if delta is not None and delta.holds_tokens:
        return True
    return holds(choice.text) or holds(choice.token_ids)


def _told(choice: Choice) -> int | None:
    """Tokens of the chunk as it says itself: ids, or one log probability a token."""
    if holds(choice.token_ids):
        ids = small(choice.token_ids)
        if isinstance(ids, list):
            return len(ids)
    if holds(choice.logprobs):
        told = small_dict(choice.logprobs)
        for key in ("content", "tokens"):
            if isinstance(told.get(key), list) and told[key]:
                return len(told[key])
    return None


def _finish(reading: Reading, choice: Choice) -> None:
    reading.finish(small(choice.finish_reason), choice.index or 0)
