"""Digits that others wrote become a number or nothing, never an exception."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_probe.digits import port_number, whole_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("007", 7),
        ("100", 100),
        ("101", None),
        ("", None),
        ("-1", None),
        ("+1", None),
        ("1.0", None),
        (" 1", None),
    ],
)
def test_a_number_up_to_the_most_that_is_allowed(text: str, number: int | None) -> None:
    """ASCII digits alone; zeros before it change nothing."""
    assert whole_number(text, 100) == number


@pytest.mark.parametrize("text", ["\u00b2", "\u0663", "\uff11", "9" * 5000])
def test_what_python_calls_digits_and_int_refuses_is_nothing(text: str) -> None:
    """Superscripts, other scripts, and more digits than `int` takes."""
    assert text.isdigit()
    assert whole_number(text, 1 << 62) is None


@pytest.mark.parametrize(("text", "port"), [("1", 1), ("65535", 65535), ("0", None), ("65536", None)])
def test_a_port_is_from_1_to_65535(text: str, port: int | None) -> None:
    """Zero is no port to connect to."""
    assert port_number(text) == port


@given(text=st.text(max_size=30), most=st.integers(min_value=0, max_value=1 << 63))
def test_any_text_is_a_number_within_bounds_or_nothing(text: str, most: int) -> None:
    """Never an exception, never more than was allowed."""
    found = whole_number(text, most)
    assert found is None or 0 <= found <= most
