"""Durations of requests for whole tables at once: those of `store/metrics.py`, row by row the same (a test holds both).

A table of thousands of rows is counted in milliseconds beside its commit, so nothing here is done per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from collector.live.sketches import NUM_BUCKETS, Counts, Floats, Tallies, tally

Flags = npt.NDArray[np.bool_]

METRICS: Final = ("ttft", "tpot", "itl", "e2e", "queue", "prefill")
"""What pages show of each worker."""
PHASES: Final = {"cache_lookup": "cache_lookup_s", "kv_load": "kv_load_s", "kv_transfer": "kv_transfer_s"}
"""Further phases that are counted, and their columns."""
CACHED_VALUES: Final = 32_768


def tallies_of(
    requests: pa.Table,
    groups: Counts | None,
    num_groups: int,
    fresh: Mapping[str, Flags] | None = None,
    weights: Floats | None = None,
    durations: Mapping[str, Floats] | None = None,
) -> dict[str, Tallies]:
    """Every metric of METRICS and PHASES that some row tells, by the group of its row (None: all are one group).

    durations what `durations_of` says of the rows, where the caller has it
    fresh     metric -> rows whose value counts; None: all do
    weights   how many requests each row stands for, [rows]; None: itself
    """
    found: dict[str, Tallies] = {}
    for metric, seconds in (durations_of(requests) if durations is None else durations).items():
        known = ~np.isnan(seconds) if fresh is None else ~np.isnan(seconds) & fresh[metric]
        if known.any():
            of_known = None if groups is None else groups[known]
            found[metric] = tally(
                seconds[known], of_known, num_groups, weights=None if weights is None else weights[known]
            )
    if fresh is not None:
        requests, groups = requests.filter(pa.array(fresh["itl"])), None if groups is None else groups[fresh["itl"]]
        weights = None if weights is None else weights[fresh["itl"]]
    instants, counts = one_array(requests.column("token_ns")), one_array(requests.column("token_counts"))
    if instants.null_count < len(instants):
        # A few rows at a time: the arrays of a whole batch leave the processor's cache and cost twice as much.
        rows = max(1, len(instants) * max(CACHED_VALUES, num_groups * NUM_BUCKETS) // (len(instants.flatten()) + 1))
        for start in range(0, len(instants), rows):
            of_part = None if groups is None else groups[start : start + rows]
            weight = None if weights is None else weights[start : start + rows]
            part = tally_gaps(instants.slice(start, rows), counts.slice(start, rows), of_part, num_groups, weight)
            found["itl"] = found["itl"] + part if "itl" in found else part
    return found


def durations_of(requests: pa.Table) -> dict[str, Floats]:
    """Metric (all but ITL) -> duration (s) of each row of a `request` table; NaN where unknown or below 0."""
    t0, t1, tn = (_instants(requests, name) for name in ("arrival_ns", "first_token_ns", "last_token_ns"))
    output = _floats(requests, "output_tokens")
    with np.errstate(invalid="ignore", divide="ignore"):
        found = {
            "ttft": t1 - t0,
            "tpot": np.where(output > 1, (tn - t1) / (output - 1), np.nan),
            "e2e": tn - t0,
            "queue": _floats(requests, "queue_s"),
            "prefill": _floats(requests, "prefill_s"),
        }
        for metric, name in PHASES.items():
            if requests.column(name).null_count < requests.num_rows:
                found[metric] = _floats(requests, name)
        return {metric: np.where(seconds >= 0, seconds, np.nan) for metric, seconds in found.items()}


def weights_of(requests: pa.Table) -> Floats | None:
    """How many requests each row stands for (`store.metrics.weight`), [rows]; None where every row was kept."""
    rates = requests.column("sample_rate")
    if rates.null_count == len(rates):
        return None
    return np.asarray(1.0 / pc.fill_null(rates, 1.0).to_numpy())


def tally_gaps(
    token_ns: pa.ListArray,
    token_counts: pa.ListArray,
    groups: Counts | None,
    num_groups: int,
    weights: Floats | None = None,
) -> Tallies:
    """ITL by group: the gap before each chunk but a row's first; a chunk of k tokens counts k times gap / k."""
    lengths = _lengths(token_ns)
    instants = token_ns.flatten().to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(lengths)
    starts = (np.cumsum(lengths) - lengths)[rows]
    seconds = np.empty(len(instants))
    np.subtract(instants[1:], instants[:-1], out=seconds[1:], casting="unsafe")
    seconds *= 1e-9
    seconds[starts] = 0.0  # a row's first chunk has no gap: it is counted as 0 s here and taken out again below
    tokens = _chunk_tokens(token_counts, lengths)
    if tokens is not None:
        tokens[starts] = 1
        seconds /= tokens
    spans = (instants[starts + lengths[rows] - 1] - instants[starts]) * 1e-9
    if weights is not None:
        spans *= weights[rows]
        counted = np.repeat(weights, lengths) if tokens is None else np.repeat(weights, lengths) * tokens
        counted[starts] = 0.0
    of_row = np.zeros(len(rows), np.int64) if groups is None else groups[rows]
    found = tally(
        seconds,
        None if groups is None else np.repeat(groups, lengths),
        num_groups,
        weights=tokens if weights is None else counted,
        total_s=np.bincount(of_row, spans, minlength=num_groups).astype(np.float64),
    )
    if weights is not None:
        return found
    firsts = np.bincount(of_row, minlength=num_groups)
    found.fine[:, 0] -= firsts
    found.coarse[:, 0] -= firsts
    return found


def _chunk_tokens(token_counts: pa.ListArray, lengths: Counts) -> Counts | None:
    """Tokens of every chunk (at least 1), None where no row tells; a row that does not tell has 1 a chunk."""
    if token_counts.null_count == len(token_counts):
        return None
    told = _lengths(token_counts)
    counts = pc.fill_null(token_counts.flatten(), 1).to_numpy(zero_copy_only=False)
    if (told == lengths).all():
        return np.asarray(np.maximum(counts, 1))
    tokens = np.ones(int(lengths.sum()), dtype=np.int64)
    tokens[np.repeat(told == lengths, lengths)] = np.maximum(counts[np.repeat(told == lengths, told)], 1)
    return tokens


def _lengths(lists: pa.ListArray) -> Counts:
    """Length of each list, 0 for null."""
    lengths = pc.list_value_length(lists)
    return np.asarray((pc.fill_null(lengths, 0) if lengths.null_count else lengths).to_numpy().astype(np.int64))


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """The column as one array; copied only where it is in pieces."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


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
