"""A trace of one request and of all that its workers did meanwhile, or of a list of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collector.perfetto.surroundings import scene_of
from collector.perfetto.tracks import draw
from engine_probe.errors import NotFound
from store.interface import Store, Window


def trace_of_request(store: Store, request_id: str, window: Window | None) -> dict[str, Any]:
    """The trace of one request, with the others that shared its workers. Raises NotFound."""
    return _trace(store, [request_id], window, with_neighbours=True)


def trace_of_requests(store: Store, ids: Sequence[str], window: Window) -> dict[str, Any]:
    """The trace of these requests. Raises NotFound where none of them is stored."""
    return _trace(store, list(dict.fromkeys(ids)), window, with_neighbours=False)


def _trace(store: Store, ids: Sequence[str], window: Window | None, *, with_neighbours: bool) -> dict[str, Any]:
    scene = scene_of(store, ids, window, with_neighbours=with_neighbours)
    if not scene.requests:
        what = f"request {ids[0]!r}" if len(ids) == 1 else "the requests"
        where = "" if window is None else f" in {window}"
        raise NotFound(f"no row of {what} is stored{where}, so there is nothing to draw", request_ids=list(ids[:10]))
    facts = {
        "requests": len(scene.subjects),
        "window": "all rows" if window is None else str(window),
        "truncated": ", ".join(scene.truncated),
    }
    return draw(scene).document(facts)
