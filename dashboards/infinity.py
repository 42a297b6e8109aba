"""Queries to the collector's JSON API through the Infinity data source: raw events, which Prometheus does not have.

The SDK has no builder for this plugin, so a query is written out here in the plugin's own field names. No Grafana server
could be had where it was made: paths, parameters and columns are held against the API's own description by a test, and no more
is claimed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from grafana_foundation_sdk.cog import variants
from grafana_foundation_sdk.cog.builder import Builder

PLUGIN: Final = "yesoreyeram-infinity-datasource"
WINDOW: Final = "${__from:date:iso}/${__to:date:iso}"
"""The dashboard's time range as the API takes a window."""


def chosen(variable: str) -> str:
    """What people chose of a variable, as a pattern: one name, `(a|b)`, or `.*` for all. The API matches it as PromQL does."""
    return f"${{{variable}:regex}}"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table. selector: its place in a row of the answer; kind: string | number; unit: as Grafana names it.

    is_instant   nanoseconds since 1970, shown as local time
    """

    selector: str
    title: str
    kind: str = "string"
    unit: str | None = None
    is_instant: bool = False


class ApiQuery(variants.Dataquery):
    """One GET of the collector's API; `root` is the list in its answer that becomes the rows."""

    def __init__(self, path: str, root: str, columns: tuple[Column, ...], params: dict[str, str], ref_id: str) -> None:
        self.path, self.root, self.columns, self.params, self.ref_id = path, root, columns, params, ref_id

    def to_json(self) -> dict[str, object]:
        """As the plugin keeps it."""
        options: dict[str, Any] = {"method": "GET", "data": ""}
        if self.params:
            options["params"] = [{"key": key, "value": value} for key, value in self.params.items()]
        return {
            "datasource": {"type": PLUGIN, "uid": "${api}"},
            "refId": self.ref_id,
            "type": "json",
            "parser": "backend",
            "source": "url",
            "format": "table",
            "url": self.path,
            "url_options": options,
            "root_selector": self.root,
            "columns": [{"selector": c.selector, "text": c.title, "type": c.kind} for c in self.columns],
            "filters": [],
        }


class ApiQueryBuilder(Builder[variants.Dataquery]):
    """The SDK adds targets as builders."""

    def __init__(self, query: ApiQuery) -> None:
        self._query = query

    def build(self) -> variants.Dataquery:
        """The query itself."""
        return self._query
