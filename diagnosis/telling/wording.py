"""How numbers are said: one place, so that text, report and evidence speak alike."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

BEYOND_NOISE = "beyond noise"
"""A side effect that stands when all of them are looked at together."""


SHORTEST_S = 5e-6
"""Half of the last digit that is shown: what is less has no sign."""
SMALLEST_SHARE = 5e-4
"""Likewise of a percentage."""

_NUMBER_AND_UNIT = re.compile(r"(?<=\d) (?=(?:%|ns|us|ms|s|h|d|[KMGT]i?B)(?!\w))")
_KEPT = "\N{NO-BREAK SPACE}"


def wrapped(text: str, width: int, first: str = "", rest: str = "") -> str:
    """The text in lines of at most `width` columns; no word is broken, and no number is parted from its unit ('5 %')."""
    lines = textwrap.fill(
        _NUMBER_AND_UNIT.sub(_KEPT, text),
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines.replace(_KEPT, " ")


def seconds(value: float | None) -> str:
    """0.0123 -> '12 ms', 1.2345 -> '1.23 s'; unknown is 'unknown'."""
    if value is None or not math.isfinite(value):
        return "unknown"
    size = abs(value)
    if size < 0.001:
        return f"{value * 1e3:.2f} ms" if size >= SHORTEST_S else "0 ms"
    if size < 0.0995:
        return f"{value * 1e3:.1f} ms"
    if size < 0.9995:
        return f"{value * 1e3:.0f} ms"
    return f"{value:.2f} s" if size < 100 else f"{value:,.0f} s"


def signed(value: float | None) -> str:
    """As `seconds`, with a plus where it grew."""
    if value is None or not math.isfinite(value):
        return "unknown"
    return ("+" if value >= SHORTEST_S else "") + seconds(value)


def interval(bounds: Sequence[float | None] | None) -> str:
    """'+12 ms to +30 ms', 'at least +12 ms' for a one-sided bound, or a dash where no interval is given."""
    if not bounds:
        return "-"
    if bounds[1] is None or math.isinf(bounds[1]):
        return f"at least {signed(bounds[0])}"
    return f"{signed(bounds[0])} to {signed(bounds[1])}"


def percent(value: float | None) -> str:
    """0.123 -> '12 %'."""
    if value is None or not math.isfinite(value):
        return "unknown"
    if abs(value) < SMALLEST_SHARE:
        return "0.0 %"
    return f"{value * 100:.0f} %" if abs(value) >= 0.0995 else f"{value * 100:.1f} %"


def share_of(value: float | None) -> str:
    """A share of a change: '78 %'; above the whole 'more than all (111 %)', where other parts went the other way."""
    more = value is not None and math.isfinite(value) and value >= 1.005
    return f"more than all ({percent(value)})" if more else percent(value)


def share_words(cause: Mapping[str, Any], asked: str) -> str:
    """'78 % of the P99 change' of a named cause; 'no share ...' where that change went the other way, or nowhere.

    A cause that is about what is told owns no seconds of anything.
    """
    if not cause.get("rows", True):
        return "of what is told, not of what was done"
    share = cause["share_p99"]
    return f"{'no share' if share is None else share_of(share)} of the {quantile_name(asked)} change"


def tentative(verdict: Mapping[str, Any]) -> str:
    """A warning above causes that stand beside a change which is not established; else nothing."""
    if verdict["status"] == "explained" or not any(cause.get("rows", True) for cause in verdict["causes"]):
        return ""
    if verdict["status"] == "not_observable":
        return "In part: more than half of the change lies where this setup cannot look.\n\n"
    return "Tentative: the change itself is not established.\n\n"


def quantile_name(q: str) -> str:
    """'0.99' -> 'P99', '0.999' -> 'P99.9'."""
    return "P" + format((Decimal(q) * 100).normalize(), "f")


def metric_name(metric: str) -> str:
    """'ttft' -> 'TTFT'."""
    return {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E latency"}[metric]


def size(num_bytes: float) -> str:
    """Bytes in the unit that leaves one to three digits before the point."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(num_bytes) < 999.5:
            return f"{number(num_bytes)} {unit}" if unit == "bytes" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def bandwidth(bytes_per_s: float) -> str:
    """Bytes a second, likewise."""
    return f"{size(bytes_per_s)}/s"


def number(value: float) -> str:
    """12345.0 -> '12,345'; 1.25 -> '1.25'."""
    return f"{value:,.0f}" if abs(value) >= 100 or float(value).is_integer() else f"{value:.3g}"


def listing(words: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    words = list(words)
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
