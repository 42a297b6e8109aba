"""Bodies of requests, decoded and checked before anything is made of them.

Raises BadRequest (no JSON), PromptRefused (JSON that asks for what cannot be; its `field` names what is wrong).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from engine_probe.engine.server.fields import acted_on
from engine_probe.errors import BadRequest, PromptRefused

MOST_CHOICES: Final = 128
MOST_PROMPTS: Final = 2048
MOST_SEQUENCES: Final = 4096
"""Of one call, prompts times choices: each is a request of its own to the engine, made before the first is submitted."""
_I64: Final = (1 << 63) - 1

TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Stops = Annotated[list[Annotated[str, Meta(min_length=1, max_length=1000)]], Meta(max_length=64)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """include_usage: a last chunk with the usage; continuous_usage_stats: the usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What completions and chat have in common. priority: as in vLLM, a smaller number goes first."""

    model: str | None = None
    max_tokens: Annotated[int, Meta(le=(1 << 31) - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: float | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    seed: Annotated[int, Meta(ge=-_I64 - 1, le=_I64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[str, Meta(max_length=1000)] | Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    user: Annotated[str, Meta(max_length=1000)] | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1000)] | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    add_special_tokens: bool | None = None

    @property
    def stops(self) -> list[str]:
        """Stop strings."""
        found = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [one for one in found if one]

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def counts_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerateRequest, frozen=True, kw_only=True):
    """prompt: a text, texts, token ids, or several lists of them."""

    prompt: str | list[Any] | None = None

    def prompts(self) -> list[str] | list[list[int]]:
        """One or more. Raises PromptRefused."""
        prompt = self.prompt
        if prompt is None:
            raise PromptRefused("a completion needs a prompt", field="prompt")
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise PromptRefused("the prompt is an empty list; give a text or token ids", field="prompt")
        if all(type(one) is int for one in prompt):
            return [prompt]
        if len(prompt) > MOST_PROMPTS:
            raise PromptRefused(f"{len(prompt)} prompts in one call; at most {MOST_PROMPTS}", field="prompt")
        if len(prompt) * (self.n or 1) > MOST_SEQUENCES:
            raise PromptRefused(
                f"{len(prompt)} prompts with {self.n} choices each are {len(prompt) * (self.n or 1)} sequences in one call; at "
                f"most {MOST_SEQUENCES}",
                field="n",
            )
        is_text = all(isinstance(one, str) for one in prompt)
        if is_text or all(isinstance(one, list) and all(type(token) is int for token in one) for one in prompt):
            return prompt
        raise PromptRefused(
            "the prompt is none of: a text, a list of texts, a list of token ids, a list of such lists", field="prompt"
        )


class ChatRequest(GenerateRequest, frozen=True, kw_only=True):
    """messages: as the chat template takes them; max_completion_tokens: the newer name of max_tokens."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Annotated[int, Meta(le=(1 << 31) - 1)] | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """tokens: ids of the model's vocabulary."""

    tokens: list[TokenId]
    model: str | None = None


R = TypeVar("R", GenerateRequest, CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)


def parse(body: bytes, into: type[R]) -> R:
    """The request of a body. Raises BadRequest, PromptRefused."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise BadRequest(f"the body is a JSON {type(document).__name__}; expected an object")
    own = frozenset(into.__struct_fields__)
    try:
        return msgspec.convert(acted_on(document, own), into)
    except (msgspec.ValidationError, RecursionError) as error:
        message, _, at = str(error).partition(" - at ")
        named = re.search(r"\$\.(\w+)", at) or re.search(r"field `(\w+)`", message)
        field = named[1] if named else None
        raise PromptRefused(f"{field or 'the body'}: {message[0].lower()}{message[1:]}", field=field) from error
