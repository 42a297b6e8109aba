"""One check of the doctor: what was looked at, how it is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["ok", "note", "warn", "fail"]
ORDER: tuple[State, ...] = ("ok", "note", "warn", "fail")
"""ok: as it should be. note: something to know. warn: works, but a verdict may suffer. fail: does not work."""


@dataclass(frozen=True, slots=True)
class Check:
    """`area` groups checks on the page; `do` is the one thing to do, empty where there is nothing to do."""

    area: str
    subject: str
    state: State
    text: str
    do: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def worst(checks: list[Check]) -> State:
    """The worst state among them."""
    return max((check.state for check in checks), key=ORDER.index, default="ok")
