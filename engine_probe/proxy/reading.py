"""What one answer said of itself while it streamed by: ids, token instants, usage, how it ended. No content.

The dialects fill it, `rows.py` turns it into a row. Words from the wire are kept only where they look like identifiers, since
an error's text, or a field used in ways we do not know, may quote a prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Raw

from engine_probe.adapters.llamacpp import ENGINE as LLAMA
from engine_probe.adapters.llamacpp import model_name, timings_columns
from engine_probe.proxy.order import Order
from engine_probe.proxy.pattern import Pattern
from engine_probe.proxy.shapes import count, holds, small, small_dict
from engine_probe.proxy.tokens import TokenLog
from engine_probe.proxy.usage import metrics_columns, usage_columns

_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@+\-]{0,199}\Z")

FINISH_REASONS: Final[Mapping[str, str]] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "word": "stop",
    "completed": "stop",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "limit": "length",
    "tool_use": "tool_calls",
    "cancelled": "abort",
}
"""Other APIs' words -> the contract's."""


def identifier(value: object, limit: int = 200) -> str | None:
    """A word from the wire that may be kept: letters, digits and `_.:/@+-`, of bounded length; None for all else."""
    if isinstance(value, str) and len(value) <= limit and _IDENTIFIER.match(value):
        return value
    return None


class Reading:
    """The state of one answer. `order` checks that its pieces belong to it."""

    __slots__ = (
        "_running",
        "api",
        "columns",
        "engine",
        "error",
        "finish_reasons",
        "has_end",
        "is_recognised",
        "model",
        "num_unreadable",
        "order",
        "pattern",
        "tokens",
    )

    def __init__(self, order: Order) -> None:
        self.order = order
        self.tokens = TokenLog()
        self.pattern: Pattern | None = None
        self.api: str | None = None
        self.engine: str | None = None
        self.model: str | None = None
        self.columns: dict[str, Any] = {}
        self.finish_reasons: dict[int, str] = {}
        self.error: str | None = None
        self.is_recognised = False
        self.has_end = False
        self.num_unreadable = 0
        self._running: dict[tuple[str, int], int] = {}

    @property
    def answer_id(self) -> str | None:
        """The id that the answer gives itself."""
        return identifier(self.order.answer_id)

    @property
    def finish_reason(self) -> str | None:
        """Of the first choice that has one."""
        return next((self.finish_reasons[index] for index in sorted(self.finish_reasons)), None)

    def recognise(self, api: str) -> None:
        """The document is of this API."""
        self.is_recognised = True
        if self.api is None:
            self.api = api

    def name_model(self, model: str | None) -> None:
        if self.model is None and model is not None:
            self.model = identifier(model_name(model))

    def token(self, now_ns: int, choice: int = 0, tokens: int | None = None) -> None:
        """A chunk with tokens came. tokens: how many it holds, where it says so."""
        self.tokens.add(now_ns, choice, tokens)

    def gained(self, what: str, choice: int, total: object) -> int | None:
        """Tokens since this count ran last; None where there is none. A count that falls is out of order."""
        now = count(total)
        if now is None or len(self._running) > 1024:
            return None
        before = self._running.get((what, choice))
        self._running[what, choice] = now
        if before is not None and now < before:
            self.order.found("position", f"a running token count falls from {before} to {now}")
            return None
        return now - (before or 0)

    def use(self, raw: Raw | bytes) -> Mapping[str, Any]:
        """A usage object: later ones complete earlier ones."""
        usage = small_dict(raw)
        if usage:
            self.columns.update(usage_columns(usage))
        return usage

    def time(self, raw: Raw | bytes) -> Mapping[str, Any]:
        """llama.cpp's timings."""
        timings = small_dict(raw)
        if timings:
            self.engine = LLAMA
            self.columns.update(timings_columns(timings))
        return timings

    def measure(self, raw: Raw | bytes) -> None:
        """vLLM's metrics."""
        metrics = small_dict(raw)
        if metrics:
            self.columns.update(metrics_columns(metrics))

    def finish(self, reason: object, choice: int = 0) -> None:
        """This choice ended."""
        if isinstance(reason, dict):
            reason = reason.get("type")
        word = identifier(reason, 64)
        if word is not None:
            self.finish_reasons[choice] = FINISH_REASONS.get(word, word)

    def fail(self, raw: Raw | bytes) -> None:
        """An error inside the answer: its type and code are kept, its text is not."""
        if not holds(raw):
            return
        told = small(raw)
        words = [told.get(key) for key in ("type", "code", "status")] if isinstance(told, dict) else []
        kept = [str(word) if isinstance(word, int) else identifier(word, 64) for word in words]
        self.error = " ".join(dict.fromkeys(word for word in kept if word and word != "error")) or "error"
