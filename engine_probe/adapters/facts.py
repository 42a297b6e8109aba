"""Slow facts of workers over time: the first sight is a `worker` row, a change a new row and a `config_changed` mark.

Invariant: the mark names each setting with its old and its new value, and nothing is a change that merely became
known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class WorkerFacts:
    """The last known facts of every worker of one source (mix no sources: they know different things)."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}

    def known(self, worker: str) -> Mapping[str, Any]:
        """What is known of a worker now; {} where nothing is."""
        return self._known.get(worker, {})

    def observe(self, worker: str, facts: Mapping[str, Any], at_ns: int) -> dict[str, list[dict[str, Any]]]:
        """Rows that these facts are worth: {} where nothing is new, else kind -> rows of `worker` and `mark`.

        facts  columns of a `worker` row; None means unknown, and keeps what was known
        """
        known = self._known.get(worker)
        told = {key: value for key, value in facts.items() if value is not None}
        merged = {**(known or {}), **told}
        merged["flags"] = {**(known or {}).get("flags", {}), **told.get("flags", {})}
        if known == merged:
            return {}
        self._known[worker] = merged
        rows: dict[str, list[dict[str, Any]]] = {"worker": [{"worker": worker, "at_ns": at_ns, **merged}]}
        if known is not None:
            marks = [_mark(worker, at_ns, *change) for change in changes(known, merged)]
            if marks:
                rows["mark"] = marks
        return rows


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(setting, old, new) of every fact and flag that was known and is different now; names in order."""
    found: dict[str, tuple[str, str]] = {}
    for before, after in ((old.get("flags", {}), new.get("flags", {})), (old, new)):
        for key in before.keys() & after.keys() - {"flags"}:
            if before[key] is not None and after[key] is not None and before[key] != after[key]:
                found[key] = (str(before[key]), str(after[key]))
    return [(key, *found[key]) for key in sorted(found)]


def _mark(worker: str, at_ns: int, setting: str, old: str, new: str) -> dict[str, Any]:
    return {
        "worker": worker,
        "at_ns": at_ns,
        "mark": "config_changed",
        "subject": worker,
        "text": f"{setting} changed from {old} to {new} on {worker}.",
        "attrs": {"setting": setting, "old": old, "new": new},
    }
