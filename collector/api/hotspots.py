"""`/api/v1/hotspots`: where routing loses time, over HTTP."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from collector import problems
from collector.api.common import READ_ERRORS, WINDOW_DOC, answer
from collector.reading.name_patterns import PatternText, matching
from collector.services import Services, services_of
from engine_probe.errors import DiagnosisError

router = APIRouter(prefix="/api/v1", tags=["diagnosis"])

_Window = Annotated[
    str | None,
    Query(
        description=WINDOW_DOC.replace("all live rows", "the last 15 minutes"), examples=["-15m/now"], max_length=500
    ),
]
_Suspect = Annotated[
    str | None, Query(description="another word for window, beside a baseline", examples=["-15m/now"], max_length=500)
]
_Baseline = Annotated[
    str | None,
    Query(
        description="tells of each hotspot whether it was there in this window too",
        examples=["-75m/-60m"],
        max_length=500,
    ),
]


class HotspotRow(BaseModel):
    """One hotspot."""

    kind: (
        Literal["straggler", "dead_signal", "tie_breaking", "affinity", "stale_index", "unreachable_threshold"] | None
    ) = Field(description="null: too much goes there, and why cannot be told")
    cause: str | None = Field(description="identifier of the cause", examples=["hotspot_affinity"])
    subject: dict[str, str | None] = Field(description="kind (worker, fleet), id")
    interval: dict[str, int] = Field(description="start_ns, end_ns")
    detected_ns: int = Field(description="end of the first test interval in which it was found")
    regret_s: float | None = Field(description="seconds lost against the best alternative of each decision")
    regret_share: float | None
    num_requests: int
    statement: str
    because: str | None = Field(description="why the kind is not known")
    evidence: list[dict[str, Any]] = Field(description="statement, value, unit, sql, request_ids")
    advice: dict[str, Any] = Field(
        description="text, replicas, spill_above, recompute_s, wait_each_s, threshold_ratio; null where it does not apply"
    )
    in_baseline: bool | None


class HotspotsDocument(BaseModel):
    """Hotspots of a window. Keys as in `kvscope hotspots --json`."""

    status: Literal["hotspots", "none", "not_observable"]
    verdict: str = Field(description="one sentence")
    window: dict[str, Any]
    baseline: dict[str, Any] | None
    interval_s: float = Field(description="length of a test interval")
    num_intervals: int
    false_alarm_rate: float = Field(description="most of the intervals without a hotspot in which one is told")
    num_decisions: int
    has_routes: bool = Field(description="false: no route rows, judged by outcome only")
    policies: list[str]
    regret: dict[str, Any] = Field(description="total_s, mean_s, num_known, by_worker, by_prefix")
    hotspots: list[HotspotRow] = Field(description="the most expensive first")
    cannot_tell: list[str]


@router.get(
    "/hotspots",
    summary="Workers that get more than they can serve, and why",
    responses={200: {"model": HotspotsDocument}, **problems.responses(*READ_ERRORS, DiagnosisError)},
)
async def get_hotspots(
    request: Request,
    window: _Window = None,
    baseline: _Baseline = None,
    suspect: _Suspect = None,
    worker_matches: PatternText = None,
) -> Response:
    """Judges each routing decision by what it lost, and each interval by tests with a stated rate of false alarms.

    `worker_matches` narrows the list of hotspots to those of the workers that it matches; the fleet is judged all the same.
    """
    services = services_of(request)
    asked = (window, baseline, suspect, worker_matches)
    return answer(await services.judging.run("/api/v1/hotspots", _hotspots, services, *asked))


def _hotspots(
    services: Services, window: str | None, baseline: str | None, suspect: str | None, pattern: str | None
) -> dict[str, Any]:
    from diagnosis.hotspots import question

    found = question.answer(services.store, window, baseline, suspect, time.time_ns()).to_dict()
    chosen = matching(services.store, pattern, [_worker_of(spot) for spot in found["hotspots"]])
    return {**found, "hotspots": [spot for spot in found["hotspots"] if _worker_of(spot) in chosen]}


def _worker_of(spot: dict[str, Any]) -> str:
    """Empty where the hotspot is the whole fleet's."""
    subject = spot["subject"]
    return str(subject["id"]) if subject["kind"] == "worker" and subject["id"] is not None else ""
