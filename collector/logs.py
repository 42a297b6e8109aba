"""The only code that configures log handlers: text on a terminal, one JSON object a line elsewhere.

A message is a constant phrase; what varies is in its fields: `log.info("batch stored", extra={"rows": 10})`.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from collector.terminal.output import printable

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a record: ts, level, logger, message, its fields, and the traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(document, enc_hook=str).decode()
        except UnicodeEncodeError:  # half a character, from a path or a message that was no UTF-8: never lose the line
            return json.dumps(document, default=str)


class TextFormatter(logging.Formatter):
    """`12:00:00.000 info  message key=value`, for people."""

    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        fields = "".join(f" {key}={printable(str(value))}" for key, value in _fields(record).items())
        text = f"{clock} {record.levelname.lower():7} {record.getMessage()}{fields}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def configure(level: str = "info", format_: str = "auto", stream: TextIO | None = None) -> None:
    """Send every record of `level` and above to `stream` (stderr) in one format; uvicorn's included."""
    stream = stream or sys.stderr
    as_json = format_ == "json" or (format_ == "auto" and not stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    # What is no HTTP is answered with 400; a line for each would let anybody who connects fill the log.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    logging.getLogger("uvicorn.access").setLevel(logging.ERROR)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}
