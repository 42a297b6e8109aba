"""Mooncake Store's master: how full the shared KV pool is, what was read from it, what it pushed out.

The pool is the remote tier of all engines that use it, so nothing here is one engine's number. Bytes read are those of
objects that the master found for a reader, from memory and from SSD; what was written in bytes it does not count. Source:
a page of a real mooncake_master (mooncake-transfer-engine 0.3.13); reference section 12.
"""

from __future__ import annotations

from typing import Any, Final

from engine_probe.adapters.adapter import Adapter, Client, Discovery, Line, Surroundings
from engine_probe.adapters.metric_names import MetricNames
from engine_probe.adapters.prometheus import Page
from engine_probe.adapters.provides import Provides, names

ENGINE: Final = "mooncake"

READ: Final = {"tier_read_bytes_total": ("cache_hit_bytes_total",)}
NAMES: Final = MetricNames(ENGINE, ("master_",), {})
MEMORY_NAMES: Final = MetricNames(ENGINE, ("mem_",), READ)
SSD_NAMES: Final = MetricNames(ENGINE, ("file_",), READ)

PROVIDES: Final = (
    Provides(
        engine=ENGINE,
        source="metrics",
        needs="`mooncake_master --metrics_port 9003` (its default)",
        names=names(
            """sample: worker at_ns name labels value tier_read_bytes_total
            mark: at_ns mark subject text attrs"""
        ),
        caveats={
            "sample.tier_read_bytes_total": "of objects found for a reader, from memory and SSD (`labels.wire` says which)",
        },
    ),
)


class MooncakeAdapter(Adapter):
    """mooncake_master."""

    engine = ENGINE
    title = "Mooncake master"
    tables = (NAMES, MEMORY_NAMES, SSD_NAMES)
    provides = PROVIDES
    guide = "docs/engines/lmcache.md"
    serves = False

    def recognises(self, page: Page) -> bool:
        names = page.names()
        return "master_key_count" in names and "master_total_capacity_bytes" in names

    def discover(self, client: Client, page: Page) -> Discovery:
        wanted = ("master_active_clients", "master_key_count", "master_allocated_bytes", "master_total_capacity_bytes")
        values = {s.series.name: s.value for s in page.samples if s.series.name in wanted}
        return Discovery(series=frozenset(page.names()), details=values)

    def facts(self, page: Page, seen: Discovery) -> dict[str, dict[str, Any]]:
        return {}

    def lines(self, seen: Discovery, around: Surroundings) -> list[Line]:
        told = seen.details
        text = f"Mooncake master with {told.get('master_active_clients', 0):.0f} clients and "
        text += f"{told.get('master_key_count', 0):,.0f} keys; {len(seen.series)} series every {around.interval_s:g} s"
        lines = [Line("metrics", bool(seen.series), text)]
        capacity = told.get("master_total_capacity_bytes", 0.0)
        used = told.get("master_allocated_bytes", 0.0) / capacity if capacity else None
        hint = "no client has mounted a segment yet, so the pool has no room"
        lines.append(Line("capacity", used is not None, hint if used is None else f"{used:.0%} of the pool is in use"))
        lines.append(Line("transfers", False, "whose reads they are is told by each engine: attach to them too"))
        return lines
