"""Latencies of live requests by worker and model, from committed rows: histograms since the start, and recent minutes.

A request's durations are those of `store/metrics.py` (design section 4), computed here for whole tables at once; a test
holds both to the same numbers. Rows of an imported run are history and stay out. The engine's vantage is shown where a
model has it, else the client's; the router's is never mixed in. Invariant: at most `max_series` worker and model pairs
have their own series; later ones share `other`, so that a client that invents names cannot fill the memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from collector.sketches import Counts, Floats, Tally, empty, tally

METRICS: Final = ("ttft", "tpot", "itl", "e2e", "queue", "prefill")
SUMS: Final = ("prompt_tokens", "cached_tokens", "output_tokens", "num_preemptions")
OTHER: Final = "other"
MINUTE_NS: Final = 60_000_000_000
KEPT_MINUTES: Final = 15


@dataclass(frozen=True, slots=True)
class SeriesKey:
    """One series; an empty worker or model is one that the rows do not name."""

    vantage: str
    worker: str
    model: str


@dataclass(slots=True)
class Series:
    """Counts of one series.

    total     metric -> durations since the start
    minutes   number of the minute -> the same, of the newest minutes
    sums      column of SUMS -> sum since the start; absent where no row ever told it
    states    state of a request -> how many ended so
    """

    total: dict[str, Tally] = field(default_factory=dict)
    minutes: dict[int, dict[str, Tally]] = field(default_factory=dict)
    sums: dict[str, int] = field(default_factory=dict)
    states: dict[str, int] = field(default_factory=dict)


class Latencies:
    """Tallies of every series; safe from several threads."""

    def __init__(self, max_series: int) -> None:
        self._max_series = max_series
        self._series: dict[SeriesKey, Series] = {}
        self._lock = threading.Lock()

    def observe(self, requests: pa.Table, now_ns: int) -> None:
        """Count a committed table of `request`."""
        live = requests.filter(pc.is_null(requests.column("run_id"))) if _has_runs(requests) else requests
        if live.num_rows == 0:
            return
        durations = durations_of(live)
        codes, keys = _series_of(live)
        minute = np.asarray(live.column("at_ns").to_numpy()) // MINUTE_NS
        newest = now_ns // MINUTE_NS
        for code, key in enumerate(keys):
            if key.vantage == "router":
                continue
            mine = None if len(keys) == 1 else codes == code
            self._count(key, live if mine is None else live.filter(pa.array(mine)))
            for number in np.unique(minute if mine is None else minute[mine]).tolist():
                chosen = minute == number if mine is None else (minute == number) & mine
                self._add(key, number, newest, durations, None if chosen.all() else chosen)

    def shown(self) -> list[tuple[SeriesKey, Series]]:
        """Totals since the start: the engine's where a model has them, else the client's."""
        with self._lock:
            copy = [
                (key, Series(dict(series.total), {}, dict(series.sums), dict(series.states)))
                for key, series in self._series.items()
            ]
        at_engine = {key.model for key, _ in copy if key.vantage == "engine"}
        return [(key, series) for key, series in copy if key.vantage == "engine" or key.model not in at_engine]

    def recent(self, now_ns: int, minutes: int) -> list[tuple[SeriesKey, dict[str, Tally]]]:
        """As `shown`, of requests that ended in the last `minutes` minutes (the running one included)."""
        first = now_ns // MINUTE_NS - minutes + 1
        with self._lock:
            copy = [
                (key, [dict(part) for number, part in series.minutes.items() if number >= first])
                for key, series in self._series.items()
            ]
        summed = [(key, _sum(parts)) for key, parts in copy if parts]
        at_engine = {key.model for key, _ in summed if key.vantage == "engine"}
        return [(key, total) for key, total in summed if key.vantage == "engine" or key.model not in at_engine]

    def _add(
        self,
        key: SeriesKey,
        minute: int,
        newest: int,
        durations: dict[str, Durations],
        chosen: npt.NDArray[np.bool_] | None,
    ) -> None:
        tallies = {name: part for name in METRICS if (part := durations[name].tally(chosen)) is not None}
        with self._lock:
            series = self._series_at(key)
            _merge(series.total, tallies)
            if newest - KEPT_MINUTES < minute <= newest + 1:
                _merge(series.minutes.setdefault(minute, {}), tallies)
            for number in [number for number in series.minutes if number <= newest - KEPT_MINUTES]:
                del series.minutes[number]

    def _count(self, key: SeriesKey, rows: pa.Table) -> None:
        sums = {name: pc.sum(rows.column(name)).as_py() for name in SUMS}
        states = {item["values"]: item["counts"] for item in pc.value_counts(rows.column("state")).to_pylist()}
        with self._lock:
            series = self._series_at(key)
            for name, value in sums.items():
                if value is not None:
                    series.sums[name] = series.sums.get(name, 0) + value
            for state, count in states.items():
                series.states[state] = series.states.get(state, 0) + count

    def _series_at(self, key: SeriesKey) -> Series:
        if key not in self._series and len(self._series) >= self._max_series:
            key = SeriesKey(key.vantage, OTHER, OTHER)
        return self._series.setdefault(key, Series())


@dataclass(frozen=True, slots=True)
class Durations:
    """Durations (s) of one metric.

    per_row   how many durations each row has; None where each has one (NaN: unknown)
    weights   how often each duration counts; None: once
    """

    values: Floats
    per_row: Counts | None = None
    weights: Counts | None = None

    def tally(self, chosen: npt.NDArray[np.bool_] | None) -> Tally | None:
        """Count those of the chosen rows (None: all); None where there are none."""
        values, weights = self.values, self.weights
        if chosen is not None:
            part = chosen if self.per_row is None else np.repeat(chosen, self.per_row)
            values, weights = values[part], None if weights is None else weights[part]
        if self.per_row is None:
            values = values[~np.isnan(values)]
        return tally(values, weights) if values.size else None


def durations_of(requests: pa.Table) -> dict[str, Durations]:
    """Every metric of METRICS for a table of `request` rows; durations that are unknown or below 0 are left out."""
    t0, t1, tn = (_instants(requests, name) for name in ("arrival_ns", "first_token_ns", "last_token_ns"))
    output = _floats(requests, "output_tokens")
    with np.errstate(invalid="ignore", divide="ignore"):
        tpot = np.where(output > 1, (tn - t1) / (output - 1), np.nan)
    return {
        "ttft": _known(t1 - t0),
        "tpot": _known(tpot),
        "itl": _gaps(requests),
        "e2e": _known(tn - t0),
        "queue": _known(_floats(requests, "queue_s")),
        "prefill": _known(_floats(requests, "prefill_s")),
    }


def _gaps(requests: pa.Table) -> Durations:
    """ITL: the gap before each chunk but the first; a chunk of k tokens counts k times gap / k."""
    column = requests.column("token_ns").combine_chunks()
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    instants = column.flatten().to_numpy(zero_copy_only=False)
    per_row = np.maximum(lengths - 1, 0)
    if per_row.sum() == 0:
        return Durations(np.empty(0), per_row)
    gaps = np.diff(instants)
    starts = np.cumsum(lengths)[:-1]
    inner = starts[(starts > 0) & (starts < len(instants))]
    if inner.size:
        keep = np.ones(len(gaps), dtype=np.bool_)
        keep[inner - 1] = False
        gaps = gaps[keep]
    seconds = gaps * 1e-9
    tokens = _chunk_tokens(requests, lengths)
    if tokens is None:
        return Durations(seconds, per_row)
    first = np.zeros(len(tokens), dtype=np.bool_)
    first[np.append(0, starts)[lengths > 0]] = True
    tokens = np.maximum(tokens[~first], 1)
    return Durations(seconds / tokens, per_row, tokens)


def _chunk_tokens(requests: pa.Table, lengths: Counts) -> Counts | None:
    """Tokens of every chunk, None where no row tells; a row that does not tell has 1 a chunk."""
    column = requests.column("token_counts")
    if column.null_count == len(column):
        return None
    column = column.combine_chunks()
    told = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    counts = pc.fill_null(column.flatten(), 1).to_numpy(zero_copy_only=False)
    if (told == lengths).all():
        return np.asarray(counts)
    tokens = np.ones(int(lengths.sum()), dtype=np.int64)
    tokens[np.repeat(told == lengths, lengths)] = counts[np.repeat(told == lengths, told)]
    return tokens


def _series_of(requests: pa.Table) -> tuple[Counts, list[SeriesKey]]:
    """Number of the series of each row, and the series by number."""
    code = np.zeros(requests.num_rows, dtype=np.int64)
    words: list[list[str]] = []
    for name in ("vantage", "worker", "model"):
        encoded = pc.dictionary_encode(pc.fill_null(requests.column(name), "").combine_chunks())
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


def _known(seconds: Floats) -> Durations:
    with np.errstate(invalid="ignore"):
        return Durations(np.where(seconds >= 0, seconds, np.nan))


def _instants(requests: pa.Table, name: str) -> Floats:
    """Seconds since the first arrival of the table; differences keep their nanoseconds that way."""
    column = requests.column(name)
    origin = requests.column("arrival_ns")[0].as_py()
    return _as_floats(pc.subtract(column, pa.scalar(origin, pa.int64()))) * 1e-9


def _floats(requests: pa.Table, name: str) -> Floats:
    return _as_floats(requests.column(name))


def _as_floats(column: pa.ChunkedArray) -> Floats:
    """NaN where null."""
    values: Floats = pc.fill_null(pc.cast(column, pa.float64(), safe=False), float("nan")).to_numpy()
    return values


def _merge(into: dict[str, Tally], tallies: dict[str, Tally]) -> None:
    for name, part in tallies.items():
        into[name] = into[name] + part if name in into else part


def _sum(parts: list[dict[str, Tally]]) -> dict[str, Tally]:
    total: dict[str, Tally] = {}
    for part in parts:
        _merge(total, part)
    return total


def quantiles(tallies: Iterator[Tally], q: str) -> float | None:
    """Quantile (s) of several series together; None without durations."""
    total = empty()
    for part in tallies:
        total = total + part
    return total.quantile(q)
