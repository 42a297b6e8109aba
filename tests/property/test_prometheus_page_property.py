"""A parser that remembers the page before it reads the next one as a parser that remembers nothing would."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine_probe.adapters.prometheus import PageParser
from engine_probe.errors import UnknownFormat

LINES = st.sampled_from(
    [
        "a 1",
        "a 2",
        'b{x="1"} 3',
        'b{x="1"} 4 1700000000000',
        'b{x="2"} NaN',
        "# TYPE a counter",
        "# TYPE a gauge",
        "# HELP a text",
        "# just a remark",
        "# EOF",
        "",
        "  ",
        "a 1\r",
        "wrong line {",
        "a one",
    ]
)
PAGES = st.lists(st.lists(LINES, max_size=8), min_size=2, max_size=5)


def read(parser: PageParser, text: str) -> Any:
    """What the page says, or the error it gets."""
    try:
        page = parser.parse(text)
    except UnknownFormat as error:
        return error.message
    samples = [(s.series.name, dict(s.series.labels), repr(s.value), s.at_ns) for s in page.samples]
    return samples, dict(page.types), dict(page.helps), page.is_openmetrics


@given(pages=PAGES)
def test_memory_changes_nothing(pages: list[list[str]]) -> None:
    """Pages that share lines, at the same places or others, whole or wrong, of both dialects."""
    remembering = PageParser()
    for lines in pages:
        text = "\n".join(lines)
        assert read(remembering, text) == read(PageParser(), text)
