"""From what load generators measure (a start, a first gap, more gaps) to the columns of a `request` row.

Rules that all formats share: a chunk has a known number of tokens where there are as many chunks as tokens; an error is
kept as its last line, since some tools write a whole traceback; an instant that the file does not tell is *assumed*, and
the row says so in `labels.arrival`, so that nobody reads an order or a rate out of it that nobody measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from engine_probe.errors import UnknownFormat
from engine_probe.readers.mooncake import ANCHOR_NS
from engine_probe.readers.source import FoundWindow, ReadOptions
from engine_probe.schema import table_from_rows

if TYPE_CHECKING:
    import pyarrow as pa

ASSUMED: Final = "assumed"
"""Value of `labels.arrival` where the arrival is ours and not the tool's."""
REJECTED: Final = frozenset((429, 503))
LONGEST_S: Final = 2_678_400.0
"""A month: no request and no benchmark takes longer."""

_ROWS_A_CHUNK: Final = 2_000
_MAX_ERROR: Final = 300
_STATUS: Final = {status.phrase: status.value for status in HTTPStatus}


def chunked(rows: Iterator[dict[str, Any]]) -> Iterator[Mapping[str, pa.Table]]:
    """`request` tables of up to 2,000 rows: a row of a benchmark may hold a thousand token instants."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        kept.append(row)
        if len(kept) >= _ROWS_A_CHUNK:
            yield {"request": table_from_rows("request", kept)}
            kept = []
    if kept:
        yield {"request": table_from_rows("request", kept)}


def streamed(
    arrival_ns: int,
    ttft_s: float | None,
    gaps_s: Sequence[float],
    output_tokens: int | None,
    where: str,
    tokens: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Columns of a streamed answer; empty where no first token came.

    gaps_s   one a chunk after the first      tokens   tokens in each chunk, the first one included, where known
    Raises UnknownFormat, naming `where`, for a duration below zero or beyond a month.
    """
    import numpy as np

    if ttft_s is None:
        return {}
    after = np.cumsum(np.array([ttft_s, *gaps_s], dtype=float))
    if not (min(ttft_s, *gaps_s, 0.0) >= 0.0 and float(after[-1]) < LONGEST_S):
        raise UnknownFormat(f"{where}: a time to first token or a gap between tokens is below zero or beyond a month.")
    token_ns = arrival_ns + np.round(after * 1e9).astype(np.int64)
    if tokens is None and output_tokens == len(token_ns):
        tokens = [1] * len(token_ns)
    return {
        "first_token_ns": int(token_ns[0]),
        "last_token_ns": int(token_ns[-1]),
        "token_ns": token_ns,
        "token_counts": tokens,
    }


def spread(num_rows: int, duration_s: float | None, anchor_ns: int) -> list[int]:
    """Assumed arrivals: evenly over the run, in the order of sending."""
    step_s = (duration_s or 0.0) / max(num_rows, 1)
    return [anchor_ns + round(position * step_s * 1e9) for position in range(num_rows)]


def seconds(value: float | None, where: str, key: str) -> float | None:
    """A duration in s. Raises UnknownFormat where it is below zero, not finite, or beyond a month."""
    if value is None:
        return None
    if not 0.0 <= value < LONGEST_S:
        raise UnknownFormat(f"{where}: {key} is {value!r}, expected a duration in seconds.", key=key)
    return value


def count(value: int | None, where: str, key: str) -> int | None:
    """A count. Raises UnknownFormat where it is below zero or beyond any length."""
    if value is not None and not 0 <= value < 1 << 53:
        raise UnknownFormat(f"{where}: {key} is {value!r}, expected a count of tokens.", key=key)
    return value


def epoch_ns(at_s: float | None, where: str, key: str) -> int | None:
    """Seconds since 1970 -> ns. Raises UnknownFormat where it is no instant of these decades."""
    if at_s is None:
        return None
    if not 1e8 < at_s < 9e9:
        raise UnknownFormat(f"{where}: {key} is {at_s!r}, expected seconds since 1970.", key=key)
    whole = math.floor(at_s)
    return whole * 1_000_000_000 + round((at_s - whole) * 1e9)


def failure(error: str | None) -> dict[str, Any]:
    """`error` (its last line that says something), and the status where the error is an HTTP status in words."""
    lines = [line.strip() for line in (error or "").splitlines() if line.strip()]
    text = lines[-1][:_MAX_ERROR] if lines else None
    status = _STATUS.get((text or "").split(": ")[0].rstrip(":"))
    return {"error": text, "http_status": status, "state": "rejected" if status in REJECTED else "failed"}


def prefix_sizes(prompt: int | None, cached: int | None) -> dict[str, int | None]:
    """`cached_tokens`, and `computed_tokens` where both are known."""
    known = prompt is not None and cached is not None and cached <= prompt
    return {"cached_tokens": cached, "computed_tokens": (prompt or 0) - (cached or 0) if known else None}


def local_date_ns(text: str | None) -> int | None:
    """`20261129-181500`, the local time of a machine whose zone is not told, read as UTC; None where it is no date."""
    try:
        at = datetime.strptime(text or "", "%Y%m%d-%H%M%S").replace(tzinfo=UTC)
    except ValueError:
        return None
    return int(at.timestamp()) * 1_000_000_000


def summary_samples(
    numbers: Mapping[str, float], tool: str, at_ns: int, labels: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """The tool's own figures as `sample` rows `<tool>:<key>`; their unit is what the key says."""
    return [
        {"at_ns": at_ns, "name": f"{tool}:{key}", "labels": {"wire": key, **(labels or {})}, "value": value}
        for key, value in numbers.items()
    ]


def beginning(options: ReadOptions) -> int:
    """`--start`, or the fixed instant that relative times are laid from."""
    return ANCHOR_NS if options.start_ns is None else options.start_ns


def span_of(rows: Sequence[Mapping[str, Any]], name: str) -> FoundWindow | None:
    """The window from the first arrival to the last thing seen of these rows."""
    if not rows:
        return None
    return FoundWindow(name, min(row["arrival_ns"] for row in rows), max(row["at_ns"] for row in rows) + 1)
