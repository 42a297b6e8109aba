"""Work on two threads at once: large arrays and the store let go of the interpreter lock, so two cores are used.

Invariant: results do not depend on which thread is first; an exception is that of the first work in order. What is set for the caller
(`contextvars`: who listens to a calibration) is set for its threads. A process that has a core to itself, among others that have theirs,
says so (`alone`), and everything is done in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")

THREADS = 2
"""What the store and large arrays gain by: more wait for memory."""


class _Threads(ThreadPoolExecutor):
    """Threads that see what their caller sees."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return super().submit(partial(copy_context().run, fn, *args, **kwargs))


class _InTurn(Executor):
    """Work is done when it is handed in, on the caller's own thread."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        done: Future[T] = Future()
        try:
            done.set_result(copy_context().run(fn, *args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done


_is_alone = False


def alone() -> None:
    """From now on this process works on one thread: others of its kind have the other cores."""
    global _is_alone
    _is_alone = True


@contextmanager
def beside() -> Iterator[Executor]:
    """One more thread, for work that goes on beside the caller's."""
    with _pool(1) as pool:
        yield pool


def both(first: Callable[[], T], second: Callable[[], S]) -> tuple[T, S]:
    """The results of two pieces of work that do not depend on each other."""
    with beside() as pool:
        other: Future[S] = pool.submit(second)
        return first(), other.result()


def each(work: Callable[..., T], *arguments: Iterable[object]) -> list[T]:
    """`work` of each row of arguments, in order, on two threads."""
    with _pool(THREADS) as pool:
        return list(pool.map(work, *arguments))


def _pool(threads: int) -> Executor:
    return _InTurn() if _is_alone else _Threads(threads)
