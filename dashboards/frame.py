"""What all dashboards share: data sources and variables to choose, marks and findings on the time axis, links among each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from grafana_foundation_sdk.builders import dashboard as board
from grafana_foundation_sdk.models import dashboard as models

from dashboards.infinity import PLUGIN
from dashboards.parts import METRICS_SOURCE, Panel
from store import metric_catalogue as names

TAG: Final = "kvscope"
COLLECTOR_URL: Final = "http://127.0.0.1:8321"
METRICS, API, COLLECTOR = "metrics", "api", "collector"
"""Variables that name the two data sources, and where the collector's pages are."""
_OFFERED: Final = {"model": names.REQUESTS, "worker": names.REQUESTS, "tenant": names.TENANT_REQUESTS}
"""Variable -> the family whose label values it offers."""


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard: its subject, rows of panels (title, panels), and the variables that its panels read.

    typed     variables that people type: (name, label)
    refresh   how often it asks again by itself; seldom where a table makes the collector judge a window, empty: never
    """

    name: str
    title: str
    doc: str
    rows: Sequence[tuple[str, Sequence[Panel]]]
    variables: tuple[str, ...] = ("model", "worker")
    typed: tuple[tuple[str, str], ...] = ()
    refresh: str = "30s"

    @property
    def uid(self) -> str:
        """Where Grafana keeps it."""
        return f"kvscope-{self.name.replace('_', '-')}"

    def build(self) -> models.Dashboard:
        """As Grafana wants it."""
        made = (
            board.Dashboard(f"kvscope: {self.title}")
            .uid(self.uid)
            .description(self.doc)
            .tags([TAG])
            .timezone("browser")
            .time("now-1h", "now")
            .refresh(self.refresh)
            .tooltip(models.DashboardCursorSync.CROSSHAIR)
            .readonly()
            .annotation(_marks_and_findings())
            .link(_link_to_others())
            .link(_link_to_collector())
            .with_variable(board.DatasourceVariable(METRICS).label("Prometheus").type("prometheus"))
            .with_variable(board.DatasourceVariable(API).label("collector API").type(PLUGIN))
            .with_variable(board.ConstantVariable(COLLECTOR).value(COLLECTOR_URL))
        )
        for name in self.variables:
            made = made.with_variable(_choice_of(name))
        for name, label in self.typed:
            made = made.with_variable(board.TextBoxVariable(name).label(label).default_value(""))
        for title, panels in self.rows:
            made = made.with_row(board.Row(title))
            for panel in panels:
                made = made.with_panel(panel)
        return made.build()


def _choice_of(name: str) -> board.QueryVariable:
    return (
        board.QueryVariable(name)
        .label(name)
        .datasource(METRICS_SOURCE)
        .query({"query": f"label_values({_OFFERED[name].name}, {name})", "refId": f"values-{name}"})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(text="All", value="$__all", selected=True))
    )


def _marks_and_findings() -> board.AnnotationQuery:
    """What `dashboards publish` writes: Grafana's own annotations with our tag."""
    return (
        board.AnnotationQuery()
        .name("kvscope marks and findings")
        .datasource(models.DataSourceRef(type_val="grafana", uid="-- Grafana --"))
        .enable(True)
        .icon_color("orange")
        .target(board.AnnotationTarget().limit(200).match_any(True).tags([TAG]).type("tags"))
    )


def _link_to_others() -> board.DashboardLink:
    return (
        board.DashboardLink("kvscope")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )


def _link_to_collector() -> board.DashboardLink:
    return (
        board.DashboardLink("collector")
        .type(models.DashboardLinkType.LINK)
        .url("$collector")
        .target_blank(True)
        .tooltip("the collector's own pages: requests, diagnosis, alerts")
    )
