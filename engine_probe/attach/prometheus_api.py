"""Asks a Prometheus server (or what speaks its API: Thanos, Mimir, VictoriaMetrics) for raw samples of a stretch of time.

Raw means: the very numbers and instants that it scraped, from an instant query of a range selector, `{job="vllm"}[300s]`;
a range query would give numbers of its own grid instead. Stale markers are not among them. A stretch that is too much for
the server (its limit on samples, its time-out, our limit on a body) is asked for in halves. Invariant: an answer is
whole, or an error says so; what the server warns of is handed on. Source: Prometheus HTTP API v1.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import msgspec

from engine_probe.attach.fetch import KEPT, split_auth, why_unreachable
from engine_probe.errors import EngineUnreachable, UnknownFormat, UsageError

TIMEOUT_S: Final = 30.0
MAX_BODY_BYTES: Final = 256 << 20
MIN_SPAN_MS: Final = 1_000
_MS: Final = 1_000_000
_LAST_S: Final = 9_000_000_000
"""Instants from here on do not fit into ns of 64 bits."""

Point = tuple[int, float]
"""(UTC ns, value)"""
Labelled = dict[frozenset[tuple[str, str]], list[Point]]
"""Labels, `__name__` among them -> points in the order of time."""


@dataclass(slots=True)
class Answer:
    """Series of a stretch; `warnings` in the server's words; series of native histograms, which are left out."""

    series: Labelled = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    num_native_histograms: int = 0


class _Metric(msgspec.Struct):
    metric: dict[str, str]
    values: list[tuple[float, str]] = []
    histograms: list[msgspec.Raw] = []


class _Data(msgspec.Struct):
    resultType: str = ""  # the API's own spelling
    result: msgspec.Raw = msgspec.Raw(b"[]")


class _Reply(msgspec.Struct):
    status: str = ""
    data: _Data | None = None
    errorType: str = ""
    error: str = ""
    warnings: list[str] = []
    infos: list[str] = []


class _TooMuch(Exception):
    """The stretch must be asked for in smaller parts; the text says why."""


