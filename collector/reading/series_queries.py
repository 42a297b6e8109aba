"""Time series for dashboards: one number a bucket of time and group, exact, from raw rows.

What can be asked for:
    ttft tpot e2e itl and every phase          of requests, in the bucket of their arrival
    requests                                   count of requests
    prompt_tokens cached_tokens ...            sums over requests
    step.COLUMN                                a number of scheduler steps
    block.CHANGE                               count of block events
    sample.NAME                                a scraped number; `increase` of a counter survives its resets

A quantile is nearest rank on the raw values of the bucket (`store/metrics.py`), never an average of quantiles. Where rows
are a sample, counts, sums and means are estimates with each row's weight (1 / sample_rate), and a quantile is that of the
rows; by weight, where their rates differ. A request that several rows tell counts once (`store/evidence/one_request.py`).

Merging rows takes ten times as long as the answer, and few windows need it; so it is asked first whether any could. Such
questions end at the first row, and where no row can be meant they end at the statistics of the column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from diagnosis.windows import judged_vantage, vantages
from engine_probe.errors import UsageError
from engine_probe.events import KINDS, column
from store.evidence.lineage import sample_rates, window_sql
from store.evidence.one_request import IS_SPAN, one_request_sql
from store.interface import KEY_EPOCH, Store, Window
from store.metrics import METRICS, Metric, metric, quantile_sql, weight_sql, weighted_rank

if TYPE_CHECKING:
    import pyarrow as pa

WORDS: Final = ("mean", "min", "max", "sum", "count", "last", "increase")
GROUPS: Final = {
    "request": ("worker", "model", "tenant", "workload", "priority_class", "vantage", "state", "engine", "run_id"),
    "step": ("worker", "run_id"),
    "block": ("worker", "tier", "reason", "run_id"),
    "sample": ("worker", "run_id"),
}
STEPS_S: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
DEFAULT_BUCKETS: Final = 120
TOKENS: Final = (
    "prompt_tokens",
    "cached_tokens",
    "computed_tokens",
    "recomputed_tokens",
    "self_hit_tokens",
    "output_tokens",
)
"""Columns of requests that are counts of tokens; a request that does not tell one adds nothing to its sum."""
MAX_CHUNK_TOKENS: Final = 4096
"""A streamed chunk counts as at most so many tokens here: its count is a sender's word, and each becomes a row."""


@dataclass(frozen=True, slots=True)
class SeriesRequest:
    """What to draw.

    stat       a quantile as a decimal text ("0.99"), or a word of WORDS; None: 0.99 of durations, count of events,
               mean of steps, last of samples
    step_s     length of a bucket; None takes one that gives at most DEFAULT_BUCKETS, and no more points than max_points
    by         columns to group by
    vantage    of requests: only rows of this vantage; None takes the client's where it measures, else the engine's, else
               the router's, unless the rows are grouped by vantage: numbers of two vantages are never mixed
    """

    metric: str
    window: Window
    stat: str | None = None
    step_s: int | None = None
    by: Sequence[str] = ()
    vantage: str | None = None
    max_points: int = 5_000


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where rows come from: what stands behind FROM, up to its WHERE, and the values of its `?`."""

    sql: str
    params: list[Any]

    def hold(self, store: Store, condition: str) -> bool:
        """Whether any of them meets it."""
        found = store.query(f"SELECT 1 FROM {self.sql} AND {condition} LIMIT 1", self.params)
        return bool(found.num_rows)


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the values come from: a relation with `instant`, `value` and the groups, and the unit of a value.

    rows    what the relation is made of
    usual   the stat where none is named
    vantage whose rows these are, of requests
    """

    kind: str
    rows: _Rows
    relation: str
    params: list[Any]
    unit: str
    usual: str
    vantage: str | None = None


