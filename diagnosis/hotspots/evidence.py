"""The numbers behind a hotspot, each with the SQL that gives it: runs as it is in `kvscope sql`, one row, first column."""

from __future__ import annotations

import numpy as np

from diagnosis.claims.evidence_sql import text
from diagnosis.facts import I64
from diagnosis.hotspots.finding import Evidence
from diagnosis.hotspots.kinds import Named
from diagnosis.hotspots.observed import Observed
from diagnosis.hotspots.regret import Regret
from diagnosis.telling.wording import percent, seconds
from store.interface import Window

WORST = 5
"""Requests that are named beside a number."""


def scope_sql(window: Window) -> str:
    """The run of a window, or the live rows."""
    return "run_id IS NULL" if window.run_id is None else f"run_id = {text(window.run_id)}"


def judged_sql(seen: Observed, start_ns: int, end_ns: int, *, is_route: bool) -> str:
    """`table WHERE ...`: what is judged in an interval, without warm-up."""
    scope = scope_sql(seen.window)
    if is_route:
        warm = f"SELECT request_id FROM request WHERE {scope} AND labels['phase'] = 'warmup'"
        return (
            f"route WHERE {scope} AND at_ns >= {start_ns} AND at_ns < {end_ns} AND chosen IS NOT NULL "
            f"AND request_id NOT IN ({warm})"
        )
    return (
        f"request WHERE {scope} AND arrival_ns >= {start_ns} AND arrival_ns < {end_ns} AND vantage = "
        f"{text(seen.vantage)} AND worker IS NOT NULL AND coalesce(labels['phase'], '') <> 'warmup'"
    )


def worst(seen: Observed, regret: Regret, rows: I64) -> tuple[str, ...]:
    """Ids of the decisions that lost most, the worst first; where nothing is known, of the first."""
    lost = np.nan_to_num(regret.seconds[rows], nan=-1.0)
    return tuple(seen.decisions.ids[row] for row in rows[np.argsort(-lost, kind="stable")[:WORST]])


def share_of(seen: Observed, regret: Regret, rows: I64, worker: int, start_ns: int, end_ns: int) -> Evidence:
    """The worker's share of the decisions, beside its fair one."""
    mine = rows[seen.decisions.chosen[rows] == worker]
    name = seen.workers[worker]
    share = len(mine) / max(len(rows), 1)
    column = "chosen" if seen.has_routes else "worker"
    where = judged_sql(seen, start_ns, end_ns, is_route=seen.has_routes)
    return Evidence(
        f"{name} got {len(mine)} of {len(rows)} requests ({percent(share)}); its even share of {seen.num_workers} workers is "
        f"{percent(1 / seen.num_workers)}",
        share,
        "ratio",
        f"SELECT avg(CAST({column} = {text(name)} AS DOUBLE)) AS share FROM {where}",
        worst(seen, regret, mine),
    )


def queue_of(seen: Observed, regret: Regret, rows: I64, worker: int, start_ns: int, end_ns: int) -> Evidence | None:
    """How many waited there, and elsewhere."""
    steps = seen.gauges if seen.steps is None else seen.steps
    if steps is None:
        return None
    here = np.nanmean(regret.waiting[rows, worker]) if len(rows) else np.nan
    others = np.delete(regret.waiting[rows], worker, axis=1)
    known = others[np.isfinite(others)]
    if not np.isfinite(here) or not len(known):
        return None
    name = seen.workers[worker]
    first, last = (start_ns - seen.origin_ns) / 1e9, (end_ns - seen.origin_ns) / 1e9
    inside = (steps.worker == worker) & (steps.at_s >= first) & (steps.at_s < last) & np.isfinite(steps.waiting)
    if not inside.any():
        return None
    most = float(steps.waiting[inside].max())
    return Evidence(
        f"when requests were routed, {here:.1f} waited at {name} on average and {float(known.mean()):.1f} at the others; the "
        f"most that waited there: {most:.0f}",
        most,
        "requests",
        f"SELECT max(value) AS most FROM sample WHERE {scope_sql(seen.window)} AND name = 'requests_waiting' AND worker = {text(name)} "
        f"AND at_ns >= {start_ns} AND at_ns < {end_ns}"
        if seen.steps is None
        else f"SELECT max(num_waiting_prefill) AS most FROM step WHERE {scope_sql(seen.window)} AND worker = {text(name)} "
        f"AND at_ns >= {start_ns} AND at_ns < {end_ns}",
    )


