"""What a postmortem says beside the verdict: who was hurt, how it went over time, and the slowest requests.

Pure reading: the same store, verdict and rules give the same document, byte for byte. Requests are those of the verdict's vantage;
one is over its SLO where it did not finish or exceeded a limit (`store.metrics.meets_rules_sql`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Final

from engine_probe.events import PHASES
from store.interface import Store, Window
from store.metrics import SloRule, meets_rules_sql, metric, slo_rules
from store.sql_json import json_objects

SIDES: Final = ("baseline", "suspect")
BUCKETS: Final = 60
SLOWEST: Final = 10
MOST_TENANTS: Final = 12
MOST_MARKS: Final = 60
BEFORE_NS: Final = 600_000_000_000
"""Marks so long before the suspect window are part of the story."""


@dataclass(frozen=True, slots=True)
class Told:
    """Something that others said about the time of the incident, as a fired alert. text is one line."""

    at_ns: int
    text: str


def incident(
    store: Store, verdict: Mapping[str, Any], rules: Sequence[SloRule] = (), alerts: Sequence[Told] = ()
) -> dict[str, Any]:
    """The document: `impact`, `over_time`, `moments`, `slowest`, `queries`, of a verdict's two windows.

    `queries` is every query behind a number, of these parts and of the verdict's evidence, each with the parts that rest on it (`of`).
    """
    held_to = slo_rules() if not rules else tuple(rules)
    asked = _Asked(store)
    parts = {
        "impact": _impact(asked, verdict, held_to),
        "over_time": {side: _over_time(asked, verdict, side) for side in SIDES},
        "moments": _moments(asked, verdict, alerts),
        "slowest": _slowest(asked, verdict),
    }
    for cause in verdict["causes"]:
        for evidence in cause["evidence"]:
            if evidence["sql"]:
                asked.remember(cause["cause"], evidence["sql"])
    return {**parts, "queries": asked.told()}


class _Asked:
    """Asks the store, and remembers what was asked for which part; queries hold their values, so that each runs as it stands."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._of: dict[str, list[str]] = {}

    def rows(self, of: str, sql: str) -> list[dict[str, Any]]:
        """The answer, for the part `of`."""
        self.remember(of, sql)
        return json_objects(self._store.query(sql))

    def remember(self, of: str, sql: str) -> None:
        """A query that the part `of` rests on."""
        parts = self._of.setdefault(sql, [])
        if of not in parts:
            parts.append(of)

    def told(self) -> list[dict[str, Any]]:
        """hash (of its text), sql, of."""
        return [{"hash": query_hash(sql), "sql": sql, "of": parts} for sql, parts in self._of.items()]


def window_of(verdict: Mapping[str, Any], side: str) -> Window:
    """One of the verdict's windows."""
    told = verdict["windows"][side]
    return Window(told["start_ns"], told["end_ns"], told["run"])


def _impact(asked: _Asked, verdict: Mapping[str, Any], rules: Sequence[SloRule]) -> dict[str, Any]:
    """Requests, tenants and sessions over their SLO in both windows, and the goodput (requests/s within every limit)."""
    sides: dict[str, Any] = {}
    for side in SIDES:
        (row,) = asked.rows("impact", _OVER.format(met=meets_rules_sql(rules), where=_requests(verdict, side)))
        told = verdict["windows"][side]
        length_s = (told["end_ns"] - told["start_ns"]) / 1e9
        sides[side] = row | {"goodput_rps": row["met"] / length_s if length_s > 0 else None}
    tenants = _by_tenant(asked, verdict, rules)
    limits = {rule.name: {"name": rule.name, **asdict(rule.slo)} for rule in rules}
    return {**sides, "tenants": tenants, "slo": list(limits.values())}


_OVER: Final = """SELECT count(*) AS requests, count(*) FILTER ({met}) AS met, count(*) FILTER (NOT {met}) AS over,
    count(*) FILTER (state <> 'finished') AS unfinished, count(DISTINCT tenant) AS tenants,
    count(DISTINCT tenant) FILTER (NOT {met}) AS tenants_over, count(DISTINCT session_id) AS sessions,
    count(DISTINCT session_id) FILTER (NOT {met}) AS sessions_over FROM request WHERE {where}"""


