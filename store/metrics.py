"""Every definition of design section 4, once: as Python on one row and as SQL over the columns of `request`.

t0 arrival, t1 first token visible, tN last content token visible, tend stream end, all at one vantage; N output
tokens. A value that cannot be known is null, and so is a time below zero: its two instants cannot both be right. Every surface (API, pages, metrics, diagnosis, reports) takes its numbers
from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine_probe.errors import UsageError
from engine_probe.events import PHASES
from store.percentile import (
    nearest_rank,
    parse_quantile,
    quantile_sql,
    quantiles_sql,
    rank_index,
    rank_interval,
    weighted_rank,
)

__all__ = [
    "CACHE_SQL",
    "METRICS",
    "PRESET_SLOS",
    "SLO_GOAL",
    "THROUGHPUT",
    "Metric",
    "Slo",
    "SloRule",
    "at_least_one_slow",
    "count_sql",
    "goodput_rps",
    "goodput_sql",
    "hit_class",
    "hit_class_sql",
    "itl_s",
    "meets_rules_sql",
    "meets_slo",
    "meets_slo_sql",
    "metric",
    "nearest_rank",
    "parse_quantile",
    "quantile_sql",
    "quantiles_sql",
    "rank_index",
    "rank_interval",
    "reusable_tokens",
    "slo_rules",
    "total_sql",
    "weight",
    "weight_sql",
    "weighted_rank",
]

Row = Mapping[str, Any]


# Sampling: how many rows a row stands for


_WEIGHT: Final = "(1.0 / coalesce({r}sample_rate, 1.0))"


def weight(row: Row) -> float:
    """How many rows a stored row stands for: 1 / sample_rate; null means that all were kept, so 1.

    A sum of weights (Horvitz and Thompson 1952) estimates a count without bias whatever the rates were; a ratio of two such
    sums at one rate is the plain ratio.
    """
    rate = row.get("sample_rate")
    return 1.0 if rate is None else 1.0 / float(rate)


def weight_sql(alias: str = "") -> str:
    """SQL expression for `weight`."""
    return _WEIGHT.format(r=f"{alias}." if alias else "")


def total_sql(expression: str, alias: str = "") -> str:
    """SQL aggregate: estimated sum of an expression over all rows that the stored ones stand for."""
    return f"sum(({expression}) * {weight_sql(alias)})"


def count_sql(alias: str = "", where: str | None = None) -> str:
    """SQL aggregate: estimated number of rows that the stored ones (those that meet `where`) stand for; 0 without any."""
    kept = "" if where is None else f" FILTER ({where})"
    return f"coalesce(sum({weight_sql(alias)}){kept}, 0)"


@dataclass(frozen=True, slots=True)
class Metric:
    """One value a request.

    sql     expression; `{r}` stands for a table alias with its dot, or nothing
    needs   columns it reads
    """

    name: str
    unit: str
    doc: str
    needs: tuple[str, ...]
    sql: str
    of: Callable[[Row], float | None]

    def expression(self, alias: str = "") -> str:
        """The SQL expression over the table `alias`."""
        return self.sql.format(r=f"{alias}." if alias else "")


def _span(name: str, doc: str, start: str, end: str) -> Metric:
    """Metric that is the time between two instants of a row."""

    def of(row: Row) -> float | None:
        first, last = row.get(start), row.get(end)
        return None if first is None or last is None or last < first else float(last - first) / 1e9

    sql = f"(CASE WHEN {{r}}{end} >= {{r}}{start} THEN ({{r}}{end} - {{r}}{start}) / 1e9 END)"
    return Metric(name, "s", doc, (start, end), sql, of)


def _phase(phase: str) -> Metric:
    column = f"{phase}_s"

    def of(row: Row) -> float | None:
        value = row.get(column)
        return None if value is None else float(value)

    return Metric(column, "s", f"recorded phase {phase}", (column,), f"{{r}}{column}", of)


def _tpot(row: Row) -> float | None:
    first, last, count = row.get("first_token_ns"), row.get("last_token_ns"), row.get("output_tokens")
    if first is None or last is None or last < first or count is None or count <= 1:
        return None
    return float(last - first) / 1e9 / float(count - 1)


_ALL: Final = (
    _span("ttft_s", "TTFT = t1 - t0", "arrival_ns", "first_token_ns"),
    Metric(
        "tpot_s",
        "s",
        "TPOT = (tN - t1) / (N - 1), null for N <= 1; the protocol tail never enters",
        ("first_token_ns", "last_token_ns", "output_tokens"),
        "CASE WHEN {r}output_tokens > 1 AND {r}last_token_ns >= {r}first_token_ns THEN ({r}last_token_ns - {r}first_token_ns) / 1e9 / ({r}output_tokens - 1) END",
        _tpot,
    ),
    _span("e2e_token_s", "E2E_token = tN - t0", "arrival_ns", "last_token_ns"),
    _span("e2e_stream_s", "E2E_stream = tend - t0", "arrival_ns", "end_ns"),
    _span("protocol_tail_s", "protocol tail = tend - tN", "last_token_ns", "end_ns"),
    *(_phase(phase) for phase in PHASES),
)

METRICS: Final[dict[str, Metric]] = {found.name: found for found in _ALL}
"""Metrics of one request by name."""

_ALIASES: Final = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_token_s", "e2e_token": "e2e_token_s"}


def metric(name: str) -> Metric:
    """The metric of that name (`ttft`, `tpot`, `e2e` are short for the usual ones); UsageError where there is none."""
    found = METRICS.get(_ALIASES.get(name, name))
    if found is None:
        raise UsageError(f"There is no metric {name!r}. The metrics are {', '.join(METRICS)}.", metric=name)
    return found


def itl_s(token_ns: Sequence[int] | None, token_counts: Sequence[int] | None = None) -> list[float] | None:
    """ITL_i = t_i - t_(i-1) (s), one value a token after the first chunk.

    A chunk of k tokens counts as k gaps of gap/k, since only their sum is known. Without counts a chunk is one token.
    """
    if token_ns is None:
        return None
    counts = [1] * len(token_ns) if token_counts is None else [max(1, count) for count in token_counts]
    gaps: list[float] = []
    for before, now, count in zip(token_ns, token_ns[1:], counts[1:], strict=False):
        gaps.extend([(now - before) / 1e9 / count] * count)
    return gaps


# Throughput and goodput


THROUGHPUT: Final[dict[str, str]] = {
    "output_tokens/s": f"sum({{r}}output_tokens * {_WEIGHT})",
    "total_tokens/s": f"sum(({{r}}prompt_tokens + {{r}}output_tokens) * {_WEIGHT})",
    "requests/s": f"sum({_WEIGHT})",
}
"""Unit -> SQL of what is counted over the finished requests of a window; divide by the window's seconds.

