"""What an observer with less to see would have of a lab run: a filter of rows, applied after the run and its truth.

    full     every row that the fleet told
    otlp     spans and metrics: the request columns and the samples that vLLM's spans and metrics page show, pages scraped
             every SCRAPE_S; no steps, no blocks, no routes, no callers
    client   the callers' rows alone, as `kvscope proxy` would keep them; no engine spoke
    lossy    one batch of a hundred is lost on its way, and nobody says so

What spans, metrics and the proxy show is what their adapters declare, so it is typed nowhere twice. Invariant: the same rows,
mode and seed give the same rows; a row that is left is as it was, but for the columns that nobody saw.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from diagnosis.lab.clients import client_rows
from diagnosis.lab.scene import ClientView
from engine_probe.adapters.provides import visible
from engine_probe.adapters.proxy_provides import PROXY
from engine_probe.errors import UsageError
from engine_probe.events import KINDS

if TYPE_CHECKING:
    import pyarrow as pa

MODES: Final = ("full", "otlp", "client", "lossy")
SCRAPE_S: Final = 5.0
"""Seconds between two scrapes of a metrics page."""
BATCH_S: Final = 0.5
"""Seconds of one worker's rows that go in one batch: how often a recorder flushes."""
LOST: Final = 0.01
"""Share of the batches that are lost."""
OURS: Final = frozenset({"run_id", "sample_rate", "labels"})
"""Columns that the collector, or whoever sends the calls, puts there."""

Rows = Mapping[str, "pa.Table"]


def check_mode(how: str) -> None:
    """Raises UsageError for a mode that is not known."""
    if how not in MODES:
        raise UsageError(f"--observe {how!r} is not known; give one of {', '.join(MODES)}")


def observe(tables: Rows, how: str, seed: int = 0) -> dict[str, pa.Table]:
    """The rows of a run that this observer has. seed: of which batches are lost. Raises UsageError for an unknown mode."""
    check_mode(how)
    if how == "otlp":
        return _spans_and_metrics(tables)
    if how == "client":
        return {"request": _callers(tables["request"])}
    if how == "lossy":
        return {kind: _without_lost(table, seed) for kind, table in tables.items()}
    return dict(tables)


def _spans_and_metrics(tables: Rows) -> dict[str, pa.Table]:
    import pyarrow as pa
    import pyarrow.compute as pc

    seen = visible("vllm", ("otlp", "metrics"))
    requests = tables["request"]
    requests = _with_stalls_in_decode(requests.filter(pc.equal(requests["vantage"], "engine")))
    found = {"request": _only(requests, "request", seen)}
    if "sample" in tables:
        names = [name.removeprefix("sample.") for name in seen if name.startswith("sample.")]
        samples = tables["sample"]
        samples = samples.filter(pc.is_in(samples["name"], value_set=pa.array(names)))
        found["sample"] = samples.filter(pa.array(_scraped(samples)))
    for kind in ("worker", "mark"):
        if kind in tables:
            found[kind] = _only(tables[kind], kind, seen)
    return {kind: table for kind, table in found.items() if table.num_rows}


def _with_stalls_in_decode(requests: pa.Table) -> pa.Table:
    """A span's decode lasts from the first token to the last, whatever held it up between."""
    import pyarrow.compute as pc

    index = requests.schema.get_field_index("decode_s")
    lasted = pc.divide(pc.cast(pc.subtract(requests["last_token_ns"], requests["first_token_ns"]), "float64"), 1e9)
    return requests.set_column(index, requests.schema.field(index), lasted)


def _callers(requests: pa.Table) -> pa.Table:
    """Rows at the client's vantage: those that are there, else what the engines sent as its callers would have seen it."""
    import pyarrow.compute as pc

    if "client" not in pc.unique(requests["vantage"]).to_pylist():
        requests = client_rows(requests, ClientView(), requests["run_id"][0].as_py())
    callers = requests.filter(pc.equal(requests["vantage"], "client"))
    return _only(callers, "request", PROXY.names - {"request.worker", "request.engine"})


def _only(table: pa.Table, kind: str, seen: frozenset[str]) -> pa.Table:
    """The table with null in every column that nobody saw."""
    import pyarrow as pa

    columns = {column.name for column in KINDS[kind] if f"{kind}.{column.name}" in seen} | OURS
    for index, field in enumerate(table.schema):
        if field.name not in columns:
            table = table.set_column(index, field, pa.nulls(table.num_rows, field.type))
    return table


def _scraped(samples: pa.Table) -> np.ndarray:
    """[n] the newest sample of each series in each SCRAPE_S: what a page shows when it is read."""
    at = np.asarray(samples["at_ns"]).astype(np.int64)
    labels = [str(row) for row in samples["labels"].to_pylist()]
    series = list(zip(samples["worker"].to_pylist(), samples["name"].to_pylist(), labels, strict=True))
    newest: dict[tuple[object, ...], int] = {}
    for row in np.argsort(at, kind="stable"):
        newest[(*series[row], at[row] // round(SCRAPE_S * 1e9))] = int(row)
    kept = np.zeros(len(at), dtype=bool)
    kept[list(newest.values())] = True
    return kept


def _without_lost(table: pa.Table, seed: int) -> pa.Table:
    """The rows whose batch arrived: a batch is what one worker told, of any kind, in BATCH_S."""
    import pyarrow as pa

    at = np.asarray(table["at_ns"]).astype(np.int64)
    batches = list(zip(table["worker"].to_pylist(), (at // round(BATCH_S * 1e9)).tolist(), strict=True))
    arrived = {batch: _draw(seed, *batch) >= LOST for batch in set(batches)}
    return table.filter(pa.array([arrived[batch] for batch in batches], pa.bool_()))


def _draw(seed: int, worker: str | None, batch: int) -> float:
    """A number in [0, 1) of each batch."""
    from hashlib import blake2b

    told = blake2b(f"{seed} {worker} {batch}".encode(), digest_size=8).digest()
    return int.from_bytes(told, "little") / 2.0**64
