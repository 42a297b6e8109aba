"""Every query to the collector's API that a dashboard makes, asked of a real collector: the path, the list, the columns.

What the Infinity plugin makes of the answer cannot be tried without a Grafana server; that the answer holds what is asked for can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx

from dashboards.build import Target
from dashboards.check import BROKEN, EMPTY, OK, Checked
from dashboards.infinity import WINDOW, chosen
from dashboards.promql import VARIABLES

TIMEOUT_S: Final = 60.0


def check_api(client: httpx.Client, targets: Sequence[Target], window: str, values: Mapping[str, str]) -> list[Checked]:
    """Ask every API query once; `window` stands for the dashboard's time range, `values` for what people type; of variables all is chosen."""
    return [_check(client, target, window, values) for target in targets if target.query is not None]


def _check(client: httpx.Client, target: Target, window: str, values: Mapping[str, str]) -> Checked:
    query: dict[str, Any] = target.query or {}
    params = {one["key"]: _filled(one["value"], window, values) for one in query["url_options"].get("params", ())}
    asked = f"GET {query['url']} {params}"
    try:
        answer = client.get(query["url"], params=params, timeout=TIMEOUT_S)
        document = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        return Checked(target, asked, BROKEN, error=str(error))
    if answer.status_code != httpx.codes.OK:
        return Checked(target, asked, BROKEN, error=str(document.get("detail", answer.status_code)))
    rows = document.get(query["root_selector"])
    if not isinstance(rows, list):
        return Checked(target, asked, BROKEN, error=f"the answer has no list {query['root_selector']!r}")
    missing = [c["selector"] for c in query["columns"] if rows and not any(_has(row, c["selector"]) for row in rows)]
    if missing:
        return Checked(target, asked, BROKEN, len(rows), f"no row has {', '.join(missing)}")
    return Checked(target, asked, OK if rows else EMPTY, len(rows))


def _filled(text: str, window: str, values: Mapping[str, str]) -> str:
    for name, value in {WINDOW: window, **{chosen(name): ".*" for name in VARIABLES}, **values}.items():
        text = text.replace(name, value)
    return text


def _has(row: Any, selector: str) -> bool:
    """Whether a row has the place; a null on the way is a value that is not known."""
    for part in selector.split("."):
        if row is None:
            return True
        if not isinstance(row, dict) or part not in row:
            return False
        row = row[part]
    return True
