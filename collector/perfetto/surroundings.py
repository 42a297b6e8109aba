"""What lies around some requests: the steps, blocks, routes, transfers and marks of their workers while they were there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from store.evidence.lineage import window_sql
from store.interface import Store, Window
from store.metrics import metric
from store.sql_json import json_objects

Row = dict[str, Any]

MOST: Final = {"step": 100_000, "block": 100_000, "route": 20_000, "transfer": 20_000, "mark": 1_000, "request": 10_000}
"""Most rows of a kind that are drawn; a viewer in a browser gets slow beyond some hundred thousand events."""
MOST_NEIGHBOURS: Final = 300

_METRICS: Final = ", ".join(f"{metric(name).expression()} AS {name}_s" for name in ("ttft", "tpot", "e2e"))
_STEP: Final = """worker, step, at_ns, duration_s, num_running, num_waiting_prefill, num_waiting_decode, waiting_on, oldest_wait_s,
    prefill_tokens, decode_tokens, recomputed_tokens, num_preempted, schedule_s, forward_s, sample_s, alloc_s, probe_s, kv_load_s,
    blocks_total, blocks_used, blocks_reserved, blocks_cached, blocks_evicted"""
_BLOCK: Final = """worker, at_ns, change, tier, request_id, any_value(reason) AS reason, count(*) AS blocks, sum(num_tokens) AS tokens,
    min(idle_s) AS min_idle_s, max(idle_s) AS max_idle_s, sum(reuse_count) AS reuse_count"""


@dataclass(frozen=True, slots=True)
class Scene:
    """Rows by kind: requests in order of arrival, the others in order of time; `truncated` names the kinds of which rows were left out."""

    requests: list[Row]
    subjects: frozenset[str]
    steps: list[Row]
    blocks: list[Row]
    routes: list[Row]
    transfers: list[Row]
    marks: list[Row]
    truncated: list[str] = field(default_factory=list)


def scene_of(store: Store, ids: Sequence[str], window: Window | None, *, with_neighbours: bool) -> Scene:
    """Everything stored about these requests, and about their workers in the meantime.

    With neighbours the other requests that their workers served meanwhile are in it too, without their tokens.
    """
    reader = _Reader(store)
    condition, params = ("true", []) if window is None else window_sql(window, "arrival_ns")
    requests = reader.rows(
        "request", f"*, {_METRICS}", f"request_id IN (SELECT unnest(?)) AND {condition}", [list(ids), *params]
    )
    stays = _stays(requests)
    if with_neighbours:
        requests += reader.neighbours(stays, ids)
    requests.sort(key=lambda row: row["arrival_ns"])
    named = [row["request_id"] for row in requests]
    first_ns, last_ns = _bounds(stays)
    runs = sorted({row["run_id"] or "" for row in requests})
    about = f"coalesce(run_id, '') IN (SELECT unnest(?)) AND request_id IN (SELECT unnest(?)) AND at_ns BETWEEN {first_ns - _SLACK_NS} AND {last_ns + _SLACK_NS}"
    around = Window(first_ns - _SLACK_NS, last_ns + 1, requests[0]["run_id"]) if requests else Window(0, 0)
    condition, params = window_sql(around, "at_ns")
    return Scene(
        requests=requests,
        subjects=frozenset(ids),
        steps=reader.during("step", _STEP, stays, "at_ns - coalesce(duration_s, 0) * 1e9"),
        blocks=reader.during("block", _BLOCK, stays, "at_ns", "GROUP BY worker, at_ns, change, tier, request_id"),
        routes=reader.rows("route", "*", about, [runs, named]),
        transfers=reader.rows("transfer", "*", about, [runs, named]),
        marks=reader.rows("mark", "*", condition, params),
        truncated=sorted(reader.truncated),
    )


_SLACK_NS: Final = 60_000_000_000
"""Routes and transfers are told by other clocks, and marks explain what comes after them."""


@dataclass(frozen=True, slots=True)
class _Stay:
    """A worker had some of the requests from start to end."""

    run_id: str | None
    worker: str
    start_ns: int
    end_ns: int


class _Reader:
    """Reads kinds within their limits, and remembers what was cut."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.truncated: set[str] = set()

    def rows(self, kind: str, columns: str, condition: str, params: Sequence[Any], group: str = "") -> list[Row]:
        sql = f'SELECT {columns} FROM "{kind}" WHERE {condition} {group} ORDER BY at_ns LIMIT {MOST[kind] + 1}'
        found = json_objects(self._store.query(sql, list(params)))
        if len(found) > MOST[kind]:
            self.truncated.add(f"{kind}s")
        return found[: MOST[kind]]

    def during(self, kind: str, columns: str, stays: Sequence[_Stay], start: str, group: str = "") -> list[Row]:
        """Rows of the workers that overlap one of the stays. `start` is where a row begins, in SQL."""
        if not stays:
            return []
        first_ns, last_ns = _bounds(stays)
        lists = [
            [stay.run_id for stay in stays],
            [stay.worker for stay in stays],
            [stay.start_ns for stay in stays],
            [stay.end_ns for stay in stays],
        ]
        condition = (
            f"at_ns BETWEEN {first_ns} AND {last_ns + _SLACK_NS} AND EXISTS (FROM (SELECT unnest(?::VARCHAR[]) AS run, "
            "unnest(?::VARCHAR[]) AS whose, unnest(?::BIGINT[]) AS first_ns, unnest(?::BIGINT[]) AS last_ns) AS stay WHERE "
            f"stay.run IS NOT DISTINCT FROM run_id AND stay.whose = worker AND at_ns >= stay.first_ns AND {start} <= stay.last_ns)"
        )
        return self.rows(kind, columns, condition, lists, group)

    def neighbours(self, stays: Sequence[_Stay], ids: Sequence[str]) -> list[Row]:
        """Other requests that the workers served during the stays, the earliest first."""
        found = [
            row
            for row in self.during("request", f"*, {_METRICS}", stays, "arrival_ns")
            if row["vantage"] == "engine" and row["request_id"] not in ids
        ]
        if len(found) > MOST_NEIGHBOURS:
            self.truncated.add("neighbours")
        return found[:MOST_NEIGHBOURS]


def _stays(requests: Sequence[Mapping[str, Any]]) -> list[_Stay]:
    """When which worker had any of the requests: stretches that overlap are one."""
    whole = sorted(
        (
            _Stay(row["run_id"], row["worker"], row["arrival_ns"], end_of(row))
            for row in requests
            if row["worker"] is not None
        ),
        key=lambda stay: (stay.run_id or "", stay.worker, stay.start_ns),
    )
    merged: list[_Stay] = []
    for stay in whole:
        last = merged[-1] if merged else None
        if last and (last.run_id, last.worker) == (stay.run_id, stay.worker) and stay.start_ns <= last.end_ns:
            merged[-1] = _Stay(stay.run_id, stay.worker, last.start_ns, max(last.end_ns, stay.end_ns))
        else:
            merged.append(stay)
    return merged


def _bounds(stays: Sequence[_Stay]) -> tuple[int, int]:
    return min((stay.start_ns for stay in stays), default=0), max((stay.end_ns for stay in stays), default=0)


def end_of(row: Mapping[str, Any]) -> int:
    """The last instant that is known of a request: of one that was aborted that may be the instant of its row alone."""
    told = row["at_ns"] if row["end_ns"] is None and row["last_token_ns"] is None else None
    known = (row["end_ns"], row["last_token_ns"], row["first_token_ns"], row["arrival_ns"], told)
    return int(max(instant for instant in known if instant is not None))
