"""In which form the rows of a statement are answered."""

from __future__ import annotations

import pytest

from collector.api.sql import prefers_arrow

ARROW = "application/vnd.apache.arrow.stream"


@pytest.mark.parametrize(
    ("accept", "arrow"),
    [
        ("", False),
        ("*/*", False),
        (ARROW, True),
        (f"{ARROW.upper()} ; q=0.5", True),
        (f"text/html, {ARROW};q=0.9, */*;q=0.8", True),
        (f"{ARROW};q=0", False),
        (f"{ARROW};q=0.5, application/json", False),
        (f"{ARROW}, application/json;q=0.5", True),
        (f"{ARROW};q=many", False),
        (f"{ARROW}x", False),
        (f"{ARROW};q=0.5, */*", False),
        (f"{ARROW};q=0.5, application/*;q=0.4, */*", True),
        (f"{ARROW};q=0.5, application/json;q=0.4, application/*, */*", True),
        (f"{ARROW};q=inf", False),
        (f"{ARROW};q=nan", False),
        (f"{ARROW};q=1_0", False),
        (f"{ARROW};q=-1", False),
        (f"{ARROW};q = 1.000", True),
        (f"{ARROW}, application/json;q=nan", True),
        (f"{ARROW};", True),
        (f",;,=;q,{ARROW};q;Q=1", False),
        ("\u0661;q=\u0661, ;;;", False),
    ],
)
def test_arrow_is_answered_to_who_prefers_it(accept: str, arrow: bool) -> None:
    """By its name and its weight; everybody else has JSON."""
    assert prefers_arrow(accept) is arrow
