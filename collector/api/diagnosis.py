"""`/api/v1/diagnosis`, `/findings`, `/reports`, `/capacity`: the judgements, over HTTP."""

from __future__ import annotations

import time
from dataclasses import asdict
from importlib import metadata
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from alerts.finding import short
from collector import problems
from collector.api.common import READ_ERRORS, WINDOW_DOC, WindowText, answer, window_of
from collector.services import Services, services_of, slos_of
from engine_probe.errors import BadWindow, DiagnosisError, UsageError

REPORT_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
router = APIRouter(prefix="/api/v1", tags=["diagnosis"])

_CHOSEN = "; default chosen by the rule that the verdict tells"
BaselineText = Annotated[str | None, Query(description=WINDOW_DOC + _CHOSEN, examples=["a-ample-long"], max_length=500)]
SuspectText = Annotated[
    str | None, Query(description=WINDOW_DOC + _CHOSEN, examples=["c-squeeze-long"], max_length=500)
]
MetricText = Annotated[Literal["ttft", "tpot", "e2e"], Query(description="what got worse")]
QuantileText = Annotated[str, Query(description="decimal between 0 and 1", examples=["0.99"], max_length=20)]
VantageText = Annotated[
    Literal["client", "engine", "router"] | None, Query(description="default the client's where both windows have it")
]


class VerdictDocument(BaseModel):
    """Which causes own the change between two windows. Keys as in `kvscope diagnose --json`."""

    status: Literal["explained", "no_change", "not_distinguishable", "not_observable"]
    verdict: str = Field(description="one sentence")
    metric: str
    quantile: str = Field(description="the quantile that was judged")
    requested_quantile: str
    carried_by: Literal["quantile", "mean"] = Field(description="what carries the verdict")
    vantage: str
    windows: dict[str, Any]
    n: dict[str, int]
    n_effective: dict[str, float | None]
    delta: dict[str, Any] = Field(description="mean_s, p99_s, judged_s: value and interval_95; baseline, suspect")
    composition: list[dict[str, Any]] = Field(description="what requests around the quantile are made of, by window")
    attribution: list[dict[str, Any]] = Field(
        description="rows sum to the change: cause, mean_s, p99_s, es_s, interval_95"
    )
    causes: list[dict[str, Any]] = Field(description="ranked, with evidence, refutation and remedy")
    side_effects: list[dict[str, Any]]
    unexplained: dict[str, float | None]
    excluded: list[dict[str, Any]]
    not_observable: list[dict[str, Any]]
    quality: list[dict[str, Any]]
    notes: list[str]
    next_experiment: dict[str, Any] | None
    side: dict[str, Any] | None = Field(description="prefill side, decode side, or the batch; both queues apart")
    calibration: dict[str, Any]


class Finding(BaseModel):
    """A verdict in short."""

    id: int
    made_ns: int
    baseline: str | None = Field(description="the window as it was asked for; null: chosen by rule")
    suspect: str | None
    judged: dict[str, str] | None = Field(
        None,
        description="baseline, suspect: the windows so that they can be asked for again; null: of an older release",
    )
    metric: str
    quantile: str
    status: str
    verdict: str
    causes: list[dict[str, Any]] = Field(description="cause, subject, share_p99, confidence_word; ranked")
    alert_id: str | None = Field(None, description="the alert that it stands behind; null: somebody asked")


class Findings(BaseModel):
    """The newest verdicts, newest first."""

    findings: list[Finding]


class CapacityRow(BaseModel):
    """Hit rate at one size of the cache of each worker."""

    blocks: int | None = Field(description="KV blocks; null: a cache without an end")
    hit_rate: float | None
    hit_blocks: int
    requested_blocks: int


