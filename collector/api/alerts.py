"""`/api/v1/alerts`: what is wrong now and who was told; silences; messages that could not be delivered; Alertmanager's webhook."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from alerts.condition import SEVERAL
from collector import problems
from collector.alerting.alerting import Alerting
from collector.alerting.answers import alert_rows, delivery_rows, discard, end_silence, replay, silence, silence_rows
from collector.alerting.intake import AlertmanagerMessage, take_in
from collector.api.common import READ_ERRORS, answer, json_only
from collector.reading.name_patterns import PatternText, matching
from collector.services import Services, services_of
from engine_probe.errors import (
    AlertMisuse,
    BadRequest,
    DiskFull,
    NotFound,
    NotReady,
    StoreBusy,
    StoreMisuse,
    TooManyQueries,
    UnknownFormat,
)
from store.alert_rows import Alert

router = APIRouter(prefix="/api/v1/alerts", tags=["alerts"])
LONGEST_SILENCE_S = 366 * 86_400
_WRITE_ERRORS = (*READ_ERRORS, BadRequest, UnknownFormat, AlertMisuse, DiskFull)


class AlertRow(BaseModel):
    """One episode of an alert."""

    alert_id: str
    fingerprint: str = Field(description="the same for every episode of the same alert")
    origin: Literal["evaluator", "alertmanager"]
    state: Literal["pending", "firing", "resolved", "dismissed"]
    labels: dict[str, str]
    annotations: dict[str, str] = Field(
        description="summary, description, remedy, runbook; report and finding once it fires"
    )
    starts_ns: int
    fired_ns: int | None
    last_seen_ns: int = Field(description="end of the newest window that showed it")
    ends_ns: int | None
    updated_ns: int
    baseline: str | None = Field(description="the window that it is judged against")
    silenced_by: list[str]
    inhibited_by: list[str] = Field(description="alerts that are told in its place")
    why_muted: str | None


class AlertRows(BaseModel):
    """Alerts, most recently changed first."""

    alerts: list[AlertRow]


class NewSilence(BaseModel):
    """Say nothing of alerts that match all matchers, for a while."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"matchers": ['worker="w1"'], "duration_s": 3600, "created_by": "ann", "comment": "known"}]
        },
    )

    matchers: list[Annotated[str, Field(max_length=500)]] = Field(min_length=1, max_length=50)
    duration_s: float = Field(gt=0, le=LONGEST_SILENCE_S)
    starts_ns: int | None = Field(None, ge=0, lt=2**62, description="default now")
    created_by: str = Field(min_length=1, max_length=200)
    comment: str = Field("", max_length=2000)


class SilenceRow(BaseModel):
    """A silence."""

    silence_id: str
    matchers: list[str]
    starts_ns: int
    ends_ns: int
    created_by: str
    comment: str
    is_active: bool


class SilenceRows(BaseModel):
    """Silences that have not ended."""

    silences: list[SilenceRow]


class DeliveryRow(BaseModel):
    """A message to a receiver, without its body."""

    delivery_id: str
    receiver: str
    state: Literal["waiting", "delivered", "dead"]
    created_ns: int
    attempts: int
    next_ns: int
    ended_ns: int | None
    message: str | None = Field(description="why the newest attempt failed")


class DeliveryRows(BaseModel):
    """Messages, newest first."""

    deliveries: list[DeliveryRow]


