"""Prometheus text pages, both dialects (text 0.0.4 and OpenMetrics 1.0), read without a heavy dependency.

Idea: between two scrapes of one engine only the numbers change, so the text in front of the number (the series) is
parsed once and remembered; a `Series` object is the same object in every page of one parser, and adapters may key
their own caches on it. Invariant: a page is read whole or refused with the number of the line that is wrong;
exemplars are checked and left out; sizes are bounded, so that a hostile page costs bounded time and memory. Source:
Prometheus exposition formats; OpenMetrics 1.0; reference section 3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

from engine_probe.errors import UnknownFormat

MAX_PAGE_BYTES = 32 << 20
MAX_SAMPLES = 500_000
MAX_REMEMBERED_SERIES = 200_000

_LABEL_BODY = r'(?:[^"{}]|"(?:[^"\\]|\\.)*+")*+'
_LINE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:.]*+)?"
    rf"(?:[ \t]*+\{{(?P<labels>{_LABEL_BODY})\}})?"
    r"(?P<gap>[ \t]*+)(?P<value>[^ \t]++)"
    r"(?:[ \t]++(?P<time>[-+0-9.eE]++))?"
    rf"(?:[ \t]++(?P<exemplar>#[ \t]*+\{{{_LABEL_BODY}\}}[ \t]++[^ \t]++(?:[ \t]++[-+0-9.eE]++)?))?"
    r"[ \t]*+"
)
_LABEL = re.compile(
    r'[ \t]*+(?P<key>[a-zA-Z_][a-zA-Z0-9_.:]*+|"(?:[^"\\]|\\.)*+")'
    r'(?:[ \t]*+=[ \t]*+"(?P<value>(?:[^"\\]|\\.)*+)")?[ \t]*+'
)
_JSON = re.compile(r'\[|\{\s*+(?:\}\s*+$|"(?:[^"\\]|\\.)*+"\s*+:)')
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "\\": "\\", '"': '"'}
_TYPES = frozenset(
    ["counter", "gauge", "histogram", "summary", "untyped", "unknown", "info", "stateset", "gaugehistogram"]
)


_BLANK, _REMARK, _EOF = "blank", "remark", "end of page"
"""What a line is where it tells nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One line's name and labels. Compared by identity: one object a series in one parser. Do not change `labels`."""

    name: str
    labels: Mapping[str, str]


class Sample(NamedTuple):
    """One number of a page. `at_ns` is the page's own timestamp (UTC ns) where it gives one."""

    series: Series
    value: float
    at_ns: int | None


@dataclass(frozen=True, slots=True)
class Page:
    """One scrape: samples in page order, declared types and help texts by family name."""

    samples: list[Sample]
    types: Mapping[str, str]
    helps: Mapping[str, str]
    is_openmetrics: bool

    def names(self) -> set[str]:
        """Names of all series of the page."""
        return {sample.series.name for sample in self.samples}