Each row counts with its `weight`, so a sampled window gives an estimate. Null (not 0) where there is no request."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits (s) that a request must meet; None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_token_s: float | None = None


SLO_GOAL: Final = 0.99
"""Share of the requests that should meet their SLO, unless the settings say another (`KVSCOPE_SLO__GOAL`): the rest is the error budget."""


PRESET_SLOS: Final[dict[str, Slo]] = {
    "interactive": Slo(ttft_s=1.0, tpot_s=0.1),
    "code": Slo(ttft_s=0.5, tpot_s=0.05),
    "batch": Slo(e2e_token_s=300.0),
}
"""By workload. People read a token in 100 to 200 ms, so 100 ms TPOT is never waited for."""


@dataclass(frozen=True, slots=True)
class SloRule:
    """Requests of this model, workload and tenant (None: any) are held to `slo`, which is shown as `name`."""

    name: str
    slo: Slo
    model: str | None = None
    workload: str | None = None
    tenant: str | None = None


def slo_rules(rules: Sequence[SloRule] = (), default: str = "interactive") -> tuple[SloRule, ...]:
    """In their order, first that fits wins: those that are given, the preset of each workload, the default preset for all others."""
    presets = [SloRule(name, slo, workload=name) for name, slo in PRESET_SLOS.items()]
    return (*rules, *presets, SloRule(default, PRESET_SLOS[default]))


def meets_slo(row: Row, slo: Slo) -> bool:
    """The request finished and met every limit. What is unknown is not met; TPOT does not apply to N <= 1."""
    if row.get("state") != "finished":
        return False
    for name in ("ttft_s", "tpot_s", "e2e_token_s"):
        limit = getattr(slo, name)
        if limit is None or (name == "tpot_s" and row.get("output_tokens") is not None and row["output_tokens"] <= 1):
            continue
        value = METRICS[name].of(row)
        if value is None or value > limit:
            return False
    return True


