"""How wide text is on a terminal: 漢 and most emoji take two columns, combining marks none, so `len` does not align them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile


def width_of(text: str) -> int:
    """Columns that one line of printable text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def padded(text: str, width: int, *, right: bool = False) -> str:
    """The text in at least so many columns, at their right or left end."""
    room = " " * (width - width_of(text))
    return room + text if right else text + room


def cut(text: str, width: int) -> str:
    """The text in at most so many columns; what is left out is told by an ellipsis."""
    if width_of(text) <= width:
        return text
    kept, used = "", 0
    for character in text:
        used += width_of(character)
        if used > width - 1:
            break
        kept += character
    return kept + "…" if width > 0 else ""


def told_apart(names: Sequence[str], width: int) -> list[str]:
    """The names in at most so many columns each: where one is longer, what all begin or end with is left out first."""
    if all(width_of(name) <= width for name in names):
        return list(names)
    distinct = sorted(set(names))
    if len(distinct) > 1:
        head = _shared(distinct)
        tail = _shared([name[head:][::-1] for name in distinct])
        names = [
            ("…" if head > 1 else name[:head])
            + name[head : len(name) - tail]
            + ("…" if tail > 1 else name[len(name) - tail :])
            for name in names
        ]
    return [cut(name, width) for name in names]


def _shared(names: Sequence[str]) -> int:
    """How many characters all of them begin with."""
    return sum(1 for _ in takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False)))
