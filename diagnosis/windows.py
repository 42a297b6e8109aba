"""Which two windows are compared, and why: named runs, times, or chosen by a stated rule.

`NAME`            the run of that name
`START/END`       live rows; instants as ISO 8601 (UTC where no zone is given) or nanoseconds; `now`, `-15m`, `-2h` also work; no END: now
`NAME@START/END`  a part of a run
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from engine_probe.errors import BadWindow
from store.evidence.lineage import window_sql
from store.interface import Store, Window

NS = 1_000_000_000
"""Nanoseconds of a second."""
MINUTE = 60 * NS
DAY = 24 * 60 * MINUTE
VANTAGES = ("client", "engine", "router")
LAST_NS = (1 << 63) - 1
"""Latest instant that the store can hold."""
DEFAULT_LENGTH = 15 * MINUTE
MIN_REQUESTS = 30
"""A window that we choose ourselves has at least this many requests."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Two windows, their names in the verdict, and why they were taken."""

    base: Window
    suspect: Window
    base_name: str
    suspect_name: str
    why: str


def parse_window(text: str, store: Store, now_ns: int) -> Window:
    """Text -> window. Raises BadWindow where it names no run and is no span, or where its end lies before its start."""
    text = text.strip()
    runs = store.runs()
    if text in runs:
        return Window(run_id=text)
    run, at, span = text.rpartition("@")
    if at and run not in runs:
        raise BadWindow(f"there is no run named {run!r}; known runs: {_known(runs)}", window=text)
    if "/" not in span:
        raise BadWindow(f"{text!r} is neither a run nor START/END; known runs: {_known(runs)}", window=text)
    start_text, _, end_text = span.partition("/")
    if not start_text.strip():
        raise BadWindow(
            f"window {text!r} does not say where it starts: give START/END (without an END it ends now)", window=text
        )
    start, end = parse_instant(start_text, now_ns), parse_instant(end_text, now_ns)
    if end == start:
        raise BadWindow(f"window {text!r} is empty: it ends before it starts, or just there", window=text)
    if end < start:
        raise BadWindow(
            f"window {text!r} ends before it starts ({iso(start)} is after {iso(end)}); give START/END", window=text
        )
    if start > now_ns:
        raise BadWindow(f"window {text!r} lies in the future: it is {iso(now_ns)} now", window=text)
    return Window(
        start, min(end, now_ns), run or None
    )  # what has not been yet is no part of it: rates would be too low


