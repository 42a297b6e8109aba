"""The service is as before; what is told of it is wrong, or too little."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from diagnosis.lab.fault import SWITCH, Expected, Fault, Severity
from diagnosis.lab.faults.quiet import SILENT
from diagnosis.lab.scene import ClientView, Scene, at_rate, with_edit

if TYPE_CHECKING:
    import pyarrow as pa

LIAR = "prefix_hits_tokens_total"
AHEAD = "w2"


def stopped_counter(tables: dict[str, pa.Table]) -> dict[str, pa.Table]:
    """The hit counter reads 0, whatever was hit; requests say nothing of it, as where the counter is all there is."""
    import pyarrow as pa
    import pyarrow.compute as pc

    samples = tables["sample"]
    index = samples.schema.get_field_index("value")
    told = pc.if_else(pc.equal(samples["name"], LIAR), 0.0, samples["value"])
    return {**tables, "sample": samples.set_column(index, samples.schema.field(index), told.cast(pa.float64()))}


def clock_ahead(tables: dict[str, pa.Table], worker: str, seconds: float) -> dict[str, pa.Table]:
    """Every instant that this worker tells is so many seconds later; what its callers saw is as it was."""
    return {kind: _moved(table, worker, round(seconds * 1e9)) for kind, table in tables.items()}


def _moved(table: pa.Table, worker: str, move_ns: int) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    ours = pc.fill_null(pc.equal(table["worker"], worker), False)
    for index, field in enumerate(table.schema):
        if not field.name.endswith("_ns"):
            continue
        column = table.column(index)
        if pa.types.is_list(field.type):
            moved = pa.array(
                [
                    [at + move_ns for at in row] if mine and row is not None else row
                    for row, mine in zip(column.to_pylist(), ours.to_pylist(), strict=True)
                ],
                field.type,
            )
        else:
            moved = pc.if_else(ours, pc.add(column, move_ns), column)
        table = table.set_column(index, field, moved)
    return table


def _lies(scene: Scene, severity: float) -> Scene:
    return with_edit(scene, stopped_counter)


def _clients(scene: Scene, severity: float) -> Scene:
    return replace(scene, clients=ClientView())


def _skew(scene: Scene, severity: float) -> Scene:
    return with_edit(scene, lambda tables: clock_ahead(tables, AHEAD, severity))


FAULTS = (
    Fault(
        "telemetry_contradiction",
        "telemetry",
        "The engines' hit counter stands still at 0 while requests hit (a counter that lies)",
        SWITCH,
        Expected(("telemetry_contradiction",), never=("prefix_caching_off",), is_told=True),
        _lies,
    ),
    Fault(
        "clock_skew",
        "telemetry",
        f"The clock of {AHEAD} is ahead of its callers'",
        Severity(0.1, 0.5, 2.0, "seconds ahead"),
        Expected(("clock_skew",), is_told=True),
        _skew,
        _clients,
        subject=("worker", AHEAD),
    ),
    Fault(
        "too_few",
        "telemetry",
        "Two dozen requests, drawn anew: whatever they seem to say, they cannot say it",
        Severity(4, 4, 4, "requests a second"),
        SILENT,
        setting=at_rate,
        is_paired=False,
        requests=24,
    ),
)
