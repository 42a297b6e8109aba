"""Fields of OpenAI's and vLLM's requests that this engine does not act on: refused where they would change the answer.

A field of `NEUTRAL` passes with the values at which it changes nothing; with another it is refused by name, so that nobody
measures an answer that was not the one asked for. Fields of `WITHOUT_EFFECT` are about book-keeping elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from engine_probe.errors import PromptRefused

_OFF: Final[tuple[Any, ...]] = (None, False)
_NONE: Final[tuple[Any, ...]] = (None, [], {})
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "add_generation_prompt": (None, True),
    "allowed_token_ids": _NONE,
    "audio": (None,),
    "bad_words": _NONE,
    "best_of": (None, 1),
    "chat_template": (None,),
    "chat_template_kwargs": _NONE,
    "continue_final_message": _OFF,
    "documents": _NONE,
    "early_stopping": _OFF,
    "echo": _OFF,
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": _NONE,
    "guided_choice": _NONE,
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "kv_transfer_params": (None,),
    "length_penalty": (None, 1),
    "logit_bias": _NONE,
    "logits_processors": _NONE,
    "logprobs": _OFF,
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, False, True),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "reasoning_effort": (None, "none"),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "return_token_ids": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, False, True),
    "structured_outputs": _NONE,
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": _NONE,
    "top_k": (None, 0, -1),
    "top_logprobs": (None, 0),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": _OFF,
    "vllm_xargs": _NONE,
    "web_search_options": (None,),
}
WITHOUT_EFFECT: Final = frozenset(
    (
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "verbosity",
    )
)


def acted_on(document: Mapping[str, Any], own: frozenset[str]) -> dict[str, Any]:
    """The fields of `document` that are in `own`. Raises PromptRefused naming any other that is not neutral."""
    found = {}
    for name, value in document.items():
        if name in own:
            found[name] = value
        elif name in NEUTRAL:
            if not any(_is_same(value, neutral) for neutral in NEUTRAL[name]):
                raise PromptRefused(
                    f"{name} is {msgspec.json.encode(value).decode()[:100]}: this engine does not do that; leave it out",
                    field=name,
                )
        elif name not in WITHOUT_EFFECT:
            raise PromptRefused(f"no field '{name[:100]}' is known here; leave it out", field=name[:100])
    return found


def _is_same(value: Any, neutral: Any) -> bool:
    """Equal, where a number is no truth value: `logprobs: 0` asks for something, `false` does not."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
