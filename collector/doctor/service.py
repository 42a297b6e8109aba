"""The store and the collector: do they open, answer, take rows, and is what they hold sound and fresh?"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final

import httpx

from collector.doctor.check import Check
from collector.terminal.client import CollectorClient, holder_of
from engine_probe.errors import KvscopeError, StoreBusy

STALE_S: Final = 300.0
CLOCK_OFF_S: Final = 2.0


def look_at_store(url: str) -> Iterator[Check]:
    """A store that is a file: does it open, what does it hold, does `store verify` find anything?"""
    from store.open import open_store, path_of

    try:
        path = path_of(url)
        if path != ":memory:" and not Path(path).exists():
            yield Check("store", url, "note", "there is none yet; `kvscope serve`, `import` or `attach` makes it")
            return
        with open_store(url, read_only=True) as store:
            stats = store.stats()
            rows = ", ".join(f"{count:,} {kind}" for kind, count in stats.rows.items() if count) or "no rows"
            yield Check("store", url, "ok", f"{stats.bytes / 1e6:,.1f} MB: {rows}", facts={"rows": dict(stats.rows)})
            yield from _fresh(stats.newest_ns)
            yield from _verified(store)
    except StoreBusy as error:
        holder = holder_of(url)
        if holder is None:
            yield Check("store", url, "fail", error.message)
        else:
            yield Check("store", url, "ok", f"held by the collector at {holder}", facts={"collector": holder})
    except KvscopeError as error:
        yield Check("store", url, "fail", error.message)


def _fresh(newest_ns: int | None) -> Iterator[Check]:
    if newest_ns is not None:
        age_s = time.time() - newest_ns / 1e9
        yield Check("store", "newest row", "note" if age_s > STALE_S else "ok", f"{_ago(age_s)} old")


def _verified(store: Any) -> Iterator[Check]:
    problems = store.verify()
    if not problems:
        yield Check("store", "verify", "ok", "tables, identities, counts and sealed files agree")
    for problem in problems:
        yield Check("store", "verify", "fail", f"{problem.where}: {problem.statement}", "kvscope store verify")


def look_at_collector(url: str, token: str | None, *, is_asked: bool) -> Iterator[Check]:
    """A collector at `url`: up, taking batches, does the token fit, do the clocks agree, what do its senders say?

    is_asked  the user named it: then its absence is a failure, else a note
    """
    try:
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            begun = time.time()
            answer = client.get(f"{url}/healthz")
            took = time.time() - begun
            ready = client.get(f"{url}/readyz")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        if is_asked:
            yield Check("collector", url, "fail", f"nothing answers ({error})", "kvscope serve")
        else:
            yield Check("collector", url, "note", "none is running here; `kvscope serve` starts it")
            yield _port(url)
        return
    if answer.status_code != 200 or "status" not in answer.text:
        yield Check("collector", url, "fail", f"answers {answer.status_code}, but is no kvscope collector")
        return
    if ready.status_code == 200:
        yield Check("collector", url, "ok", "up, takes batches")
    else:
        yield Check("collector", url, "warn", "up, but takes nothing: it is starting or draining")
    yield from _offset("collector", answer.headers.get("date"), begun, took)
    yield from _senders(url, token)


def _senders(url: str, token: str | None) -> Iterator[Check]:
    client = CollectorClient(url, token)
    try:
        marks = client.get("/api/v1/marks", {"mark": "gap", "limit": 5})
    except KvscopeError as error:
        yield Check("collector", "token", "fail", error.message, "give --token or KVSCOPE_TOKEN")
        return
    gaps = marks.get("marks", marks.get("items", [])) if isinstance(marks, dict) else []
    if gaps:
        newest = str(gaps[0].get("text", ""))
        text = f"rows were lost on the way at least {len(gaps)} times, last: {newest}"
        yield Check("collector", "gaps", "warn", text, "diagnose says what it means for a window")
    else:
        yield Check("collector", "gaps", "ok", "no sender told of lost rows")


def _port(url: str) -> Check:
    """Whether the collector's port is free, so that `serve` can take it."""
    parsed = httpx.URL(url)
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((parsed.host, parsed.port or 8321))
        except OSError as error:
            text = f"{parsed.host}:{parsed.port} is taken by something that is no collector ({error.strerror})"
            return Check("collector", "port", "warn", text, "kvscope serve --port 0")
    return Check("collector", "port", "ok", f"{parsed.host}:{parsed.port} is free")


def _offset(area: str, date: str | None, begun_s: float, took_s: float) -> Iterator[Check]:
    """The other side's clock against ours, from its Date header (whole seconds)."""
    if date is None:
        return
    try:
        theirs = parsedate_to_datetime(date).timestamp() + 0.5
    except (ValueError, TypeError):
        return
    offset = theirs - (begun_s + took_s / 2)
    error = 0.5 + took_s / 2
    facts = {"offset_s": round(offset, 3), "error_s": round(error, 3)}
    if abs(offset) - error > CLOCK_OFF_S:
        text = f"its clock is {offset:+.1f} s (to within {error:.1f} s) from ours"
        yield Check(
            area, "clock", "warn", text, "synchronise both machines; instants are not joined across them", facts
        )
    else:
        yield Check(area, "clock", "ok", "agrees with ours as far as its answers tell (whole seconds)", facts=facts)


def _ago(seconds: float) -> str:
    for size, word in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {word}"
    return f"{max(seconds, 0):.0f} s"
