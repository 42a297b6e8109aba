"""Latencies of live requests by worker and model, from committed rows: histograms since the start, and recent minutes.

A request's durations are those of `durations.py`. Rows of an imported run are history and stay out. The engine's
vantage is shown where a model has it, else the client's; the router's is never mixed in. A request that several rows tell
(plugin and spans, a batch sent twice) counts once, with what any of them knows (`told.py`). A row of a sample counts as the
many requests that it stands for, so rates over these counters hold whatever the sampling rate was, or became. Invariant: at most
`max_series` worker and model pairs have their own series; later ones share `other`, so that a client that invents names
cannot fill the memory.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from collector.durations import Flags, one_array, tallies_of, weights_of
from collector.sketches import Counts, Floats, Tallies
from collector.told import Bits, Told, bit, knows

SUMS: Final = ("prompt_tokens", "cached_tokens", "output_tokens", "num_preemptions")
NEEDS: Final = {
    "ttft": ("first_token_ns",),
    "tpot": ("first_token_ns", "last_token_ns", "output_tokens"),
    "itl": ("token_ns",),
    "e2e": ("last_token_ns",),
    "queue": ("queue_s",),
    "prefill": ("prefill_s",),
}
"""Columns that a metric is made of."""
OTHER: Final = "other"
MINUTE_NS: Final = 60_000_000_000
KEPT_MINUTES: Final = 6
LONG_AGO: Final = KEPT_MINUTES + 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SeriesKey:
    """One series; an empty worker or model is one that the rows do not name."""

    vantage: str
    worker: str
    model: str


@dataclass(slots=True)
class Histogram:
    """Counts of one metric since the start: by Prometheus bound (BOUNDS_S, the last above all), and the sum (s)."""

    counts: Counts
    total_s: float


@dataclass(slots=True)
class Series:
    """Counts of one series.

    total     metric -> histogram since the start
    minutes   number of the minute -> metric -> counts by log bucket, of the newest minutes
    sums      column of SUMS -> sum since the start; absent where no row ever told it
    states    state of a request -> how many ended so
    """

    total: dict[str, Histogram] = field(default_factory=dict)
    minutes: dict[int, dict[str, Counts]] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    states: dict[str, float] = field(default_factory=dict)


class Latencies:
    """Tallies of every series; safe from several threads."""

    def __init__(self, max_series: int) -> None:
        self._max_series = max_series
        self._series: dict[SeriesKey, Series] = {}
        self._keys: list[SeriesKey] = []
        self._numbers: dict[SeriesKey, int] = {}
        self._told = Told()
        self._lock = threading.Lock()

    def observe(self, requests: pa.Table, now_ns: int) -> None:
        """Count a committed table of `request`."""
        live = requests.filter(pc.is_null(requests.column("run_id"))) if _has_runs(requests) else requests
        if live.num_rows == 0:
            return
        with self._lock:
            split = self._told.split(live)
            new = live if len(split.again) == 0 else live.take(pa.array(split.first))
            if new.num_rows:
                of_row = self._series_of_rows(new)
                self._told.series[split.places] = of_row
                self._count(new, of_row, now_ns)
            if len(split.again):
                of_row = self._told.series[split.places_again]
                self._count(live.take(pa.array(split.again)), of_row, now_ns, counted=split.known)

    def _count(self, rows: pa.Table, of_row: Counts, now_ns: int, counted: Bits | None = None) -> None:
        """Count rows into the series of these numbers; `counted`: bits of what was counted of their requests before."""
        newest = now_ns // MINUTE_NS
        age = newest + 1 - rows.column("at_ns").to_numpy() // MINUTE_NS
        age = np.where((age >= 0) & (age <= KEPT_MINUTES), age, LONG_AGO)
        pairs, of_pair = np.unique(of_row * (LONG_AGO + 1) + age, return_inverse=True)
        fresh, weights = None if counted is None else _fresh(rows, counted), weights_of(rows)
        tallies = tallies_of(rows, None if len(pairs) == 1 else of_pair, len(pairs), fresh, weights)
        for position, pair in enumerate(pairs.tolist()):
            number, minutes_ago = divmod(pair, LONG_AGO + 1)
            minute = None if minutes_ago == LONG_AGO else newest + 1 - minutes_ago
            self._add(self._keys[number], minute, tallies, position)
        numbers, codes = np.unique(of_row, return_inverse=True)
        sums = _sums(rows, codes, len(numbers), counted, weights)
        states = {} if counted is not None else _states(rows, codes, weights)
        for code, number in enumerate(numbers.tolist()):
            self._add_sums(self._series[self._keys[number]], sums, states, code)
        for series in self._series.values():
            for number in [number for number in series.minutes if number <= newest - KEPT_MINUTES]:
                del series.minutes[number]

    def shown(self) -> list[tuple[SeriesKey, Series]]:
        """Totals since the start: the engine's where a model has them, else the client's; never the router's."""
        with self._lock:
            copy = [
                (key, Series({name: replace(part) for name, part in series.total.items()}, {}, dict(series.sums)))
                for key, series in self._series.items()
            ]
            for key, series in copy:
                series.states = dict(self._series[key].states)
        return _preferred(copy)

    def recent(self, now_ns: int, minutes: int) -> list[tuple[SeriesKey, dict[str, Counts]]]:
        """Counts by log bucket of requests that ended in the last `minutes` minutes (the running one included)."""
        first = now_ns // MINUTE_NS - minutes + 1
        found: list[tuple[SeriesKey, dict[str, Counts]]] = []
        with self._lock:
            for key, series in self._series.items():
                summed: dict[str, Counts] = {}
                for number, part in series.minutes.items():
                    if number >= first:
                        for metric, counts in part.items():
                            summed[metric] = summed[metric] + counts if metric in summed else counts
                if summed:
                    found.append((key, summed))
        return _preferred(found)

    def _series_of_rows(self, requests: pa.Table) -> Counts:
        """The number of the series of each row, [rows]; series are made where they are new."""
        codes, named = _series_of(requests)
        return np.array([self._admit(key) for key in named], dtype=np.int64)[codes]

    def _admit(self, key: SeriesKey) -> int:
        if key not in self._series and len(self._series) >= self._max_series:
            key = SeriesKey(key.vantage, OTHER, OTHER)
        if key not in self._series:
            self._series[key] = Series()
            self._numbers[key] = len(self._keys)
            self._keys.append(key)
        return self._numbers[key]

    def _add(self, key: SeriesKey, minute: int | None, tallies: dict[str, Tallies], position: int) -> None:
        series = self._series[key]
        for metric, part in tallies.items():
            fine = part.fine[position]
            if not fine.any():
                continue
            histogram = series.total.setdefault(metric, Histogram(np.zeros_like(part.coarse[0]), 0.0))
            histogram.counts = histogram.counts + part.coarse[position]
            histogram.total_s += float(part.total_s[position])
            if minute is not None:
                kept = series.minutes.setdefault(minute, {})
                kept[metric] = kept[metric] + fine if metric in kept else fine.copy()

    @staticmethod
    def _add_sums(
        series: Series, sums: dict[str, list[float | None]], states: dict[tuple[int, str], float], number: int
    ) -> None:
        for name, values in sums.items():
            value = values[number]
            if value is not None:
                series.sums[name] = series.sums.get(name, 0) + value
        for (of, state), count in states.items():
            if of == number:
                series.states[state] = series.states.get(state, 0) + count