def iso(at_ns: int) -> str:
    """An instant for people: '2026-01-31 12:00:00 UTC'."""
    return datetime.fromtimestamp(at_ns // NS, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def shown(window: Window) -> str:
    """A window for people: its run, and its instants as ISO."""
    ends = ["the beginning" if end is None else iso(end) for end in (window.start_ns, window.end_ns)]
    if window.end_ns is None:
        ends[1] = "the end"
    span = "" if window.start_ns is None and window.end_ns is None else f"{ends[0]} to {ends[1]}"
    if window.run_id is None:
        return span or "all live rows"
    return f"{window.run_id}, {span}" if span else window.run_id


def holds_nothing(store: Store, window: Window, what: str) -> str:
    """Why a window is empty, and where requests of its run (or live ones) lie."""
    scope, params = window_sql(Window(run_id=window.run_id), "arrival_ns")
    first, last = (
        store.query(f"SELECT min(arrival_ns) AS first, max(arrival_ns) AS last FROM request WHERE {scope}", params)
        .to_pylist()[0]
        .values()
    )
    of = "live requests" if window.run_id is None else f"requests of {window.run_id}"
    where = (
        f"the {of} that are stored came from {iso(first)} to {iso(last)}" if first is not None else f"there are no {of}"
    )
    return f"{what}; {where} (`kvscope requests list`)"


def parse_instant(text: str, now_ns: int) -> int:
    """`2026-01-31T12:00:00Z`, nanoseconds, `now`, or `-15m` (before now) -> ns since 1970 UTC. Raises BadWindow."""
    instant = _instant(text.strip(), now_ns)
    if not 0 <= instant <= LAST_NS:
        raise BadWindow(f"{text.strip()!r} lies outside 1970 to 2262, which nanoseconds can say", window=text.strip())
    return instant


def _instant(text: str, now_ns: int) -> int:
    if text in ("", "now"):
        return now_ns
    if re.fullmatch(r"[0-9]{17,19}", text):
        return int(text)
    if re.fullmatch(r"[0-9]{9,16}", text):
        unit = "microseconds" if len(text) > 14 else "milliseconds" if len(text) > 11 else "seconds"
        raise BadWindow(f"{text!r} looks like {unit} since 1970; give nanoseconds or ISO 8601", window=text)
    relative = re.fullmatch(r"-([0-9]{1,6})([smhd])", text)
    if relative:
        length = {"s": NS, "m": MINUTE, "h": 60 * MINUTE, "d": DAY}[relative.group(2)]
        return now_ns - int(relative.group(1)) * length
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise BadWindow(
            f"{text!r} is no instant: use ISO 8601 (2026-01-31T12:00:00Z), nanoseconds since 1970, now, or -15m",
            window=text,
        ) from None
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    # whole seconds and microseconds apart: a float of seconds since 1970 would lose the last digits
    return int(moment.replace(microsecond=0).timestamp()) * NS + moment.microsecond * 1000


def choose(store: Store, baseline: Window | None, suspect: Window | None, now_ns: int) -> Chosen:
    """Fill in what was not given: suspect = the last 15 minutes; baseline = the same time yesterday (up to 7 days back), else the
    window before the newest mark, else the quietest earlier window of the same length."""
    why: list[str] = []
    if suspect is None:
        end = _newest(store, now_ns)
        suspect = Window(end - DEFAULT_LENGTH, end)
        why.append(
            "suspect: the last 15 minutes"
            if end >= now_ns - MINUTE
            else "suspect: the last 15 minutes that hold requests"
        )
    if baseline is None:
        baseline, reason = _baseline(store, suspect)
        why.append(f"baseline: {reason}")
    if baseline == suspect:
        raise BadWindow(
            f"baseline and suspect are the same window ({suspect}); there is nothing to compare", window=str(suspect)
        )
    if overlap(baseline, suspect):
        raise BadWindow(
            f"baseline ({shown(baseline)}) and suspect ({shown(suspect)}) overlap; give two windows that share no time",
            window=str(suspect),
        )
    given = (
        "; ".join(why)
        if why
        else "both windows were given; windows chosen by eye after looking at the data overstate a change"
    )
    if _is_later(baseline, suspect):
        given += (
            "; the baseline lies after the suspect window, so what is told is how the earlier one differs from the later one: "
            "exchange them to ask what got worse"
        )
    names = (baseline.run_id or "baseline", suspect.run_id or "suspect")
    if names[0] == names[1]:  # two parts of one run
        names = ("baseline", "suspect")
    return Chosen(baseline, suspect, *names, given)


def latest(store: Store, now_ns: int) -> Window:
    """The last 15 minutes, or the last 15 that hold requests. Raises BadWindow where nothing live is stored."""
    end = _newest(store, now_ns, "name a run instead, or START/END of one as NAME@START/END")
    return Window(end - DEFAULT_LENGTH, end)


def overlap(one: Window, other: Window) -> bool:
    """They share time of one run (or of the live rows)."""
    return (
        one.run_id == other.run_id
        and (one.start_ns or 0) < (other.end_ns or 1 << 62)
        and (other.start_ns or 0) < (one.end_ns or 1 << 62)
    )


def _is_later(baseline: Window, suspect: Window) -> bool:
    """Of one run (or of the live rows) the baseline begins where the suspect window has ended, or later."""
    ends = (baseline.start_ns, suspect.end_ns)
    return baseline.run_id == suspect.run_id and None not in ends and (ends[0] or 0) >= (ends[1] or 0)


def _baseline(store: Store, suspect: Window) -> tuple[Window, str]:
    if suspect.run_id is not None and suspect.start_ns is None:
        raise BadWindow(
            f"a baseline is needed for the run {suspect.run_id!r}: give --baseline NAME; known runs: {_known(store.runs())}",
            window=str(suspect),
        )
    start, end = suspect.start_ns, suspect.end_ns
    if start is None or end is None:
        raise BadWindow(
            f"a baseline is needed for a window that is open at one end ({suspect}): give --baseline START/END or a run",
            window=str(suspect),
        )
    length = end - start
    for days in range(1, 8):
        window = Window(start - days * DAY, end - days * DAY, suspect.run_id)
        if _count(store, window) >= MIN_REQUESTS:
            return window, f"the same time {days} day{'s' if days > 1 else ''} earlier"
    condition, params = window_sql(Window(None, end, suspect.run_id), "at_ns")
    newest = store.query(
        f"SELECT max(at_ns) FROM mark WHERE {condition} AND mark IN ('config_changed', 'deployed', 'canary')", params
    )
    mark = newest.column(0)[0].as_py()
    if mark is not None:
        stop = min(mark, start)
        window = Window(stop - length, stop, suspect.run_id)
        if _count(store, window) >= MIN_REQUESTS:
            return window, "the window before the newest change mark"
    window, found = _quietest(store, suspect, length)
    if found:
        return window, "the quietest earlier window of the same length"
    before = datetime.fromtimestamp(start // 1_000_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    raise BadWindow(
        f"no baseline was found: fewer than {MIN_REQUESTS} requests are stored before {before}, where the suspect window "
        "begins; wait until there are more, or give --baseline START/END or a run",
        window=str(suspect),
    )


def _quietest(store: Store, suspect: Window, length: int) -> tuple[Window, bool]:
    """Earlier window of the same length with the lowest 95th percentile of TTFT among those with enough requests."""
    condition, params = window_sql(Window(None, suspect.start_ns, suspect.run_id), "arrival_ns")
    start = suspect.start_ns or 0
    vantage = judged_vantage(vantages(store, suspect)) or "client"
    table = store.query(
        f"""
SELECT (? - arrival_ns) // ? AS back, count(*) AS n, quantile_disc(first_token_ns - arrival_ns, 0.95) AS p95
FROM request WHERE {condition} AND first_token_ns IS NOT NULL AND vantage = ?
GROUP BY back HAVING n >= {MIN_REQUESTS} ORDER BY p95, back LIMIT 1""",
        [start - 1, length, *params, vantage],
    )
    if table.num_rows == 0:
        return suspect, False
    back = int(table["back"][0].as_py())
    return Window(start - (back + 1) * length, start - back * length, suspect.run_id), True


def _count(store: Store, window: Window) -> int:
    condition, params = window_sql(window, "arrival_ns")
    sql = f"SELECT count(DISTINCT request_id) FROM request WHERE {condition}"
    return int(store.query(sql, params).column(0)[0].as_py())


def vantages(store: Store, window: Window) -> frozenset[str]:
    """Vantages that have requests in the window."""
    condition, params = window_sql(window, "arrival_ns")
    table = store.query(f"SELECT DISTINCT vantage FROM request WHERE {condition}", params)
    return frozenset(table.column(0).to_pylist())


def judged_vantage(seen: Collection[str]) -> str | None:
    """The vantage that is judged where several were seen: what the client felt, else the engine, else the router."""
    return next((vantage for vantage in VANTAGES if vantage in seen), None)


def _newest(store: Store, now_ns: int, instead: str = "name two runs instead") -> int:
    newest = store.query("SELECT max(arrival_ns) FROM request WHERE run_id IS NULL").column(0)[0].as_py()
    if newest is None:
        runs = store.runs()
        hint = f"; {instead} (known: {_known(runs)})" if runs else "; attach an engine or import a recording first"
        raise BadWindow("no live requests are stored" + hint, window="last 15 minutes")
    return now_ns if newest > now_ns - 15 * MINUTE else int(newest) + 1


def _known(runs: Iterable[str]) -> str:
    names = list(runs)
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "") if names else "none"
