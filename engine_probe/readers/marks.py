"""Windows that a source names, as `experiment` marks: where each begins and ends on the time axis."""

from __future__ import annotations

from typing import Any

from engine_probe.readers.source import FoundWindow


def window_marks(window: FoundWindow) -> list[dict[str, Any]]:
    """Two `mark` rows, at the window's edges."""
    attrs = {"window": window.name, "start_ns": str(window.start_ns), "end_ns": str(window.end_ns)}
    return [
        {
            "mark": "experiment",
            "at_ns": at_ns,
            "subject": window.name,
            "text": f"The {window.name} window {verb}.",
            "attrs": attrs | {"edge": edge},
            "worker": None,
        }
        for edge, verb, at_ns in (("start", "began", window.start_ns), ("end", "ended", window.end_ns))
    ]
