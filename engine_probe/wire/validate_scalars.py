"""The flat half of `validate.py`: the rules of one column (or one nested field) of numbers.

Invariant: one vectorised pass decides; only a refusal looks for the row.
"""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from engine_probe.errors import InvalidRows
from engine_probe.events import Column
from engine_probe.wire.row_errors import expectation, invalid_rows

DAY_NS = 86_400 * 10**9
MIN_INSTANT_NS = 10**17
"""1973-03-03: what lies before it is not an instant in nanoseconds but one in seconds, milliseconds or microseconds."""


def check_instants(kind: str, column: Column, array: pa.ChunkedArray, now_ns: int) -> None:
    """Every instant is in nanoseconds, and at most a day after `now_ns`."""
    bounds = pc.min_max(array)
    lowest, highest = bounds["min"].as_py(), bounds["max"].as_py()
    expected = "ns since 1970-01-01 UTC, at most a day in the future"
    if lowest is not None and lowest < MIN_INSTANT_NS:
        raise refuse(
            kind, column, array, pc.less(array, MIN_INSTANT_NS), f"is {lowest}, {looks_like(lowest)}", expected, lowest
        )
    if highest is not None and highest > now_ns + DAY_NS:
        ahead = (highest - now_ns) / 1e9
        problem = f"is {highest}, {ahead:.0f} s after this machine's clock"
        raise refuse(kind, column, array, pc.greater(array, now_ns + DAY_NS), problem, expected, highest)


def check_counts(kind: str, column: Column, array: pa.ChunkedArray, now_ns: int) -> None:
    """No number is below 0."""
    lowest = pc.min(array).as_py()
    if lowest is not None and lowest < 0:
        raise refuse(kind, column, array, pc.less(array, 0), expected=f"0 or more: {expectation(column)}")


def check_floats(kind: str, column: Column, array: pa.ChunkedArray, now_ns: int) -> None:
    """Finite; not negative where the column is not signed; within 0..1 where it is a ratio."""
    # A sum is the one pass that sees NaN and infinity alike (min and max skip NaN).
    total = pc.sum(array).as_py()
    if total is not None and not math.isfinite(total):
        bad = pc.invert(pc.is_finite(array))
        if pc.any(bad).as_py():
            raise refuse(kind, column, array, bad, expected=f"a finite number: {expectation(column)}")
    if column.signed:
        return
    bounds = pc.min_max(array)
    lowest, highest = bounds["min"].as_py(), bounds["max"].as_py()
    if lowest is None:
        return
    if lowest < 0:
        raise refuse(kind, column, array, pc.less(array, 0.0), expected=f"0 or more: {expectation(column)}")
    if column.unit == "ratio 0..1" and highest > 1:
        hint = ", which looks like a percentage" if 1 < highest <= 100 else ""
        problem = f"is {highest}{hint}"
        raise refuse(
            kind, column, array, pc.greater(array, 1.0), problem, f"within 0..1: {expectation(column)}", highest
        )
    if column.name == "sample_rate" and lowest == 0:
        raise refuse(kind, column, array, pc.equal(array, 0.0), expected="above 0, at most 1, or null (all were kept)")


def refuse(
    kind: str,
    column: Column,
    array: pa.ChunkedArray,
    bad: pa.ChunkedArray,
    problem: str | None = None,
    expected: str | None = None,
    value: object = None,
) -> InvalidRows:
    """The refusal of the first row where `bad` is true (of the row that holds `value`, where one is given)."""
    if value is not None:
        bad = pc.equal(array, value)
    row = int(np.argmax(pc.fill_null(bad, False).to_numpy()))
    if value is None:
        value = array[row].as_py()
    return invalid_rows(
        problem or f"is {value!r}",
        kind=kind,
        row=row,
        column=column.name,
        value=value,
        expected=expected or expectation(column),
    )


def looks_like(value: int) -> str:
    """What an integer below MIN_INSTANT_NS was probably meant to be."""
    if value == 0:
        return "which is the beginning of 1970 and not unknown: leave the column out where the instant is not known"
    if value < 0:
        return "which is before 1970"
    for limit, unit in ((10**11, "seconds"), (10**14, "milliseconds"), (MIN_INSTANT_NS, "microseconds")):
        if value < limit:
            return f"which looks like {unit}"
    raise AssertionError(f"{value} is an instant in nanoseconds")