def _series_of(requests: pa.Table) -> tuple[Counts, list[SeriesKey]]:
    """Number of the series of each row, and the series by number."""
    code = np.zeros(requests.num_rows, dtype=np.int64)
    words: list[list[str]] = []
    for name in ("vantage", "worker", "model"):
        encoded = pc.dictionary_encode(one_array(pc.fill_null(requests.column(name), "")))
        words.append(encoded.dictionary.to_pylist())
        code = code * len(words[-1]) + encoded.indices.to_numpy(zero_copy_only=False)
    present, codes = np.unique(code, return_inverse=True)
    return codes, [_key(int(number), words) for number in present]


def _key(number: int, words: list[list[str]]) -> SeriesKey:
    rest, model = divmod(number, len(words[2]))
    vantage, worker = divmod(rest, len(words[1]))
    return SeriesKey(words[0][vantage], words[1][worker], words[2][model])


def _has_runs(requests: pa.Table) -> bool:
    column = requests.column("run_id")
    return bool(column.null_count < len(column))


def _sums(
    requests: pa.Table, of_row: Counts, num_series: int, counted: Bits | None, weights: Floats | None
) -> dict[str, list[float | None]]:
    """Column of SUMS -> its sum by series, None where no row of the series tells it; what was `counted` is not told again."""
    found: dict[str, list[float | None]] = {}
    for name in SUMS:
        column = requests.column(name)
        if column.null_count == len(column):
            continue
        known = pc.is_valid(column).to_numpy()
        if counted is not None:
            known = known & (counted & bit(name) == 0)
        values = np.where(known, pc.fill_null(column, 0).to_numpy(), 0)
        told = np.bincount(of_row, known, minlength=num_series)
        sums = np.bincount(of_row, values if weights is None else values * weights, minlength=num_series)
        found[name] = [float(value) if count else None for value, count in zip(sums, told, strict=True)]
    return found


def _fresh(rows: pa.Table, counted: Bits) -> dict[str, Flags]:
    """Metric -> rows that know it, of requests whose rows so far did not, [rows]."""
    told = knows(rows)
    of = {metric: bit(*columns) for metric, columns in NEEDS.items()}
    return {metric: ((told & bits) == bits) & ((counted & bits) != bits) for metric, bits in of.items()}


def _states(requests: pa.Table, of_row: Counts, weights: Floats | None) -> dict[tuple[int, str], float]:
    """(number of the series, state) -> requests."""
    encoded = pc.dictionary_encode(one_array(requests.column("state")))
    words = encoded.dictionary.to_pylist()
    pairs, codes = np.unique(of_row * len(words) + encoded.indices.to_numpy(), return_inverse=True)
    counts = np.bincount(codes, weights)
    return {
        (int(pair) // len(words), words[int(pair) % len(words)]): float(count)
        for pair, count in zip(pairs, counts, strict=True)
    }


def _preferred(series: list[tuple[SeriesKey, T]]) -> list[tuple[SeriesKey, T]]:
    at_engine = {key.model for key, _ in series if key.vantage == "engine"}
    return [
        (key, part)
        for key, part in series
        if key.vantage == "engine" or (key.vantage == "client" and key.model not in at_engine)
    ]
