"""What is kept of a finished run: one line of a small CSV file, enough for every figure that is published.

Rows are sorted, floats have four significant digits, and what a reader can work out from the faults' catalogue is left out: so the
file is committed beside the page that is made of it, and a change of one run is a change of one line.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diagnosis.attribution.ranking import CAP_WHEN_FEW, CAP_WHEN_TENTATIVE
from diagnosis.lab.gauges import GAUGES
from engine_probe.errors import UsageError

NOTHING = "nothing"
Gauges = Mapping[str, "float | None"]
Named = tuple[str, float]
"""A cause and its confidence."""


@dataclass(frozen=True, slots=True)
class Result:
    """One run, graded.

    causes        as ranked, with confidence; empty where none was named
    certainty     of the first cause: what its confidence was read off
    truth_*_s     what the fault owns of the change (None where several were injected)
    share_*       what the first cause claims of that, where it is the right one
    unexplained   share of the change that nobody owns, where a right cause is named
    base, suspect what a dashboard showed of both windows
    code          which version of the code made it (`code.py`); empty: not known
    """

    fault: str
    severity: str
    seed: int
    requests: int
    observe: str
    marked: bool
    outcome: str
    status: str
    carried_by: str
    causes: tuple[Named, ...]
    certainty: float | None
    is_moved: bool
    is_subject_right: bool | None
    truth_mean_s: float | None
    truth_p99_s: float | None
    share_mean: float | None
    share_p99: float | None
    unexplained: float | None
    base: Gauges
    suspect: Gauges
    code: str = ""

    @property
    def first(self) -> str:
        """The cause in the first place, or NOTHING."""
        return self.causes[0][0] if self.causes else NOTHING

    @property
    def confidence(self) -> float | None:
        """Of the first cause."""
        return self.causes[0][1] if self.causes else None

    @property
    def is_held_down(self) -> bool:
        """Whether its confidence is a bound of a rule, and not what the calibration says: too few requests, or a change that is not established."""
        return self.confidence in (CAP_WHEN_TENTATIVE, CAP_WHEN_FEW)

    def order(self) -> tuple[Any, ...]:
        return (self.fault, self.severity, self.observe, self.marked, self.requests, self.seed)


FIELDS = (
    "fault", "severity", "seed", "requests", "observe", "marked", "outcome", "status", "carried_by", "causes", "certainty", "moved",
    "subject", "truth_mean_s", "truth_p99_s", "share_mean", "share_p99", "unexplained",
    *(f"base_{name}" for name in GAUGES), *(f"suspect_{name}" for name in GAUGES), "code",
)  # fmt: skip


def results(documents: Iterable[Mapping[str, Any]]) -> list[Result]:
    """Of finished runs' documents, sorted and rounded as the file is: what is said of them can be said of the file."""
    found = sorted((from_document(each) for each in documents), key=Result.order)
    return [_result(dict(zip(FIELDS, map(str, _line(each)), strict=True))) for each in found]


def from_document(found: Mapping[str, Any]) -> Result:
    """Of a finished run's document (`cell.run_cell`)."""
    truth = list(found["truth"].values())
    alone = truth[0] if len(truth) == 1 else None
    gauges = found.get("gauges") or {"baseline": {}, "suspect": {}}
    return Result(
        found["fault"],
        found["severity"],
        found["seed"],
        found["requests"],
        found.get("observe", "full"),
        found.get("marked", False),
        found["outcome"],
        found.get("status", "failed"),
        found.get("carried_by", ""),
        tuple((cause["cause"], cause["confidence"]) for cause in found["causes"]),
        found["causes"][0].get("certainty") if found["causes"] else None,
        bool(found.get("is_moved", False)),
        found.get("is_subject_right"),
        alone["mean_s"] if alone else None,
        alone["p99_s"] if alone else None,
        found.get("share_of_mean"),
        found.get("share_of_truth"),
        found.get("unexplained"),
        gauges["baseline"],
        gauges["suspect"],
        found.get("code", ""),
    )


def write(results: Iterable[Result], path: Path) -> None:
    """The file, sorted."""
    path.write_text(text(results), encoding="utf-8")


def text(results: Iterable[Result]) -> str:
    """The file's text: a head and a line a result."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(FIELDS)
    for result in sorted(results, key=Result.order):
        writer.writerow(_line(result))
    return out.getvalue()


def read(path: Path) -> list[Result]:
    """Raises UsageError where it is none of our files."""
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = csv.DictReader(lines)
            if tuple(rows.fieldnames or ()) != FIELDS:
                raise UsageError(f"{path} is no file of lab results: its columns are others; make it anew with `kvscope lab matrix`", path=str(path))  # fmt: skip
            return [_result(row) for row in rows]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; give the CSV that `kvscope lab matrix` wrote", path=str(path)) from error  # fmt: skip
    except (UnicodeDecodeError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} holds a line that is no result ({error}); make it anew with `kvscope lab matrix`", path=str(path)) from error  # fmt: skip


def _line(r: Result) -> Sequence[Any]:
    causes = " ".join(f"{name}:{confidence:.4g}" for name, confidence in r.causes)
    numbers = (r.truth_mean_s, r.truth_p99_s, r.share_mean, r.share_p99, r.unexplained)
    shown = (*(r.base.get(name) for name in GAUGES), *(r.suspect.get(name) for name in GAUGES))
    return (
        r.fault, r.severity, r.seed, r.requests, r.observe, int(r.marked), r.outcome, r.status, r.carried_by, causes, _number(r.certainty),
        int(r.is_moved), "" if r.is_subject_right is None else int(r.is_subject_right), *map(_number, numbers), *map(_number, shown),
        r.code,
    )  # fmt: skip


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _result(row: Mapping[str, str]) -> Result:
    def number(name: str) -> float | None:
        return float(row[name]) if row[name] else None

    causes = [part.rpartition(":") for part in row["causes"].split()]
    return Result(
        row["fault"],
        row["severity"],
        int(row["seed"]),
        int(row["requests"]),
        row["observe"],
        row["marked"] == "1",
        row["outcome"],
        row["status"],
        row["carried_by"],
        tuple((name, float(confidence)) for name, _, confidence in causes),
        number("certainty"),
        row["moved"] == "1",
        row["subject"] == "1" if row["subject"] else None,
        number("truth_mean_s"),
        number("truth_p99_s"),
        number("share_mean"),
        number("share_p99"),
        number("unexplained"),
        {name: number(f"base_{name}") for name in GAUGES},
        {name: number(f"suspect_{name}") for name in GAUGES},
        row["code"],
    )
