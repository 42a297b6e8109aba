"""Latencies of live requests by worker and model, from committed rows: histograms since the start, and recent minutes.

A request's durations are those of `durations.py`. Rows of an imported run are history and stay out. The engine's
vantage is shown where a model has it, else the client's; the router's is never mixed in. A request that several rows tell
(plugin and spans, a batch sent twice) counts once, with what any of them knows (`told.py`). A row of a sample counts as the
many requests that it stands for, so rates over these counters hold whatever the sampling rate was, or became. Invariant: at most
`max_series` worker and model pairs have their own series; later ones share `other`, so that a client that invents names
cannot fill the memory. Each pair has a series for every hit class of `store.metrics.hit_class`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from collector.counts.book import Exemplars
from collector.counts.bounded import label
from collector.counts.columns import numbers, words
from collector.counts.outcomes import Outcomes
from collector.live.durations import PHASES, Flags, durations_of, one_array, tallies_of, weights_of
from collector.live.sketches import BOUNDS_S, Counts, Floats, Tallies
from collector.live.told import Bits, Told, bit, knows

SUMS: Final = (
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "num_preemptions",
    "computed_tokens",
    "recomputed_tokens",
    "self_hit_tokens",
    "draft_tokens",
    "accepted_tokens",
    "cached_tokens_device",
    "cached_tokens_host",
    "cached_tokens_remote",
)
"""Columns that are summed as they are."""
REUSE: Final = {
    "reused_some": ("cached_tokens",),
    "reused_none": ("cached_tokens",),
    "cache_prompt_tokens": ("cached_tokens", "prompt_tokens"),
}
"""Further sums, and the columns that they need: what the two hit rates are made of."""
NEEDS: Final = {
    "ttft": ("first_token_ns",),
    "tpot": ("first_token_ns", "last_token_ns", "output_tokens"),
    "itl": ("token_ns",),
    "e2e": ("last_token_ns",),
    "queue": ("queue_s",),
    "prefill": ("prefill_s",),
    **{metric: (name,) for metric, name in PHASES.items()},
}
"""Columns that a metric is made of."""
WITH_EXEMPLARS: Final = ("ttft", "e2e")
LONGEST_ID: Final = 100
"""OpenMetrics allows 128 characters for an exemplar's labels; a shortened id would lead nowhere."""
OTHER: Final = "other"
MINUTE_NS: Final = 60_000_000_000
KEPT_MINUTES: Final = 6
LONG_AGO: Final = KEPT_MINUTES + 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SeriesKey:
    """One series; an empty worker or model is one that the rows do not name, an empty hit class is not known."""

    vantage: str
    worker: str
    model: str
    hit: str = ""


@dataclass(slots=True)
class Histogram:
    """Counts of one metric since the start: by Prometheus bound (BOUNDS_S, the last above all), and the sum (s)."""

    counts: Counts
    total_s: float
    exemplars: Exemplars = field(default_factory=dict)


@dataclass(slots=True)
class Series:
    """Counts of one series.

    total     metric -> histogram since the start
    minutes   number of the minute -> metric -> counts by log bucket, of the newest minutes
    sums      column of SUMS (reuse: name of REUSE) -> sum since the start; absent where no row ever told it
    states    state of a request -> how many ended so
    """

    total: dict[str, Histogram] = field(default_factory=dict)
    minutes: dict[int, dict[str, Counts]] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    reuse: dict[str, float] = field(default_factory=dict)
    states: dict[str, float] = field(default_factory=dict)


