"""LMCache: its series beside the engine's on one page (in-process), or on a page of its own (multiprocess server).

In-process its names are `lmcache:x`; what goes to and comes from its remote tier, and the times of storing, retrieving and
looking up, get the contract's names. Hits of the connector are told by the engine too (`external_prefix_cache_*`): where
it does, LMCache's own count keeps its name, so that no hit counts twice. Its histograms of the remote tier are in ms.
The multiprocess server writes OpenTelemetry names (`lmcache_mp.x`, on the page with `_`, unit and `_total`). Source:
pages made by LMCache 0.5.6's own code; reference section 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from engine_probe.adapters.adapter import Adapter, Client, Discovery, Line, Surroundings
from engine_probe.adapters.derived import Told
from engine_probe.adapters.metric_names import MetricNames
from engine_probe.adapters.prometheus import Page, Sample
from engine_probe.adapters.provides import Provides, names

ENGINE: Final = "lmcache"
PREFIXES: Final = ("lmcache:", "lmcache_")
MP_PREFIX: Final = "lmcache_mp_"
LOOKUPS: Final = {
    "num_lookup_tokens_total": "external_queries_tokens_total",
    "num_lookup_hits_total": "external_hits_tokens_total",
}

CANONICAL: Final[dict[str, tuple[str, ...]]] = {
    "tier_read_bytes_total": ("num_remote_read_bytes_total",),
    "tier_written_bytes_total": ("num_remote_write_bytes_total",),
}
HISTOGRAMS: Final[dict[str, tuple[str, ...]]] = {
    "tier_read_time_seconds": ("time_to_retrieve",),
    "tier_write_time_seconds": ("time_to_store",),
    "tier_lookup_time_seconds": ("time_to_lookup",),
    "remote_read_time_seconds": ("remote_time_to_get",),
    "remote_write_time_seconds": ("remote_time_to_put",),
}
MP_CANONICAL: Final[dict[str, tuple[str, ...]]] = {
    "external_queries_tokens_total": ("lookup_requested_tokens_total",),
    "external_hits_tokens_total": ("lookup_hit_tokens_total",),
}
MP_HISTOGRAMS: Final[dict[str, tuple[str, ...]]] = {
    "block_lifetime_seconds": ("l0_block_lifetime_seconds",),
    "block_idle_before_evict_seconds": ("l0_block_idle_before_evict_seconds",),
    "block_reuse_gap_seconds": ("l0_block_reuse_gap_seconds",),
}


class ConnectorHits:
    """`external_*` from LMCache's lookups, where no engine on the page counts them itself."""

    def told(self, samples: Sequence[Sample], at_ns: int) -> list[Told]:
        """Lookups and hits, in tokens."""
        found = []
        for series, value, _ in samples:
            if "external_prefix_cache_" in series.name:
                return []
            bare = next((series.name[len(p) :] for p in PREFIXES if series.name.startswith(p)), "")
            if bare in LOOKUPS:
                found.append(Told(LOOKUPS[bare], {**series.labels, "wire": series.name}, value))
        return found


NAMES: Final = MetricNames(
    ENGINE,
    PREFIXES,
    CANONICAL,
    HISTOGRAMS,
    scales={"remote_time_to_get": 1e-3, "remote_time_to_put": 1e-3},
    derives=ConnectorHits,
)
MP_NAMES: Final = MetricNames(ENGINE, (MP_PREFIX,), MP_CANONICAL, MP_HISTOGRAMS)

PROVIDES: Final = (
    Provides(
        engine=ENGINE,
        source="metrics",
        needs="in-process: nothing, its series stand on the engine's page and are read with it; multiprocess server: its "
        "Prometheus port (9090)",
        names=names(
            """sample: worker at_ns name labels value external_queries_tokens_total external_hits_tokens_total
            tier_read_bytes_total tier_written_bytes_total
            mark: at_ns mark subject text attrs"""
        ),
        caveats={
            "sample.external_hits_tokens_total": "in-process only where the engine does not count its connector's hits; of "
            "the server on its own page: attached beside its engines it says the same hits once more, as its own worker",
            "sample.tier_read_bytes_total": "the remote tier alone, in-process; bytes of the CPU tier are not counted",
            "sample.tier_written_bytes_total": "likewise",
        },
    ),
    Provides(
        engine=ENGINE,
        source="log",
        needs="in-process: the engine's output in a file, read with `attach vllm --log`",
        names=names("transfer: worker at_ns request_id source_worker target_worker num_bytes outcome reason wire_s"),
        caveats={
            "transfer.at_ns": "the log's time has no zone: only lines that are being written now are read",
            "transfer.reason": "how many tokens, where not all that were asked for came",
            "transfer.num_bytes": "four digits of GiB",
        },
    ),
)


class LmcacheAdapter(Adapter):
    """A multiprocess LMCache server, or a page with LMCache's series alone."""

    engine = ENGINE
    title = "LMCache"
    tables = (MP_NAMES, NAMES)
    provides = PROVIDES
    guide = "docs/engines/lmcache.md"
    serves = False

    def recognises(self, page: Page) -> bool:
        names = page.names()
        is_engine = any(name.startswith(("vllm:", "sglang:", "dynamo_")) for name in names)
        return not is_engine and any(name.startswith((MP_PREFIX, "lmcache:")) for name in names)

    def discover(self, client: Client, page: Page) -> Discovery:
        models = {s.series.labels["model_name"] for s in page.samples if s.series.labels.get("model_name")}
        return Discovery(series=frozenset(page.names()), models=sorted(models))

    def facts(self, page: Page, seen: Discovery) -> dict[str, dict[str, Any]]:
        return {}

    def lines(self, seen: Discovery, around: Surroundings) -> list[Line]:
        is_server = any(name.startswith(MP_PREFIX) for name in seen.series)
        kind = "LMCache server" if is_server else "LMCache beside an engine that shows no page here"
        text = f"{kind} for {', '.join(seen.models) or 'models unknown'}; {len(seen.series)} series"
        lines = [Line("metrics", bool(seen.series), f"{text} every {around.interval_s:g} s")]
        has_life = any("l0_block_lifetime" in name for name in seen.series)
        hint = "how long blocks live is told once blocks were evicted (multiprocess server)"
        lines.append(Line("residency", has_life, "how long sampled blocks live and lie idle" if has_life else hint))
        lines.append(
            Line("transfers", False, "one row a load or store stands in the engine's log: attach vllm URL --log FILE")
        )
        return lines
