"""A trace as a file, and what is said of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from collector.terminal.output import emit, emit_json, say
from engine_probe.errors import UsageError

PerfettoOption = Annotated[
    Path | None,
    typer.Option(help="Draw them: write a trace to this file (.json), which ui.perfetto.dev opens.", metavar="FILE"),
]


def write_trace(trace: Mapping[str, Any], path: Path, as_json: bool) -> None:
    """Write the file, and say what is in it. Raises UsageError where it cannot be written."""
    import msgspec

    facts = trace["otherData"]
    try:
        path.write_bytes(msgspec.json.encode(trace))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", path=str(path)) from error
    told = {"file": str(path), "events": len(trace["traceEvents"]), **facts}
    if as_json:
        emit_json(told)
    else:
        emit(f"{path}: {facts['requests']} requests in {told['events']} events; open it in ui.perfetto.dev")
    if facts["truncated"]:
        say(f"not all of its {facts['truncated']} are in it: there are too many to draw; take fewer requests")
