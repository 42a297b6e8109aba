"""A postmortem as one HTML file: nothing beside it, nothing fetched, no script; it prints, and it reads in light and dark."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from itertools import chain
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from diagnosis.postmortem import svg
from diagnosis.postmortem.incident import SIDES, query_hash
from diagnosis.postmortem.words import impact_sentence, summary
from diagnosis.telling.wording import interval, metric_name, quantile_name, seconds, signed


def render_html(verdict: Mapping[str, Any], incident: Mapping[str, Any], *, version: str) -> str:
    """HTML of a verdict document and its incident (`incident.incident`); the same input gives the same bytes."""
    by_mean = verdict["delta"]["judged_s"]["interval_95"] is None
    key = "mean_s" if by_mean else "judged_s"
    delta = verdict["delta"]
    rows = [row for row in verdict["attribution"] if row[key] is not None]
    charts = {
        "waterfall": svg.waterfall(
            delta["baseline"][key], [(r["cause"], r[key]) for r in rows], delta["suspect"][key], seconds
        )
        if rows and delta["baseline"][key] is not None
        else None,
        "over_time": _over_time(verdict, incident),
        "slowest": _slowest(incident),
    }
    page: str = _template().render(
        v=verdict,
        i=incident,
        charts=charts,
        judged="the mean" if by_mean else quantile_name(verdict["quantile"]),
        summary=summary(verdict, incident),
        impact=impact_sentence(incident["impact"]),
        moments=[{**moment, "utc": utc(moment["at_ns"])} for moment in incident["moments"]],
        version=version,
        sides=SIDES,
        by_mean=by_mean,
        key=key,
        metric=metric_name(verdict["metric"]),
        quantile=quantile_name(verdict["requested_quantile"]),
    )
    return page


def _over_time(verdict: Mapping[str, Any], incident: Mapping[str, Any]) -> str | None:
    """Both windows laid over each other, from the start of each; the numbered moments are those of the suspect window."""
    series, length_s = {}, 0.0
    for side in SIDES:
        told = verdict["windows"][side]
        points = [((row["at_ns"] - told["start_ns"]) / 1e9, row["value_s"]) for row in incident["over_time"][side]]
        if points:
            series[side] = points
        length_s = max(length_s, (told["end_ns"] - told["start_ns"]) / 1e9)
    if not series:
        return None
    start_ns = verdict["windows"]["suspect"]["start_ns"]
    moments = [((moment["at_ns"] - start_ns) / 1e9, moment["text"]) for moment in incident["moments"]]
    return svg.lines(series, moments, seconds, length_s)


def _slowest(incident: Mapping[str, Any]) -> str | None:
    rows = [(row["request_id"][:18], row["phases"]) for row in incident["slowest"] if row["phases"]]
    names = list(dict.fromkeys(chain.from_iterable(phases for _, phases in rows)))
    return svg.bars(rows, names, seconds) if rows else None


def utc(at_ns: int) -> str:
    """An instant in UTC, to the millisecond."""
    return datetime.fromtimestamp(at_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


@cache
def _template() -> Any:
    environment = Environment(
        loader=PackageLoader("diagnosis", "postmortem"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"seconds": seconds, "signed": signed, "interval": interval, "utc": utc, "hash": query_hash}
    return environment.get_template("report.html")