def series(store: Store, wanted: SeriesRequest) -> dict[str, Any]:
    """`{metric, unit, stat, vantage, sample_rate, step_s, window, series: [{labels, points: [[at_ns, value, n], ...]}]}`.

    Raises UsageError.

    `at_ns` is the start of a bucket; buckets without rows are absent; `n` is the number of values behind a point, as they
    were seen. `sample_rate` is the lowest share of such rows that was kept, None where all were.
    """
    source = _source(store, wanted)
    for name in wanted.by:
        if name not in GROUPS[source.kind]:
            raise UsageError(
                f"{wanted.metric} cannot be grouped by {name!r}; only by {', '.join(GROUPS[source.kind])}", by=name
            )
    step_ns = _step_ns(store, source, wanted)
    labels = "".join(f"{name}, " for name in wanted.by)
    stat = source.usual if wanted.stat is None else wanted.stat
    lowest, differ = None, False
    if source.rows.hold(store, "sample_rate IS NOT NULL"):
        lowest, differ = sample_rates(store, source.rows.sql, source.rows.params)
    by_weight = differ and stat not in WORDS
    aggregate = _lists(stat) if by_weight else _aggregate(stat, source, weighted=lowest is not None)

    def asked(step_ns: int) -> pa.Table:
        return store.query(
            f"SELECT {labels}instant // {step_ns} * {step_ns} AS bucket, {aggregate} AS value, count(value) AS n "
            f"FROM ({source.relation}) WHERE value IS NOT NULL GROUP BY {labels}bucket ORDER BY {labels}bucket "
            f"LIMIT {wanted.max_points + 1}",
            source.params,
        )

    table = asked(step_ns)
    if table.num_rows > wanted.max_points and wanted.step_s is None and wanted.by:
        step_ns = _step_ns(store, source, wanted, _num_groups(store, source, wanted.by))
        table = asked(step_ns)
    if table.num_rows > wanted.max_points:
        raise UsageError(
            f"the answer has more than {wanted.max_points} points; choose a larger step, a smaller window or fewer groups",
            limit=wanted.max_points,
        )
    found: dict[tuple[Any, ...], list[list[Any]]] = {}
    for row in table.to_pylist():
        if by_weight:
            values, weights = (np.asarray(row["value"][part], dtype=np.float64) for part in "vw")
            row["value"] = weighted_rank(values, weights, stat)
        found.setdefault(tuple(row[name] for name in wanted.by), []).append([row["bucket"], row["value"], row["n"]])
    return {
        "metric": wanted.metric,
        "unit": source.unit,
        "stat": stat,
        "vantage": source.vantage,
        "sample_rate": lowest,
        "step_s": step_ns // 1_000_000_000,
        "window": str(wanted.window),
        "series": [
            {"labels": dict(zip(wanted.by, values, strict=True)), "points": points} for values, points in found.items()
        ],
    }


def _source(store: Store, wanted: SeriesRequest) -> _Source:
    kind, _, rest = wanted.metric.partition(".")
    if not rest:
        vantage = wanted.vantage
        if vantage is None and "vantage" not in wanted.by:
            vantage = judged_vantage(vantages(store, wanted.window))
        return _of_requests(store, wanted, vantage)
    if wanted.vantage is not None:
        raise UsageError(f"{wanted.metric} has no vantage; only metrics of requests have one", vantage=wanted.vantage)
    condition, params = window_sql(wanted.window, "at_ns")
    groups = ", ".join((*GROUPS.get(kind, ()), "sample_rate"))
    rows = _Rows(f"{kind} WHERE {condition}", params)
    if kind == "step":
        wanted_column = next((c for c in KINDS["step"] if c.name == rest and c.type in ("int64", "float64")), None)
        if wanted_column is None or rest == "at_ns":
            raise UsageError(f"steps have no number {rest!r}; see the event contract", metric=wanted.metric)
        relation = f"SELECT at_ns AS instant, {rest} AS value, {groups} FROM {rows.sql}"
        return _Source("step", rows, relation, params, wanted_column.unit or "1", "mean")
    if kind == "block":
        known = column("block", "change").choices
        if rest not in known:
            raise UsageError(
                f"blocks have no change {rest!r}; the changes are {', '.join(known)}", metric=wanted.metric
            )
        relation = f"SELECT at_ns AS instant, 1 AS value, {groups} FROM {rows.sql} AND change = ?"
        return _Source("block", rows, relation, [*params, rest], "events", "count")
    if kind == "sample":
        return _of_samples(wanted, rest, condition, params)
    raise UsageError(f"there is no metric {wanted.metric!r}; {_KNOWN}", metric=wanted.metric)


