"""What every page has: the frame with its ways to the others, and headers that let in nothing from elsewhere.

No inline script and no script of another host runs (Content-Security-Policy); styles may be inline, since plotly sets them
on the elements that it draws.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.responses import HTMLResponse

STATIC: Final = Path(__file__).parent.parent / "static"


class Way(NamedTuple):
    """A page of the frame's list."""

    path: str
    name: str


WAYS: Final = (
    Way("/", "Overview"),
    Way("/diagnosis", "Diagnosis"),
    Way("/requests", "Requests"),
    Way("/workers", "Workers"),
    Way("/kv", "KV map"),
    Way("/capacity", "Capacity"),
    Way("/experiments", "Experiments"),
    Way("/alerts", "Alerts"),
    Way("/sql", "SQL"),
    Way("/sight", "What is visible"),
)

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def page(template: str, *, path: str, title: str, **facts: Any) -> HTMLResponse:
    """A page of a template. `path` is that of the way it belongs to."""
    html = (
        environment()
        .get_template(template)
        .render(
            facts, ways=WAYS, path=path, title=title, version=metadata.version("kvscope"), fingerprint=fingerprint()
        )
    )
    return HTMLResponse(html, headers=HEADERS)


def fragment(template: str, **facts: Any) -> str:
    """A part of a page, for one that is already shown."""
    return environment().get_template(template).render(facts)


@cache
def environment() -> Environment:
    """Templates escape what they are given, and a name that nobody gave is an error."""
    made = Environment(
        loader=PackageLoader("collector", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["instant"] = instant
    return made


@cache
def fingerprint() -> str:
    """Changes when a script or a style does, so that browsers may keep them."""
    digest = hashlib.blake2b(digest_size=6)
    for file in sorted(STATIC.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def instant(at_ns: int) -> str:
    """ISO 8601 in UTC, to the millisecond."""
    return datetime.fromtimestamp(at_ns / 1e9, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
