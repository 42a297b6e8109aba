"""A fleet that lives now, for `kvscope dashboards check`: rows of the embedded engine in virtual time, sent as time passes.

Two deployments, one after the other: workers with too few blocks, a host tier, speculation and impatient clients behind a
prefix-aware router; then prefill and decode workers that hand KV over. They are computed ahead, moved to now, and sent when the
wall clock reaches their instants, so that Prometheus sees counters move as it would in production. The engine never answers with an HTTP
error, so a gateway that turns requests away is played beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from threading import Event
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from engine_probe.schema import table_from_rows
from engine_probe.sending.sink import MemorySink

if TYPE_CHECKING:
    from engine_probe.engine.fleet.build import FleetSettings
    from engine_probe.engine.traffic.synthetic import Traffic

Tables = Mapping[str, pa.Table]
TICK_S: Final = 0.5
S: Final = 1_000_000_000


def feed(send: Callable[[Tables], None], seconds: float, stopping: Event, seed: int = 1) -> None:
    """Send rows for `seconds`, or until `stopping`. Raises what `send` raises."""
    half = seconds / 2
    some_ns = time.time_ns()
    computed = squeezed_rows(some_ns, half, seed), handover_rows(some_ns + round(half * S), half, seed)
    start_ns = time.time_ns()
    pending = [shifted(rows, start_ns - some_ns) for rows in computed]
    gateway = _refusals(start_ns)
    while not stopping.is_set():
        now_ns = time.time_ns()
        for number, tables in enumerate(pending):
            due = {kind: table.filter(pc.less_equal(table["at_ns"], now_ns)) for kind, table in tables.items()}
            pending[number] = {kind: table.filter(pc.greater(table["at_ns"], now_ns)) for kind, table in tables.items()}
            due = {kind: table for kind, table in due.items() if table.num_rows}
            if due:
                send(due)
        send({"request": next(gateway)})
        if now_ns > start_ns + seconds * S:
            return
        stopping.wait(TICK_S)


def shifted(tables: Tables, by_ns: int) -> Tables:
    """The rows at other instants: every `*_ns` column moved, those inside lists and spans too."""
    found = {}
    for kind, table in tables.items():
        columns = []
        for field in table.schema:
            column = table[field.name].combine_chunks()
            columns.append(_shifted(column, by_ns) if _tells_instants(field) else column)
        found[kind] = pa.table(columns, schema=table.schema)
    return found


def _tells_instants(field: pa.Field) -> bool:
    name: str = field.name
    return name.endswith("_ns") or name == "spans"


def _shifted(column: pa.Array, by_ns: int) -> pa.Array:
    if pa.types.is_list(column.type):
        values = _shifted(column.flatten(), by_ns)
        return pa.ListArray.from_arrays(_offsets(column), values, type=column.type, mask=column.is_null())
    if pa.types.is_struct(column.type):
        parts = [
            _shifted(part, by_ns) if field.name.endswith("_ns") else part
            for field, part in zip(column.type, column.flatten(), strict=True)
        ]
        return pa.StructArray.from_arrays(parts, fields=list(column.type))
    return pc.add(column, pa.scalar(by_ns, column.type))


def _offsets(column: pa.ListArray) -> pa.Array:
    """Where each list begins in the flattened values, nulls taking none of them."""
    lengths = pc.fill_null(pc.list_value_length(column), 0)
    return pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths).cast(pa.int32())])


def squeezed_rows(start_ns: int, seconds: float, seed: int = 1) -> Tables:
    """Four workers whose blocks are too few: evictions, preemptions, loads from the host tier, clients that give up."""
    from engine_probe.engine.fleet.build import RouterSettings
    from engine_probe.engine.fleet.kv_moves import TierSettings
    from engine_probe.engine.fleet.virtual_fleet import Patience
    from engine_probe.engine.roofline.extras import Extras, Speculation
    from engine_probe.engine.traffic.synthetic import Lengths

    settings = replace(
        _settings(seed),
        num_workers=4,
        num_blocks=560,
        router=RouterSettings(policy="affinity_with_load"),
        patience=Patience(timeout_s=2.0, max_retries=1),
        tier=TierSettings(num_blocks=4000),
        extras=Extras(speculation=Speculation()),
    )
    traffic = replace(
        _traffic(seconds, 16.0, "squeezed", seed),
        groups=12,
        shared_tokens=1024,
        own_tokens=Lengths(100, 1200),
        output_tokens=Lengths(200, 900),
    )
    return _rows(settings, traffic, start_ns)


def handover_rows(start_ns: int, seconds: float, seed: int = 1) -> Tables:
    """Two workers prefill, two decode; one hand-over in twenty breaks."""
    from engine_probe.engine.fleet.kv_moves import HandoverSettings

    handover = HandoverSettings(prefill_workers=2, failure_ratio=0.05, timeout_s=0.2)
    settings = replace(_settings(seed), num_workers=4, num_blocks=3000, handover=handover)
    return _rows(settings, _traffic(seconds, 12.0, "handover", seed), start_ns)


def _settings(seed: int) -> FleetSettings:
    from engine_probe.engine.fleet.build import FleetSettings
    from engine_probe.engine.roofline.hardware import find_hardware
    from engine_probe.engine.roofline.model_shape import find_shape

    return FleetSettings(find_shape("llama-3-8b"), find_hardware("H100"), seed=seed)


def _traffic(seconds: float, rate: float, prefix: str, seed: int) -> Traffic:
    from engine_probe.engine.traffic.synthetic import Traffic

    return Traffic(
        num_requests=max(1, round(seconds * rate)),
        rate=rate,
        tenants=(("acme", 3.0), ("umbrella", 1.0)),
        workload="interactive",
        seed=seed,
        prefix=prefix,
    )


def _rows(settings: FleetSettings, traffic: Traffic, start_ns: int) -> Tables:
    from engine_probe.engine.fleet.build import build_fleet, recorders
    from engine_probe.engine.virtual_costs import CostSettings, VirtualCosts

    sink = MemorySink()
    fleet = build_fleet(
        settings, sink, start_utc_ns=start_ns, costs=lambda clock: VirtualCosts(clock, CostSettings(), settings.seed)
    )
    fleet.run(traffic.calls())
    for recorder in recorders(fleet):
        recorder.close()
    return {kind: sink.table(kind) for kind in sink.num_rows}


def _refusals(start_ns: int) -> Iterator[pa.Table]:
    """Requests that a gateway turns away: too many, too large, one that timed out behind it, and one that was open for an hour."""
    ends: tuple[dict[str, Any], ...] = (
        {"state": "rejected", "http_status": 429},
        {"state": "failed", "http_status": 400},
        {"state": "failed", "http_status": 504, "error": "upstream timed out"},
        {"state": "aborted", "arrival_ns": start_ns - 3600 * S},
    )
    number = 0
    while True:
        now_ns = time.time_ns()
        row = {"request_id": f"refused-{start_ns}-{number}", "vantage": "engine", "worker": "w0", "model": "llama-3-8b"}
        yield table_from_rows("request", [row | {"arrival_ns": now_ns, "at_ns": now_ns} | ends[number % len(ends)]])
        number += 1


def odd_requests() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Requests (method, path, options of httpx) that a collector sees in a bad hour, over and over: what its health is told by.

    A gap, a batch twice, a refused row, a column of a newer probe, spans and metrics by OTLP, questions, a diagnosis, a mark.
    """
    number = 0
    while True:
        now_ns = time.time_ns()
        gap = {"at_ns": now_ns, "mark": "gap", "subject": "dashboard-feed", "attrs": {"dropped_rows": "7"}}
        step = {"worker": "w-gpu", "at_ns": now_ns, "step": number, **_TOLD_BY_OTHERS}
        facts = {"worker": "w-gpu", "at_ns": now_ns, "block_size": 16, "num_blocks": 100}
        before, after = now_ns - 20 * S, now_ns - 10 * S
        windows = {"baseline": f"{before}/{after}", "suspect": f"{after}/{now_ns}"}
        twice = {"source": "twice", "epoch": "check", "seq": number // 2, "events": {"mark": [gap]}}
        wrong = {"source": "wrong", "events": {"step": [{**step, "duration_s": -1.0}]}}
        newer = {"source": "newer", "events": {"step": [{**step, "of_a_newer_probe": 1}], "worker": [facts]}}
        mark = {"mark": "deployed", "text": f"release {number} of the check", "subject": "fleet"}
        yield from (
            ("POST", "/v1/events", {"json": twice}),
            ("POST", "/v1/events", {"json": twice}),
            ("POST", "/v1/events", {"json": wrong}),
            ("POST", "/v1/events", {"json": newer}),
            ("POST", "/v1/traces", {"json": _span(now_ns, number)}),
            ("POST", "/v1/metrics", {"json": _point(now_ns, number)}),
            ("GET", "/api/v1/requests", {"params": {"limit": "5"}}),
            ("GET", "/api/v1/diagnosis", {"params": windows}),
            ("POST", "/api/v1/marks", {"json": mark}),
        )
        number += 1


_TOLD_BY_OTHERS: Final = {
    "duration_s": 0.02,
    "alloc_s": 0.001,
    "blocks_total": 100,
    "blocks_used": 40,
    "blocks_cached": 50,
    "wasted_slots": 64,
    "gpu_util": 0.7,
    "memory_util": 0.9,
}
"""What steps of other engines tell, and those of the embedded one do not."""


def _span(now_ns: int, number: int) -> dict[str, Any]:
    """An export of one request span, as vLLM makes it."""
    span = {
        "traceId": f"{number + 1:032x}",
        "spanId": f"{number + 1:016x}",
        "name": "llm_request",
        "startTimeUnixNano": str(now_ns - S),
        "endTimeUnixNano": str(now_ns),
        "attributes": [
            {"key": "gen_ai.request.id", "value": {"stringValue": f"span-{number}"}},
            {"key": "gen_ai.usage.prompt_tokens", "value": {"intValue": "100"}},
            {"key": "gen_ai.usage.completion_tokens", "value": {"intValue": "10"}},
            {"key": "gen_ai.latency.time_to_first_token", "value": {"doubleValue": 0.2}},
            {"key": "gen_ai.latency.e2e", "value": {"doubleValue": 1.0}},
        ],
    }
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "spans"}}]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": [span]}]}]}


def _point(now_ns: int, number: int) -> dict[str, Any]:
    """An export of one gauge."""
    point = {"timeUnixNano": str(now_ns), "asDouble": float(number)}
    metric = {"name": "queue.depth", "gauge": {"dataPoints": [point]}}
    return {"resourceMetrics": [{"scopeMetrics": [{"metrics": [metric]}]}]}