class Latencies:
    """Tallies of every series; safe from several threads.

    block_sizes   worker -> tokens in a KV block, which hit classes need; may grow meanwhile
    outcomes      counts what is told of each request once
    """

    def __init__(
        self, max_series: int, block_sizes: Mapping[str, int] | None = None, outcomes: Outcomes | None = None
    ) -> None:
        self._max_series = max_series
        self._block_sizes = {} if block_sizes is None else block_sizes
        self._outcomes = outcomes
        self._pairs: set[tuple[str, str, str]] = set()
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
        durations = durations_of(rows)
        tallies = tallies_of(rows, None if len(pairs) == 1 else of_pair, len(pairs), fresh, weights, durations)
        for position, pair in enumerate(pairs.tolist()):
            number, minutes_ago = divmod(pair, LONG_AGO + 1)
            minute = None if minutes_ago == LONG_AGO else newest + 1 - minutes_ago
            self._add(self._keys[number], minute, tallies, position)
        series_of, codes = np.unique(of_row, return_inverse=True)
        sums = _sums(rows, codes, len(series_of), counted, weights)
        states = {} if counted is not None else _states(rows, codes, weights)
        for code, number in enumerate(series_of.tolist()):
            self._add_sums(self._series[self._keys[number]], sums, states, code)
        for metric in WITH_EXEMPLARS:
            seconds = durations[metric]
            known = ~np.isnan(seconds) if fresh is None else ~np.isnan(seconds) & fresh[metric]
            self._add_exemplars(metric, rows, seconds, of_row, np.flatnonzero(known))
        if counted is None and self._outcomes is not None:
            keys = [self._keys[number] for number in series_of.tolist()]
            labels = [(key.vantage, key.worker, key.model) for key in keys]
            self._outcomes.count(rows, codes, labels, durations, weights, now_ns)
        for series in self._series.values():
            for number in [number for number in series.minutes if number <= newest - KEPT_MINUTES]:
                del series.minutes[number]

    def shown(self) -> list[tuple[SeriesKey, Series]]:
        """Totals since the start: the engine's where a model has them, else the client's; never the router's."""
        with self._lock:
            copy = [
                (
                    key,
                    Series(
                        {name: replace(part, exemplars=dict(part.exemplars)) for name, part in series.total.items()},
                        {},
                        dict(series.sums),
                        dict(series.reuse),
                        dict(series.states),
                    ),
                )
                for key, series in self._series.items()
            ]
        return _preferred(copy)

    def models_at_engine(self) -> set[str]:
        """Models whose numbers are the engine's, and not the client's."""
        with self._lock:
            return {key.model for key in self._series if key.vantage == "engine"}

    def recent(self, now_ns: int, minutes: int) -> list[tuple[SeriesKey, dict[str, Counts]]]:
        """Counts by log bucket of requests that ended in the last `minutes` minutes (the running one included)."""
        first = now_ns // MINUTE_NS - minutes + 1
        found: dict[SeriesKey, dict[str, Counts]] = {}
        with self._lock:
            for key, series in self._series.items():
                summed = found.setdefault(replace(key, hit=""), {})
                for number, part in series.minutes.items():
                    if number >= first:
                        for metric, counts in part.items():
                            summed[metric] = summed[metric] + counts if metric in summed else counts
        return _preferred([(key, summed) for key, summed in found.items() if summed])

    def recent_hits(self, now_ns: int, minutes: int) -> dict[str, dict[str, int]]:
        """Worker -> hit class -> requests that ended in the last `minutes` minutes with a first token, as engines tell them."""
        first = now_ns // MINUTE_NS - minutes + 1
        found: dict[str, dict[str, int]] = {}
        with self._lock:
            for key, series in self._series.items():
                if key.vantage == "engine" and key.hit:
                    ended = sum(
                        int(part["ttft"].sum())
                        for number, part in series.minutes.items()
                        if number >= first and "ttft" in part
                    )
                    of_worker = found.setdefault(key.worker, {})
                    of_worker[key.hit] = of_worker.get(key.hit, 0) + ended
        return found

    def _series_of_rows(self, requests: pa.Table) -> Counts:
        """The number of the series of each row, [rows]; series are made where they are new."""
        codes, named = _series_of(requests, self._block_sizes)
        return np.array([self._admit(key) for key in named], dtype=np.int64)[codes]

    def _admit(self, key: SeriesKey) -> int:
        pair = (key.vantage, key.worker, key.model)
        if pair not in self._pairs and len(self._pairs) >= self._max_series:
            key = SeriesKey(key.vantage, OTHER, OTHER, key.hit)
        else:
            self._pairs.add(pair)
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

    def _add_exemplars(self, metric: str, rows: pa.Table, seconds: Floats, of_row: Counts, known: Counts) -> None:
        """Keep the newest request of every bucket, with its id."""
        ids = rows.column("request_id")
        known = known[pc.less_equal(pc.utf8_length(ids), LONGEST_ID).to_numpy()[known]]
        if len(known) == 0:
            return
        width = len(BOUNDS_S) + 1
        flat = of_row[known] * width + np.searchsorted(BOUNDS_S, seconds[known], side="left")
        places, newest = np.unique(flat[::-1], return_index=True)
        picked = known[::-1][newest]
        told = rows.select(["request_id", "at_ns"]).take(pa.array(picked)).to_pylist()
        for place, row, seen in zip(places.tolist(), picked.tolist(), told, strict=True):
            histogram = self._series[self._keys[place // width]].total[metric]
            histogram.exemplars[place % width] = (seen["request_id"], float(seconds[row]), seen["at_ns"] / 1e9)

    @staticmethod
    def _add_sums(
        series: Series, sums: dict[str, list[float | None]], states: dict[tuple[int, str], float], number: int
    ) -> None:
        for name, values in sums.items():
            value = values[number]
            if value is not None:
                into = series.reuse if name in REUSE else series.sums
                into[name] = into.get(name, 0) + value
        for (of, state), count in states.items():
            if of == number:
                series.states[state] = series.states.get(state, 0) + count


HITS: Final = ("", "hit", "partial", "miss")


def _series_of(requests: pa.Table, block_sizes: Mapping[str, int]) -> tuple[Counts, list[SeriesKey]]:
    """Number of the series of each row, and the series by number."""
    found = [words(requests, name) for name in ("vantage", "worker", "model")]
    code = np.zeros(requests.num_rows, dtype=np.int64)
    for of_row, known in found:
        code = code * len(known) + of_row
    code = code * len(HITS) + _hits(requests, *found[1], block_sizes)
    present, codes = np.unique(code, return_inverse=True)
    return codes, [_key(int(number), [known for _, known in found]) for number in present]


def _key(number: int, words_of: list[list[str]]) -> SeriesKey:
    rest, hit = divmod(number, len(HITS))
    rest, model = divmod(rest, len(words_of[2]))
    vantage, worker = divmod(rest, len(words_of[1]))
    return SeriesKey(words_of[0][vantage], label(words_of[1][worker]), label(words_of[2][model]), HITS[hit])


def _hits(requests: pa.Table, of_row: Counts, workers: list[str], block_sizes: Mapping[str, int]) -> Counts:
    """[rows] number in HITS of each request's class: `store.metrics.hit_class` for a whole table."""
    cached, prompt = numbers(requests, "cached_tokens"), numbers(requests, "prompt_tokens")
    size = np.array([block_sizes.get(name, np.nan) for name in workers])[of_row]
    if cached is None or prompt is None or np.isnan(size).all():
        return np.zeros(len(of_row), dtype=np.int64)
    known = np.isfinite(cached) & np.isfinite(prompt) & np.isfinite(size)
    with np.errstate(invalid="ignore"):
        reusable = np.maximum(prompt - 1, 0) // size * size
        found = np.select(
            (cached <= 0, cached >= reusable), (HITS.index("miss"), HITS.index("hit")), HITS.index("partial")
        )
    return np.where(known, found, 0)


def _has_runs(requests: pa.Table) -> bool:
    column = requests.column("run_id")
    return bool(column.null_count < len(column))


def _sums(
    requests: pa.Table, of_row: Counts, num_series: int, counted: Bits | None, weights: Floats | None
) -> dict[str, list[float | None]]:
    """Name of SUMS or REUSE -> its sum by series, None where no row of the series tells it; what was `counted` is not told again."""
    found: dict[str, list[float | None]] = {}
    columns = {name: values for name in SUMS if (values := numbers(requests, name)) is not None}
    for name, values, needs in _summed(columns):
        known = np.isfinite(values)
        if counted is not None:
            known = known & ((counted & bit(*needs)) != bit(*needs))
        told = np.bincount(of_row, known, minlength=num_series)
        counts = np.where(known, values if weights is None else values * weights, 0.0)
        sums = np.bincount(of_row, counts, minlength=num_series)
        found[name] = [float(value) if count else None for value, count in zip(sums, told, strict=True)]
    return found


def _summed(columns: Mapping[str, Floats]) -> Iterator[tuple[str, Floats, tuple[str, ...]]]:
    """(name, value of each row, columns that it needs) of every sum."""
    for name, values in columns.items():
        yield name, values, (name,)
    cached = columns.get("cached_tokens")
    if cached is not None:
        unknown = np.isnan(cached)
        yield "reused_some", np.where(unknown, np.nan, cached > 0), REUSE["reused_some"]
        yield "reused_none", np.where(unknown, np.nan, cached <= 0), REUSE["reused_none"]
        if "prompt_tokens" in columns:
            prompt = np.where(unknown, np.nan, columns["prompt_tokens"])
            yield "cache_prompt_tokens", prompt, REUSE["cache_prompt_tokens"]


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
