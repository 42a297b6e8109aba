"""How requests ended, and for whom: errors by status and reason, SLOs, the largest tenants, the hottest prefixes.

Each request is counted once, by the first row that tells of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from collector.counts.book import Book
from collector.counts.bounded import OTHER, Tops, label
from collector.counts.columns import numbers, words
from collector.counts.slos import Slos
from collector.live.durations import one_array
from store import metric_catalogue as names

Codes = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Key = tuple[str, str, str]
"""vantage, worker, model: the labels of a series."""

_OF_TENANTS: Final = (
    names.TENANT_TTFT,
    names.TENANT_REQUESTS,
    names.TENANT_SLO_REQUESTS,
    names.TENANT_PROMPT_TOKENS,
    names.TENANT_HIT_TOKENS,
    names.TENANT_OUTPUT_TOKENS,
)
_OF_PREFIXES: Final = (names.HOT_PREFIX_REQUESTS, names.HOT_PREFIX_PROMPT_TOKENS, names.HOT_PREFIX_HIT_TOKENS)
_TIMEOUT: Final = "(?i)time.?out|timed out|deadline"
REASONS: Final = (
    "too_many_requests",
    "timeout",
    "aborted",
    "server_error",
    "client_error",
    "rejected",
    "failed",
)


class Outcomes:
    """Counts new requests into a book. Its caller sees to it that one thread at a time comes in."""

    def __init__(self, book: Book, slos: Slos, top_tenants: int, top_prefixes: int) -> None:
        self._book = book
        self._slos = slos
        self._tenants = Tops(top_tenants)
        self._prefixes = Tops(top_prefixes)

    def count(
        self,
        requests: pa.Table,
        of_row: Codes,
        keys: Sequence[Key],
        durations: Mapping[str, Floats],
        weights: Floats | None,
        now_ns: int,
    ) -> None:
        """Count a table of requests that no earlier row told; `keys[of_row]` are the labels of their series."""
        of_rule = self._slos.assign(requests)
        met = self._slos.met(requests, of_rule, durations)
        self._count_slos(of_row, keys, of_rule, met, weights)
        self._count_errors(requests, of_row, keys, weights)
        self._count_tenants(requests, of_row, keys, durations, met, weights, now_ns)
        self._count_prefixes(requests, of_row, keys, weights, now_ns)

    def _count_slos(self, of_row: Codes, keys: Sequence[Key], of_rule: Codes, met: Codes, weights: Any) -> None:
        rules = self._slos.names
        flat = (of_row * len(rules) + of_rule) * 2 + met
        counts = np.bincount(flat, weights, len(keys) * len(rules) * 2).reshape(len(keys) * len(rules), 2)
        self._book.add_all(
            names.SLO_REQUESTS,
            (
                ((*keys[n // len(rules)], rules[n % len(rules)], outcome), float(counts[n, place]))
                for n in np.flatnonzero(counts.any(axis=1)).tolist()
                for place, outcome in enumerate(_OUTCOME)
            ),
        )

    def _count_errors(self, requests: pa.Table, of_row: Codes, keys: Sequence[Key], weights: Any) -> None:
        rows = np.flatnonzero(pc.not_equal(requests.column("state"), "finished").to_numpy())
        if len(rows) == 0:
            return
        failed = requests.take(pa.array(rows))
        status = numbers(failed, "http_status")
        code = np.zeros(len(rows)) if status is None else np.nan_to_num(status)
        code = np.where((code >= 100) & (code < 600), code, 0).astype(np.int64)
        reason = _reasons(failed, code)
        flat = (of_row[rows] * 600 + code) * len(REASONS) + reason
        present, which = np.unique(flat, return_inverse=True)
        counts = np.bincount(which, None if weights is None else weights[rows])
        self._book.add_all(
            names.REQUEST_ERRORS,
            (
                ((*keys[n // len(REASONS) // 600], _status(n // len(REASONS) % 600), REASONS[n % len(REASONS)]), count)
                for n, count in zip(present.tolist(), counts.tolist(), strict=True)
            ),
        )

    def _count_tenants(
        self,
        requests: pa.Table,
        of_row: Codes,
        keys: Sequence[Key],
        durations: Mapping[str, Floats],
        met: Codes,
        weights: Any,
        now_ns: int,
    ) -> None:
        column = one_array(requests.column("tenant"))
        if column.null_count == len(column):
            return
        encoded = pc.dictionary_encode(column.drop_null())
        gone = set(map(label, self._tenants.offer(encoded.dictionary.to_pylist(), _counts(encoded), now_ns)))
        if gone:
            self._book.drop(_OF_TENANTS, lambda labels: labels[2] in gone)
        of_tenant, shown = _slots(column, list(self._tenants.shown), pa.string())
        pairs = sorted({(key[0], key[2]) for key in keys})
        of_pair = np.array([pairs.index((key[0], key[2])) for key in keys])[of_row]
        labels = [(*pair, label(tenant)) for pair in pairs for tenant in shown]
        group = of_pair * len(shown) + of_tenant
        self._book.spread(names.TENANT_TTFT, names.LATENCY_BOUNDS_S, durations["ttft"], group, labels, weights)
        self._by_word(names.TENANT_SLO_REQUESTS, group, labels, met.astype(np.int64), _OUTCOME, weights)
        of_state, states = words(requests, "state")
        self._by_word(names.TENANT_REQUESTS, group, labels, of_state, states, weights)
        for name, family in (
            ("prompt_tokens", names.TENANT_PROMPT_TOKENS),
            ("cached_tokens", names.TENANT_HIT_TOKENS),
            ("output_tokens", names.TENANT_OUTPUT_TOKENS),
        ):
            self._total(family, numbers(requests, name), group, labels, weights)

    def _count_prefixes(
        self, requests: pa.Table, of_row: Codes, keys: Sequence[Key], weights: Any, now_ns: int
    ) -> None:
        if requests.column("prefix_hash").null_count == requests.num_rows:
            return
        at_engine = np.array([key[0] == "engine" for key in keys])[of_row]
        rows = np.flatnonzero(at_engine & pc.is_valid(requests.column("prefix_hash")).to_numpy())
        if len(rows) == 0:
            return
        table = requests.select(["prefix_hash", "prompt_tokens", "cached_tokens"]).take(pa.array(rows))
        column = one_array(table.column("prefix_hash"))
        values, counts = np.unique(column.to_numpy(), return_counts=True)
        gone = {_hex(value) for value in self._prefixes.offer(values.tolist(), counts, now_ns)}
        if gone:
            self._book.drop(_OF_PREFIXES, lambda labels: labels[1] in gone)
        of_prefix, shown = _slots(column, list(self._prefixes.shown), pa.uint64())
        workers = sorted({key[1] for key in keys})
        of_worker = np.array([workers.index(key[1]) for key in keys])[of_row[rows]]
        labels = [(worker, _hex(prefix)) for worker in workers for prefix in shown]
        group = of_worker * len(shown) + of_prefix
        mine = None if weights is None else weights[rows]
        self._total(names.HOT_PREFIX_REQUESTS, np.ones(len(rows)), group, labels, mine)
        self._total(names.HOT_PREFIX_PROMPT_TOKENS, numbers(table, "prompt_tokens"), group, labels, mine)
        self._total(names.HOT_PREFIX_HIT_TOKENS, numbers(table, "cached_tokens"), group, labels, mine)

    def _by_word(
        self, family: names.Family, group: Codes, labels: Sequence[Any], of_word: Codes, found: Any, weights: Any
    ) -> None:
        counts = np.bincount(group * len(found) + of_word, weights, len(labels) * len(found))
        counts = counts.reshape(len(labels), len(found))
        # whoever is told of has a 0 where none was of that kind: a share of them is then 0 and not unknown
        self._book.add_all(
            family,
            (
                ((*labels[n], word), float(counts[n, place]))
                for n in np.flatnonzero(counts.any(axis=1)).tolist()
                for place, word in enumerate(found)
            ),
        )

    def _total(
        self, family: names.Family, values: Floats | None, group: Codes, labels: Sequence[Any], weights: Any
    ) -> None:
        if values is None:
            return
        known = np.isfinite(values)
        counted = np.where(known, values if weights is None else values * weights, 0.0)
        sums, told = np.bincount(group, counted, len(labels)), np.bincount(group, known, len(labels))
        self._book.add_all(family, ((labels[n], float(sums[n])) for n in np.flatnonzero(told).tolist()))


_OUTCOME: Final = ("missed", "met")


def _reasons(failed: pa.Table, code: Codes) -> Codes:
    """[rows] number in REASONS of why each request did not finish; the first that fits."""
    state_of, states = words(failed, "state")
    told = np.zeros(len(code), dtype=np.bool_)
    for name in ("error", "finish_reason"):
        column = one_array(failed.column(name))
        if column.null_count < len(column):
            found = pc.fill_null(pc.match_substring_regex(column, _TIMEOUT), False)
            told |= found.to_numpy(zero_copy_only=False)

    def is_state(name: str) -> Codes:
        return state_of == states.index(name) if name in states else np.zeros(len(code), dtype=np.bool_)

    rules = (
        code == 429,
        told | (code == 408) | (code == 504),
        is_state("aborted"),
        code >= 500,
        code >= 400,
        is_state("rejected"),
    )
    return np.select(rules, range(len(rules)), len(rules))


def _status(code: int) -> str:
    return str(code) if code else ""


def _counts(encoded: pa.DictionaryArray) -> Codes:
    return np.bincount(encoded.indices.to_numpy(), minlength=len(encoded.dictionary))


def _slots(column: pa.Array, shown: list[Any], type_: pa.DataType) -> tuple[Codes, list[Any]]:
    """[rows] number of the label of each value, and the labels: those shown, `other`, and the empty one of what is not told."""
    found = pc.index_in(column, value_set=pa.array(shown, type_))
    of_row = pc.fill_null(found, len(shown)).to_numpy(zero_copy_only=False).astype(np.int64)
    if column.null_count:
        of_row = np.where(pc.is_null(column).to_numpy(zero_copy_only=False), len(shown) + 1, of_row)
    return of_row, [*shown, OTHER, ""]


def _hex(prefix: int | str) -> str:
    """A prefix as 16 hex digits; words stay as they are."""
    return prefix if isinstance(prefix, str) else f"{prefix:016x}"
