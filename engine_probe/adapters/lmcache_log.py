"""LMCache's lines in an engine's log: what was stored for and loaded for each request -> `transfer` rows.

`[req_id=R] Retrieved 512 out of 1024 required tokens (from 2048 total tokens). size: 0.1250 gb, cost 12.5 ms` is one load
from the cache into the worker; `Stored` is the way back; a hit that is too small to be worth loading is a refusal. Sizes
are GiB. The log's time is local and has no zone: the zone is what makes a line that is being written now be now, in
quarters of an hour; older lines before the first such one are passed over. Source: LMCache 0.5.6 `v1/cache_engine.py`,
`integration/vllm/vllm_v1_adapter.py`, `logging.py`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from engine_probe.adapters.adapter import LogReader, Rows
from engine_probe.adapters.router_log import COLOUR
from engine_probe.adapters.vllm import normalise_request_id

NOW_S: Final = 60
"""A line whose time is so near to now, but for whole quarters of an hour, is being written now."""
QUARTER_S: Final = 900
_GIB: Final = 1 << 30

_STAMP: Final = re.compile(r"\[(\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d),(\d{3})\] LMCache ")
_MOVED: Final = re.compile(
    r"\[req_id=(?P<id>[^\]]{1,256})\] (?P<verb>Stored|Retrieved) (?P<got>\d+) out of (?:total )?(?P<wanted>\d+)"
    r"(?: required)? (?:tokens|out of)"
)
_COST: Final = re.compile(r"size: (?P<gib>[\d.]+) [gG][bB], cost (?P<ms>[\d.]+) ms")
_SKIPPED: Final = re.compile(
    r"Reqid: (?P<id>\S{1,256}), Total tokens \d+, .*?LMCache hit tokens: (?P<hit>\d+), "
    r"but need to load: \d+ < min_retrieve (?P<least>\d+)"
)


class LmcacheLog:
    """Reads one engine's output. `worker` is the engine that LMCache runs in."""

    def __init__(self, worker: str, *, clock: Callable[[], int] = time.time_ns) -> None:
        self._worker = worker
        self._clock = clock
        self._zone_s: int | None = None

    def feed(self, line: str) -> Rows:
        """One line; a `transfer` row where it tells of a load, a store, or a hit that was not loaded."""
        if "LMCache" not in line:
            return {}
        text = COLOUR.sub("", line)
        stamp = _STAMP.search(text)
        at_ns = None if stamp is None else self._instant(stamp)
        if at_ns is None:
            return {}
        row = _moved(text, self._worker) or _skipped(text, self._worker)
        return {} if row is None else {"transfer": [{"worker": self._worker, "at_ns": at_ns, **row}]}

    def worker_facts(self) -> dict[str, Any]:
        """LMCache's lines tell no geometry of the engine."""
        return {}

    def _instant(self, stamp: re.Match[str]) -> int | None:
        """UTC ns of a line; None while the zone is not known."""
        try:
            local = datetime.fromisoformat(f"{stamp[1]}T{stamp[2]}").replace(tzinfo=UTC)
        except ValueError:
            return None
        local_s = int(local.timestamp())
        away_s = local_s - self._clock() // 1_000_000_000
        zone_s = round(away_s / QUARTER_S) * QUARTER_S
        if abs(away_s - zone_s) <= NOW_S and abs(zone_s) <= 14 * 3_600:
            self._zone_s = zone_s
        if self._zone_s is None:
            return None
        return (local_s - self._zone_s) * 1_000_000_000 + int(stamp[3]) * 1_000_000


class BesideEngine:
    """An engine's own reader, with LMCache's lines of the same log beside it."""

    def __init__(self, engine: LogReader, lmcache: LmcacheLog) -> None:
        self._engine = engine
        self._lmcache = lmcache

    def feed(self, line: str) -> Rows:
        """Rows of both."""
        rows = self._engine.feed(line)
        if told := self._lmcache.feed(line):
            rows = {**rows, **told}
        return rows

    def worker_facts(self) -> dict[str, Any]:
        """What the engine's own lines tell."""
        return self._engine.worker_facts()


def _moved(text: str, worker: str) -> dict[str, Any] | None:
    match, cost = _MOVED.search(text), _COST.search(text)
    if match is None:
        return None
    got, wanted = int(match["got"]), int(match["wanted"])
    loads = match["verb"] == "Retrieved"
    reason = f"{got} of {wanted} tokens" if got < wanted else None
    return {
        "request_id": normalise_request_id(match["id"]),
        "source_worker": "lmcache" if loads else worker,
        "target_worker": worker if loads else "lmcache",
        "num_bytes": None if cost is None else round(float(cost["gib"]) * _GIB),
        "outcome": "ok" if got == wanted or not loads else "fell_back",
        "reason": reason,
        "wire_s": None if cost is None else float(cost["ms"]) / 1e3,
    }


def _skipped(text: str, worker: str) -> dict[str, Any] | None:
    match = _SKIPPED.search(text)
    if match is None:
        return None
    return {
        "request_id": normalise_request_id(match["id"]),
        "source_worker": "lmcache",
        "target_worker": worker,
        "outcome": "refused",
        "reason": f"a hit of {match['hit']} tokens is below min_retrieve {match['least']}",
    }
