"""Which worker a series speaks of, where its own labels do not say it in our words: rules that the user gives.

A rule is `LABEL:VALUE=WORKER`: a series whose label LABEL has VALUE is WORKER's (`gpu:0=worker-a`, `pod:vllm-1-*=b`).
`*` and `?` in VALUE stand for any text; `{label}` in WORKER is filled from the series. The first rule that fits wins.
A Prometheus server renames the labels of an exporter that it has itself (`pod` becomes `exported_pod`): the exporter's
own is asked first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from engine_probe.errors import UsageError

_RULE = re.compile(r"(?P<label>[A-Za-z_][A-Za-z0-9_]*):(?P<value>.+)=(?P<worker>[^=]+)")
_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True, slots=True)
class WorkerRule:
    """One rule. `value` may hold wildcards, `worker` names of labels in braces."""

    label: str
    value: str
    worker: str


class WorkerMap:
    """Rules in the order given. Without rules no series is renamed."""

    def __init__(self, rules: Sequence[WorkerRule] = ()) -> None:
        self.rules = tuple(rules)

    @classmethod
    def parse(cls, texts: Sequence[str]) -> WorkerMap:
        """Rules from `LABEL:VALUE=WORKER`. Raises UsageError for what is no rule."""
        rules = []
        for text in texts:
            match = _RULE.fullmatch(text.strip())
            if match is None:
                raise UsageError(f"--map {text!r} is no rule; expected LABEL:VALUE=WORKER, such as gpu:0=worker-a.")
            rules.append(WorkerRule(match["label"], match["value"], match["worker"].strip()))
        return cls(rules)

    def worker(self, labels: Mapping[str, str]) -> str | None:
        """The worker that these labels mean; None where no rule fits."""
        for rule in self.rules:
            value = own_label(labels, rule.label)
            if value is not None and fnmatchcase(value, rule.value):
                filled = _FIELD.sub(lambda field: own_label(labels, field[1]) or "", rule.worker)
                if filled:
                    return filled
        return None

    def renamed(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row of a router's log with the workers that rules name (`worker_id:ID=NAME`) under these names."""
        if not self.rules:
            return row
        names = {name: self._known_as(row.get(name)) for name in ("worker", "chosen") if row.get(name)}
        candidates = row.get("candidates")
        if isinstance(candidates, list):
            names["candidates"] = [{**one, "worker": self._known_as(one.get("worker"))} for one in candidates]
        return {**row, **names}

    def _known_as(self, worker: Any) -> Any:
        return self.worker({"worker_id": worker, "worker": worker}) or worker if isinstance(worker, str) else worker


def own_label(labels: Mapping[str, str], name: str) -> str | None:
    """A label as the exporter wrote it, under whatever name it arrived; None where it is not there or empty."""
    return labels.get(f"exported_{name}") or labels.get(name) or None
