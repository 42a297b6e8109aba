"""Every expression of every dashboard, asked of a real Prometheus: does it parse, and did it return data within a span of time?

A query that parses and returns nothing is as wrong as one that does not parse: a label that is never set, a name that moved. What
a dashboard's variables become here is what `All` means there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Span:
    """Instants (Unix time) at which an expression is worked out: from start to end, each step."""

    start_s: float
    end_s: float
    step_s: float


class Prometheus:
    """A Prometheus server's query API, `with Prometheus(url) as prometheus`. Raises ServerUnreachable where none answers."""

    def __init__(self, url: str, client: httpx.Client | None = None) -> None:
        self.url = url.rstrip("/")
        self._client = client or httpx.Client(timeout=TIMEOUT_S, trust_env=False)

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def query(self, expr: str, span: Span) -> tuple[int, str | None]:
        """(series that the expression has had within the span, why it is wrong or None)."""
        asked = {
            "query": expr,
            "start": f"{span.start_s:.3f}",
            "end": f"{span.end_s:.3f}",
            "step": f"{span.step_s:.3f}",
        }
        try:
            answer = self._client.get(f"{self.url}/api/v1/query_range", params=asked)
            document: Any = answer.json()
            if document["status"] == "success":
                return sum(_has_number(one) for one in document["data"]["result"]), None
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


def check(prometheus: Prometheus, targets: Sequence[Target], interval: str, span: Span) -> list[Checked]:
    """Ask every PromQL target once."""
    found = []
    for target in targets:
        if target.expr is not None:
            asked = as_asked(target.expr, interval)
            num_series, error = prometheus.query(asked, span)
            status = BROKEN if error is not None else OK if num_series else EMPTY
            found.append(Checked(target, asked, status, num_series, error))
    return found


def _has_number(series: Mapping[str, Any]) -> bool:
    """A NaN draws nothing."""
    return any(value != "NaN" for _, value in series["values"])
