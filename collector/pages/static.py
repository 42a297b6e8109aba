"""Scripts and styles of the pages, and plotly's script out of the package that is installed; no other host is asked for anything."""

from __future__ import annotations

import gzip
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

from fastapi import APIRouter, Header
from fastapi import Path as InPath
from starlette.responses import Response

from collector.pages.frame import STATIC
from engine_probe.errors import NotFound

router = APIRouter(include_in_schema=False)

PLOTLY: Final = "plotly.min.js"
_TYPES: Final = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}


@router.get("/static/{name}")
async def static(
    name: Annotated[str, InPath(max_length=60)], accept_encoding: Annotated[str, Header()] = ""
) -> Response:
    """A script or a style. Its address carries a fingerprint, so it may be kept for a year."""
    body = _packed(name)
    headers = {
        "Cache-Control": "private, max-age=31536000, immutable",
        "X-Content-Type-Options": "nosniff",
        "Vary": "Accept-Encoding",
    }
    if "gzip" in accept_encoding:
        headers["Content-Encoding"] = "gzip"
    else:
        body = gzip.decompress(body)
    return Response(body, media_type=_TYPES[Path(name).suffix], headers=headers)


@cache
def _packed(name: str) -> bytes:
    """Content of a file, packed. Raises NotFound for a name that is none of ours."""
    if name == PLOTLY:
        spec = find_spec("plotly")
        if spec is None or spec.origin is None:
            raise NotFound("plotly is not installed; install kvscope[service]", name=name)
        return gzip.compress((Path(spec.origin).parent / "package_data" / PLOTLY).read_bytes(), 6)
    known = {file.name: file for file in STATIC.iterdir()}
    if name not in known:
        raise NotFound("there is no such script or style", name=name)
    return gzip.compress(known[name].read_bytes(), 6)
