"""Read queries beside the event loop: few at once, few waiting, so that commits stay quick and a flood gets 429.

Invariant: at most `max_concurrent` run and `max_waiting` wait; the next is refused at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from collector.meters import Meters
from engine_probe.errors import TooManyQueries

P = ParamSpec("P")
T = TypeVar("T")


class Reads:
    """A pool of threads for queries."""

    def __init__(self, name: str, max_concurrent: int, max_waiting: int, meters: Meters) -> None:
        self._pool = ThreadPoolExecutor(max_concurrent, thread_name_prefix=f"kvscope-{name}")
        self._most = max_concurrent + max_waiting
        self._meters = meters
        self._num_here = 0

    async def run(self, route: str, query: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Answer of `query`, run on a thread. Raises TooManyQueries, and what the query raises."""
        if self._num_here >= self._most:
            raise TooManyQueries(
                f"{self._num_here} queries run or wait already; ask again later", retry_after_s=1, limit=self._most
            )
        self._num_here += 1
        started = time.perf_counter()
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, lambda: query(*args, **kwargs))
        finally:
            self._num_here -= 1
            self._meters.queries.labels(route).observe(time.perf_counter() - started)

    def close(self) -> None:
        """Forget what waits; what runs ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)
