"""Panels as short words: lines, a number, bars, a heatmap, a table of raw events. Each subject's module is written in them.

Every panel says in its description what it shows and where it comes from. Queries get their `refId` here: the SDK leaves it
empty, and Grafana then drops all but one of a panel's queries.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from grafana_foundation_sdk.builders import bargauge, common, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as board
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards import promql
from dashboards.infinity import PLUGIN, WINDOW, ApiQuery, ApiQueryBuilder, Column, chosen
from store.metric_catalogue import Family

METRICS_SOURCE: Final = models.DataSourceRef(type_val="prometheus", uid="${metrics}")
API_SOURCE: Final = models.DataSourceRef(type_val=PLUGIN, uid="${api}")
FROM_API: Final = "From the collector's JSON API through the Infinity data source: raw events, not Prometheus."
TIMELINE: Final = "${collector}/requests/${__value.raw:percentencode}"
"""The page of one request's timeline; the field's value is its id."""
SECONDS: Final = "s"
RATIO: Final = "percentunit"
BYTES: Final = "bytes"
PLAIN: Final = "short"
REQUESTS_S: Final = "reqps"
TOKENS_S: Final = "tokens/s"
BLOCKS_S: Final = "blocks/s"
SECONDS_S: Final = "s/s"

Panel = Builder[models.Panel]


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression, and what its lines are called (`{{label}}`)."""

    expr: str
    legend: str = ""


def lines(
    title: str, doc: str, unit: str, *queries: Query, span: int = 12, stacked: bool = False, log: bool = False
) -> Panel:
    """Lines over time."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(doc)
        .unit(unit)
        .span(span)
        .height(8)
        .datasource(METRICS_SOURCE)
        .line_width(1)
        .fill_opacity(40 if stacked else 8)
        .show_points(common_models.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_models.TooltipDisplayMode.MULTI)
            .sort(common_models.SortOrder.DESCENDING)
        )
        .no_value("nothing told it in this time")
    )
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    if log:
        panel = panel.scale_distribution(
            common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LOG).log(10)
        )
    else:
        panel = panel.axis_soft_min(0)
    for query in _targets(queries):
        panel = panel.with_target(query)
    return panel


def number(title: str, doc: str, unit: str, expr: str, *, bad_from: float | None = None, span: int = 4) -> Panel:
    """One number of now, with its course; red from `bad_from` on."""
    steps = [models.Threshold(value=None, color="text" if bad_from is None else "green")]
    if bad_from is not None:
        steps.append(models.Threshold(value=bad_from, color="red"))
    return (
        stat.Panel()
        .title(title)
        .description(doc)
        .unit(unit)
        .span(span)
        .height(4)
        .datasource(METRICS_SOURCE)
        .graph_mode(common_models.BigValueGraphMode.AREA)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(board.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
        .no_value("not told")
        .with_target(_targets([Query(expr)])[0])
    )


def bars(title: str, doc: str, unit: str, query: Query, span: int = 12) -> Panel:
    """Bars of now, the longest first."""
    return (
        bargauge.Panel()
        .title(title)
        .description(doc)
        .unit(unit)
        .min(0)
        .span(span)
        .height(8)
        .datasource(METRICS_SOURCE)
        .orientation(common_models.VizOrientation.HORIZONTAL)
        .display_mode(common_models.BarGaugeDisplayMode.BASIC)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .no_value("not told")
        .with_target(
            prometheus.Dataquery()
            .expr(f"sort_desc({query.expr})")
            .legend_format(query.legend)
            .instant()
            .ref_id("A")
            .datasource(METRICS_SOURCE)
        )
    )


def heat(title: str, doc: str, family: Family, unit: str = SECONDS, span: int = 12) -> Panel:
    """How values are spread over time: a histogram's buckets, with the exemplars that name requests."""
    return (
        heatmap.Panel()
        .title(title)
        .description(doc)
        .span(span)
        .height(8)
        .datasource(METRICS_SOURCE)
        .calculate(False)
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64))
        .with_target(
            prometheus.Dataquery()
            .expr(promql.buckets(family))
            .legend_format("{{le}}")
            .format(PromQueryFormat.HEATMAP)
            .range()
            .exemplar(True)
            .ref_id("A")
            .datasource(METRICS_SOURCE)
        )
    )


def api_table(
    title: str,
    doc: str,
    path: str,
    root: str,
    *columns: Column,
    params: dict[str, str] | None = None,
    chosen_by: Sequence[str] = (),
    in_window: bool = True,
    span: int = 24,
) -> Panel:
    """A table of raw events. A column `request` links to the request's timeline page.

    chosen_by   variables of the dashboard that narrow it, as they narrow what Prometheus is asked
    """
    asked = ({"window": WINDOW} if in_window else {}) | (params or {}) | {f"{v}_matches": chosen(v) for v in chosen_by}
    panel = (
        table.Panel()
        .title(title)
        .description(f"{doc} {FROM_API}")
        .span(span)
        .height(9)
        .datasource(API_SOURCE)
        .no_value("nothing in this time")
        .with_target(ApiQueryBuilder(ApiQuery(path, root, columns, asked, "A")))
    )
    for column in columns:
        if column.is_instant:
            panel = panel.with_transformation(_as_milliseconds(column.title))
        properties = _properties(column)
        if properties:
            panel = panel.override_by_name(_shown(column), properties)
    instants = [column for column in columns if column.is_instant]
    if instants:
        options: dict[str, Any] = {
            "excludeByName": {column.title: True for column in instants},
            "indexByName": {_shown(column): number for number, column in enumerate(instants)},
            "renameByName": {},
        }
        panel = panel.with_transformation(models.DataTransformerConfig(id_val="organize", options=options))
    return panel


def _properties(column: Column) -> list[models.DynamicConfigValue]:
    found = []
    if column.is_instant:
        found.append(models.DynamicConfigValue("unit", "dateTimeAsLocal"))
    elif column.unit is not None:
        found.append(models.DynamicConfigValue("unit", column.unit))
    if column.title == "request":
        link: dict[str, Any] = {"title": "timeline", "url": TIMELINE, "targetBlank": True}
        found.append(models.DynamicConfigValue("links", [link]))
    return found


def _as_milliseconds(title: str) -> models.DataTransformerConfig:
    """Grafana's instants are milliseconds, the contract's are nanoseconds."""
    options: dict[str, Any] = {
        "mode": "binary",
        "alias": title.removesuffix(" (ns)"),
        "binary": {"left": title, "operator": "/", "right": "1000000"},
        "replaceFields": False,
    }
    return models.DataTransformerConfig(id_val="calculateField", options=options)


def _shown(column: Column) -> str:
    """The title that people read: an instant's column is worked out from one in ns."""
    return column.title.removesuffix(" (ns)")


def _targets(queries: Sequence[Query]) -> list[prometheus.Dataquery]:
    return [
        prometheus.Dataquery()
        .expr(query.expr)
        .legend_format(query.legend or "__auto")
        .range()
        .ref_id(ref_id)
        .datasource(METRICS_SOURCE)
        for ref_id, query in zip(string.ascii_uppercase, queries, strict=False)
    ]
