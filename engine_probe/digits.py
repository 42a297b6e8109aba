"""Whole numbers in text that others wrote: ports, ranks, codes. The one place that turns such digits into an int.

`str.isdigit` and `isdecimal` admit digits of every script, superscripts among them, and `int` refuses what is longer than
4,300 digits: either way a strange text would end in a ValueError far from where it came in.
"""

from __future__ import annotations


def whole_number(text: str, most: int) -> int | None:
    """The number that `text` is in ASCII digits, from 0 to `most`; None for anything else."""
    if not text.isascii() or not text.isdigit() or len(text) > len(str(most)) + 20:
        return None
    number = int(text)
    return number if number <= most else None


def port_number(text: str) -> int | None:
    """A TCP port, 1 to 65,535; None for anything else."""
    return whole_number(text, 65_535) or None
