"""`/runbooks/NAME`: where the links of alerts lead, so that a person who was paged reads a page and no source text."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from fastapi import APIRouter, Path, Request
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup
from starlette.responses import HTMLResponse

from alerts.runbooks import names, runbook
from collector.pages.frame import page
from collector.paths import text
from collector.services import services_of
from engine_probe.errors import AlertMisuse

router = APIRouter(include_in_schema=False)

CAUSES_PAGE: Final = "causes.md"


@router.get(f"/runbooks/{text('name')}")
async def one_runbook(request: Request, name: Annotated[str, Path(max_length=100)]) -> HTMLResponse:
    """What an alert or a cause means and what to do; for another name, 404 with those that there are."""
    return await services_of(request).pages.run("/runbooks", _shown, name)


def _shown(name: str) -> HTMLResponse:
    try:
        text = runbook(name)
    except AlertMisuse:
        shown = page("pages/runbook.html", path="/alerts", title="No such runbook", body=None, names=names())
        shown.status_code = 404
        return shown
    return page("pages/runbook.html", path="/alerts", title=name, body=html_of(text), names=names())


def html_of(text: str) -> Markup:
    """A runbook's Markdown as HTML. Raw HTML in it is shown as text; a link to a cause leads to that cause's page."""
    return Markup(_markdown().render(text))  # the parser escapes all text, HTML is switched off


@cache
def _markdown() -> MarkdownIt:
    made = MarkdownIt("commonmark", {"html": False})
    made.add_render_rule("link_open", _link)
    return made


def _link(renderer: Any, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    at = urlsplit(str(tokens[index].attrGet("href")))
    if at.path == CAUSES_PAGE and at.fragment:
        tokens[index].attrSet("href", f"/runbooks/{at.fragment}")
    return str(renderer.renderToken(tokens, index, options, env))
