"""Work on two threads at once: large arrays and the store let go of the interpreter lock, so two cores are used.

Invariant: results do not depend on which thread is first; an exception is that of the first work in order. What is set for the caller
(`contextvars`: who listens to a calibration) is set for its threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")

THREADS = 2
"""What the store and large arrays gain by: more wait for memory."""


class _Threads(ThreadPoolExecutor):
    """Threads that see what their caller sees."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return super().submit(copy_context().run, fn, *args, **kwargs)


@contextmanager
def beside() -> Iterator[ThreadPoolExecutor]:
    """One more thread, for work that goes on beside the caller's."""
    with _Threads(1) as pool:
        yield pool


def both(first: Callable[[], T], second: Callable[[], S]) -> tuple[T, S]:
    """The results of two pieces of work that do not depend on each other."""
    with beside() as pool:
        other: Future[S] = pool.submit(second)
        return first(), other.result()


def each(work: Callable[..., T], *arguments: Iterable[object]) -> list[T]:
    """`work` of each row of arguments, in order, on two threads."""
    with _Threads(THREADS) as pool:
        return list(pool.map(work, *arguments))
