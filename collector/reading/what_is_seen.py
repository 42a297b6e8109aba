"""What the rows of a window tell, column by column, and which verdicts that allows."""

from __future__ import annotations

from typing import Any, Final

from diagnosis.cause import all_causes
from diagnosis.observability import judgeable
from engine_probe.events import COMMON, KINDS, column
from store.evidence.lineage import window_sql
from store.interface import Store, Window

_ALWAYS: Final = frozenset(each.name for each in COMMON)


def what_is_seen(store: Store, window: Window) -> dict[str, Any]:
    """`{window, kinds: [{kind, rows, columns: [{name, told}]}], metrics, causes: [{cause, summary, lacks}]}`.

    told     share of the kind's rows that know the column
    lacks    names (`kind.column`, `block.CHANGE`) that a cause needs and nobody told; empty: it can be judged
    """
    kinds, names = [], set[str]()
    for kind, columns in KINDS.items():
        wanted = [each.name for each in columns if each.name not in _ALWAYS]
        condition, params = window_sql(window, "arrival_ns" if kind == "request" else "at_ns")
        counts = ", ".join(f'count("{name}") AS "{name}"' for name in wanted)
        (row,) = store.query(f'SELECT count(*) AS _rows, {counts} FROM "{kind}" WHERE {condition}', params).to_pylist()
        rows = row.pop("_rows")
        told = [{"name": name, "told": row[name] / rows if rows else None} for name in wanted]
        kinds.append({"kind": kind, "rows": rows, "columns": told})
        names |= {f"{kind}.{name}" for name in wanted if row[name]} | ({kind} if rows else set())
        names |= {f"{kind}.{name}" for name in _parts(store, kind, condition, params)}
    names |= _words(store, window, "block", "change") | _words(store, window, "sample", "name")
    allowed = judgeable(names)
    causes = [
        {"cause": name, "summary": cause.summary(), "lacks": allowed.lacking.get(name, [])}
        for name, cause in all_causes().items()
    ]
    return {"window": str(window), "kinds": kinds, "metrics": list(allowed.metrics), "causes": causes}


def _parts(store: Store, kind: str, condition: str, params: list[Any]) -> set[str]:
    """Fields inside a kind's structs that some row tells, as `waiting_on_budget`; of lists only what a router believed."""
    told = {}
    for each in KINDS[kind]:
        for name, _ in each.fields:
            if each.type == "struct":
                told[f"{each.name}_{name}"] = f'count("{each.name}"."{name}")'
            elif kind == "route":
                told[f"{each.name}_{name}"] = (
                    f'count(*) FILTER (len(list_filter("{each.name}", part -> part."{name}" IS NOT NULL)) > 0)'
                )
    if not told:
        return set()
    counts = ", ".join(f'{expression} AS "{name}"' for name, expression in told.items())
    (row,) = store.query(f'SELECT {counts} FROM "{kind}" WHERE {condition}', params).to_pylist()
    return {name for name, number in row.items() if number}


def _words(store: Store, window: Window, kind: str, name: str) -> set[str]:
    condition, params = window_sql(window, "at_ns")
    assert column(kind, name)
    found = store.query(f'SELECT DISTINCT "{name}" AS word FROM "{kind}" WHERE {condition}', params)
    return {f"{kind}.{word}" for word in found.column(0).to_pylist()}
