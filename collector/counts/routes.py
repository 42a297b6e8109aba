"""Routing decisions, KV transfers and marks as counters."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from collector.counts.book import Book
from collector.counts.bounded import Names
from collector.counts.columns import numbers, words
from collector.live.durations import weights_of
from engine_probe.events import column
from store import metric_catalogue as names

OUTCOMES: Final = column("transfer", "outcome").choices


def count_routes(book: Book, routes: pa.Table, worker: Names, policy: Names) -> None:
    """Count live rows of `route`."""
    if routes.num_rows == 0:
        return
    chosen_of, chosen = words(routes, "chosen")
    policy_of, policies = words(routes, "policy")
    of_policy = [(policy(name),) for name in policies]
    weights = weights_of(routes)
    pairs = np.bincount(chosen_of * len(policies) + policy_of, weights, len(chosen) * len(policies))
    book.add_all(
        names.ROUTES,
        (
            ((worker(chosen[n // len(policies)]), *of_policy[n % len(policies)]), float(pairs[n]))
            for n in np.flatnonzero(pairs).tolist()
        ),
    )
    took = numbers(routes, "decision_s")
    if took is not None:
        book.spread(names.ROUTE_DECISION, names.LATENCY_BOUNDS_S, took, policy_of, of_policy, weights)


def count_transfers(book: Book, transfers: pa.Table, worker: Names) -> None:
    """Count live rows of `transfer`, by the worker that received."""
    if transfers.num_rows == 0:
        return
    target_of, targets = words(transfers, "target_worker")
    outcome_of, outcomes = words(transfers, "outcome")
    labels = [(worker(name),) for name in targets]
    weights = weights_of(transfers)
    pairs = np.bincount(target_of * len(outcomes) + outcome_of, weights, len(targets) * len(outcomes))
    book.add_all(
        names.TRANSFERS,
        (
            ((*labels[n // len(outcomes)], outcomes[n % len(outcomes)]), float(pairs[n]))
            for n in np.flatnonzero(pairs).tolist()
        ),
    )
    # who is told of has a 0 where none ended so: the share that went wrong is then 0 and not unknown
    book.add_all(names.TRANSFERS, (((*label, outcome), 0.0) for label in labels for outcome in OUTCOMES))
    sizes = numbers(transfers, "num_bytes")
    if sizes is not None:
        known = np.isfinite(sizes)
        moved = np.nan_to_num(sizes) if weights is None else np.nan_to_num(sizes) * weights
        sums, told = np.bincount(target_of, moved, len(targets)), np.bincount(target_of, known, len(targets))
        book.add_all(names.TRANSFER_BYTES, ((labels[n], float(sums[n])) for n in np.flatnonzero(told).tolist()))
    for name, family in (("wire_s", names.TRANSFER_WIRE), ("wait_s", names.TRANSFER_WAIT)):
        values = numbers(transfers, name)
        if values is not None:
            book.spread(family, names.LATENCY_BOUNDS_S, values, target_of, labels, weights)


def count_marks(book: Book, marks: pa.Table) -> None:
    """Count live rows of `mark`."""
    of_row, found = words(marks, "mark")
    counts = np.bincount(of_row, minlength=len(found))
    book.add_all(names.MARKS, (((name,), float(counts[number])) for number, name in enumerate(found)))
