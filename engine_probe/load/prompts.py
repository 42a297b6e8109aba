"""Prompts that share what their calls share: a block's name decides its text, so equal blocks are equal text.

Words are short and common, so most tokenizers make one token of each; how many a token takes with this one is measured once
(`words_per_token`). Token ids are exact wherever the endpoint takes them. Content means nothing and quotes nobody.
Invariant: two calls have the same beginning exactly as far as their blocks are the same; a salt in front ends all sharing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from engine_probe.engine.traffic.call import Call, mixed
from engine_probe.errors import UsageError

KINDS = ("words", "tokens", "chat")
WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
    "father",
    "power",
    "hour",
    "game",
    "line",
    "end",
    "member",
    "law",
    "car",
    "city",
    "community",
    "name",
    "president",
    "team",
    "minute",
    "idea",
    "kid",
    "body",
    "information",
    "back",
    "parent",
    "face",
]
FIRST_ID = 100
"""Lower ids are often special tokens."""
SALT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class PromptWriter:
    """kind: words (a completion's text), tokens (ids below `vocab`), chat (one user message of words)."""

    kind: str = "words"
    vocab: int = 1000
    block_size: int = 16
    words_per_token: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"--prompt is {self.kind!r}; known: {', '.join(KINDS)}")
        if self.kind == "tokens" and self.vocab <= FIRST_ID + 1:
            raise UsageError(f"--vocab is {self.vocab}; expected above {FIRST_ID + 1}: ids from {FIRST_ID} on are used")

    def body(self, call: Call, salt: str = "") -> dict[str, Any]:
        """The fields of a request that hold the prompt. salt: what stands in front, so that nothing before it is shared."""
        if self.kind == "tokens":
            return {"prompt": self._ids(call, salt)}
        text = self._text(call, salt)
        return {"messages": [{"role": "user", "content": text}]} if self.kind == "chat" else {"prompt": text}

    def _names(self, call: Call) -> list[tuple[int, int]]:
        """(name, tokens) of each stretch of the prompt: its full blocks, and the rest, which is the call's own."""
        names = [(int(name), self.block_size) for name in call.blocks]
        rest = call.prompt_tokens - len(names) * self.block_size
        own = mixed(int.from_bytes(call.request_id.encode()[-8:], "little"))
        return [*names, (own, rest)] if rest > 0 else names

    def _text(self, call: Call, salt: str) -> str:
        words = [salt] if salt else []
        for name, tokens in self._names(call):
            words += random.Random(name).choices(WORDS, k=max(1, round(tokens * self.words_per_token)))
        return " ".join(words)

    def _ids(self, call: Call, salt: str) -> list[int]:
        ids = random.Random(salt).choices(range(FIRST_ID, self.vocab), k=SALT_TOKENS) if salt else []
        for name, tokens in self._names(call):
            ids += random.Random(name).choices(range(FIRST_ID, self.vocab), k=tokens)
        return ids
