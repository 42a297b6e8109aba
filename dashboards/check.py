"""Every expression of every dashboard, asked of a real Prometheus: does it parse, and does it return data?

A query that parses and returns nothing is as wrong as one that does not parse: a label that is never set, a name that moved. What
a dashboard's variables become here is what `All` means there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import httpx

from dashboards.build import Target
from engine_probe.errors import ServerUnreachable

TIMEOUT_S: Final = 20.0
OK, EMPTY, BROKEN = "ok", "empty", "broken"


@dataclass(frozen=True, slots=True)
class Checked:
    """One query and what came of it: ok | empty | broken. num_series that it returned; error: why it is broken."""

    target: Target
    asked: str
    status: str
    num_series: int = 0
    error: str | None = None


class Prometheus:
    """A Prometheus server's query API, `with Prometheus(url) as prometheus`. Raises ServerUnreachable where none answers."""

    def __init__(self, url: str, client: httpx.Client | None = None) -> None:
        self.url = url.rstrip("/")
        self._client = client or httpx.Client(timeout=TIMEOUT_S, trust_env=False)

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def query(self, expr: str) -> tuple[int, str | None]:
        """(series that the expression has now, why it is wrong or None)."""
        try:
            answer = self._client.get(f"{self.url}/api/v1/query", params={"query": expr})
            document: Any = answer.json()
            if document["status"] == "success":
                return _num_series(document["data"]), None
            return 0, str(document["error"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise ServerUnreachable(
                f"no Prometheus answers at {self.url}: {error}; start it, or name another with --prometheus",
                url=self.url,
            ) from error


def as_asked(expr: str, interval: str, values: Mapping[str, str] | None = None) -> str:
    """The expression with its variables filled in: `All` for choices, `interval` for Grafana's own."""
    for name, value in {"$__rate_interval": interval, **(values or {})}.items():
        expr = expr.replace(name, value)
    for name in ("$model", "$worker", "$tenant"):
        expr = expr.replace(name, ".*")
    return expr


def check(prometheus: Prometheus, targets: Sequence[Target], interval: str) -> list[Checked]:
    """Ask every PromQL target once."""
    found = []
    for target in targets:
        if target.expr is not None:
            asked = as_asked(target.expr, interval)
            num_series, error = prometheus.query(asked)
            status = BROKEN if error is not None else OK if num_series else EMPTY
            found.append(Checked(target, asked, status, num_series, error))
    return found


def check_until(
    prometheus: Prometheus,
    targets: Sequence[Target],
    interval: str,
    is_over: Callable[[], bool],
    wait: Callable[[], None],
) -> list[Checked]:
    """Ask again and again until every expression has returned data once, or `is_over`; the best that came of each."""
    best: dict[tuple[str, str, str], Checked] = {}
    while True:
        open_ = [target for target in targets if not _is_done(best.get(_key(target)))]
        for checked in check(prometheus, open_, interval):
            best[_key(checked.target)] = replace(checked)
        if is_over() or all(checked.status != EMPTY for checked in best.values()):
            return list(best.values())
        wait()


def _is_done(checked: Checked | None) -> bool:
    return checked is not None and checked.status != EMPTY


def _key(target: Target) -> tuple[str, str, str]:
    return target.dashboard, target.panel, target.ref_id


def _num_series(data: Mapping[str, Any]) -> int:
    """Series of an instant answer that have a number (NaN is none)."""
    if data["resultType"] == "scalar":
        return 1
    return sum(one["value"][1] != "NaN" for one in data["result"])