class Which(BaseModel):
    """Dead letters by id, or all of them."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"all": True}]})

    ids: list[Annotated[str, Field(max_length=200)]] = Field(default_factory=list, max_length=1000)
    all: bool = False


class Replayed(BaseModel):
    """What goes out again, under the ids that it had."""

    replayed: list[str]


class Discarded(BaseModel):
    """Messages that were forgotten."""

    discarded: list[str]


class Taken(BaseModel):
    """What became of one alert of Alertmanager."""

    alert_id: str
    fingerprint: str
    status: Literal["firing", "resolved"]
    finding: dict[str, Any] | None = Field(description="the verdict on its window, in short; null: none could be made")
    report: str | None = Field(description="URL of the report")
    because: str | None = Field(description="why there is no finding")


class TakenAll(BaseModel):
    """An answer to Alertmanager, in the order of its alerts."""

    alerts: list[Taken]


@router.get(
    "", summary="Alerts", responses={200: {"model": AlertRows}, **problems.responses(*READ_ERRORS, StoreMisuse)}
)
async def get_alerts(
    request: Request,
    state: Annotated[
        Literal["open", "pending", "firing", "resolved", "dismissed", "all"],
        Query(description="open: pending or firing"),
    ] = "open",
    origin: Annotated[Literal["evaluator", "alertmanager"] | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    worker_matches: PatternText = None,
    model_matches: PatternText = None,
    tenant_matches: PatternText = None,
) -> Response:
    """What is wrong now, and what was; with why nobody was told where that is so.

    A pattern narrows the list by a label; an alert without that label is about them all and stays.
    """
    services = services_of(request)
    book = _alerting(services).book
    patterns = {"worker": worker_matches, "model": model_matches, "tenant": tenant_matches}
    asked = (state, origin, limit, time.time_ns(), _label_filter(services, patterns))
    return answer(await services.reads.run("/api/v1/alerts", alert_rows, book, *asked))


@router.post(
    "/webhook",
    summary="Alertmanager's webhook",
    dependencies=[Depends(json_only)],
    responses={200: {"model": TakenAll}, **problems.responses(*_WRITE_ERRORS, StoreMisuse)},
)
async def post_webhook(request: Request, message: AlertmanagerMessage) -> Response:
    """Takes what Alertmanager sends to a webhook (version 4), diagnoses the alerts' window and answers with finding and report.

    Busy is 503 and not 429 here, because Alertmanager tries again after the first alone.
    """
    services = services_of(request)
    if "kvscope-delivery" in request.headers:
        raise AlertMisuse("this message was sent by a kvscope; alerts that go round in a circle help nobody")
    alerting = _alerting(services)
    try:
        taken = await services.judging.run("/api/v1/alerts/webhook", take_in, services, alerting, message)
    except (TooManyQueries, StoreBusy) as error:
        raise NotReady(f"busy: {error.message}", retry_after_s=5) from error
    return answer({"alerts": taken})


@router.get(
    "/silences",
    summary="Silences",
    responses={200: {"model": SilenceRows}, **problems.responses(*READ_ERRORS, StoreMisuse)},
)
async def get_silences(request: Request) -> Response:
    """Those that hold now or later, the first to end first."""
    services = services_of(request)
    book = _alerting(services).book
    return answer(await services.reads.run("/api/v1/alerts/silences", silence_rows, book, time.time_ns()))


@router.post(
    "/silences",
    summary="Silence alerts for a while",
    status_code=201,
    dependencies=[Depends(json_only)],
    responses={201: {"model": SilenceRow}, **problems.responses(*_WRITE_ERRORS, StoreMisuse)},
)
async def post_silence(request: Request, new: NewSilence) -> Response:
    """Alerts that match go on and are shown; nobody is told. The end of one that was told before is told all the same."""
    services = services_of(request)
    row = await services.reads.run(
        "/api/v1/alerts/silences",
        silence,
        _alerting(services).book,
        new.matchers,
        time.time_ns() if new.starts_ns is None else new.starts_ns,
        new.duration_s,
        created_by=new.created_by,
        comment=new.comment,
    )
    return answer(row, 201)


@router.delete(
    "/silences/{silence_id}",
    summary="End a silence",
    responses={200: {"model": SilenceRow}, **problems.responses(*_WRITE_ERRORS, NotFound, StoreMisuse)},
)
async def delete_silence(
    request: Request, silence_id: Annotated[str, Path(max_length=200, examples=["6f1f4d6e"])]
) -> Response:
    """From now on its alerts are told again."""
    services = services_of(request)
    book = _alerting(services).book
    return answer(await services.reads.run("/api/v1/alerts/silences", end_silence, book, silence_id, time.time_ns()))


@router.get(
    "/deliveries",
    summary="Messages to receivers",
    responses={200: {"model": DeliveryRows}, **problems.responses(*READ_ERRORS, StoreMisuse)},
)
async def get_deliveries(
    request: Request,
    state: Annotated[
        Literal["waiting", "delivered", "dead"] | None, Query(description="dead: the dead letters")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """What waits, what arrived, and what could not be delivered, with the reason."""
    services = services_of(request)
    book = _alerting(services).book
    return answer(await services.reads.run("/api/v1/alerts/deliveries", delivery_rows, book, state, limit))


@router.post(
    "/deliveries/replay",
    summary="Send dead letters again",
    dependencies=[Depends(json_only)],
    responses={200: {"model": Replayed}, **problems.responses(*_WRITE_ERRORS, NotFound, StoreMisuse)},
)
async def post_replay(request: Request, which: Which) -> Response:
    """Under the same ids, so a receiver that has one of them already can tell."""
    services = services_of(request)
    alerting = _alerting(services)
    ids = await services.reads.run(
        "/api/v1/alerts/deliveries", replay, alerting.book, which.ids, every=which.all, now_ns=time.time_ns()
    )
    alerting.courier.wake()
    return answer({"replayed": ids})


@router.post(
    "/deliveries/discard",
    summary="Forget dead letters",
    dependencies=[Depends(json_only)],
    responses={200: {"model": Discarded}, **problems.responses(*_WRITE_ERRORS, NotFound, StoreMisuse)},
)
async def post_discard(request: Request, which: Which) -> Response:
    """They were not delivered, and will not be: of a receiver that is gone, or no news any more."""
    services = services_of(request)
    book = _alerting(services).book
    ids = await services.reads.run("/api/v1/alerts/deliveries", discard, book, which.ids, every=which.all)
    return answer({"discarded": ids})


def _label_filter(services: Services, patterns: Mapping[str, str | None]) -> Callable[[list[Alert]], list[Alert]]:
    """Alerts of whose labels each is one that its pattern matches, or says nothing of one alone."""

    def narrowed(found: list[Alert]) -> list[Alert]:
        for label, pattern in patterns.items():
            if pattern is not None:
                told = [alert.labels.get(label, SEVERAL) for alert in found]
                chosen = matching(services.store, pattern, told) | {SEVERAL}
                found = [alert for alert, name in zip(found, told, strict=True) if name in chosen]
        return found

    return narrowed


def _alerting(services: Services) -> Alerting:
    if services.alerting is None:
        raise StoreMisuse(f"the store {type(services.store).__name__} keeps no alerts")
    return services.alerting
