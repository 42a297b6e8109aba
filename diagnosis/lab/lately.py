"""What was worked out lately is not worked out again: runs that share a scene or a baseline share what comes of it.

Keys are compared and not hashed, since a scene holds what has no hash. Invariant: a key finds what was made of an equal one.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import eq
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Lately(Generic[K, V]):
    """The `size` values that were asked for last. same: when two keys are one; whoever keys by identity gives `operator.is_`."""

    def __init__(self, size: int, same: Callable[[K, K], bool] = eq) -> None:
        self._size = size
        self._same = same
        self._kept: list[tuple[K, V]] = []

    def of(self, key: K, make: Callable[[], V]) -> V:
        """The value of this key; `make` where it was not asked for lately."""
        for at, (known, value) in enumerate(self._kept):
            if self._same(known, key):
                self._kept.append(self._kept.pop(at))
                return value
        value = make()
        self._kept.append((key, value))
        del self._kept[: -self._size]
        return value

    def clear(self) -> None:
        """Everything is worked out anew."""
        self._kept.clear()
