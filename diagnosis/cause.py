"""What a cause is: a function of the case that claims rows of the ledger with evidence, or says why it does not.

`@cause(name, needs=..., rows=...)` registers one; its docstring is the runbook text, in paragraphs that begin with `Why:`,
`Refuted by:`, `Remedy:` (one line each, `engine: setting` or `application: change`) and `Experiment:`. A cause whose
`needs` were not seen answers "not observable here" without being asked.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from diagnosis.attribution.shapley import Attribution
from diagnosis.attribution.traffic import Traffic
from diagnosis.checks.check import Check
from diagnosis.facts import Facts
from diagnosis.ledger.ledger import Ledger
from diagnosis.ledger.work_model import WorkModel
from diagnosis.sampled import num_requests, total
from diagnosis.statistics.comparability import Mix
from store.interface import Window

MATERIAL = 0.10
"""Share of the change that a cause must own before it is named."""


BY_LEDGER = "the ledger, from its seconds of each request"
BY_CALIBRATION = "calibration, from the steps of both windows"
BY_CHAINS = "lineage, from the block at which each request's chain broke"
BY_MIX = "the comparison of both windows' mixes"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One statement with its number, the SQL that gives the number, and some of the requests behind it.

    computed_by   who works the number out where no SQL can
    """

    statement: str
    value: float | None
    unit: str
    sql: str | None = None
    request_ids: Sequence[str] = ()
    computed_by: str = BY_LEDGER


@dataclass(frozen=True, slots=True)
class Claim:
    """A cause says: these seconds are mine, and here is why. `strength` 0..1 is lowered per missing observation.

    advice   what to do with this window's own numbers; told before the remedies of the runbook
    rows     what it claims here, where that is less than the cause may claim; None: all
    began    what it stands on is counted, met by many requests here and by next to none there: no two draws of one process differ so
    is_sure  it changed beyond chance by evidence of its own, though both windows have it
    """

    evidence: Sequence[Evidence]
    subject: tuple[str, str | None] = ("fleet", None)
    interval_s: tuple[float, float] | None = None
    strength: float = 1.0
    advice: Sequence[str] = ()
    rows: tuple[str, ...] | None = None
    began: bool = False
    is_sure: bool = False


@dataclass(frozen=True, slots=True)
class Excluded:
    """A cause says: not me, and this number is why."""

    because: str


@dataclass(frozen=True, slots=True)
class Case:
    """Everything a cause may look at. `row(name)` gives the change of a ledger row: (mean s, quantile s).

    Where latency fell, the sides are exchanged (`ended`): a cause is then asked what the baseline had and the suspect window
    has no more. `base_word` and `suspect_word` name the sides truly either way, so evidence uses them. The traffic's own causes go
    by the raw change, which may be the other way than the one at a common mix (`of_traffic`).
    """

    base: Facts
    suspect: Facts
    base_window: Window
    suspect_window: Window
    base_ledger: Ledger
    suspect_ledger: Ledger
    attribution: Attribution
    model: WorkModel
    metric: str
    quantile: str
    mix: Mix | None = None
    traffic: Traffic | None = None
    traffic_fell: bool = False
    """What the traffic's mix did to the raw numbers made them fall."""
    ended: bool = False
    checks: Sequence[Check] = ()
    """What was checked of both windows' data."""
    apart: tuple[str, ...] = ()
    """Dimensions that moved so far that the windows have no kind of request in common; then nothing was reweighted."""

    @property
    def base_word(self) -> str:
        return "suspect window" if self.ended else "baseline"

    @property
    def suspect_word(self) -> str:
        return "baseline" if self.ended else "suspect window"

    def exchanged(self) -> Case:
        """The same pair asked the other way round; attribution stays as it is."""
        return replace(
            self,
            base=self.suspect,
            suspect=self.base,
            base_window=self.suspect_window,
            suspect_window=self.base_window,
            base_ledger=self.suspect_ledger,
            suspect_ledger=self.base_ledger,
            model=self.model.exchanged(),
            ended=not self.ended,
        )

    def of_traffic(self) -> Case:
        """The case the way round in which the traffic's own causes are told: by the raw change, whatever there is at a common mix."""
        return self if self.traffic is None or self.ended == self.traffic_fell else self.exchanged()

    def window_of(self, facts: Facts) -> Window:
        """The window that these facts are of."""
        return self.base_window if facts is self.base else self.suspect_window

    def word_of(self, facts: Facts) -> str:
        return self.base_word if facts is self.base else self.suspect_word

    def row(self, name: str) -> tuple[float, float]:
        for row in self.attribution.rows:
            if row.name == name:
                return row.mean_s, row.quantile_s
        return 0.0, 0.0

    def worst_requests(self, name: str, limit: int = 5) -> list[str]:
        """Ids of the suspect's requests with most seconds in a row of the ledger."""
        seconds = self.suspect_ledger.column(name)
        order = np.argsort(seconds)[::-1][:limit]
        ids = self.suspect.requests.request_id[self.suspect_ledger.rows[order]]
        return [str(rid) for rid, s in zip(ids, seconds[order], strict=True) if s > 0]

    def when(self, name: str) -> tuple[float, float] | None:
        """Span of time (s since the suspect's origin) in which most of a row's seconds fell: 5th to 95th percentile of them."""
        seconds = self.suspect_ledger.column(name)
        total = float(seconds.sum())
        if total <= 0 or self.suspect.requests.num_assumed:
            return None
        arrival = self.suspect.requests.arrival_s[self.suspect_ledger.rows]
        cumulative = np.cumsum(seconds) / total
        low, high = np.searchsorted(cumulative, [0.05, 0.95])
        return float(arrival[low]), float(arrival[min(high, len(arrival) - 1)])

    def worker_subject(self, name: str) -> tuple[str, str | None]:
        """The worker that owns 80 % of a row's seconds, else the fleet."""
        seconds = self.suspect_ledger.column(name)
        total = float(seconds.sum())
        r = self.suspect.requests
        for code, worker in enumerate(r.worker_names):
            mine = float(seconds[r.worker[self.suspect_ledger.rows] == code].sum())
            if total > 0 and mine >= 0.8 * total and worker is not None:
                return "worker", worker
        return "fleet", None

    def increase(self, counter: str) -> tuple[float | None, float | None]:
        """Increase of a canonical counter in (baseline, suspect); None where it was not seen."""
        return self.base.samples.get(counter), self.suspect.samples.get(counter)

    def total(self, facts: Facts, column: str) -> float | None:
        """Sum of a request column over the window; None where unknown."""
        return total(facts.requests, column)

    def sql_scope(self, window: Window) -> str:
        """The run of a window (or the live rows) as SQL text."""
        return "run_id IS NULL" if window.run_id is None else "run_id = '" + window.run_id.replace("'", "''") + "'"

    def sql_where(self, window: Window, column: str) -> str:
        """The window as SQL text, ready for `kvscope sql`."""
        parts = [self.sql_scope(window)]
        if window.start_ns is not None:
            parts.append(f"{column} >= {window.start_ns}")
        if window.end_ns is not None:
            parts.append(f"{column} < {window.end_ns}")
        return " AND ".join(parts)


