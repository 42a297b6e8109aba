"""The options with which `kvscope import prometheus+http://host:9090` says what to ask a Prometheus server for."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from collector.terminal.instants import iso_ns
from engine_probe.errors import UsageError

if TYPE_CHECKING:
    from engine_probe.readers.source import Source

_AGO: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def server_source(
    url: str,
    *,
    match: Sequence[str],
    start: str | None,
    end: str | None,
    worker_map: Sequence[str],
    worker_label: str | None,
    key: str | None,
    header: Sequence[str],
    ca: Path | None,
    insecure: bool,
) -> Source:
    """The source that these options mean. Raises UsageError naming the option that is wrong or missing."""
    from engine_probe.adapters.worker_map import WorkerMap
    from engine_probe.attach.fetch import trust
    from engine_probe.readers.prometheus_server import ServerQuery, ServerSource

    if start is None:
        raise UsageError("Say from when: --start 2026-11-29T13:20:00Z, or how long ago, such as --start 2h.")
    now_ns = time.time_ns()
    query = ServerQuery(
        url=url,
        matches=match,
        start_ns=instant_ns("--start", start, now_ns),
        end_ns=now_ns if end is None else instant_ns("--end", end, now_ns),
        worker_map=WorkerMap.parse(worker_map),
        worker_label=worker_label,
        key=key,
        headers=headers_of(header),
        verify=trust(ca, insecure=insecure),
    )
    return ServerSource(query)


def headers_of(texts: Sequence[str]) -> dict[str, str]:
    """`Name: value` -> header. Raises UsageError."""
    headers = {}
    for text in texts:
        name, colon, value = text.partition(":")
        if not colon or not re.fullmatch(r"[A-Za-z0-9-]+", name.strip()):
            raise UsageError(f"--header {text!r} is no header; expected NAME: VALUE, such as 'X-Scope-OrgID: team'.")
        headers[name.strip()] = value.strip()
    return headers


def instant_ns(option: str, text: str, now_ns: int) -> int:
    """ISO 8601, nanoseconds since 1970, or how long before now (`90m`, `2h`, `3d`) -> ns. Raises UsageError."""
    ago = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if ago is not None:
        return now_ns - round(float(ago[1]) * _AGO[ago[2]] * 1e9)
    return iso_ns(option, text)
