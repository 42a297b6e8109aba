"""When each step began and ended, kept as long as an open request may still need it.

A token's instant is the end of its step, so this is what runs of steps are unfolded with. Kept by step number in
growing arrays; what no open request reaches back to is forgotten. Invariant: `end_ns` ascends with the step number; a step
that was lost has the instant `LOST`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from engine_probe.recording.step_ring import Steps

LOST: Final = -1
MAX_STEPS: Final = 1 << 20
"""Longest memory, 32 MiB: about 87 minutes of 5 ms steps. A request that is open longer loses its first instants."""


class StepTimes:
    """start_ns, end_ns (monotonic), alloc_ns, sample_ns of steps `base` .. `stop` - 1."""

    def __init__(self) -> None:
        import numpy as np

        self.base = 0
        self.stop = 0
        self._columns = np.full((4, 1 << 12), LOST, dtype=np.int64)

    def extend(self, steps: Steps) -> None:
        """Take drained steps in; those that are missing between them are lost."""
        import numpy as np

        if not len(steps):
            return
        if self.stop == self.base:
            self.base = self.stop = int(steps.step[0])
        self._reserve(int(steps.step[-1]) + 1)
        at = steps.step - self.base
        kept = slice(int(np.searchsorted(at, 0)), None)
        at, index = at[kept], steps.index[kept]
        self._columns[0, at] = steps.start_ns[kept]
        self._columns[1, at] = steps.end_ns[kept]
        for name, which in (("alloc_s", 2), ("sample_s", 3)):
            seconds = steps.rows[name]
            nanoseconds = np.where(seconds >= 0, seconds * 1e9, LOST)
            self._columns[which, at] = nanoseconds.astype(np.int64)[index]

    def forget_before(self, step: int) -> None:
        """Steps before this one are not needed any more."""
        cut = min(step, self.stop) - self.base
        if cut <= 0:
            return
        kept = self.stop - self.base - cut
        self._columns[:, :kept] = self._columns[:, cut : cut + kept]
        self._columns[:, kept : kept + cut] = LOST
        self.base += cut

    def ends(self, first: int, stop: int) -> npt.NDArray[np.int64] | None:
        """End instants of steps first .. stop - 1; None where one of them is lost, forgotten or not there yet."""
        if first < self.base or stop > self.stop:
            return None
        found: npt.NDArray[np.int64] = self._columns[1, first - self.base : stop - self.base]
        return None if (found == LOST).any() else found

    def start(self, step: int) -> int | None:
        """Start instant of a step; None where it is not known."""
        return self._get(0, step)

    def end(self, step: int) -> int | None:
        """End instant of a step; None where it is not known."""
        return self._get(1, step)

    def alloc_ns(self, step: int) -> int | None:
        """Time the step spent on block allocation; None where it is not known."""
        return self._get(2, step)

    def sample_ns(self, step: int) -> int | None:
        """Time the step spent on sampling; None where it is not known."""
        return self._get(3, step)

    def _get(self, which: int, step: int) -> int | None:
        if not self.base <= step < self.stop:
            return None
        value = int(self._columns[which, step - self.base])
        return None if value == LOST else value

    def _reserve(self, stop: int) -> None:
        import numpy as np

        if stop - self.base > MAX_STEPS:
            self.forget_before(stop - MAX_STEPS // 2)
            if self.base == self.stop:
                self.base = self.stop = stop - MAX_STEPS // 2
        size = self._columns.shape[1]
        while stop - self.base > size:
            size *= 2
        if size > self._columns.shape[1]:
            grown = np.full((4, size), LOST, dtype=np.int64)
            grown[:, : self._columns.shape[1]] = self._columns
            self._columns = grown
        self.stop = max(self.stop, stop)
