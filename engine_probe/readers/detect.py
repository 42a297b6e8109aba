"""What is at PATH: a recording, a trace, pages, events. Content decides, names only break ties."""

from __future__ import annotations

from pathlib import Path

from engine_probe.errors import UnknownFormat
from engine_probe.readers.recording import Recording
from engine_probe.readers.source import Source

KNOWN = (
    "a recording folder (scenario.json with client, otlp, metrics, kv_events), a Mooncake trace (.jsonl), "
    "Prometheus text, NDJSON events, Parquet events or a folder of them"
)


def open_source(path: Path) -> Source:
    """Recognise PATH. Raises UnknownFormat saying what was found and what would be known."""
    if not path.exists():
        raise UnknownFormat(f"There is nothing at {path}. Give the path of {KNOWN}.")
    if path.is_dir():
        if (path / "scenario.json").is_file():
            return Recording(path)
    raise UnknownFormat(f"{path} is nothing that can be read. Known are {KNOWN}.")
