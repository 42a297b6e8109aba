"""What a check says of one window: conditions that hold, and whether it could tell at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from alerts.matchers import fingerprint
from store.interface import Window

SEVERAL: Final = "several"
"""A label's value where it is no single worker (model, tenant) that it is about."""
RUNBOOKS = "/runbooks/"
"""Where the collector shows runbooks by name; a condition names its own in the annotation `runbook_url`."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Something that is wrong. `annotations` may differ from look to look, and so may the labels named in `moving`.

    starts_ns   when it began, as far as is known
    moving      labels that are no part of its identity: a severity that rises makes no second alert
    """

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    starts_ns: int
    moving: tuple[str, ...] = ("severity",)

    @property
    def fingerprint(self) -> str:
        """The same for the same labels, those that move left out."""
        return fingerprint({name: value for name, value in self.labels.items() if name not in self.moving})


@dataclass(frozen=True, slots=True)
class Look:
    """One window, looked at once.

    can_tell   False: too little was seen to say that anything is wrong, or that nothing is (`because`)
    baseline   the window it was compared with, as text; None where the check compares nothing
    finding    the verdict in short, for those who read findings
    """

    conditions: tuple[Condition, ...] = ()
    can_tell: bool = True
    because: str | None = None
    baseline: str | None = None
    finding: Mapping[str, Any] | None = field(default=None, compare=False)


class Check(Protocol):
    """A judgement that is made again and again."""

    @property
    def name(self) -> str:
        """As it is called on /metrics."""
        ...

    def look(self, window: Window, baseline: str | None) -> Look:
        """What is wrong in the window. `baseline` None: chosen by rule. Raises KvscopeError where the store fails."""
        ...

    def owns(self, labels: Mapping[str, str]) -> bool:
        """An alert with these labels is raised and ended by this check."""
        ...

    def report(self, window: str, baseline: str | None) -> str:
        """Path and query of the page that tells people all about the window; `suspect` in the query names it."""
        ...


def text_of(window: Window) -> str:
    """A live window as the API takes it: START/END in ns."""
    return f"{window.start_ns}/{window.end_ns}"


def window_of(text: str) -> Window:
    """The window of `text_of`."""
    start, _, end = text.partition("/")
    return Window(int(start), int(end))
