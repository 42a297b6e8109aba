"""Work on two threads at once: large arrays and the store let go of the interpreter lock, so two cores are used.

Invariant: results do not depend on which thread is first; an exception is that of the first work in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")

THREADS = 2


@contextmanager
def beside() -> Iterator[ThreadPoolExecutor]:
    """One more thread, for work that goes on beside the caller's."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def both(first: Callable[[], T], second: Callable[[], S]) -> tuple[T, S]:
    """The results of two pieces of work that do not depend on each other."""
    with beside() as pool:
        other: Future[S] = pool.submit(second)
        return first(), other.result()


def each(work: Callable[..., T], *arguments: Iterable[object]) -> list[T]:
    """`work` of each row of arguments, in order, on two threads."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, *arguments))
