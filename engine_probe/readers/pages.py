"""Prometheus pages kept as files: one page, a folder of pages, or a log of scrapes (JSON lines with at_ns and text).

The instant of a page is, in this order: the timestamps on its samples; `--start` (one page); a file name that is a
number of ns, us, ms or s since 1970, or an ISO instant; the file's time of last change, which is said. Pages of a
folder are read in the order of their instants.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engine_probe.errors import UnknownFormat
from engine_probe.readers.lines import head, json_lines
from engine_probe.readers.scrapes import ScrapeTarget
from engine_probe.readers.source import CHUNK_ROWS, Notes, ReadOptions

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIXES: Final = (".prom", ".metrics", ".txt", ".openmetrics")
MAX_PAGE_BYTES: Final = 32 << 20


class PageFiles:
    """One page a file."""

    format = "Prometheus text"

    def __init__(self, files: list[Path], others: Sequence[Path] = ()) -> None:
        self.files = files
        self._others = others

    def chunks(self, options: ReadOptions, notes: Notes) -> Iterator[Mapping[str, pa.Table]]:
        """`sample` (and `worker`, `mark`) tables of all pages."""
        target = ScrapeTarget(options.worker)
        timed = []
        guessed = 0
        for path in self.files:
            at_ns = options.at_ns if len(self.files) == 1 and options.at_ns is not None else instant_of_name(path.stem)
            guessed += at_ns is None
            timed.append((path.stat().st_mtime_ns if at_ns is None else at_ns, path.name, path))
        for at_ns, name, path in sorted(timed):
            text = head(path, MAX_PAGE_BYTES + 1)
            try:
                target.take(text, at_ns)
            except UnknownFormat as error:
                raise UnknownFormat(f"{name}: {error.message}", **error.facts) from error
            if len(target.rows) >= CHUNK_ROWS:
                yield target.drain()
        target.finish()
        if tables := target.drain():
            yield tables
        notes.left_out += [f"{path.name}: not a page" for path in self._others]
        if guessed:
            notes.assumed.append(
                f"instants: {guessed} pages without a time got that of the file's last change; give --start for one "
                "page, or name each file by its instant"
            )
        if not target.num_read:
            raise UnknownFormat(
                f"{self.files[0].name} holds no samples: only comments or nothing. Is it a /metrics page?"
            )


class ScrapeLog:
    """JSON lines {at_ns, worker, status, text}, as recordings keep them."""

    format = "log of metrics scrapes"

    def __init__(self, path: Path) -> None:
        self.files = [path]

    def chunks(self, options: ReadOptions, notes: Notes) -> Iterator[Mapping[str, pa.Table]]:
        """`sample` (and `worker`, `mark`) tables; one target a worker."""
        path = self.files[0]
        targets: dict[str | None, ScrapeTarget] = {}
        failed = 0
        for number, scrape in json_lines(path, ("at_ns", "text")):
            if scrape.get("status", 200) != 200:
                failed += 1
                continue
            worker = scrape.get("worker", options.worker)
            if (
                type(scrape["at_ns"]) is not int
                or not isinstance(scrape["text"], str)
                or not isinstance(worker, str | None)
            ):
                raise UnknownFormat(
                    f"{path.name}, line {number}: at_ns must be ns, text a page, worker a name.", line=number
                )
            target = targets.setdefault(worker, ScrapeTarget(worker))
            try:
                target.take(scrape["text"], scrape["at_ns"])
            except UnknownFormat as error:
                raise UnknownFormat(f"{path.name}, line {number}: {error.message}", line=number) from error
            if len(target.rows) >= CHUNK_ROWS:
                yield target.drain()
        for target in targets.values():
            target.finish()
            if tables := target.drain():
                yield tables
        if failed:
            notes.left_out.append(f"{failed} scrapes that the engine did not answer with 200")


def instant_of_name(stem: str) -> int | None:
    """Instant (UTC ns) in a file name: digits since 1970 in ns, us, ms or s, or ISO 8601; None where none is."""
    digits = re.search(r"(?<!\d)(\d{10}|\d{13}|\d{16}|\d{19})(?!\d)", stem)
    if digits is not None:
        return int(digits[1].ljust(19, "0"))
    iso = re.search(r"\d{4}-\d{2}-\d{2}[T_ ]\d{2}[:.-]?\d{2}[:.-]?\d{2}", stem)
    if iso is None:
        return None
    try:
        at = datetime.strptime(re.sub(r"\D", "", iso[0]), "%Y%m%d%H%M%S").replace(tzinfo=UTC)
    except ValueError:
        return None
    return int(at.timestamp()) * 1_000_000_000
