"""Rows of a lab run as if they came live: no run, instants moved, requests renamed. Every instant of the contract moves alike."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from collector.dashboard_check.feed import shifted
from diagnosis.lab.run import LabRun, Order, run_lab

NS = 1_000_000_000


def as_live(tables: Mapping[str, pa.Table], by_ns: int, name: str) -> dict[str, pa.Table]:
    """The rows `by_ns` later, of no run, with `name` before every request id."""
    return {kind: _of_no_run(table, name) for kind, table in shifted(tables, by_ns).items()}


def lab_windows(
    fault: str, start_ns: int, *, requests: int, severity: str = "typical", kinds: tuple[str, ...]
) -> Windows:
    """A lab run as a story: the baseline from `start_ns` on, and the fault right after it."""
    return Windows(run_lab(Order(fault, severity=severity, requests=requests)), start_ns, kinds)


class Windows:
    """`baseline` and `suspect` rows that follow each other; `[base_ns, fault_ns)` and `[fault_ns, end_ns)` are their arrivals."""

    def __init__(self, run: LabRun, start_ns: int, kinds: tuple[str, ...]) -> None:
        first, last = _arrivals(run.baseline)
        self.length_ns = max(last, _arrivals(run.suspect)[1]) - first + 1
        self.base_ns, self.fault_ns = start_ns, start_ns + self.length_ns
        self.end_ns = self.fault_ns + self.length_ns
        self.baseline = as_live(_judged(run.baseline, first, kinds), self.base_ns - first, "base-")
        self.suspect = as_live(_judged(run.suspect, first, kinds), self.fault_ns - first, "fault-")

    def moved(self, by_ns: int) -> Windows:
        """The same story at another time."""
        self.baseline, self.suspect = _later(self.baseline, by_ns), _later(self.suspect, by_ns)
        self.base_ns, self.fault_ns, self.end_ns = self.base_ns + by_ns, self.fault_ns + by_ns, self.end_ns + by_ns
        return self


def _later(tables: Mapping[str, pa.Table], by_ns: int) -> dict[str, pa.Table]:
    return dict(shifted(tables, by_ns))


def _of_no_run(table: pa.Table, name: str) -> pa.Table:
    for column, make in (
        ("run_id", lambda values: pa.nulls(len(values), values.type)),
        ("request_id", lambda values: pc.binary_join_element_wise(name, values, "")),
    ):
        if column in table.column_names:
            index = table.schema.get_field_index(column)
            table = table.set_column(index, table.schema.field(index), make(table[column].combine_chunks()))
    return table


def _arrivals(tables: Mapping[str, pa.Table]) -> tuple[int, int]:
    rows = _without_warmup(tables["request"])
    found = pc.min_max(rows["arrival_ns"]).as_py()
    return int(found["min"]), int(found["max"])


def _without_warmup(requests: pa.Table) -> pa.Table:
    warm = [dict(labels or ()).get("phase") == "warmup" for labels in requests["labels"].to_pylist()]
    return requests.filter(pc.invert(pa.array(warm)))


def _judged(tables: Mapping[str, pa.Table], first_ns: int, kinds: tuple[str, ...]) -> dict[str, pa.Table]:
    """Rows of these kinds from the first judged arrival on: what came before would lie in the other window."""
    found = {}
    for kind in kinds:
        table = _without_warmup(tables[kind]) if kind == "request" else tables[kind]
        column = "arrival_ns" if kind == "request" else "at_ns"
        found[kind] = table.filter(pc.greater_equal(table[column], first_ns))
    return found