def _of_requests(store: Store, wanted: SeriesRequest, vantage: str | None) -> _Source:
    if wanted.metric == "requests" and wanted.stat not in (None, "count"):
        raise UsageError("requests are counted: stat=count, or none", stat=wanted.stat)
    is_plain = wanted.metric in ("requests", "itl", *TOKENS)
    measured = None if is_plain else _metric_of(wanted.metric)
    needs = ("token_ns", "token_counts") if wanted.metric == "itl" else measured.needs if measured else ()
    if wanted.metric in TOKENS:
        needs = (wanted.metric,)
    groups = ", ".join((*GROUPS["request"], "sample_rate"))
    rows = _one_row_each(store, wanted.window, vantage, ["arrival_ns", *GROUPS["request"], "sample_rate", *needs])
    if wanted.metric == "itl":
        tokens = f"least(greatest(1, coalesce(token_counts[i + 1], 1)), {MAX_CHUNK_TOKENS})"
        gaps = (
            f"SELECT arrival_ns AS instant, (token_ns[i + 1] - token_ns[i]) / 1e9 / {tokens} AS value, {tokens} AS times, {groups} "
            f"FROM (SELECT *, unnest(range(1, len(token_ns))) AS i FROM {rows.sql} AND len(token_ns) > 1)"
        )
        relation = (
            f"SELECT instant, value, {groups} FROM ({gaps}) WHERE times = 1 UNION ALL "
            f"SELECT instant, value, {groups} FROM (SELECT *, unnest(range(times)) AS again FROM ({gaps}) WHERE times > 1)"
        )
        return _Source("request", rows, relation, [*rows.params, *rows.params], "s", "0.99", vantage)
    value, unit, usual = "1", "requests", "count"
    if wanted.metric in TOKENS:
        value, unit, usual = wanted.metric, "tokens", "sum"
    if measured is not None:
        value, unit, usual = measured.expression(), measured.unit, "0.99"
    relation = f"SELECT arrival_ns AS instant, {value} AS value, {groups} FROM {rows.sql}"
    return _Source("request", rows, relation, rows.params, unit, usual, vantage)


def _one_row_each(store: Store, window: Window, vantage: str | None, columns: list[str]) -> _Rows:
    """The window's requests, one row each: as they are stored where no two rows can tell of one, else merged."""
    condition, params = window_sql(window, "arrival_ns")
    if vantage is not None:
        condition, params = f"{condition} AND vantage = ?", [*params, vantage]
    rows = _Rows(f"request WHERE {condition}", params)
    spans_and_others = rows.hold(store, IS_SPAN) and rows.hold(store, f"NOT {IS_SPAN}")
    if spans_and_others or _some_came_twice(store, rows):
        return _Rows(f"({one_request_sql(condition, columns)}) WHERE true", params)
    return rows


def _some_came_twice(store: Store, rows: _Rows) -> bool:
    """Whether rows of senders that can deliver a batch again (they give it no identity) name a request twice."""
    names = [s.source for s in store.sources() if not s.epoch or s.epoch.startswith(KEY_EPOCH)]
    if not names:
        return False
    found = store.query(
        f"SELECT count(*) > count(DISTINCT request_id) FROM {rows.sql} AND NOT {IS_SPAN} "
        "AND source IN (SELECT unnest(?::VARCHAR[]))",
        [*rows.params, names],
    )
    return bool(found.column(0)[0].as_py())


