"""Block bootstrap as counts: how often each request is drawn, so that orders sorted once serve every replicate.

Idea: neighbouring requests share a queue, so they are resampled in blocks of consecutive arrivals (circular: the last
is followed by the first). The block length follows from how long exceedances of a high level stay correlated. Arms with
repeats resample whole repeats instead, the only unit that is independent there.

Invariant: every replicate of a block bootstrap draws exactly n requests; the same seed gives the same counts.
Source: Politis & Romano 1992 (circular blocks); Politis & White 2004 with the 2009 correction (block length).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diagnosis.statistics.quantiles import F64, Counts, Index, allowed_above, rank_order
from engine_probe.errors import DiagnosisError

MIN_BLOCKS = 20  # fewer blocks than this and their spread says nothing about the spread of the whole
LEVEL_EXCEEDANCES = 50  # a correlation read off fewer exceedances is noise
LOWEST_LEVEL = 0.25  # but the level stays in the upper quarter
LONGER = 1.5  # short blocks make intervals too narrow, long ones only make them less steady: lean to the safe side
MAX_BLOCKS = 5000  # more blocks cost time and tell nothing more about the spread
CHUNK_ELEMENTS = 250_000
"""Numbers of replicates that are held at once: so many stay in a cache."""


@dataclass(frozen=True, slots=True)
class Correlation:
    """How long the tail of a series stays correlated, in requests.

    lag     longest distance at which exceedances are still significantly correlated; 0 for none
    block   block length for the bootstrap
    missed  how many times larger the true spread is than the spread between blocks of that length; 1 for none
    """

    lag: int
    block: int
    missed: float = 1.0


def correlation(values: F64, q: str, order: Index | None = None) -> Correlation:
    """Correlation of values [n] in arrival order, looked at where the quantile q is decided.

    Both the exceedances of a level (the quantile itself, or lower until 50 requests exceed it) and the ranks of all
    values are looked at, since the same blocks serve the quantile and the mean; the longer block counts. A block is at
    least 1 and n/5000 requests and at most n/20, so that 20 blocks remain. order spares sorting again.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.size < 4:
        return Correlation(0, 1)
    tail = _memory(high_values(values, q).astype(np.float64))
    longest = max(1, values.size // MIN_BLOCKS)
    if longest == 1:
        return Correlation(tail.lag, 1)
    body = _memory(ranks(values, order))
    wanted = max(values.size // MAX_BLOCKS, *(memory.block_length(values.size) for memory in (tail, body)))
    block = min(longest, wanted)
    return Correlation(tail.lag, block, max(tail.missed(block), body.missed(block)))


def correlation_length(values: F64, q: str) -> int:
    """Block length, in requests in arrival order, that keeps the correlation of the tail inside blocks."""
    return correlation(values, q).block


def high_values(values: F64, q: str) -> npt.NDArray[np.bool_]:
    """The requests whose clustering tells of the tail's: those above q, or more until they are 50 or a quarter, [n]."""
    n = values.size
    return exceedances(values, max(allowed_above(n, q), min(LEVEL_EXCEEDANCES, int(n * LOWEST_LEVEL)), 1))


def exceedances(values: F64, wanted: int) -> npt.NDArray[np.bool_]:
    """Which values [n] are among the `wanted` largest; where equal values straddle that number, all of them count.

    Only when that would be every value do the equal ones not count (unless nothing is larger than they are).
    """
    index = max(values.size - 1 - wanted, 0)
    level = np.partition(values, index)[index]
    above: npt.NDArray[np.bool_] = values > level
    strictly = int(np.count_nonzero(above))
    if strictly >= wanted:
        return above
    reaching: npt.NDArray[np.bool_] = values >= level
    return above if strictly > 0 and reaching.all() else reaching


def ranks(values: F64, order: Index | None = None) -> F64:
    """Ranks of the values, equal ones sharing their middle rank: no outlier hides a correlation, no tie makes one."""
    order = rank_order(values) if order is None else order
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    sizes = np.diff(np.append(starts, values.size))
    out = np.empty(values.size)
    out[order] = np.repeat(starts + (sizes - 1) / 2.0, sizes)
    return out


def block_counts(n: int, block: int, replicates: int, seed: int) -> npt.NDArray[np.uint16]:
    """Circular block bootstrap: [replicates, n] how often each request is drawn; every row sums to n.

    block is in requests, 1 <= block; longer than n means n. Raises DiagnosisError for sizes below 1.
    """
    chunks = list(iter_block_counts(n, block, replicates, seed))
    return np.concatenate(chunks) if chunks else np.empty((0, n), dtype=np.uint16)


def iter_block_counts(n: int, block: int, replicates: int, seed: int) -> Iterator[npt.NDArray[np.uint16]]:
    """The rows of `block_counts` in chunks of bounded memory."""
    for runs in iter_runs(n, block, replicates, seed):
        yield runs.counts()


@dataclass(frozen=True, slots=True)
class Runs:
    """The drawn blocks of some replicates: runs of consecutive requests among n, the last followed by the first.

    starts [rows, blocks], rising but for the last; lengths [blocks], equal but for the last, which is cut so that a row
    draws exactly n requests.
    """

    n: int
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    def rows(self, rows: Index) -> Runs:
        """Some of these replicates."""
        return Runs(self.n, self.starts[rows], self.lengths)

    def counts(self) -> npt.NDArray[np.uint16]:
        """How often each request is drawn, [rows, n]."""
        rows, at_once = len(self), max(1, CHUNK_ELEMENTS // self.n)
        if rows > at_once:  # no more at a time than stay in the cache
            parts = [self.rows(np.arange(i, min(i + at_once, rows))).counts() for i in range(0, rows, at_once)]
            return np.concatenate(parts)
        offset = self.n * np.arange(rows)[:, None]
        covered = np.zeros(rows * self.n, dtype=np.int32)
        np.add.at(covered, (self.starts + offset).ravel(), np.int32(1))
        if self.lengths[0] > 1:
            ends = self.starts + self.lengths
            np.subtract.at(covered, (ends % self.n + offset).ravel(), np.int32(1))
            by_row = covered.reshape(rows, self.n)
            by_row[:, 0] += np.count_nonzero(ends >= self.n, axis=1)  # these runs go on at position 0
            np.cumsum(by_row, axis=1, dtype=np.int32, out=by_row)
        return covered.reshape(rows, self.n).astype(np.uint16)

    def counts_at(self, positions: Index) -> npt.NDArray[np.int64]:
        """`counts` of some positions [m] only, [rows, m]: cheaper where n is large and m is not."""
        by_place = np.argsort(positions)  # a search for rising needles stays in the cache
        rising = positions[by_place]
        found: npt.NDArray[np.int64] = ((rising - self.starts[:, -1:]) % self.n < self.lengths[-1]).astype(np.int64)
        if self.starts.shape[1] > 1:
            before = rising - int(self.lengths[0])  # a run covers p when it starts in (p - length, p], on the circle
            wraps = before < 0
            before = np.where(wraps, before + self.n, before)
            for row, begun in zip(found, self.starts[:, :-1], strict=True):
                row += np.searchsorted(begun, rising, side="right") - np.searchsorted(begun, before, side="right")
                row += wraps * begun.size
        out = np.empty_like(found)
        out[:, by_place] = found
        return out

    def sums(self, through: Counts) -> Counts:
        """Sum of the drawn values in each replicate, [rows]; `through` comes from `twice_through`."""
        length, last = int(self.lengths[0]), self.starts[:, -1]
        if self.starts.size > self.n:  # worth working out for every place where a run may start
            drawn = (through[length : length + self.n] - through[: self.n]).take(self.starts)
        else:
            drawn = through.take(self.starts + length) - through.take(self.starts)
        drawn[:, -1] = through[last + self.lengths[-1]] - through[last]
        return np.asarray(drawn.sum(axis=1))


def twice_through(values: Counts) -> Counts:
    """Cumulative sums of values [n] gone through twice, [2 n + 1]: any circular run's sum is one difference."""
    through = np.zeros(2 * values.size + 1, dtype=np.int32 if values.dtype == np.bool_ else values.dtype)
    np.cumsum(np.concatenate([values, values]), out=through[1:])
    return through


def iter_runs(n: int, block: int, replicates: int, seed: int, at_once: int | None = None) -> Iterator[Runs]:
    """Circular block bootstrap as runs, `at_once` replicates at a time. Raises DiagnosisError for sizes below 1.

    at_once   None: as many as `counts` of takes little memory for; the draws are the same however many
    """
    if n < 1 or block < 1 or replicates < 0:
        raise DiagnosisError(f"a bootstrap of {n} requests in blocks of {block}, {replicates} times, makes no sense")
    block = min(block, n)
    rng = np.random.default_rng(seed)
    num_blocks = -(-n // block)
    lengths = np.full(num_blocks, block, dtype=np.int64)
    lengths[-1] = n - (num_blocks - 1) * block
    at_once = max(1, CHUNK_ELEMENTS // n) if at_once is None else at_once
    for first in range(0, replicates, at_once):
        starts = rng.integers(0, n, size=(min(at_once, replicates - first), num_blocks))
        starts[:, :-1].sort(axis=1)
        yield Runs(n, starts, lengths)


def widen(draws: F64, num_blocks: float, missed: float = 1.0) -> F64:
    """Draws spread about their median by what a bootstrap of few or short blocks cannot show.

    draws [replicates]; num_blocks is how many blocks (or repeats) the smaller window holds: a spread read off few of
    them is too small, as Student's t is to the normal. missed is `Correlation.missed`. Source: Cornish-Fisher expansion
    of the 97.5 % point of t with num_blocks - 1 degrees of freedom, times sqrt(m / (m - 1)).
    """
    if draws.size == 0:
        return draws
    freedom = max(num_blocks - 1.0, 1.0)
    student = 1.959964 + 2.3723 / freedom + 2.8225 / freedom**2 + 2.5559 / freedom**3
    factor = missed * student / 1.959964 * np.sqrt((freedom + 1.0) / freedom)
    centre = float(np.median(draws))
    return np.asarray(centre + factor * (draws - centre), dtype=np.float64)


def repeat_counts(repeat_id: npt.NDArray[np.generic], replicates: int, seed: int) -> npt.NDArray[np.uint16]:
    """Bootstrap of an arm with repeats: whole repeats are drawn with replacement, [replicates, n] counts.

    repeat_id [n] names the repeat of each request. Rows do not sum to n when repeats differ in size.
    Raises DiagnosisError when there are fewer than two repeats: nothing can be learnt about their spread.
    """
    names, member = np.unique(np.asarray(repeat_id), return_inverse=True)
    if names.size < 2:
        raise DiagnosisError(
            f"resampling repeats needs at least two of them, got {names.size}; resample blocks instead"
        )
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, names.size, size=(replicates, names.size)) + names.size * np.arange(replicates)[:, None]
    per_repeat = np.bincount(drawn.ravel(), minlength=replicates * names.size).reshape(replicates, names.size)
    return per_repeat[:, member].astype(np.uint16)


@dataclass(frozen=True, slots=True)
class _Memory:
    """Autocorrelation of a series as far as it is significant: at lags 1 .. 2 lag, tapered by a flat-top window."""

    lag: int
    tapered: F64

    def long_run(self, block: float = np.inf) -> float:
        """Variance of a sum of the series to that of independent values, in full or as blocks show it."""
        seen = np.maximum(1.0 - np.arange(1, self.tapered.size + 1) / block, 0.0)
        return max(1.0 + 2.0 * float((seen * self.tapered).sum()), 1e-3)

    def block_length(self, n: int) -> int:
        """Politis-White block length of the circular bootstrap; 1 when no lag is significantly correlated."""
        spread = 2.0 * float((np.arange(1, self.tapered.size + 1) * self.tapered).sum())
        if spread <= 0.0:
            return 1
        best = (1.5 * (spread / self.long_run()) ** 2 * n) ** (1.0 / 3.0)  # least squared error of the spread
        return int(np.ceil(LONGER * best))

    def missed(self, block: int) -> float:
        """How many times larger the full spread is than the one between blocks; from 1 to 2."""
        return float(np.sqrt(min(max(self.long_run() / self.long_run(block), 1.0), 4.0)))


def _memory(series: F64) -> _Memory:
    rho = _autocorrelation(series)
    lag = _significant_lag(rho, series.size)
    lags = np.arange(1, min(2 * lag, rho.size - 1) + 1)
    taper = np.clip(2.0 * (1.0 - lags / (2.0 * lag + 1.0)), 0.0, 1.0)
    return _Memory(lag, taper * rho[lags])


def _autocorrelation(series: F64) -> F64:
    """Sample autocorrelation at lags 0 .. n/10 (at least 20 where there are as many); zeros for a constant series."""
    n = series.size
    lags = min(n - 1, max(n // 10, 20))
    centred = series - series.mean()
    size = 1 << (n + lags).bit_length()
    spectrum = np.fft.rfft(centred, size)
    covariance = np.fft.irfft(spectrum * np.conj(spectrum), size)[: lags + 1]
    variance = covariance[0]
    if variance <= 1e-12 * max(float((series * series).sum()), 1e-300):
        return np.concatenate([np.ones(1), np.zeros(lags)])
    return np.asarray(covariance / variance, dtype=np.float64)


def _significant_lag(rho: F64, n: int) -> int:
    """Smallest lag after which five lags in a row stay inside the noise band (Politis & White 2004, section 3.2)."""
    band = 2.0 * np.sqrt(np.log10(max(n, 10)) / n)
    quiet_run = max(5, int(np.ceil(np.sqrt(np.log10(max(n, 10))))))
    loud = np.concatenate([np.abs(rho[1:]) >= band, np.zeros(quiet_run, dtype=bool)])
    loud_so_far = np.concatenate([[0], np.cumsum(loud)])
    quiet = loud_so_far[quiet_run:] == loud_so_far[:-quiet_run]
    return int(np.argmax(quiet))
