"""Which requests have been counted, so that a second row that tells of one adds only what the first did not know.

What is the same request is defined by `store/evidence/one_request.py`. A stream cannot wait for the second row, so the first is
counted when it comes. Invariant: the newest `most` requests are remembered; a row that comes after so many others counts
again. A row costs one look-up of its id; more is compared only where an id is met again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from collector.live.durations import one_array
from collector.live.sketches import Counts
from store.evidence.one_request import SAME_NS, SAME_STAMP_NS

COUNTED: Final = (
    "first_token_ns",
    "last_token_ns",
    "output_tokens",
    "queue_s",
    "prefill_s",
    "token_ns",
    "prompt_tokens",
    "cached_tokens",
    "num_preemptions",
    "cache_lookup_s",
    "kv_load_s",
    "kv_transfer_s",
    "computed_tokens",
    "recomputed_tokens",
    "self_hit_tokens",
    "draft_tokens",
    "accepted_tokens",
    "cached_tokens_device",
    "cached_tokens_host",
    "cached_tokens_remote",
)
"""Columns that counts are made of; what a row knows of them are bits, the first column's the lowest."""
REMEMBERED: Final = 65_536
_UNKNOWN: Final = -1
_POSITIVE: Final = (1 << 63) - 1
_MOST_OF_AN_ID: Final = 8

Bits = npt.NDArray[np.uint32]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Split:
    """Rows of a table: the first to tell of their request, and those that tell of one that was counted.

    places, places_again   where their requests are remembered, for `Told.series`
    known                  [len(again)] bits of what the rows before them knew
    """

    first: Counts
    places: Counts
    again: Counts
    places_again: Counts
    known: Bits


