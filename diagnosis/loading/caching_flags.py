"""Whether prefix caching is on, by an engine's own flags: for workers whose rows tell those and not the column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

ON: Final = frozenset({"enable_prefix_caching", "cache_prompt", "enable_block_reuse"})
OFF: Final = frozenset({"no_enable_prefix_caching", "disable_radix_cache", "no_cache_prompt"})
"""Names of vLLM, llama.cpp and TensorRT-LLM, of vLLM, SGLang and llama.cpp."""
WORDS: Final = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def caching_by_flags(flags: Mapping[str, str]) -> bool | None:
    """None where no flag tells, or its value is no truth value; a command line's spelling (`--no-enable-prefix-caching`) counts too."""
    for flag, value in flags.items():
        name, told = flag.lstrip("-").replace("-", "_"), WORDS.get(value.strip().lower())
        if told is not None and name in ON | OFF:
            return told == (name in ON)
    return None
