"""Log lines: constant messages with fields, as text for people and JSON for programs."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from collector import logs


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_json_line_has_message_and_fields() -> None:
    """One object a line; a field that JSON does not know becomes text."""
    stream = io.StringIO()
    logs.configure("info", "json", stream)
    logging.getLogger("test").info("batch stored", extra={"rows": 3, "where": {1}})
    line = json.loads(stream.getvalue())
    assert (line["message"], line["rows"], line["where"], line["level"]) == ("batch stored", 3, [1], "info")
    assert line["ts"].endswith("+00:00")


def test_text_line_is_short_and_keeps_fields() -> None:
    """`12:00:00.000 warning batch refused reason=too-large`."""
    stream = io.StringIO()
    logs.configure("warning", "text", stream)
    logging.getLogger("test").warning("batch refused", extra={"reason": "too-large"})
    logging.getLogger("test").info("not shown")
    assert stream.getvalue().rstrip().endswith("warning batch refused reason=too-large")
    assert stream.getvalue().count("\n") == 1


def test_what_others_said_cannot_drive_a_terminal() -> None:
    """A field with escapes or line ends stays one line of printable characters."""
    stream = io.StringIO()
    logs.configure("info", "text", stream)
    logging.getLogger("test").info("refused", extra={"path": "/a\x1b[31m\nforged line"})
    assert stream.getvalue().endswith("refused path=/a\\x1b[31m\\nforged line\n")


def test_half_a_character_costs_no_line() -> None:
    """A path that is no UTF-8 is written with its escape, in both forms."""
    for form in ("json", "text"):
        stream = io.StringIO()
        logs.configure("info", form, stream)
        logging.getLogger("test").info("opened", extra={"path": "a\udcff"})
        assert "a\\udcff" in stream.getvalue()


def test_traceback_is_kept() -> None:
    """An unforeseen error keeps its place in both forms."""
    for form in ("json", "text"):
        stream = io.StringIO()
        logs.configure("info", form, stream)
        try:
            raise ValueError("inside")
        except ValueError:
            logging.getLogger("test").exception("it failed")
        assert "ValueError: inside" in stream.getvalue()


def test_stream_that_is_no_terminal_gets_json() -> None:
    """`auto` decides by the stream."""
    stream = io.StringIO()
    logs.configure("info", "auto", stream)
    logging.getLogger("test").info("hello")
    assert json.loads(stream.getvalue())["message"] == "hello"