def lost_by(seen: Observed, regret: Regret, rows: I64) -> Evidence | None:
    """What the decisions lost; no SQL gives it."""
    lost = regret.seconds[rows]
    if not np.isfinite(lost).any():
        return None
    total = float(np.nansum(lost))
    return Evidence(
        f"these {len(rows)} decisions lost {seconds(total)} against the best worker at their instants, "
        f"{seconds(total / len(rows))} each",
        total,
        "s",
        None,
        worst(seen, regret, rows),
    )


def of_kind(seen: Observed, named: Named, rows: I64, worker: int, start_ns: int, end_ns: int) -> Evidence | None:
    """What the kind rests on."""
    numbers, where = named.numbers, judged_sql(seen, start_ns, end_ns, is_route=True)
    name = seen.workers[worker]
    if named.kind == "dead_signal" and "of_one" in numbers:
        return Evidence(
            f"the router read a load of {numbers['load']:g} of {name} {'whenever it was scraped' if seen.loads_scraped else 'at every decision'}, "
            f"while up to {numbers['max_waiting']:.0f} requests waited there; the loads of the others moved",
            1.0,
            "different loads",
            f"SELECT count(DISTINCT value) AS different_loads FROM sample WHERE {scope_sql(seen.window)} AND name = 'router_load' "
            f"AND worker = {text(name)} AND at_ns >= {start_ns} AND at_ns < {end_ns}"
            if seen.loads_scraped
            else f"SELECT count(DISTINCT c.load) AS different_loads FROM (SELECT unnest(candidates) AS c FROM {where}) WHERE c.worker = {text(name)}",
        )
    if named.kind == "dead_signal":
        return Evidence(
            f"the router read a load of {numbers['load']:g} of every worker {'whenever it was scraped' if seen.loads_scraped else 'at every decision'}, while up to "
            f"{numbers['max_waiting']:.0f} requests waited in an engine",
            1.0,
            "different loads",
            f"SELECT count(DISTINCT value) AS different_loads FROM sample WHERE {scope_sql(seen.window)} AND name = 'router_load' "
            f"AND at_ns >= {start_ns} AND at_ns < {end_ns}"
            if seen.loads_scraped
            else f"SELECT count(DISTINCT c.load) AS different_loads FROM (SELECT unnest(candidates) AS c FROM {where})",
        )
    if named.kind == "tie_breaking":
        which, of = ("load", "list_min") if numbers["by_load"] else ("score", "list_max")
        best = f"list_filter(candidates, lambda c: c.{which} = {of}(list_transform(candidates, lambda d: d.{which})))"
        shared = f"shared the {'least load' if numbers['by_load'] else 'best score'} with others"
        return Evidence(
            f"in {numbers['ties']:.0f} decisions {name} {shared}{' and stood first' if numbers['as_first'] else ''}, and got "
            f"{numbers['to_it']:.0f} of them",
            numbers["to_it"],
            "requests",
            None
            if numbers["as_first"]
            else f"SELECT count(*) AS to_it FROM {where} AND chosen = {text(name)} AND len({best}) > 1 "
            f"AND list_contains(list_transform({best}, lambda c: c.worker), chosen)",
        )
    if named.kind == "affinity" and named.key_kind == "match":
        few = numbers["holders"]
        held = (
            "it alone held the longest match" if few == 1 else f"it held the longest match, as {few:.0f} of them all do"
        )
        return Evidence(
            f"{numbers['requests']:.0f} of {numbers['of']:.0f} requests went to {name} because {held}",
            numbers["share_of_worker"],
            "ratio",
            None,
        )
    if named.kind == "affinity" and named.key_kind == "session":
        return Evidence(
            f"{numbers['requests']:.0f} of {numbers['of']:.0f} requests of {name} are turns of conversations whose turn before was there too",
            numbers["share_of_worker"],
            "ratio",
            None,
        )
    if named.kind == "affinity" and named.key is not None:
        key = key_name(seen, named)
        return Evidence(
            f"{named.key_kind} {key}: {numbers['requests']:.0f} of its {numbers['of']:.0f} requests went to {name}; what "
            f"stays there like that is {percent(numbers['share_of_worker'])} of all that it got",
            numbers["requests"],
            "requests",
            None,
        )
    return None


def key_name(seen: Observed, named: Named) -> str | None:
    """The prefix or tenant that a hotspot goes by."""
    if named.key is None:
        return None
    return seen.tenants[named.key] if named.key_kind == "tenant" else seen.prefixes[named.key]
