"""What runs the runs of an experiment: the embedded engine in virtual time, or an endpoint. One protocol for both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from collector.experiments.workload import Workload
from diagnosis.experiments.design import Arm, Trial

Folder = Callable[[Trial], Path | None]
"""Where the rows of a run go as Parquet; None: nowhere."""


@dataclass(frozen=True, slots=True)
class Ran:
    """Rows of a run that are judged, by kind; what it says of itself."""

    run_id: str
    tables: Mapping[str, pa.Table]
    facts: Mapping[str, Any]


def counting_begins(trial: Trial) -> dict[str, Any]:
    """Columns of the `mark` with which the counted stretch of a run begins."""
    arm = trial.arm
    return {
        "mark": "experiment",
        "subject": trial.run_id,
        "text": f"arm {arm.name}, repeat {trial.repeat}: counting begins, {'warm' if arm.is_warm else 'cold'}",
        "attrs": {**arm.settings, "arm": arm.name, "repeat": str(trial.repeat), "turn": str(trial.turn)},
    }


class Runner(Protocol):
    """Serves the calls of runs."""

    def check(self, arms: Sequence[Arm]) -> None:
        """Raise what stops the experiment before anything runs: a setting that makes no sense, a place that nobody serves."""
        ...

    def run(
        self, trials: Sequence[Trial], workload: Workload, folder: Folder, tell: Callable[[int], None]
    ) -> list[Ran]:
        """One `Ran` a trial, in their order. tell: runs done."""
        ...

    def facts(self, arms: Sequence[Arm], workload: Workload) -> dict[str, Any]:
        """What is held fixed, by name; what differs between arms as {differs: {arm: value}}; None: nobody tells."""
        ...

    def notes(self, workload: Workload, ran: Sequence[Ran]) -> list[str]:
        """What a reader must know of how it was run."""
        ...
