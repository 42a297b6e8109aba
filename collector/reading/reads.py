"""Read queries beside the event loop: few at once, few waiting, so that commits stay quick and a flood gets 429.

Invariant: at most `max_concurrent` run and `max_waiting` wait; the next is refused at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from collector.live.meters import Meters
from engine_probe.errors import NotReady, TooManyQueries

P = ParamSpec("P")
T = TypeVar("T")


class Reads:
    """A pool of threads for queries."""

    def __init__(self, name: str, max_concurrent: int, max_waiting: int, meters: Meters) -> None:
        self._pool = ThreadPoolExecutor(max_concurrent, thread_name_prefix=f"kvscope-{name}")
        self._most = max_concurrent + max_waiting
        self._meters = meters
        self._num_here = 0
        self._is_closed = False

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

    def wait_for(self, route: str, query: Callable[[], T]) -> T:
        """Answer of `query`, for a thread of ours that waits in line behind what was asked before. Raises NotReady once closed."""
        started = time.perf_counter()
        try:
            return self._pool.submit(query).result()
        except (CancelledError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not self._is_closed:
                raise
            raise NotReady("the collector stops; nothing is judged any more") from error
        finally:
            self._meters.queries.labels(route).observe(time.perf_counter() - started)

    def close(self) -> None:
        """Forget what waits; what runs ends by itself."""
        self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
