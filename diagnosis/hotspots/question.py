"""Which window is asked about: one (`window`), or a suspect beside its baseline; a person's words in, windows out."""

from __future__ import annotations

from diagnosis.hotspots.finding import Hotspots
from diagnosis.hotspots.judge import hotspots
from diagnosis.windows import latest, overlap, parse_window
from engine_probe.errors import BadWindow, UsageError
from store.interface import Store


def answer(store: Store, window: str | None, baseline: str | None, suspect: str | None, now_ns: int) -> Hotspots:
    """Hotspots of `window`, or of `suspect` beside `baseline`; with none of them, of the last 15 minutes.

    Raises UsageError where they do not go together, BadWindow for unknown, empty, future or overlapping windows.
    """
    if window is not None and suspect is not None:
        raise UsageError("window and suspect are the same question: give one of them (a baseline may stand beside it)")
    asked = window if window is not None else suspect
    found = latest(store, now_ns) if asked is None else parse_window(asked, store, now_ns)
    before = None if baseline is None else parse_window(baseline, store, now_ns)
    if before is not None and overlap(before, found):
        raise BadWindow(
            f"baseline {before} and suspect {found} overlap; give two windows that share no time", window=str(found)
        )
    return hotspots(store, found, before)
