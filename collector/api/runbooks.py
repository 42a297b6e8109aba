"""`/api/v1/runbooks`: what an alert means and what to do, as text for programs; people have the page `/runbooks/NAME`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from collector import problems
from collector.api.common import READ_ERRORS
from collector.services import services_of
from engine_probe.errors import AlertMisuse, NotFound

router = APIRouter(prefix="/api/v1/runbooks", tags=["alerts"])


@router.get(
    "/{name}",
    summary="A runbook",
    response_class=Response,
    responses={
        200: {"content": {"text/markdown": {"schema": {"type": "string"}}}, "description": "Markdown"},
        **problems.responses(*READ_ERRORS, NotFound),
    },
)
async def get_runbook(
    request: Request, name: Annotated[str, Path(max_length=100, examples=["premature_eviction"])]
) -> Response:
    """Of a cause (its name) or of a rule (the alert's name): the same text as on the pages of the documentation."""
    text = await services_of(request).reads.run("/api/v1/runbooks", _runbook, name)
    return Response(text, media_type="text/markdown; charset=utf-8")


def _runbook(name: str) -> str:
    from alerts.runbooks import runbook

    try:
        return runbook(name)
    except AlertMisuse as error:
        raise NotFound(error.message) from error
