"""What headers say of a request: who pays, which product, which conversation; limits that an API announces.

`X-Kvscope-<Tag>` is always understood; other headers by `--tag NAME=HEADER`. Tags of a column of the contract fill it, all
others are labels. Values are kept where they are short and printable, since a header is no place for content.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from engine_probe.errors import UsageError
from engine_probe.proxy.context import OWN_PREFIX
from engine_probe.proxy.heads import Head

MAX_TAGS: Final = 24
MAX_CHARS: Final = 200

COLUMNS: Final[Mapping[str, str]] = {
    "tenant": "tenant",
    "workload": "workload",
    "session": "session_id",
    "turn": "turn",
    "priority": "priority_class",
    "cost_center": "cost_center",
}
"""Tag -> column of `request`."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}\Z")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}\Z")
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?\Z")
_LIMIT = re.compile(rb"(?:x-|anthropic-)?ratelimit-([a-z0-9-]{1,60})\Z")
_LIMIT_NAMES: Final = {b"retry-after": "retry_after", b"retry-after-ms": "retry_after_ms"}
_TIMES: Final = {
    b"openai-processing-ms": "upstream_processing_ms",
    b"x-envoy-upstream-service-time": "upstream_service_ms",
}


def parse_tags(texts: Iterable[str]) -> dict[bytes, str]:
    """`NAME=HEADER` as on the command line -> lower-case header -> tag. Raises UsageError."""
    found = {}
    for text in texts:
        name, equals, header = text.partition("=")
        name = name.strip().lower().replace("-", "_")
        if not equals or _NAME.match(name) is None or _HEADER.match(header.strip()) is None:
            raise UsageError(f"--tag {text!r} is not NAME=HEADER, such as tenant=X-Tenant-Id.", tag=text)
        found[header.strip().lower().encode("ascii")] = name
    return found


def request_columns(head: Head, by_header: Mapping[bytes, str]) -> dict[str, Any]:
    """Columns that a request's headers fill, `labels` among them."""
    columns: dict[str, Any] = {}
    labels: dict[str, str] = {}
    for name, value in head.by_name.items():
        tag = by_header.get(name)
        if tag is None and name.startswith(OWN_PREFIX):
            tag = name[len(OWN_PREFIX) :].decode("latin-1").replace("-", "_")
        text = None if tag is None or _NAME.match(tag) is None else printable(value)
        if tag is None or text is None or len(labels) >= MAX_TAGS:
            continue
        column = COLUMNS.get(tag)
        if column == "turn":
            if text.isascii() and text.isdigit() and len(text) < 10:
                columns[column] = int(text)
        elif column is not None:
            columns[column] = text
        else:
            labels[tag] = text
    trace = _TRACEPARENT.match(head.get(b"traceparent") or b"")
    if trace is not None and trace[1] != b"0" * 32:
        columns["trace_id"] = trace[1].decode("ascii")
    retry = head.get(b"x-stainless-retry-count")
    if retry is not None and retry.isdigit() and len(retry) < 4:
        columns["attempt"] = int(retry)
    columns["labels"] = labels
    return columns


def answer_labels(head: Head, request_id: str) -> dict[str, str]:
    """Labels that an answer's headers give: rate limits, the time the upstream says it took, its own id."""
    labels: dict[str, str] = {}
    for name, value in head.by_name.items():
        match = _LIMIT.match(name)
        label = None
        if match is not None:
            label = "ratelimit_" + match[1].decode("ascii").replace("-", "_")
        elif name in _LIMIT_NAMES or name in _TIMES:
            label = _LIMIT_NAMES.get(name) or _TIMES[name]
        if label is not None and len(labels) < MAX_TAGS:
            text = printable(value)
            if text is not None:
                labels[label] = text
    theirs = printable(head.get(b"x-request-id") or b"")
    if theirs is not None and theirs != request_id:
        labels["upstream_request_id"] = theirs
    return labels


def printable(value: bytes) -> str | None:
    """Text of a header, where it is short and printable."""
    try:
        text = value.decode("utf-8").strip()
    except UnicodeDecodeError:
        return None
    return text if 0 < len(text) <= MAX_CHARS and text.isprintable() else None


def known_tags(by_header: Mapping[bytes, str]) -> Sequence[str]:
    """For people: what is read from where."""
    return [f"{tag} from {header.decode('ascii')}" for header, tag in by_header.items()]