class Told:
    """The newest requests that were counted, in rings. Its caller sees to it that one thread at a time comes in."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._newest: dict[str, int] = {}  # vantage and id -> place of the newest request of that id
        self._names: list[str | None] = [None] * most
        self._before = np.full(most, _UNKNOWN, dtype=np.int64)  # place of an older request of the same id
        self._facts = np.full((most, len(_FACTS)), _UNKNOWN, dtype=np.int64)
        self._known = np.zeros(most, dtype=np.uint32)
        self.series = np.zeros(most, dtype=np.int64)
        """Number of the series that the request of each place is counted in; whoever counts it writes it."""
        self._next = 0

    def split(self, requests: pa.Table) -> Split:
        """Which rows are new, and remember them."""
        names, facts, known = _names(requests), _facts(requests), knows(requests)
        plain = self._plain(names)
        found: list[tuple[int, int]] = []
        told: list[tuple[int, int, int]] = []
        for row in np.flatnonzero(~plain).tolist():
            place = self._find(names[row], facts[row].tolist())
            if place is None:
                place = int(self._remember(names[row : row + 1], facts[row : row + 1], known[row : row + 1])[0])
                found.append((row, place))
            else:
                told.append((row, place, int(self._known[place])))
                self._known[place] |= known[row]
        rows = np.flatnonzero(plain)
        places = self._remember(names if plain.all() else [names[row] for row in rows], facts[rows], known[rows])
        first, again = np.array(found, dtype=np.int64).reshape(-1, 2), np.array(told, dtype=np.int64).reshape(-1, 3)
        return Split(
            np.concatenate((first[:, 0], rows)),
            np.concatenate((first[:, 1], places)),
            again[:, 0],
            again[:, 1],
            again[:, 2].astype(np.uint32),
        )

    def _plain(self, names: list[str]) -> Flags:
        """Rows whose name nobody else has, here or before: nothing is to be compared, they are new."""
        if len(names) > self._most:
            return np.zeros(len(names), dtype=np.bool_)
        if len(set(names)) == len(names) and self._newest.keys().isdisjoint(names):
            return np.ones(len(names), dtype=np.bool_)
        times = Counter(names)
        return np.array([times[name] == 1 and name not in self._newest for name in names], dtype=np.bool_)

    def _find(self, name: str, facts: list[int]) -> int | None:
        place = self._newest.get(name, _UNKNOWN)
        for _ in range(_MOST_OF_AN_ID):
            if place == _UNKNOWN or self._names[place] != name:
                return None
            if _same(self._facts[place].tolist(), facts):
                return place
            place = int(self._before[place])
        return None

    def _remember(self, names: list[str], facts: Counts, known: Bits) -> Counts:
        """The places at which new requests, of different names, are remembered."""
        places = (self._next + np.arange(len(names))) % self._most
        self._next = (self._next + len(names)) % self._most
        newest, numbers = self._newest, places.tolist()
        for place in numbers:
            old = self._names[place]
            if old is not None and newest.get(old) == place:
                del newest[old]
        self._before[places] = [newest.get(name, _UNKNOWN) for name in names]
        newest.update(zip(names, numbers, strict=True))
        for place, name in zip(numbers, names, strict=True):
            self._names[place] = name
        self._facts[places], self._known[places] = facts, known
        return places


def knows(requests: pa.Table) -> Bits:
    """Bits of COUNTED that each row knows."""
    bits = np.zeros(requests.num_rows, dtype=np.uint32)
    for position, name in enumerate(COUNTED):
        column = requests.column(name)
        if column.null_count < len(column):
            bits |= np.uint32(1 << position) * pc.is_valid(column).to_numpy().astype(np.uint32)
    return bits


def bit(*columns: str) -> np.uint32:
    """The bits of these columns."""
    return np.uint32(sum(1 << COUNTED.index(name) for name in columns))


_FACTS: Final = ("arrival_ns", "attempt", "generation", "worker", "span")
"""What tells a request from others of its id: instants and counts as they are, words as their hash, -1 unknown."""


def _same(one: list[int], other: list[int]) -> bool:
    """Whether both rows tell of one request; see `store/evidence/one_request.py`."""
    arrival, attempt, generation, worker, span = zip(one, other, strict=True)
    if not (_agree(*attempt) and _agree(*generation)):
        return False
    apart_ns = abs(arrival[0] - arrival[1])
    return apart_ns <= (SAME_NS if _agree(*worker) else SAME_STAMP_NS if span[0] != span[1] else _UNKNOWN)


def _agree(one: int, other: int) -> bool:
    return one == other or _UNKNOWN in (one, other)


def _names(requests: pa.Table) -> list[str]:
    """Vantage and id of each row as one text."""
    vantages = requests.column("vantage").unique()
    ids: list[str] = requests.column("request_id").to_pylist()
    if len(vantages) == 1:
        vantage = vantages[0].as_py()
        return [f"{vantage} {name}" for name in ids]
    return [f"{vantage} {name}" for vantage, name in zip(requests.column("vantage").to_pylist(), ids, strict=True)]


def _facts(requests: pa.Table) -> Counts:
    """[rows, len(_FACTS)]"""
    found = np.full((requests.num_rows, len(_FACTS)), _UNKNOWN, dtype=np.int64)
    found[:, 0] = requests.column("arrival_ns").to_numpy()
    found[:, 1] = pc.fill_null(requests.column("attempt"), _UNKNOWN).to_numpy()
    generations = requests.column("generation_id")
    if generations.null_count < len(generations):
        found[pc.is_valid(generations).to_numpy(), 2] = _hashes(generations.drop_null())
    workers = one_array(pc.dictionary_encode(requests.column("worker")))
    if workers.null_count < len(workers):
        numbers = np.append(_hashes(workers.dictionary), _UNKNOWN)
        found[:, 3] = numbers[pc.fill_null(workers.indices, len(workers.dictionary)).to_numpy()]
    found[:, 4] = 0
    labels = one_array(requests.column("labels"))
    if labels.null_count < len(labels):
        rows, words = _label(labels, "engine_request_id")
        unnamed = found[rows, 2] == _UNKNOWN
        found[rows[unnamed], 2] = _hashes(words.filter(pa.array(unnamed)))
        found[_label(labels, "span_id")[0], 4] = 1
    return found


def _label(labels: pa.MapArray, key: str) -> tuple[Counts, pa.Array]:
    """Rows that have this label, and its values; a bulk form of `map_lookup`, which builds a text for every row."""
    offsets = labels.offsets.to_numpy()
    places = np.flatnonzero(pc.equal(labels.keys, key).to_numpy(zero_copy_only=False))
    places = places[(places >= offsets[0]) & (places < offsets[-1])]
    return np.searchsorted(offsets, places, "right") - 1, labels.items.take(pa.array(places))


def _hashes(words: pa.Array | pa.ChunkedArray) -> Counts:
    """A number for each word that is never negative, [words]."""
    return np.array(list(map(hash, words.to_pylist())), dtype=np.int64) & _POSITIVE