class PageParser:
    """Parses the pages of one target, remembering its series from page to page."""

    def __init__(self, *, max_bytes: int = MAX_PAGE_BYTES, max_samples: int = MAX_SAMPLES) -> None:
        self._max_bytes = max_bytes
        self._max_samples = max_samples
        self._series: dict[str, Series] = {}
        self._comments: dict[str, tuple[str, str, str] | None] = {}
        self._last: tuple[bool, list[str], list[Any]] = (False, [], [])

    def parse(self, page: str | bytes, content_type: str | None = None) -> Page:
        """Read one page. Raises UnknownFormat, naming the line, where the text is not a Prometheus page."""
        text = self._text(page)
        is_openmetrics = "openmetrics" in (content_type or "") or text.rstrip().endswith("# EOF")
        if len(self._series) + len(self._comments) > MAX_REMEMBERED_SERIES:
            self._series.clear()
            self._comments.clear()
        samples: list[Sample] = []
        types: dict[str, str] = {}
        helps: dict[str, str] = {}
        ended = False
        lines = text.split("\n")
        entries = self._entries(lines, is_openmetrics)
        for number, entry in enumerate(entries, 1):
            if entry is _BLANK:
                continue
            if ended:
                raise _wrong(number, lines[number - 1].rstrip("\r"), "text after '# EOF'")
            if entry.__class__ is Sample:
                samples.append(entry)
            elif entry is _EOF:
                ended = True
            elif entry is not _REMARK:
                (types if entry[0] == "TYPE" else helps)[entry[1]] = entry[2]
        if len(samples) > self._max_samples:
            raise UnknownFormat(f"The page has more than {self._max_samples} samples; scrape a smaller page.")
        if is_openmetrics and not ended:
            raise UnknownFormat("The OpenMetrics page was cut off: its last line is not '# EOF'. Scrape it again.")
        self._last = (is_openmetrics, lines, entries)
        return Page(samples, types, helps, is_openmetrics)

    def _entries(self, lines: list[str], is_openmetrics: bool) -> list[Any]:
        """What each line is. Most lines of a page are those of the page before it, and are taken from there."""
        was_openmetrics, last_lines, last = self._last
        if was_openmetrics != is_openmetrics:
            last_lines = last = []
        entries: list[Any] = [
            entry if line == before else self._entry(line, number, is_openmetrics)
            for number, (line, before, entry) in enumerate(zip(lines, last_lines, last, strict=False), 1)
        ]
        first_new = len(entries)
        entries += [
            self._entry(line, number, is_openmetrics) for number, line in enumerate(lines[first_new:], first_new + 1)
        ]
        return entries

    def _entry(self, raw: str, number: int, is_openmetrics: bool) -> Any:
        """A Sample, (TYPE or HELP, family, text), or one of the markers."""
        line = raw.rstrip("\r")
        head, _, tail = line.rpartition(" ")
        series = self._series.get(head)
        if series is not None:
            return Sample(series, _number(tail, number), None)
        if not line or line.isspace():
            return _BLANK
        if not line.startswith("#"):
            return self._sample(line, number, is_openmetrics)
        if line not in self._comments:
            self._comments[line] = _comment(line, number)
        told = self._comments[line]
        if told is not None:
            return told
        return _EOF if is_openmetrics and line.rstrip() == "# EOF" else _REMARK

    def _text(self, page: str | bytes) -> str:
        if len(page) > self._max_bytes:
            raise UnknownFormat(
                f"The page is larger than {self._max_bytes} bytes; this is not an engine's /metrics page."
            )
        if isinstance(page, bytes):
            data = page
            try:
                page = data.decode("utf-8")
            except UnicodeDecodeError as error:
                line = data[: error.start].count(b"\n") + 1
                raise UnknownFormat(f"Line {line} is not UTF-8 text; is this a /metrics page?", line=line) from error
        start = page[:4096].lstrip("\ufeff \t\r\n")
        if _JSON.match(start):
            raise UnknownFormat(
                "The page is JSON, not Prometheus text. If this is trtllm-serve, use `kvscope attach trtllm`; "
                "other engines answer JSON where their metrics are switched off.",
                line=1,
            )
        if start.startswith("<"):
            raise UnknownFormat("The page is HTML or XML, not Prometheus text; check the address (/metrics).", line=1)
        return page.removeprefix("\ufeff")

    def _sample(self, line: str, number: int, is_openmetrics: bool) -> Sample:
        match = _LINE.fullmatch(line)
        if match is None or not (match["name"] or match["labels"]):
            raise _wrong(number, line, 'expected: name{label="value",...} number [timestamp]')
        if match["labels"] is None and not match["gap"]:
            raise _wrong(number, line, "a space is missing between name and number")
        name, labels = match["name"], _labels(match["labels"] or "", line, number)
        if name is None:
            name = labels.pop("", "")
        if not name or "" in labels:
            raise _wrong(number, line, "the name is missing or given twice")
        value = _number(match["value"], number)
        series = Series(name, labels)
        if match["time"] is None and match["exemplar"] is None:
            self._series[line[: match.start("value")].rstrip(" \t")] = series
        return Sample(series, value, _instant(match["time"], number, is_openmetrics))


def parse_page(page: str | bytes, content_type: str | None = None) -> Page:
    """Read one page on its own. Raises UnknownFormat."""
    return PageParser().parse(page, content_type)


def _wrong(number: int, line: str, what: str) -> UnknownFormat:
    shown = line if len(line) <= 120 else line[:117] + "..."
    return UnknownFormat(f"Line {number} of the metrics page is wrong: {what}. The line: {shown!r}", line=number)


def _number(text: str, line: int) -> float:
    try:
        if "_" in text:
            raise ValueError(text)
        return float(text)
    except ValueError as error:
        raise _wrong(line, text, "not a number") from error


def _instant(text: str | None, line: int, is_openmetrics: bool) -> int | None:
    """Milliseconds (0.0.4) or seconds (OpenMetrics) since 1970 -> ns, exactly."""
    if text is None:
        return None
    try:
        at_ns = int(Decimal(text).scaleb(9 if is_openmetrics else 6))
    except (InvalidOperation, ValueError, OverflowError) as error:
        raise _wrong(line, text, "not a timestamp") from error
    if not -(2**63) <= at_ns < 2**63:
        raise _wrong(line, text, "not a timestamp")
    return at_ns


def _labels(body: str, line: str, number: int) -> dict[str, str]:
    """Labels of one series; a quoted name without value (Prometheus 3) is returned under the empty key."""
    labels: dict[str, str] = {}
    position = 0
    while position < len(body):
        match = _LABEL.match(body, position)
        if match is None:
            if body[position:].strip(" \t") == "":
                break
            raise _wrong(number, line, f"labels are not readable from character {position} on")
        key, value = match["key"], match["value"]
        if value is None:
            if not key.startswith('"'):
                raise _wrong(number, line, f"label {key!r} has no value")
            key, value = "", _unescape(key[1:-1])
        elif key.startswith('"'):
            key = _unescape(key[1:-1])
        if key in labels:
            raise _wrong(number, line, f"label {key!r} is given twice")
        labels[key] = _unescape(value)
        position = match.end()
        if position < len(body):
            if body[position] != ",":
                raise _wrong(number, line, f"a comma is missing after label {key!r}")
            position += 1
    return labels


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    return _ESCAPE.sub(lambda match: _ESCAPES.get(match[1], match[0]), text)


def _comment(line: str, number: int) -> tuple[str, str, str] | None:
    """(HELP or TYPE, family, text) of such a line; None for any other comment, which is tolerated."""
    words = line.split(None, 3)
    if len(words) < 3 or words[0] != "#" or words[1] not in ("HELP", "TYPE"):
        return None
    text = words[3] if len(words) > 3 else ""
    if words[1] == "TYPE" and text.strip() not in _TYPES:
        raise _wrong(number, line, f"unknown type {text.strip()!r}")
    return words[1], words[2], text.strip() if words[1] == "TYPE" else _unescape(text)
