"""What stands before the engines: a pool of threads that parse and tokenize, one call a thread at a time."""

from __future__ import annotations

from heapq import heapify, heapreplace

from engine_probe.engine.traffic.call import Call
from engine_probe.errors import UsageError


class ThreadPoolFrontEnd:
    """Calls wait for one of `threads`, first come first served (FrontEnd).

    fixed_s, token_s   work of a call: parsing, and each prompt token
    """

    def __init__(self, threads: int = 8, *, fixed_s: float = 0.002, token_s: float = 0.5e-6) -> None:
        if threads < 1:
            raise UsageError(f"a front end of {threads} threads answers nobody; give 1 or more")
        if not (0 <= fixed_s < float("inf") and 0 <= token_s < float("inf")):
            raise UsageError(f"fixed_s is {fixed_s}, token_s {token_s}; expected 0 or more")
        self._free_s = [0.0] * threads
        heapify(self._free_s)
        self._fixed_s = fixed_s
        self._token_s = token_s

    def delay_s(self, call: Call, now_ns: int) -> float:
        """Waiting for a thread, and its work."""
        now_s = now_ns / 1e9
        end_s = max(now_s, self._free_s[0]) + self._fixed_s + call.prompt_tokens * self._token_s
        heapreplace(self._free_s, end_s)
        return end_s - now_s
