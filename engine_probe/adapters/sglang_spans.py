"""SGLang's root span of a request, told apart from an application's span by its module, and what only it tells.

Its time in prefill runs from the hand-over to the scheduler to the first token, so the queue lies inside it and neither
is known; what lies before is `frontend_s`. Stage spans below the root are not read. Source: reference 5.6; SGLang
0.5.23 `observability/trace.py`, `observability/req_time_stats.py`, `managers/tokenizer_manager.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

ENGINE: Final = "sglang"
MODULE: Final = "module"
_TTFT: Final = "gen_ai.latency.time_to_first_token"
_FROM_DISPATCH: Final = "gen_ai.latency.time_in_model_prefill"
_DECODE: Final = "gen_ai.latency.time_in_model_decode"
_CACHED: Final = "gen_ai.usage.cached_tokens"
_PROMPT: Final = "gen_ai.usage.prompt_tokens"
_FINISH: Final = "gen_ai.response.finish_reasons"
WANTED: Final = frozenset((MODULE, _TTFT, _FROM_DISPATCH, _DECODE, _CACHED, _PROMPT, _FINISH))


def is_root(attributes: Mapping[str, Any]) -> bool:
    """Whether SGLang itself made the span for one request (`sglang::request`)."""
    module = attributes.get(MODULE)
    return isinstance(module, str) and module.startswith("sglang::")


def columns(attributes: Mapping[str, Any], arrival_ns: int) -> dict[str, Any]:
    """`request` columns beyond those of the GenAI conventions; unknown ones are absent."""
    first, dispatched, decode = (_seconds(attributes.get(name)) for name in (_TTFT, _FROM_DISPATCH, _DECODE))
    prompt, cached = _count(attributes.get(_PROMPT)), _count(attributes.get(_CACHED))
    reason = _reason(attributes.get(_FINISH))
    found = {
        "engine": ENGINE,
        "frontend_s": None if first is None or dispatched is None else max(first - dispatched, 0.0),
        "decode_s": decode,
        "last_token_ns": None if first is None or decode is None else arrival_ns + round((first + decode) * 1e9),
        "cached_tokens": cached,
        "computed_tokens": prompt - cached if prompt is not None and cached is not None and cached <= prompt else None,
        "finish_reason": reason,
        "state": "aborted" if reason == "abort" else None,
    }
    return {key: value for key, value in found.items() if value is not None}


def _reason(text: Any) -> str | None:
    """SGLang writes the list as JSON text: `["length"]`."""
    try:
        found = msgspec.json.decode(text, type=list[str]) if isinstance(text, str) else []
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return found[0] if found else None


def _seconds(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 <= value < 2_678_400 else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 62 else None
