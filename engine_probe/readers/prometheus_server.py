"""A Prometheus server's past as an import: raw samples of a stretch of time, asked for in pieces.

The content's digest is taken of what the server answered, so that the same answer imported again adds nothing, and a
server that knows more today gives another import.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engine_probe.adapters.worker_map import WorkerMap
from engine_probe.errors import UnknownFormat, UsageError
from engine_probe.readers.source import FoundWindow, Notes, ReadOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from engine_probe.attach.prometheus_api import Answer

SCHEME: Final = "prometheus+"
PIECE_NS: Final = 300_000_000_000
MAX_PIECES: Final = 30 * 24 * 12
"""30 days in pieces of five minutes."""


@dataclass(frozen=True, slots=True)
class ServerQuery:
    """What to ask which server for. Instants are UTC ns, `end_ns` is not part of it."""

    url: str
    matches: Sequence[str]
    start_ns: int
    end_ns: int
    worker_map: WorkerMap = field(default_factory=WorkerMap)
    worker_label: str | None = None
    key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    verify: bool | ssl.SSLContext = True


def is_server(text: str) -> bool:
    """Whether PATH names a server: `prometheus+http://host:9090`."""
    return text.startswith((f"{SCHEME}http://", f"{SCHEME}https://"))


class ServerSource:
    """The samples of a stretch of time as a source of rows."""

    format = "Prometheus server"

    def __init__(self, query: ServerQuery) -> None:
        from engine_probe.attach.prometheus_api import selectors_of

        if query.start_ns >= query.end_ns:
            raise UsageError("--start must be before --end.")
        if query.end_ns - query.start_ns > MAX_PIECES * PIECE_NS:
            raise UsageError("More than 30 days at once are not imported; give a shorter --start to --end.")
        self._query = query
        self._selectors = selectors_of(query.matches)
        self._state = blake2b(digest_size=16)
        self.files: list[Path] = []

    def content_digest(self) -> str:
        """Digest of what was answered. Asked after `chunks` was read."""
        return self._state.hexdigest()

    def chunks(self, options: ReadOptions, notes: Notes) -> Iterator[Mapping[str, pa.Table]]:
        """Tables piece by piece. Raises EngineUnreachable, UnknownFormat, UsageError."""
        from engine_probe.attach.prometheus_api import PrometheusApi, told_once
        from engine_probe.readers.server_targets import ServerTargets

        query = self._query
        url = query.url.removeprefix(SCHEME)
        api = PrometheusApi(url, key=query.key, headers=query.headers, verify=query.verify)
        targets = ServerTargets(query.worker_map, query.worker_label)
        warnings: list[str] = []
        native = empty = pieces = 0
        try:
            version = api.version()
            for start_ns in range(query.start_ns, query.end_ns, PIECE_NS):
                end_ns = min(start_ns + PIECE_NS, query.end_ns) - 1_000_000
                answer = api.raw(self._selectors, start_ns, end_ns)
                self._digest(answer)
                pieces, empty = pieces + 1, empty + (not answer.series)
                warnings += answer.warnings
                native = max(native, answer.num_native_histograms)
                targets.take(answer.series)
                yield targets.drain()
        finally:
            api.close()
        if not targets.num_samples:
            raise UnknownFormat(
                f"{api.url} has no samples of {', '.join(self._selectors)} in this time. Check the selector, --start and "
                "--end, and how long the server keeps its data."
            )
        targets.finish()
        yield targets.drain()
        notes.windows.append(FoundWindow("import", query.start_ns, query.end_ns))
        notes.facts["samples_read"] = targets.num_samples
        if version:
            notes.facts["prometheus_version"] = version
        notes.facts.update({f"targets_{kind}": count for kind, count in targets.kinds().items()})
        if empty:
            notes.not_told.append(f"{empty} of {pieces} pieces of five minutes are empty: the server has nothing there")
        if targets.num_late:
            notes.left_out.append(f"{targets.num_late} samples came twice or out of order")
        if native:
            notes.left_out.append(f"{native} native histograms are not read")
        notes.not_told += [f"the server warned: {text}" for text in told_once(warnings)]

    def _digest(self, answer: Answer) -> None:
        for labels, points in sorted((sorted(labels), points) for labels, points in answer.series.items()):
            self._state.update(repr((labels, points)).encode())