def meets_slo_sql(slo: Slo, alias: str = "") -> str:
    """SQL condition, true or false and never null, for `meets_slo`."""
    r = f"{alias}." if alias else ""
    terms = [f"{r}state = 'finished'"]
    for name in ("ttft_s", "tpot_s", "e2e_token_s"):
        limit = getattr(slo, name)
        if limit is None:
            continue
        term = f"coalesce({METRICS[name].expression(alias)} <= {float(limit)!r}, false)"
        terms.append(f"(coalesce({r}output_tokens <= 1, false) OR {term})" if name == "tpot_s" else term)
    return f"({' AND '.join(terms)})"


def meets_rules_sql(rules: Sequence[SloRule], alias: str = "") -> str:
    """SQL condition, true or false and never null: a request meets the first rule that fits it."""
    r = f"{alias}." if alias else ""
    cases: list[str] = []
    for rule in rules:
        wanted = {"model": rule.model, "workload": rule.workload, "tenant": rule.tenant}
        fits = [
            f"{r}{name} IS NOT DISTINCT FROM {_quoted(value)}" for name, value in wanted.items() if value is not None
        ]
        if not fits:
            return (
                f"CASE {' '.join(cases)} ELSE {meets_slo_sql(rule.slo, alias)} END"
                if cases
                else meets_slo_sql(rule.slo, alias)
            )
        cases.append(f"WHEN {' AND '.join(fits)} THEN {meets_slo_sql(rule.slo, alias)}")
    raise ValueError("the last rule has to fit every request")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''").replace("\0", "") + "'"


def goodput_rps(rows: Sequence[Row], slo: Slo, window_s: float) -> float | None:
    """Requests per second that finished within every limit, each row with its `weight`; None for a window without length."""
    if window_s <= 0:
        return None
    return sum(weight(row) for row in rows if meets_slo(row, slo)) / window_s


def goodput_sql(slo: Slo, window_s: float, alias: str = "") -> str:
    """SQL aggregate for `goodput_rps`."""
    return f"{count_sql(alias, meets_slo_sql(slo, alias))} / {float(window_s)!r}"


# Reuse of the prefix cache


def reusable_tokens(prompt_tokens: int, block_size: int) -> int:
    """Prompt tokens that a prefix cache could serve: full blocks, and at least one token is always computed."""
    return max(0, prompt_tokens - 1) // block_size * block_size


def hit_class(cached_tokens: int | None, prompt_tokens: int | None, block_size: int | None) -> str | None:
    """hit: all reusable blocks were reused; miss: none; partial: between. None where it cannot be known."""
    if cached_tokens is None or prompt_tokens is None or not block_size:
        return None
    if cached_tokens <= 0:
        return "miss"
    return "hit" if cached_tokens >= reusable_tokens(prompt_tokens, block_size) else "partial"


def hit_class_sql(block_size: str, alias: str = "") -> str:
    """SQL for `hit_class`; `block_size` is an SQL expression (a number or a column)."""
    r = f"{alias}." if alias else ""
    return (
        f"CASE WHEN {r}cached_tokens IS NULL OR {r}prompt_tokens IS NULL OR coalesce({block_size}, 0) = 0 THEN NULL "
        f"WHEN {r}cached_tokens <= 0 THEN 'miss' "
        f"WHEN {r}cached_tokens >= greatest(0, {r}prompt_tokens - 1) // {block_size} * {block_size} THEN 'hit' "
        "ELSE 'partial' END"
    )


CACHE_SQL: Final[dict[str, str]] = {
    "request_hit_ratio": (
        f"coalesce(sum({_WEIGHT}) FILTER ({{r}}cached_tokens > 0), 0) "
        f"/ sum({_WEIGHT}) FILTER ({{r}}cached_tokens IS NOT NULL)"
    ),
    "token_hit_ratio": (
        f"sum({{r}}cached_tokens * {_WEIGHT}) FILTER ({{r}}prompt_tokens IS NOT NULL) "
        f"/ nullif(sum({{r}}prompt_tokens * {_WEIGHT}) FILTER ({{r}}cached_tokens IS NOT NULL), 0)"
    ),
    "reused_tokens": f"round(sum({{r}}cached_tokens * {_WEIGHT}))::BIGINT",
}
"""Three numbers that are shown as three: share of requests with any reuse, share of prompt tokens, tokens. Self hits of
preempted requests are in none of them."""


def at_least_one_slow(p: float, n: int) -> float:
    """P(at least one slow call in n) = 1 - (1 - p)^n, for independent calls; show it beside the rate actually seen."""
    if not 0.0 <= p <= 1.0 or n < 0:
        raise ValueError(f"p = {p} must lie in 0..1 and n = {n} must not be negative")
    if p == 1.0:
        return float(n > 0)
    return -math.expm1(n * math.log1p(-p))