def _metric_of(text: str) -> Metric:
    """A metric of one request: its name, a short one, or a phase without its `_s`."""
    short = text in METRICS or text in ("ttft", "tpot", "e2e")
    name = text if short else f"{text}_s"
    if not short and name not in METRICS:
        raise UsageError(f"there is no metric {text!r}; {_KNOWN}", metric=text)
    return metric(name)


def _of_samples(wanted: SeriesRequest, name: str, condition: str, params: list[Any]) -> _Source:
    groups = ", ".join((*GROUPS["sample"], "sample_rate"))
    rows = _Rows(f"sample WHERE {condition} AND name = ?", [*params, name])
    if wanted.stat != "increase":
        relation = f"SELECT at_ns AS instant, value, {groups} FROM {rows.sql}"
        return _Source("sample", rows, relation, rows.params, "1", "last")
    # After a restart a counter begins at 0 again: what it shows then is what was added since.
    relation = (
        f"SELECT instant, CASE WHEN value >= before THEN value - before ELSE value END AS value, {groups} FROM ("
        f"SELECT at_ns AS instant, value, lag(value) OVER (PARTITION BY {groups}, labels ORDER BY at_ns) AS before, {groups} "
        f"FROM {rows.sql}) WHERE before IS NOT NULL"
    )
    return _Source("sample", rows, relation, rows.params, "1", "last")


def _lists(stat: str) -> str:
    """What a quantile by weight is made of."""
    quantile_sql("value", stat)  # refuses what is none
    return f"{{'v': list(value::DOUBLE), 'w': list({weight_sql()})}}"


def _aggregate(stat: str, source: _Source, *, weighted: bool) -> str:
    if stat == "increase" and source.kind != "sample":
        raise UsageError("increase is for counters among the samples: metric=sample.NAME_total", stat=stat)
    if stat not in WORDS:
        return quantile_sql("value", stat)
    if weighted and stat in ("mean", "sum", "count"):
        total, count = f"sum(value * {weight_sql()})", f"sum({weight_sql()})"
        return {"mean": f"{total} / {count}", "sum": total, "count": count}[stat]
    by_word = {
        "mean": "avg(value)",
        "last": "arg_max(value, instant)",
        "increase": "sum(value)",
        "sum": "sum(value::DOUBLE)",  # a sum of whole numbers is wider than JSON's
        "count": "count(value)",
    }
    return by_word.get(stat, f"{stat}(value)")


def _step_ns(store: Store, source: _Source, wanted: SeriesRequest, num_groups: int = 1) -> int:
    """The length of a bucket that was asked for, else one that gives few enough buckets, and few enough points in so many groups."""
    if wanted.step_s is not None:
        return wanted.step_s * 1_000_000_000
    first, last = wanted.window.start_ns, wanted.window.end_ns
    if first is None or last is None:
        bounds = store.query(
            f"SELECT min(instant) AS first, max(instant) AS last FROM ({source.relation})", source.params
        )
        row = bounds.to_pylist()[0]
        first = row["first"] if first is None else first
        last = row["last"] if last is None else last
    length_s = ((last or 0) - (first or 0)) / 1e9
    # a window that begins within a bucket has one more than fit into its length
    most = min(DEFAULT_BUCKETS, wanted.max_points // num_groups - 1)
    step_s = next((step for step in STEPS_S if length_s / step <= most), STEPS_S[-1])
    return step_s * 1_000_000_000


def _num_groups(store: Store, source: _Source, by: Sequence[str]) -> int:
    sql = f"SELECT count(*) FROM (SELECT DISTINCT {', '.join(by)} FROM ({source.relation}) WHERE value IS NOT NULL)"
    return max(1, int(store.query(sql, source.params).column(0)[0].as_py()))


_KNOWN: Final = f"the metrics are ttft, tpot, e2e, itl, requests, {', '.join(TOKENS)}, {', '.join(METRICS)}, step.COLUMN, block.CHANGE and sample.NAME"