def _by_tenant(asked: _Asked, verdict: Mapping[str, Any], rules: Sequence[SloRule]) -> list[dict[str, Any]]:
    """Tenants with most requests over their SLO in the suspect window, beside their share before."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for side in SIDES:
        sql = f"SELECT tenant, count(*) AS requests, count(*) FILTER (NOT {meets_rules_sql(rules)}) AS over FROM request WHERE {_requests(verdict, side)} AND tenant IS NOT NULL GROUP BY tenant"
        for row in asked.rows("impact", sql):
            found.setdefault(row["tenant"], {})[side] = row
    rows: list[dict[str, Any]] = [
        {
            "tenant": tenant,
            **{
                side: {key: sides[side][key] for key in ("requests", "over")} if side in sides else None
                for side in SIDES
            },
        }
        for tenant, sides in found.items()
        if "suspect" in sides and sides["suspect"]["over"]
    ]
    return sorted(rows, key=lambda row: (-row["suspect"]["over"], row["tenant"]))[:MOST_TENANTS]


def _over_time(asked: _Asked, verdict: Mapping[str, Any], side: str) -> list[dict[str, Any]]:
    """The judged quantile by stretch of the window: at_ns (start), value_s, requests."""
    told = verdict["windows"][side]
    step_ns = max(1, (told["end_ns"] - told["start_ns"]) // BUCKETS)
    value = metric(verdict["metric"]).expression()
    sql = (
        f"SELECT {told['start_ns']} + (arrival_ns - {told['start_ns']}) // {step_ns} * {step_ns} AS at_ns, "
        f"quantile_disc({value}, {float(verdict['requested_quantile'])}) AS value_s, count({value}) AS requests "
        f"FROM request WHERE {_requests(verdict, side)} GROUP BY 1 HAVING count({value}) > 0 ORDER BY 1"
    )
    return asked.rows("timeline", sql)


def _moments(asked: _Asked, verdict: Mapping[str, Any], alerts: Sequence[Told]) -> list[dict[str, Any]]:
    """What is worth a line on the time axis of the suspect window: marks, alerts, and when each cause held, in order."""
    window = window_of(verdict, "suspect")
    start_ns, end_ns = window.start_ns or 0, window.end_ns or 0
    condition = _literal(Window(start_ns - BEFORE_NS, end_ns, window.run_id), "at_ns")
    sql = (
        f"SELECT at_ns, mark, worker, subject, text FROM mark WHERE {condition} ORDER BY at_ns, mark LIMIT {MOST_MARKS}"
    )
    moments: list[dict[str, Any]] = [
        {
            "at_ns": row["at_ns"],
            "what": "mark",
            "text": f"{row['mark']}: {row['text'] or row['subject'] or row['worker'] or ''}".rstrip(": "),
        }
        for row in asked.rows("timeline", sql)
    ]
    moments += [{"at_ns": alert.at_ns, "what": "alert", "text": alert.text} for alert in alerts]
    for cause in verdict["causes"]:
        if cause["interval"]:
            for edge, word in (("start_ns", "begins"), ("end_ns", "ends")):
                moments.append({"at_ns": cause["interval"][edge], "what": "cause", "text": f"{cause['cause']} {word}"})
    for edge, word in (("start_ns", "begins"), ("end_ns", "ends")):
        moments.append(
            {"at_ns": verdict["windows"]["suspect"][edge], "what": "window", "text": f"the suspect window {word}"}
        )
    return sorted(moments, key=lambda moment: (moment["at_ns"], moment["what"], moment["text"]))


def _slowest(asked: _Asked, verdict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The slowest requests of the suspect window, with the seconds of each phase as the engine told them."""
    value = metric(verdict["metric"]).expression()
    phases = ", ".join(f"{phase}_s" for phase in PHASES)
    sql = (
        f"SELECT request_id, worker, tenant, arrival_ns, {value} AS value_s, prompt_tokens, cached_tokens, output_tokens, num_preemptions "
        f"FROM request WHERE {_requests(verdict, 'suspect')} AND {value} IS NOT NULL ORDER BY value_s DESC, request_id LIMIT {SLOWEST}"
    )
    rows = asked.rows("slowest requests", sql)
    if not rows:
        return rows
    run = verdict["windows"]["suspect"]["run"]
    ids = ", ".join(_quoted(row["request_id"]) for row in rows)
    engine = (
        f"SELECT request_id, any_value(worker) AS worker, {', '.join(f'sum({phase}_s) AS {phase}_s' for phase in PHASES)} FROM "
        f"(SELECT request_id, worker, {phases} FROM request WHERE vantage = 'engine' AND "
        f"{_literal(Window(run_id=run), 'arrival_ns')} AND request_id IN ({ids})) GROUP BY request_id"
    )
    told = {row["request_id"]: row for row in asked.rows("slowest requests", engine)}
    for row in rows:
        spent = told.get(row["request_id"], {})
        row["worker"] = row["worker"] or spent.get("worker")
        row["phases"] = {phase: spent[f"{phase}_s"] for phase in PHASES if spent.get(f"{phase}_s")}
    return rows


def query_hash(sql: str) -> str:
    """Twelve hexadecimal digits that name a query."""
    return sha256(sql.encode()).hexdigest()[:12]


def _requests(verdict: Mapping[str, Any], side: str) -> str:
    return f"vantage = '{verdict['vantage']}' AND {_literal(window_of(verdict, side), 'arrival_ns')}"


def _literal(window: Window, instant: str) -> str:
    """The condition of `store.evidence.lineage.window_sql` with every value in its place, so that a query can be read and run alone."""
    parts = ["run_id IS NULL" if window.run_id is None else f"run_id = {_quoted(window.run_id)}"]
    parts += [] if window.start_ns is None else [f"{instant} >= {int(window.start_ns)}"]
    parts += [] if window.end_ns is None else [f"{instant} < {int(window.end_ns)}"]
    return " AND ".join(parts)


def _quoted(text: str) -> str:
    """A text as SQL; a NUL would end the statement."""
    quoted = "'" + text.replace("'", "''") + "'"
    return quoted if "\0" not in text else "(" + quoted.replace("\0", "' || chr(0) || '") + ")"
