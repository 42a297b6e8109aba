"""Rows of a lab run as if they came live: no run, instants moved, requests renamed. Every instant of the contract moves alike."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.lab.run import LabRun, Order, run_lab
from engine_probe.events import KINDS

NS = 1_000_000_000


def as_live(tables: Mapping[str, pa.Table], by_ns: int, name: str) -> dict[str, pa.Table]:
    """The rows `by_ns` later, of no run, with `name` before every request id."""
    return {kind: _moved(kind, table, by_ns, name) for kind, table in tables.items()}


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


def _moved(kind: str, table: pa.Table, by_ns: int, name: str) -> pa.Table:
    for column in KINDS[kind]:
        index = table.schema.get_field_index(column.name)
        values = table[column.name].combine_chunks()
        if column.name == "run_id":
            values = pa.nulls(len(table), values.type)
        elif column.name == "request_id":
            values = pc.binary_join_element_wise(name, values, "")
        elif column.name.endswith("_ns"):
            values = _later(values, by_ns)
        elif column.name == "spans":
            structs = values.values
            fields = [
                _later(structs.field(f.name), by_ns) if f.name.endswith("_ns") else structs.field(f.name)
                for f in structs.type
            ]
            made = pa.StructArray.from_arrays(fields, fields=list(structs.type))
            values = pa.ListArray.from_arrays(values.offsets, made, type=values.type, mask=values.is_null())
        else:
            continue
        table = table.set_column(index, table.schema.field(index), values)
    return table


def _later(values: pa.Array, by_ns: int) -> pa.Array:
    if pa.types.is_list(values.type):
        return pa.ListArray.from_arrays(
            values.offsets, pc.add(values.values, by_ns), type=values.type, mask=values.is_null()
        )
    return pc.add(values, pa.scalar(by_ns, values.type))