Judge = Callable[[Case], "Claim | Excluded | None"]


@dataclass(frozen=True, slots=True)
class Cause:
    """A registered cause. `needs` is a list of alternatives: each entry is names joined by `|`, one of which must be visible.

    `rows` are those of the ledger that it may own; none: it is about what is told, and owns no seconds (`contradictions.py`).
    """

    name: str
    needs: tuple[str, ...]
    rows: tuple[str, ...]
    judge: Judge
    text: str = field(repr=False, default="")

    def paragraph(self, title: str) -> str:
        """The docstring paragraph that begins with `title:`, without the title."""
        match = re.search(rf"^{title}:\s*(.+?)(?=\n\s*\n|\n[A-Z][a-z]+( by)?:|\Z)", self.text, re.S | re.M)
        return " ".join(match.group(1).split()) if match else ""

    def remedies(self) -> list[str]:
        """The lines of the `Remedy:` paragraph."""
        match = re.search(r"^Remedy:\n(.+?)(?=\n\n|\Z)", self.text, re.S | re.M)
        lines = re.split(r"^- ", match.group(1), flags=re.M) if match else []
        return [" ".join(line.split()) for line in lines if line.strip()]

    def summary(self) -> str:
        return self.text.strip().splitlines()[0] if self.text else self.name

    def missing(self, visible: frozenset[str]) -> list[str]:
        """Needs that nobody saw."""
        return [need for need in self.needs if not any(option in visible for option in need.split("|"))]


_REGISTRY: dict[str, Cause] = {}


def cause(name: str, *, needs: Sequence[str] = (), rows: Sequence[str]) -> Callable[[Judge], Judge]:
    """Register a cause under its stable identifier."""

    def register(judge: Judge) -> Judge:
        _REGISTRY[name] = Cause(name, tuple(needs), tuple(rows), judge, inspect.cleandoc(judge.__doc__ or ""))
        return judge

    return register


@cache
def all_causes() -> Mapping[str, Cause]:
    """Every cause found by walking `diagnosis/causes/`, by name."""
    from diagnosis import causes

    for module in pkgutil.iter_modules(causes.__path__):
        importlib.import_module(f"diagnosis.causes.{module.name}")
    return dict(sorted(_REGISTRY.items()))


def rate_per_s(facts: Facts) -> float:
    """Arrivals per second of the window; an estimate where requests are a sample."""
    return num_requests(facts.requests) / max(facts.offered_s, 1e-9)


def to_json(evidence: Evidence) -> dict[str, Any]:
    """Evidence as a plain document."""
    return {
        "statement": evidence.statement,
        "value": evidence.value,
        "unit": evidence.unit,
        "sql": evidence.sql,
        "request_ids": list(evidence.request_ids),
        "computed_by": None if evidence.sql is not None else evidence.computed_by,
    }