class CachingWorth(BaseModel):
    """What a prefix cache of the workers' own size would be worth in seconds. Unknown is null."""

    pays: bool | None = Field(
        description="a request gains more than its look-up costs; null: what a token costs is not known"
    )
    sentence: str
    num_blocks: int | None = Field(description="blocks of each worker's cache; null: without an end")
    hit_ratio: float = Field(description="share of the prompts' tokens that it would have served")
    served_ratio: float | None = Field(description="share that was served from a cache as it was")
    token_s: float | None = Field(description="computing a prompt token, fitted")
    saved_s: float | None = Field(description="prefill that falls away, a request on average")
    lookup_s: float = Field(description="look-up that comes in its place")
    ttft_s: list[float] | None = Field(description="mean and P99 as it was")
    ttft_then_s: list[float] | None = Field(description="mean and P99 as it would have been at the same waiting")
    break_even_ratio: float | None = Field(description="hit ratio from which on it pays")


class CapacityAnswer(BaseModel):
    """Hit rate against cache size, replayed from the prompt blocks that requests asked for."""

    window: str
    policy: str
    points: list[CapacityRow]
    knee: dict[str, Any]
    caching: CachingWorth | None = Field(
        description="would caching pay here? null: the prompts do not tell their lengths"
    )


@router.get(
    "/diagnosis",
    summary="Which causes own the change",
    responses={200: {"model": VerdictDocument}, **problems.responses(*READ_ERRORS, DiagnosisError)},
)
async def get_diagnosis(
    request: Request,
    baseline: BaselineText = None,
    suspect: SuspectText = None,
    metric: MetricText = "ttft",
    quantile: QuantileText = "0.99",
    vantage: VantageText = None,
) -> Response:
    """Compares two windows and judges. Kept for /api/v1/findings."""
    services = services_of(request)
    asked = (baseline, suspect, metric, quantile, vantage)
    return answer(await services.judging.run("/api/v1/diagnosis", _diagnose, services, *asked))