class PrometheusApi:
    """One server. Not for use by several threads at once.

    url      its address, with a path where it has one (Mimir: /prometheus); `user:password@` is used as basic auth
    headers  further headers, such as X-Scope-OrgID
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        verify: bool | ssl.SSLContext = True,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        text = url.strip().rstrip("/")
        self.url, auth = split_auth(text if "://" in text else f"http://{text}")
        self._timeout_s = timeout_s
        told = dict(headers or {}) | ({"Authorization": f"Bearer {key}"} if key else {})
        self._client = httpx.Client(
            timeout=timeout_s, verify=verify, headers=told, auth=auth, follow_redirects=False, limits=KEPT
        )

    def close(self) -> None:
        self._client.close()

    def version(self) -> str | None:
        """The server's release; None where it does not tell (not every relative of Prometheus does)."""
        try:
            status, body = self._ask("/api/v1/status/buildinfo", {})
            reply = msgspec.json.decode(body) if status == 200 else {}
            version = reply.get("data", {}).get("version") if isinstance(reply, dict) else None
        except (EngineUnreachable, UnknownFormat, UsageError, AttributeError, _TooMuch):
            return None
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return None
        return str(version) if version else None

    def raw(self, selectors: Sequence[str], start_ns: int, end_ns: int) -> Answer:
        """Every sample of these selectors with start <= instant <= end.

        Raises EngineUnreachable, UnknownFormat (no Prometheus API), UsageError (key, a selector that is none, or a
        stretch of a second that is still too much).
        """
        answer = Answer()
        for selector in selectors:
            self._collect(selector, start_ns // _MS, -(-end_ns // _MS), answer)
        for points in answer.series.values():
            points.sort()
        return answer

    def _collect(self, selector: str, start_ms: int, end_ms: int, answer: Answer) -> None:
        try:
            self._stretch(selector, start_ms, end_ms, answer)
        except _TooMuch as error:
            middle = (start_ms + end_ms) // 2
            if end_ms - start_ms <= MIN_SPAN_MS:
                raise UsageError(
                    f"{self.url} cannot answer {selector} even for a second ({error}). Narrow the selector.",
                    url=self.url,
                ) from error
            self._collect(selector, start_ms, middle, answer)
            self._collect(selector, middle + 1, end_ms, answer)

    def _stretch(self, selector: str, start_ms: int, end_ms: int, answer: Answer) -> None:
        # One ms more: Prometheus 3 leaves out the sample at the stretch's left edge, Prometheus 2 does not.
        query = f"{selector}[{end_ms - start_ms + 1}ms]"
        form = {"query": query, "time": f"{end_ms // 1000}.{end_ms % 1000:03d}", "timeout": f"{self._timeout_s:g}s"}
        status, body = self._ask("/api/v1/query", form)
        for metric in self._decoded(status, body, selector, answer):
            labels = frozenset(metric.metric.items())
            points = answer.series.setdefault(labels, [])
            known = points[-1][0] if points else -1
            for at_s, text in metric.values:
                if not 0 <= at_s < _LAST_S:
                    continue
                at_ns = round(at_s * 1000) * _MS
                if start_ms * _MS <= at_ns <= end_ms * _MS and at_ns > known:
                    points.append((at_ns, self._number(text)))
            if metric.histograms and not metric.values:
                answer.num_native_histograms += 1
                del answer.series[labels]

    def _number(self, text: str) -> float:
        try:
            return float(text)
        except ValueError as error:
            raise UnknownFormat(f"{self.url} answers {text[:40]!r} where a number stands.", url=self.url) from error

    def _decoded(self, status: int, body: bytes, selector: str, answer: Answer) -> list[_Metric]:
        try:
            reply = msgspec.json.decode(body, type=_Reply)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            if status in (502, 503, 504):
                raise _TooMuch(f"it answers {status}") from error
            raise UnknownFormat(
                f"{self.url}/api/v1/query answers {status}, but not in Prometheus' JSON. Is this a Prometheus server's "
                "address? (A server behind a path needs it: Mimir has /prometheus.)",
                url=self.url,
            ) from error
        if reply.status == "success" and reply.data is not None:
            answer.warnings += [text for text in (*reply.warnings, *reply.infos) if text not in answer.warnings]
            if reply.data.resultType != "matrix":
                raise UsageError(f"--match {selector!r} gives no series with samples ({reply.data.resultType}).")
            try:
                return msgspec.json.decode(reply.data.result, type=list[_Metric])
            except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
                raise UnknownFormat(f"{self.url} answers series in a form that is not known: {error}") from error
        if reply.errorType in ("timeout", "execution", "canceled", "too_many_samples") or status in (422, 503):
            raise _TooMuch(reply.error or f"it answers {status}")
        raise UsageError(
            f"{self.url} refuses --match {selector!r}: {reply.error or reply.errorType or status}. "
            'A match is a selector such as {job="vllm"}.',
            url=self.url,
        )

    def _ask(self, path: str, form: Mapping[str, str]) -> tuple[int, bytes]:
        """Status and body. A form goes as POST, so that a long selector fits; without one it is a GET."""
        url = self.url + path
        method = "POST" if form else "GET"
        try:
            with self._client.stream(method, url, data=dict(form) or None) as response:
                body = bytearray()
                for chunk in response.iter_bytes():
                    body += chunk
                    if len(body) > MAX_BODY_BYTES:
                        raise _TooMuch(f"more than {MAX_BODY_BYTES >> 20} MiB in one answer")
                status = response.status_code
                target = response.headers.get("location", "elsewhere")
        except httpx.TimeoutException as error:
            if form and not isinstance(error, httpx.ConnectTimeout):
                raise _TooMuch(f"no answer within {self._timeout_s:g} s") from error
            raise EngineUnreachable(f"{self.url} did not answer within {self._timeout_s:g} s.", url=self.url) from error
        except httpx.HTTPError as error:
            raise EngineUnreachable(why_unreachable(self.url, error), url=self.url, is_timeout=False) from error
        if status in (401, 403):
            raise UsageError(
                f"{url} answers {status}: give a bearer token with --engine-key or KVSCOPE_ENGINE_KEY, or "
                "user:password@ in the address.",
                url=self.url,
            )
        if 300 <= status < 400:
            raise UnknownFormat(f"{url} redirects to {target}; give that address instead.", url=self.url)
        if status in (404, 405):
            raise UnknownFormat(
                f"{self.url} answers, but has no /api/v1/query. Is this a Prometheus server's address?", url=self.url
            )
        return status, bytes(body)


def selectors_of(matches: Sequence[str]) -> list[str]:
    """The selectors given, each once. Raises UsageError where there is none, or one that would match everything."""
    found = list(dict.fromkeys(text.strip() for text in matches if text.strip()))
    if not found:
        raise UsageError("Say which series: --match '{job=\"vllm\"}' (repeatable).")
    for text in found:
        if text in ("{}", '{__name__=~".+"}', '{__name__!=""}'):
            raise UsageError(f"--match {text} means every series of the server; name a job, a namespace or a metric.")
    return found


def told_once(warnings: Sequence[str]) -> list[str]:
    """Warnings for people: each once, shortened, at most ten."""
    shown: list[Any] = [text if len(text) <= 300 else text[:297] + "..." for text in dict.fromkeys(warnings)]
    return shown[:10] + ([f"... and {len(shown) - 10} more"] if len(shown) > 10 else [])
