"""TGI's output -> one `request` row a request that succeeded: its line `Success` carries the spans' times.

Both forms are read: text, and `--json-output`. Times are Rust's (`1.5s`, `12.3ms`, `45µs`), the line's own time is UTC.
validation (arrival to queue) is `frontend_s`; inference is not split into prefill and decode. The number of tokens is
inference over time per token, which TGI got by that very division. Parameters and text are not read. TGI names no
request: the row's id is the worker and the instant. Invariant: a line that is not understood says nothing. Source:
huggingface/text-generation-inference `router/src/server.rs`, `router/src/logging.rs`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import msgspec

from engine_probe.adapters.adapter import Rows

ENGINE: Final = "tgi"
MAX_LINE_CHARS: Final = 65_536
_SPAN_TIMES: Final = ("total_time", "validation_time", "queue_time", "inference_time", "time_per_token")
# A line of text: time, level, span{... fields}: target: file:line: Success
_TEXT = re.compile(r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{1,9}Z) +INFO .*: Success\s*$")
_FIELD = re.compile(
    r'\b(?P<name>total_time|validation_time|queue_time|inference_time|time_per_token)="(?P<time>[^"]{1,40})"'
)
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,12}m")
_DURATION = re.compile(r"(?P<number>\d{1,12}(?:\.\d{1,12})?)(?P<unit>ns|µs|us|ms|s)")
_UNITS: Final = {"ns": 1e-9, "µs": 1e-6, "us": 1e-6, "ms": 1e-3, "s": 1.0}


class TgiLog:
    """What one start of TGI writes."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._same = 0
        self._last_ns = -1

    def feed(self, line: str) -> Rows:
        """Take in one line; a `request` row where a request succeeded."""
        line = _COLOUR.sub("", line[:MAX_LINE_CHARS]).rstrip()
        if line.startswith("{"):
            told = _json(line)
        elif (match := _TEXT.search(line)) is not None:
            # The span's own fields come last: whatever stands in the parameters, the last of a name is TGI's.
            told = {"timestamp": match["time"]} | {found["name"]: found["time"] for found in _FIELD.finditer(line)}
        else:
            return {}
        row = request_columns(told)
        if not row:
            return {}
        self._same = self._same + 1 if row["at_ns"] == self._last_ns else 0
        self._last_ns = row["at_ns"]
        name = f"{self._worker}@{row['at_ns']}" + (f"-{self._same}" if self._same else "")
        return {"request": [{"worker": self._worker, "request_id": name, **row}]}

    def worker_facts(self) -> dict[str, Any]:
        """Nothing: `/info` tells the settings."""
        return {}


def request_columns(told: Mapping[str, Any]) -> dict[str, Any]:
    """`request` columns of one success; {} where its instant or its whole time is missing."""
    at_ns = _instant(told.get("timestamp"))
    total, validation, queue, inference, each = (seconds(told.get(name)) for name in _SPAN_TIMES)
    if at_ns is None or total is None:
        return {}
    arrival = at_ns - round(total * 1e9)
    scheduled = None if validation is None or queue is None else arrival + round((validation + queue) * 1e9)
    row = {
        "at_ns": at_ns,
        "vantage": "engine",
        "state": "finished",
        "engine": ENGINE,
        "arrival_ns": arrival,
        "first_scheduled_ns": scheduled,
        "last_token_ns": at_ns,
        "end_ns": at_ns,
        "frontend_s": validation,
        "queue_s": queue,
        "output_tokens": round(inference / each) if inference is not None and each else None,
    }
    return {key: value for key, value in row.items() if value is not None}


def seconds(text: Any) -> float | None:
    """`1.5s`, `12.3ms`, `45µs`, `7ns` -> seconds; None for anything else."""
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    return None if match is None else float(match["number"]) * _UNITS[match["unit"]]


def _json(line: str) -> dict[str, Any]:
    try:
        told = msgspec.json.decode(line)
    except (msgspec.MsgspecError, RecursionError):
        return {}
    span = told.get("span") if isinstance(told, dict) else None
    if not isinstance(span, dict) or told.get("message") != "Success":
        return {}
    return {"timestamp": told.get("timestamp")} | {name: span.get(name) for name in _SPAN_TIMES}


def _instant(text: Any) -> int | None:
    if not isinstance(text, str) or not text.endswith("Z"):
        return None
    head, _, fraction = text[:-1].partition(".")
    try:
        at = datetime.fromisoformat(head + "+00:00")
    except ValueError:
        return None
    if not 0 < len(fraction) < 10 or not fraction.isdecimal():
        fraction = "0"
    return int(at.timestamp()) * 1_000_000_000 + int(fraction.ljust(9, "0"))