@router.get(
    "/findings",
    summary="The latest verdicts",
    responses={200: {"model": Findings}, **problems.responses(*READ_ERRORS)},
)
async def get_findings(
    request: Request,
    status: Annotated[
        Literal["explained", "no_change", "not_distinguishable", "not_observable"] | None, Query()
    ] = None,
    cause: Annotated[str | None, Query(description="only verdicts that name this cause", max_length=100)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
) -> Response:
    """Verdicts that people asked for, and those behind alerts, newest first. They outlive a restart."""
    found = [
        finding
        for finding in reversed(services_of(request).findings)
        if (status is None or finding["status"] == status)
        and (cause is None or any(named["cause"] == cause for named in finding["causes"]))
    ]
    return answer({"findings": found[:limit]})


@router.get(
    "/reports",
    summary="The postmortem report of a diagnosis",
    response_class=Response,
    responses={
        200: {
            "content": {
                "text/markdown": {"schema": {"type": "string"}},
                "text/html": {"schema": {"type": "string"}},
                "application/json": {"schema": {"type": "object"}},
            },
            "description": "the report; as JSON what it is made of: `verdict` and `incident`",
        },
        **problems.responses(*READ_ERRORS, DiagnosisError),
    },
)
async def get_report(
    request: Request,
    baseline: BaselineText = None,
    suspect: SuspectText = None,
    metric: MetricText = "ttft",
    quantile: QuantileText = "0.99",
    vantage: VantageText = None,
    format: Annotated[
        Literal["markdown", "html", "json"], Query(description="html is one file with everything in it")
    ] = "markdown",
) -> Response:
    """The same judgement as /api/v1/diagnosis for people: impact, timeline, attribution, evidence with its queries, what to change."""
    services = services_of(request)
    asked = (baseline, suspect, metric, quantile, vantage)
    verdict, incident = await services.judging.run("/api/v1/reports", _case, services, *asked)
    if format == "json":
        return answer({"verdict": verdict, "incident": incident})
    version = metadata.version("kvscope")
    if format == "html":
        from diagnosis.postmortem.html import render_html

        return Response(render_html(verdict, incident, version=version), media_type="text/html", headers=REPORT_HEADERS)
    from diagnosis.report import render_markdown

    return Response(render_markdown(verdict, incident, version=version), media_type="text/markdown")


@router.get(
    "/capacity",
    summary="Hit rate against the number of KV blocks",
    responses={200: {"model": CapacityAnswer}, **problems.responses(*READ_ERRORS, DiagnosisError)},
)
async def get_capacity(
    request: Request,
    window: WindowText = None,
    policy: Annotated[Literal["lru", "lfu", "fifo"], Query(description="eviction policy")] = "lru",
    blocks: Annotated[
        str | None, Query(description="sizes separated by commas, `inf` for no end; default a series", max_length=2000)
    ] = None,
) -> Response:
    """Replays the prompt blocks that the window's requests asked for, each worker with a cache of that size."""
    services = services_of(request)
    return answer(await services.judging.run("/api/v1/capacity", _capacity, services, window, policy, blocks))


def _diagnose(
    services: Services, baseline: str | None, suspect: str | None, metric: str, quantile: str, vantage: str | None
) -> dict[str, Any]:
    from diagnosis.diagnose import diagnose

    now_ns = time.time_ns()
    windows = [None if text is None else window_of(services, text) for text in (baseline, suspect)]
    verdict = diagnose(
        services.store, windows[0], windows[1], metric=metric, quantile=quantile, vantage=vantage, now_ns=now_ns
    )
    document = verdict.to_dict()
    services.keep_finding({"made_ns": now_ns, **short(document, baseline, suspect)})
    return document


def _case(services: Services, *asked: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    from diagnosis.postmortem.incident import BEFORE_NS, Told, incident

    verdict = _diagnose(services, *asked)
    window = verdict["windows"]["suspect"]
    alerts = []
    if services.alerting is not None:
        fired = [alert for alert in services.alerting.book.alerts(None) if alert.fired_ns is not None]
        alerts = [
            Told(alert.fired_ns, alert.annotations.get("summary") or alert.labels.get("alertname", "an alert"))
            for alert in fired
            if alert.fired_ns is not None
            and window["start_ns"] - BEFORE_NS <= alert.fired_ns <= window["end_ns"] + BEFORE_NS
        ]
    return verdict, incident(services.store, verdict, slos_of(services.settings.slo).rules, alerts)


def _capacity(services: Services, text: str | None, policy: str, blocks: str | None) -> dict[str, Any]:
    from collector.commands.capacity import caching_worth, default_sizes, knee
    from diagnosis.capacity.traces import cache_loads, curve_over, stored_requests

    window = window_of(services, text)
    requests, workers = stored_requests(services.store, window)
    if requests.num_rows == 0:
        runs = ", ".join(services.known_runs().runs()) or "none"
        raise BadWindow(
            f"no request of {window} names its prompt blocks, so nothing can be replayed; known runs: {runs}",
            window=str(window),
        )
    loads = cache_loads(requests, workers)
    points = curve_over(loads, policy, default_sizes(loads) if blocks is None else _sizes(blocks))
    rows = [
        {
            "blocks": point.blocks,
            "hit_rate": point.hit_rate,
            "hit_blocks": point.hit_blocks,
            "requested_blocks": point.requested_blocks,
        }
        for point in points
    ]
    worth = caching_worth(loads)
    return {
        "window": str(window),
        "policy": policy,
        "points": rows,
        "knee": knee(loads),
        "caching": None if worth is None else asdict(worth),
    }


def _sizes(text: str) -> list[int | None]:
    sizes: list[int | None] = []
    for part in text.split(","):
        word = part.strip()
        if word == "inf":
            sizes.append(None)
        elif word.isascii() and word.isdigit() and 0 < len(word) < 16:
            sizes.append(int(word))
        else:
            raise UsageError(f"{word[:40]!r} is no number of blocks; give whole numbers or inf, such as 1000,3000,inf")
    if len(sizes) > 200:
        raise UsageError(f"{len(sizes)} sizes are more than the 200 that one answer has")
    return sizes
